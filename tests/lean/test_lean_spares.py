"""The Lean that waits in each idle sandbox: it serves one run, and says what any other would."""

from __future__ import annotations

import os
import signal

import pytest
from msgspec.structs import replace
from support.sandboxes import marked, running
from support.sites import Site, check, sample
from support.waiting import eventually

from leanq.lean import lean_driver as lean_module
from leanq.lean import process as program_module
from leanq.lean.environment import Environment
from leanq.queue.requests import Reply, Request


async def spare(site: Site) -> int:
    """The one Lean that waits, once it does."""
    await eventually(lambda: len(marked(site.marker)) == 1)
    return marked(site.marker)[0]


@pytest.mark.slow
async def test_a_spare_serves_one_check(site: Site) -> None:
    driver = await site.driver()
    seen = {await spare(site)}
    for name in ("and_swap", "wrong", "and_swap"):
        await driver.run(check(sample(name)))
        assert seen.isdisjoint(marked(site.marker))
        seen.add(await spare(site))
    assert len(seen) == 4


@pytest.mark.slow
@pytest.mark.parametrize("audit", [True, False])
async def test_a_check_after_another_command_line_is_served(site: Site, audit: bool) -> None:
    driver = await site.driver()
    example = "prelude\nimport Core\nexample (p : Prop) : p → p := id\n"
    hole = "prelude\nimport Core\ntheorem t (p : Prop) : p → p := sorry\n"
    for _ in range(2):
        reply = await driver.run(check(example, audit=audit))
        taken = "accepted" if audit else "unjudged"
        assert (reply.verdict, reply.axioms) == (taken, () if audit else None)
        (sorry,) = (await driver.run(check(hole, audit=audit))).sorries
        for tactic, verdict in (("intro h", "incomplete"), ("exact id", taken)):
            request = Request(op="step", state=sorry.state or "", tactic=tactic, audit=audit)
            assert (await driver.run(request)).verdict == verdict


@pytest.mark.slow
async def test_a_spare_that_was_killed_costs_no_check(site: Site) -> None:
    driver = await site.driver()
    pid = await spare(site)
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not running(pid))
    assert (await driver.run(check(sample("and_swap")))).verdict == "accepted"


@pytest.mark.slow
async def test_a_spare_says_what_a_new_process_says(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("and_swap", "incomplete", "wrong", "syntax_error", "heartbeats", "silent_sorry")

    async def replies() -> list[Reply]:
        driver = await site.driver()
        found = [await driver.run(check(sample(name))) for name in names]
        return [replace(reply, wall_s=0.0, cpu_s=0.0, audit_s=0.0) for reply in found]

    with_spares = await replies()
    monkeypatch.setattr(program_module.Lean, "_prepare", lambda *_: None)
    assert await replies() == with_spares


@pytest.mark.slow
async def test_no_spare_outlives_a_change(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_module, "_CHECK_CHANGES_EVERY_S", 0.0)
    monkeypatch.setattr(Environment, "changed", lambda _: changed)
    changed = False
    driver = await site.driver(slots=2)
    await eventually(lambda: len(marked(site.marker)) == 2)
    before = set(marked(site.marker))
    changed = True
    assert (await driver.run(check(sample("and_swap")))).verdict == "accepted"
    changed = False
    assert before.isdisjoint(marked(site.marker))
    await spare(site)


@pytest.mark.slow
async def test_a_supervisor_that_died_idle_costs_no_check(site: Site) -> None:
    driver = await site.driver()
    await spare(site)
    (sandbox,) = driver.opened.lean.idle
    sandbox.supervisor.kill()
    await eventually(lambda: not sandbox.alive)
    assert marked(site.marker) == []
    assert (await driver.run(check(sample("and_swap")))).verdict == "accepted"
