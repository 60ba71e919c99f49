"""A fleet of real Lean moves to a new library under load."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.fleets import until
from support.terminals import Terminal, ended, wait_for_line

import leanq.lean.environment
from leanq.client import LeanQClient
from leanq.lean.environment import Environment
from leanq.lean.toolchain import ask
from leanq.queue.settings import Settings

CHECKS = 40
CORE = Path(leanq.lean.environment.__file__).parent / "data" / "Core.lean"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fleet_moves_to_a_new_library_and_loses_nothing(
    terminal: Terminal, settings: Settings, core: Environment
) -> None:
    """What was submitted before the move uses a theorem that the new library lacks."""
    terminal.use(settings)
    workers = []
    for name in ("old", "new"):
        library = terminal.folder / name
        library.mkdir()
        text = f"{CORE.read_text()}\ntheorem {name} (p : Prop) (h : p) : p := h\n"
        (library / "Given.lean").write_text(text)
        command = (*core.toolchain.command, "-o", "Given.olean", "Given.lean")
        assert ask(command, {}, library).returncode == 0
        worker = terminal.start("worker", "--slots", "1", "--env", f"m-{name}={library}")
        wait_for_line(worker.stderr, "serves")
        workers.append(worker)
    assert terminal.run("env", "alias", "m", "m-old").code == 0

    with LeanQClient(settings) as lean:

        def uses(name: str, number: int) -> str:
            return f"prelude\nimport Given\ntheorem t{number} (p : Prop) : p → p := {name} p\n"

        neutral = "prelude\nimport Given\ntheorem n{} (p : Prop) (h : p) : p := h\n"
        before = [lean.check(uses("old", n), env="m") for n in range(CHECKS)]
        hole = "prelude\nimport Given\ntheorem s (p : Prop) : p → p := sorry\n"
        state = lean.check(hole, env="m", priority=0).result().sorries[0].state
        across = [lean.check(neutral.format(n), env="m") for n in range(CHECKS)]
        until(across[-1].running)
        assert not before[-1].done()
        assert terminal.run("env", "alias", "m", "m-new").code == 0
        after = [lean.check(uses("new", n), env="m") for n in range(CHECKS)]
        across += [lean.check(neutral.format(n), env="m") for n in range(CHECKS)]
        step = lean.step(str(state), "exact old p")
        verdicts = [each.result().verdict for each in (*before, *across, *after)]
        assert verdicts == ["accepted"] * (4 * CHECKS)
        prints = [{each.result().fingerprint for each in part} for part in (before, after)]
        assert [len(part) for part in prints] == [1, 1]
        assert prints[0].isdisjoint(prints[1])
        assert {each.result().fingerprint for each in across} == prints[0] | prints[1]
        assert (step.result().verdict, {step.result().fingerprint}) == ("accepted", prints[0])

    new, old = terminal.run("env", "list", "--json").lines
    for each, aliases, fingerprints in ((old, [], prints[0]), (new, ["m"], prints[1])):
        assert each["aliases"] == aliases
        assert {*each["fingerprints"]} == fingerprints
        assert each["libraries"] == ["Core", "Given"]
        assert each["lean"] == each["kernel"] == core.toolchain.version
        assert len(each["workers"]) == 1
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
        assert ended(worker).code == 0
    # The name is the alias', and no worker's.
    library = str(terminal.folder / "new")
    done = terminal.run("worker", "--slots", "1", "--env", f"m={library}")
    assert done.code == 2
    assert "the environment 'm' has the name of an alias" in done.err
