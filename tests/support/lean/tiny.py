"""Texts in the tiny language of the stand-in for a REPL (``repl_standin_script``)."""

from __future__ import annotations

from typing import Any

from leanq.lean.repl.driver import ReplDriver
from support.lean.sites import check

HEAD = "import Library\n"
GOOD = "theorem one\n"
BAD = "#error nothing of the kind\n"


async def verdict(driver: ReplDriver, code: str, **options: Any) -> str | None:
    reply = await driver.run(check(code, audit=False, **options))
    assert reply.error is None
    return reply.verdict
