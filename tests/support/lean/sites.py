"""What the tests of the lean driver share: an environment, and the drivers that a test opens."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from leanq.lean import environment
from leanq.lean.environment import Environment
from leanq.lean.lean_driver import LeanDriver
from leanq.lean.repl.driver import ReplDriver
from leanq.lean.repl.session import Recycling
from leanq.queue.requests import Reply, Request
from leanq.states import MemoryStates
from support.lean.sandboxes import children, marked, new_marker
from support.terminals import SAMPLES

LEAN_REPL = Path(__file__).with_name("lean_repl.py")
STANDIN = Path(__file__).with_name("repl_standin.py")
STANDIN_LEAN = Path(__file__).with_name("standin_lean.py")
# No process is replaced for its age.
SELDOM = Recycling(memory_bytes=8 << 30, requests=10_000, age_s=3600.0)

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


def repl_command(environment: Environment) -> str:
    """What starts a REPL made of the environment's own Lean."""
    arguments = (*environment.toolchain.command, *environment.options)
    lean = (word for each in arguments for word in ("--lean-arg", each))
    return shlex.join([sys.executable, "-S", str(LEAN_REPL), *lean])


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
        return replace(self.core, toolchain=wrapped)

    def shell(self) -> Environment:
        toolchain = replace(self.core.toolchain, command=SHELL)
        return replace(self.core, toolchain=toolchain, options=(), header="")

    async def driver(
        self, environment: Environment | None = None, slots: int = 1, **options: Any
    ) -> LeanDriver:
        return await self.open(lambda: environment or self.core, slots, **options)

    async def open(
        self, opener: Callable[[], Environment], slots: int = 1, **options: Any
    ) -> LeanDriver:
        driver = LeanDriver(opener, slots=slots, **options)
        self._stack.push_async_callback(driver.close)
        await driver.open(MemoryStates())
        return driver

    async def repl(self, *, slots: int = 1, **options: Any) -> ReplDriver:
        """The repl driver, with a REPL made of the environment's own Lean."""
        command = repl_command(self.core)
        return await self.open_repl(lambda: self.core, command, slots=slots, **options)

    def tiny(self) -> Environment:
        """The environment with a Lean that speaks the tiny language of the stand-in."""
        command = (sys.executable, "-S", str(STANDIN_LEAN))
        toolchain = replace(self.core.toolchain, command=command)
        made = replace(self.core, toolchain=toolchain, header="")
        scan = environment._scan(toolchain, made.search_path, made.project)  # noqa: SLF001 - its files
        return replace(made, stamp=scan.stamp())

    async def standin(self, *arguments: str, **options: Any) -> ReplDriver:
        """The repl driver, with the stand-in for a REPL and a Lean of the same language."""
        return await self.open_repl(self.tiny, self.standin_command(*arguments), **options)

    def standin_command(self, *arguments: str) -> str:
        """What starts the stand-in, so that the site finds its processes."""
        command = [sys.executable, "-S", str(STANDIN), "--mark", self.marker, *arguments]
        return shlex.join(command)

    async def open_repl(
        self,
        opener: Callable[[], Environment],
        command: str,
        *,
        slots: int = 1,
        rules: Recycling = SELDOM,
        **options: Any,
    ) -> ReplDriver:
        driver = ReplDriver(opener, command, slots=slots, rules=rules, **options)
        self._stack.push_async_callback(driver.close)
        await driver.open(MemoryStates())
        return driver

    async def one(
        self, opener: Callable[[], Environment] | None = None, slots: int = 1
    ) -> LeanDriver:
        """A driver of the site's kind."""
        opener = opener or (lambda: self.core)
        if self.kind == "repl":
            return await self.open_repl(opener, repl_command(self.core), slots=slots)
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
