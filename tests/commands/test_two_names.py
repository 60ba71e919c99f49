"""A fleet of real Lean moves to a new library under load, under a name that stays."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.terminals import Process, Terminal, ended, wait_for_line

import leanq.lean.environment
from leanq.client import LeanQClient
from leanq.lean.environment import Environment
from leanq.lean.run.toolchain import ask
from leanq.queue.settings import Settings

CHECKS = 20
CORE = Path(leanq.lean.environment.__file__).parent / "run" / "Core.lean"
HOLE = "prelude\nimport Given\ntheorem s (p : Prop) : p → p := sorry\n"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fleet_moves_to_a_new_library_and_loses_nothing(
    terminal: Terminal, settings: Settings, core: Environment
) -> None:
    """Each library has a theorem that the other lacks. A worker offers one under two names."""
    terminal.use(settings)
    for name in ("old", "new"):
        library = terminal.folder / name
        library.mkdir()
        text = f"{CORE.read_text()}\ntheorem {name} (p : Prop) (h : p) : p := h\n"
        (library / "Given.lean").write_text(text)
        command = (*core.toolchain.command, "-o", "Given.olean", "Given.lean")
        assert ask(command, {}, library).returncode == 0

    def worker(*names: str, library: str) -> Process:
        path = terminal.folder / library
        named = [word for name in names for word in ("--env", f"{name}={path}")]
        process = terminal.start("worker", "--slots", "1", *named)
        wait_for_line(process.stderr, "serves")
        return process

    def uses(name: str, number: int) -> str:
        return f"prelude\nimport Given\ntheorem t{number} (p : Prop) : p → p := {name} p\n"

    both, old = worker("m", "m-old", library="old"), worker("m-old", library="old")
    with LeanQClient(settings) as lean:
        first = [lean.check(uses("old", n), env=env) for n in range(2) for env in ("m", "m-old")]
        assert [each.result().verdict for each in first] == ["accepted"] * 4
        (print_,) = {each.result().fingerprint for each in first}
        state = lean.check(HOLE, env="m").result().sorries[0].state
        before = [lean.check(uses("old", n), env="m") for n in range(CHECKS)]
        assert [each.result().verdict for each in before] == ["accepted"] * CHECKS
        assert terminal.run("pause", "--env", "m").code == 0
        held = [lean.check(uses("new", n), env="m") for n in range(CHECKS)]
        both.send_signal(signal.SIGTERM)
        new = worker("m", "m-new", library="new")
        assert ended(both).code == 0
        assert terminal.run("resume", "--env", "m").code == 0
        assert [each.result().verdict for each in held] == ["accepted"] * CHECKS
        assert print_ not in {each.result().fingerprint for each in held}
        # The old library's states are stepped where it is still offered.
        step = lean.step(str(state), "exact old p", env="m-old").result()
        assert (step.verdict, step.fingerprint) == ("accepted", print_)
    with LeanQClient(settings) as lean:
        step = lean.step(str(state), "exact old p").result()
        assert (step.verdict, step.fingerprint) == ("accepted", print_)
    for process in (old, new):
        process.send_signal(signal.SIGTERM)
        assert ended(process).code == 0
