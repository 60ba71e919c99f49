"""Workers that start preload the headers that the fleet's texts have had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.fleets import working
from support.lean.forks import RULES
from support.lean.search_paths import as_opened
from support.lean.sites import Site
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment
from leanq.lean.run.headers import NAME, note, prepared
from leanq.queue.headers import LEAST_TEXTS
from leanq.queue.settings import Settings
from leanq.states import MemoryStates

HEADER = "prelude\nimport Core\n"
PROOF = "theorem t (p : Prop) (h : p) : p := h\n"


def preloaded(driver: LeanDriver) -> int:
    forks = driver.opened.lean.forks
    assert forks is not None
    return len(forks.pids())


@pytest.mark.slow
async def test_a_worker_that_starts_preloads_what_others_have_served(
    settings: Settings, core: Environment
) -> None:
    first, second = (LeanDriver(lambda: core, slots=1, forks=RULES) for _ in range(2))
    async with working(settings, first, slots=1), AsyncLeanQClient(settings) as lean:
        texts = [f"{PROOF}-- {number}\n" for number in range(LEAST_TEXTS + 2)]
        for text in texts:
            reply = await lean.check(text, env=first.environment, tenant="t")
            assert reply.verdict == "accepted"
        # A text that Lean does not get through to says nothing of its header.
        reply = await lean.check("import Missing\n" + PROOF, env=first.environment)
        assert reply.reason == "unknown_import"

        async def is_told() -> bool:  # with a heartbeat
            return await first._states.hot_headers(core.fingerprint) == [HEADER]  # noqa: SLF001

        await eventually(is_told)
    async with working(settings, second, slots=1):
        await eventually(lambda: preloaded(second) == 1, deadline_s=60.0)


@pytest.mark.slow
async def test_where_the_fleet_knows_of_no_texts_named_headers_are_preloaded(
    site: Site, tmp_path: Path
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    core = as_opened(
        replace(site.core, cache=tmp_path, search_path=(*site.core.search_path, library))
    )
    note(core, HEADER)
    (library / NAME).write_text("import Missing\n\nprelude\n  nonsense\n")
    assert prepared(core) == [HEADER, "prelude\n"]
    driver = await site.driver(core, forks=RULES)
    await eventually(lambda: preloaded(driver) == 2, deadline_s=60.0)
    # What another user can have written is not read.
    (library / NAME).chmod(0o666)
    assert prepared(core) == [HEADER]


@pytest.mark.slow
async def test_what_this_worker_would_not_import_is_passed_over(core: Environment) -> None:
    class Told(MemoryStates):
        async def hot_headers(self, fingerprint: str) -> list[str]:
            assert fingerprint == core.fingerprint
            return ["import Missing\n", "prelude\nimport Core\n#eval 1\n", "nonsense", HEADER]

    driver = LeanDriver(lambda: core, slots=1, forks=RULES)
    try:
        await driver.open(Told())
        await eventually(lambda: preloaded(driver) == 1, deadline_s=60.0)
    finally:
        await driver.close()
