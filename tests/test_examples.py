"""The examples, as their readers run them."""

from __future__ import annotations

import json
import sys

import pytest
from support.paths import ROOT
from support.terminals import Done, Terminal, ended

EXAMPLES = ROOT / "examples"

# As Jupyter runs a notebook: cell by cell in one namespace and one event loop.
KERNEL = """
import ast, asyncio, inspect, json, sys

async def run(path):
    space = {"__name__": "__main__"}
    for cell in json.load(open(path))["cells"]:
        if cell["cell_type"] == "code":
            code = compile("".join(cell["source"]), cell["id"], "exec",
                           flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            ran = eval(code, space)
            if inspect.iscoroutine(ran):
                await ran
    print(space["verdicts"])

asyncio.run(run(sys.argv[1]))
"""

FORKS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from reward import PROOFS, STATEMENT, compute_score, score
truths = [STATEMENT] * len(PROOFS)
expected = [1.0, 0.0, 0.0, 0.0]
assert compute_score(PROOFS, truths) == expected
child = os.fork()
if child == 0:
    right = compute_score(solution_strs=PROOFS, ground_truths=truths, extra=[1]) == expected
    score.close()
    os._exit(0 if right else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert compute_score(PROOFS[:1], truths[:1]) == [1.0]
assert compute_score([], []) == []
"""


def run(terminal: Terminal, *argv: str) -> Done:
    # Newer Pythons warn of a fork beside threads.
    program = (sys.executable, "-W", "ignore::DeprecationWarning", *argv)
    return ended(terminal.start(program=program), b"")


@pytest.mark.slow
def test_the_reward_by_itself(terminal: Terminal) -> None:
    assert run(terminal, str(EXAMPLES / "reward.py")) == Done(0, "[1.0, 0.0, 0.0, 0.0]\n", "")


@pytest.mark.slow
def test_the_reward_in_processes_that_fork(client: Terminal) -> None:
    assert run(client, "-c", FORKS, str(EXAMPLES)) == Done(0, "", "")


@pytest.mark.slow
def test_futures(client: Terminal) -> None:
    done = run(client, str(EXAMPLES / "futures.py"))
    assert (done.code, done.err) == (0, "")
    *verdicts, first = done.out.splitlines()
    assert sorted(line.split()[0] for line in verdicts) == [
        *("accepted", "accepted", "incomplete", "rejected")
    ]
    assert "h.2" in first or "h.right h.left" in first


@pytest.mark.slow
def test_the_learner_with_a_fleet_of_its_own(terminal: Terminal) -> None:
    done = run(terminal, str(EXAMPLES / "learner.py"))
    assert (done.code, done.err) == (0, "")
    assert [line.split(" proved, ")[1] for line in done.out.splitlines()] == [
        "mostly by And.intro h.right h.left",
        "mostly by h.left",
        "mostly by h",
    ]


@pytest.mark.slow
def test_the_notebook(client: Terminal) -> None:
    done = run(client, "-c", KERNEL, str(EXAMPLES / "notebook.ipynb"))
    assert (done.code, done.err) == (0, "")
    assert "10 of 30 are proved; 0 errors" in done.out
    assert "'incomplete': 10" in done.out
    assert "rejected" in done.out


def test_the_notebook_is_one_without_outputs() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        assert {"cell_type", "id", "metadata", "source"} <= cell.keys()
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_without_a_queue(terminal: Terminal) -> None:
    done = run(terminal, str(EXAMPLES / "futures.py"))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("no queue: LEANQ_URL is not set and no 'leanq up' runs")


@pytest.mark.parametrize(
    ("name", "extra", "needs"),
    [
        ("trl_grpo", "trl", "datasets"),
        ("openenv_server", "openenv", "uvicorn"),
        ("reward_server", "server", "uvicorn"),
        ("verifiers_proofs", "verifiers", "verifiers"),
    ],
)
def test_an_example_without_its_extra_names_it(
    terminal: Terminal, name: str, extra: str, needs: str
) -> None:
    script = "import runpy, sys; sys.modules[sys.argv[2]] = None; runpy.run_path(sys.argv[1])"
    done = run(terminal, "-c", script, str(EXAMPLES / f"{name}.py"), needs)
    assert done.code == 1
    assert done.err.endswith(f": pip install 'leanq[{extra}]'\n")
