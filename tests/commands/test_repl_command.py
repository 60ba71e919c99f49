"""Workers with a REPL, from the command line: a real queue, real Lean, real kills."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from support.lean.sandboxes import marked, running
from support.lean.sites import LEAN_REPL, repl_command
from support.terminals import Terminal, ended, samples, wait_for_line
from support.waiting import eventually

from leanq.lean.environment import Environment
from leanq.queue.settings import Settings

HOLE = "prelude\nimport Core\ntheorem t (p q : Prop) (hp : p) (hq : q) : And p q :=\n  sorry\n"


@pytest.fixture
def place(terminal: Terminal, settings: Settings) -> Terminal:
    """A terminal that uses a queue of its own."""
    terminal.use(settings)
    return terminal


@pytest.mark.slow
def test_checks_and_steps(place: Terminal, core: Environment) -> None:
    worker = place.start("worker", "--driver", "repl", "--repl", repl_command(core), "--slots", "1")
    wait_for_line(worker.stderr, "serves")
    done = place.run(
        "submit", "--json", *samples("and_swap", "wrong", "incomplete", "silent_sorry")
    )
    verdicts = {line["file"].rpartition("/")[2]: line["verdict"] for line in done.lines}
    assert done.code == 1
    assert verdicts == {
        "and_swap.lean": "accepted",
        "wrong.lean": "rejected",
        "incomplete.lean": "incomplete",
        "silent_sorry.lean": "incomplete",
    }
    (line,) = place.run("submit", "--json", place.file("hole.lean", HOLE)).lines
    (sorry,) = line["sorries"]
    assert (sorry["line"], sorry["column"]) == (4, 2)
    (first,) = place.run("step", "--json", sorry["state"], "constructor").lines
    assert [goal.rpartition("⊢ ")[2] for goal in first["goals"]] == ["p", "q"]
    assert place.run("step", first["state"], "exact hq").code == 1
    (last,) = place.run("step", "--json", first["state"], "exact hp\nexact hq").lines
    assert (last["verdict"], last["state"]) == ("accepted", None)
    (record,) = place.run("status", "--json").lines
    about = record["environments"]["default"]
    assert (about["driver"], about["lean"]) == ("repl", core.toolchain.version)
    worker.send_signal(signal.SIGTERM)
    assert ended(worker).code == 0
    assert place.is_clean()


@pytest.mark.slow
async def test_a_killed_worker_leaves_no_repl(place: Terminal, core: Environment) -> None:
    place.environ["LEANQ_LEASE_S"] = "1"
    worker = place.start("worker", "--driver", "repl", "--repl", repl_command(core))
    wait_for_line(worker.stderr, "serves")
    submit = place.start("submit", *samples("stack_overflow"))

    def shown(what: str) -> Any:
        return place.run("status", "--json").lines[0][what]

    await eventually(lambda: shown("running") == 1)
    repls = [*filter(place.owns, marked(str(LEAN_REPL)))]
    assert repls
    worker.kill()
    await eventually(lambda: not any(map(running, repls)))
    submit.send_signal(signal.SIGINT)
    ended(submit)
    ended(worker)
    await eventually(place.is_clean)
    await eventually(lambda: place.run("reap").code == 0 and shown("workers") == [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--driver", "repl"], 2, "--driver repl needs --repl"),
        (["--repl", "lake env repl"], 2, "--repl and --trust-steps are for --driver repl"),
        (["--trust-steps"], 2, "--repl and --trust-steps are for --driver repl"),
        (["--driver", "echo", "--env", "a=/srv"], 2, "echo offers 'echo' alone"),
        (["--driver", "repl", "--repl", " "], 2, "names no program"),
        (["--driver", "repl", "--repl", "lake env no/repl"], 3, "no program 'no/repl'"),
        (["--driver", "repl", "--repl", "/bin/true"], 3, "does not answer like a REPL"),
        (["--driver", "repl", "--repl", "/bin/echo '{}'"], 3, "does not answer like a REPL"),
    ],
)
def test_what_is_no_repl(
    place: Terminal, core: Environment, arguments: list[str], code: int, said: str
) -> None:
    done = place.run("worker", *arguments)
    assert (done.code, done.out) == (code, "")
    (line,) = [line for line in done.err.splitlines() if line.startswith("leanq: ")]
    assert said in line
    assert place.is_clean()
