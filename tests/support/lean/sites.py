"""What the tests of the lean driver share: an environment, and the drivers that a test opens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment
from leanq.queue.requests import Reply, Request
from leanq.states import MemoryStates
from support.lean.sandboxes import children, marked, new_marker
from support.lean.search_paths import as_opened
from support.terminals import SAMPLES

# A program in Lean's place that takes the candidate's text for a script. Like Lean, it writes
# nothing before it has that, since its folder is emptied while it waits; and it takes the theorem
# that a driver tries it with.
_SCRIPT = """
text=$(cat)
case "$text" in *leanq_trial*) : > LeanqSubmission.olean; exit 0;; esac
printf "%s\\n" "$text" > script.sh && exec /bin/sh ./script.sh
"""
SHELL = ("/bin/sh", "-c", _SCRIPT, "/bin/sh")
LOOKALIKE = r"""{"severity":"information","data":"'x' does not depend on any axioms"}"""


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.lean").read_text()


def check(code: str, **options: Any) -> Request:
    return Request(op="check", code=code, **options)


class Site:
    """One environment as each test wants it, with the drivers that it opened."""

    def __init__(self, core: Environment, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self.folder = folder
        self.marker = new_marker()
        # An option that no Lean knows and none minds, to find its processes by.
        self.core = replace(core, options=(f"-Dweak.test={self.marker}",))
        self.kind = "lean"
        self._stack = stack

    def behind(self, *command: str) -> Environment:
        """The environment with ``command`` in front of Lean."""
        toolchain = self.core.toolchain
        wrapped = replace(toolchain, command=(*command, *toolchain.command))
        return as_opened(replace(self.core, toolchain=wrapped))

    def shell(self) -> Environment:
        toolchain = replace(self.core.toolchain, command=SHELL)
        return as_opened(replace(self.core, toolchain=toolchain, options=(), header=""))

    async def driver(
        self, environment: Environment | None = None, slots: int = 1, **options: Any
    ) -> LeanDriver:
        made = as_opened(environment or self.core)
        return await self.open(lambda: made, slots, **options)

    async def open(
        self, opener: Callable[[], Environment], slots: int = 1, **options: Any
    ) -> LeanDriver:
        driver = LeanDriver(opener, slots=slots, **options)
        self._stack.push_async_callback(driver.close)
        await driver.open(MemoryStates())
        return driver

    async def one(
        self, opener: Callable[[], Environment] | None = None, slots: int = 1
    ) -> LeanDriver:
        """A driver of the site's kind."""
        opener = opener or (lambda: self.core)
        if self.kind == "server":
            return await self.open(opener, slots, forks=None)
        return await self.open(opener, slots)

    async def check(self, code: str, **options: Any) -> Reply:
        return await (await self.one()).run(check(code, **options))


@contextlib.asynccontextmanager
async def new_site(core: Environment, folder: Path) -> AsyncIterator[Site]:
    """A site whose drivers have to leave no process and no file in ``folder``."""
    before = children(os.getpid())
    async with contextlib.AsyncExitStack() as stack:
        made = Site(core, folder, stack)
        yield made
    assert marked(made.marker) == []
    left = {path.name: [*path.iterdir()] for path in folder.glob("leanq-*")}
    assert left == {}, left
    assert set(children(os.getpid())) <= set(before)
