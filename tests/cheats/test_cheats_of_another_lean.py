"""The same texts, compiled by a Lean that calls itself 4.28.0, before the wheel's kernel."""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path

import pytest
from support.lean.cheats import TABLE, open_libraries, request, text
from support.lean.other_lean import open_other, other_lean
from support.lean.sites import new_site

from leanq.queue.requests import Reply

# The kernel alone refuses such a text, and another Lean has taken it.
REFUSED, DISAGREED = "rejected kernel_refused", "unjudged kernels_disagree"
# Nor does it import a module beside the library that declares what the kernel knows.
IMPORTS, UNIMPORTED = (
    re.compile("import (Bare|OtherPred)$", re.MULTILINE),
    "unjudged judge_unavailable",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("operation", ["check", "verify"])
async def test_every_text_has_its_verdict(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, modules = tmp_path / "scratch", tmp_path / "modules"
    scratch.mkdir()
    modules.mkdir()
    program = other_lean(tmp_path / "toolchain")
    cache = tmp_path / "cache"
    environment = open_libraries(open_other(program, cache), cache, modules, str(program))
    names = [name for name, row in TABLE.items() if operation in row and "xfail" not in row]
    slots = asyncio.Semaphore(2)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    async with new_site(environment, scratch) as site:
        driver = await site.driver(slots=2)
        assert await driver.opened.auditor.judges.unavailable() == ""

        async def one(name: str) -> Reply:
            async with slots:
                return await driver.run(request(operation, name))

        replies = dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))
    said = {name: " ".join(filter(None, (r.verdict, r.reason))) for name, r in replies.items()}
    differ = {}
    for name in names:
        allowed = {TABLE[name][operation]}
        if REFUSED in allowed:
            allowed.add(DISAGREED)
        if IMPORTS.search(text(name)):
            allowed = {UNIMPORTED} | allowed - {"accepted"}
        if said[name] not in allowed:
            differ[name] = said[name], allowed, replies[name].messages
    assert differ == {}
    assert DISAGREED in said.values()
    assert {r.kernel for r in replies.values() if r.verdict == "accepted"} == {"4.35.0"}
