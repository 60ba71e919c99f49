"""Headers in the processes of the REPL: reused, kept apart, and read as Lean reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest
from support.lean.sandboxes import marked
from support.lean.sites import Site, check
from support.lean.tiny import BAD, GOOD, HEAD, verdict

from leanq.lean.repl.driver import ReplDriver


async def test_code_sees_nothing_of_earlier_requests(site: Site) -> None:
    driver = await site.standin()
    for header in ("", HEAD):
        assert await verdict(driver, f"{header}define a\nuse a\n") == "unjudged"
        assert await verdict(driver, f"{header}use a\n") == "rejected"


async def test_a_blank_header_is_one_of_its_own(site: Site) -> None:
    driver = await site.standin()
    assert await verdict(driver, f"define a\n{BAD}") == "rejected"
    for blank in ("", "\n\n", "-- a comment\n", "/- another /- one -/ -/\n"):
        assert await verdict(driver, f"{blank}use a\n") == "rejected"
        assert list(headers(driver)) == [""]
    assert await verdict(driver, f"{HEAD}use a\n") == "rejected"
    assert await verdict(driver, "use Library\n") == "rejected"


def headers(driver: ReplDriver) -> Collection[str]:
    """Those in the process that was used last."""
    return driver.kept.sessions.idle[-1].headers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "same"),
    [
        ("import A\nimport B\n", "/- x -/ import A -- y\n\n   import   B\n"),
        ("module\npublic import all A\n", "module public  import\n all  A\n"),
        ("prelude\nimport A\n", "-- z\nprelude import A\n"),
    ],
)
async def test_headers_that_mean_the_same_are_one(site: Site, one: str, same: str) -> None:
    driver = await site.standin()
    for header, line in ((one, 3), (same, same.count("\n") + 1)):
        reply = await driver.run(check(f"{header}{BAD}", audit=False))
        assert [(m.line, m.column) for m in reply.messages] == [(line, 0)]
        assert len(headers(driver)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("other", ["import B\nimport A\n", "import A\n", "prelude\nimport A\n"])
async def test_other_headers_are_others(site: Site, other: str) -> None:
    driver = await site.standin()
    for count, header in enumerate(("import A\nimport B\n", other), 1):
        assert await verdict(driver, f"{header}{BAD}") == "rejected"
        known = {key for session in driver.kept.sessions.idle for key in session.headers}
        assert len(known) == count


@pytest.mark.slow
async def test_a_header_that_failed_is_never_kept(site: Site) -> None:
    driver = await site.standin()
    reply = await driver.run(check(f"import Missing\n{GOOD}", audit=False))
    assert reply.verdict == "rejected"
    assert "unknown module prefix 'Missing'" in reply.messages[0].text
    assert await verdict(driver, f"{HEAD}{GOOD}") == "unjudged"
    assert list(headers(driver)) == ["import Library"]
    assert await verdict(driver, f"import Missing\n{GOOD}") == "rejected"


@pytest.mark.slow
async def test_many_headers_at_a_time(site: Site) -> None:
    driver = await site.standin(slots=2)
    codes = [f"import L{n % 5}\ndefine a{n}\n{BAD if n % 2 else GOOD}" for n in range(30)]
    free = asyncio.Semaphore(2)

    async def run(code: str) -> str | None:
        async with free:
            return await verdict(driver, code)

    verdicts = await asyncio.gather(*map(run, codes))
    assert verdicts == ["rejected" if BAD in code else "unjudged" for code in codes]
    assert len(marked(f"--mark\0{site.marker}")) <= 3
