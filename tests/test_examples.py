"""The examples, as their readers run them."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from support.paths import ROOT
from support.terminals import SAMPLES, Done, Terminal, ended

from leanq import Result
from leanq.errors import TooLargeError, UnavailableError, UnknownEnvironmentError
from leanq.queue.requests import Reply
from leanq.queue.settings import Settings

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
from reward import PROOFS, THEOREM, lean, reward
prompts = [THEOREM] * len(PROOFS)
expected = [1.0, 0.0, 0.0, 0.0]
assert reward(PROOFS, prompts) == expected
child = os.fork()
if child == 0:
    right = reward(completions=PROOFS, prompts=prompts, completion_ids=[[1]] * 4) == expected
    lean().close()
    os._exit(0 if right else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert reward([THEOREM + PROOFS[0]]) == [1.0]
assert reward([], []) == []
"""


def run(terminal: Terminal, *argv: str) -> Done:
    # Newer Pythons warn of a fork beside threads.
    program = (sys.executable, "-W", "ignore::DeprecationWarning", *argv)
    return ended(terminal.start(program=program), b"")


@pytest.fixture
def example(fleet: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """``examples/reward.py``, imported, with a fleet to ask."""
    monkeypatch.setenv("LEANQ_URL", fleet.url)
    monkeypatch.setenv("LEANQ_PREFIX", fleet.prefix)
    spec = importlib.util.spec_from_file_location("reward", EXAMPLES / "reward.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    module.lean().close()


@pytest.mark.slow
def test_the_reward_by_itself(terminal: Terminal) -> None:
    rewards = "[1.0, 0.0, 0.0, 0.0]"
    done = run(terminal, str(EXAMPLES / "reward.py"))
    assert done == Done(0, f"reward {rewards}\nareward {rewards}\n", "")


@pytest.mark.slow
def test_the_reward_in_processes_that_fork(client: Terminal) -> None:
    assert run(client, "-c", FORKS, str(EXAMPLES)) == Done(0, "", "")


@pytest.mark.slow
def test_what_lean_has_not_judged_is_no_wrong_proof(
    example: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    example.CHECK["timeout_s"] = 2.0
    slow = (SAMPLES / "stack_overflow.lean").read_text()
    right, wrong = ((SAMPLES / f"{name}.lean").read_text() for name in ("and_swap", "wrong"))
    with caplog.at_level(logging.WARNING):
        assert example.reward([right, slow, wrong, "surrogate \ud800", right]) == [
            *(1.0, 0.5, 0.0, 0.0, 1.0)
        ]
    assert caplog.messages == ["no verdict of Lean's for 1 of 5: {'timeout': 1}"]


def test_each_prompt_is_a_group_of_its_own(example: ModuleType) -> None:
    prompts = ["one", "one", "two", "one", "three", "two"]
    verdicts = ["accepted", "timeout", "rejected", "exhausted", "poisoned", "memory"]
    results = [Result(n, "", Reply(verdict)) for n, verdict in enumerate(verdicts)]  # type: ignore[arg-type]
    assert example.scores(results, prompts) == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    results[2] = Result(2, "", error=TooLargeError("large"))
    assert example.scores(results, prompts) == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    for error in (UnavailableError("gone"), UnknownEnvironmentError("none")):
        results[2] = Result(2, "", error=error)
        with pytest.raises(type(error)):
            example.scores(results, prompts)


async def test_the_reward_in_an_event_loop(example: ModuleType) -> None:
    prompts = [example.THEOREM] * len(example.PROOFS)
    rewards = await example.areward(completions=example.PROOFS, prompts=prompts)
    assert rewards == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="argument 2"):
        await example.areward(example.PROOFS, prompts[1:])


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
