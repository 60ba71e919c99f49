"""Programs that were started ahead of their input."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from support.fleets import until
from support.lean.sandboxes import (
    GENEROUS,
    MB,
    MODES,
    children,
    marked,
    new_marker,
    opened,
    python,
    running,
)
from support.waiting import eventually

from leanq.errors import SandboxError
from leanq.lean.sandbox.sandbox import Finished, Limits, Sandbox

# Tells which of its kind it is, and then what it reads. It does not end before its supervisor has
# heard of its limits: of one that does, the supervisor cannot tell that it had read its input.
NAMED = """
    import os, sys, time
    name = os.urandom(8).hex()
    os.close(os.open(name, os.O_CREAT))
    print(name, sys.stdin.read())
    time.sleep(0.5)
"""


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODES)
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """One for all tests of the module, since each run in it begins clean."""
    async with opened(request.param) as sandbox:
        yield sandbox


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(shared: Sandbox) -> AsyncIterator[Sandbox]:
    """In which nothing waits, whichever test came before."""
    yield shared
    await shared._dismiss()  # noqa: SLF001 - a run would do the same, and take longer


class Spares:
    """One program, to be prepared and run."""

    def __init__(self, sandbox: Sandbox, code: str) -> None:
        self.marker = new_marker()
        self.argv = python(code, self.marker)
        self._sandbox = sandbox

    def prepare(self) -> None:
        # What another has made would seem to be this one's until the supervisor starts it.
        self._sandbox.clear()
        self._sandbox.prepare(self.argv, env={})

    async def run(
        self, stdin: bytes = b"", limits: Limits = GENEROUS, env: Mapping[str, str] | None = None
    ) -> Finished:
        return await self._sandbox.run(self.argv, env=env or {}, limits=limits, stdin=stdin)

    async def name(self) -> str:
        """What the file is called that the waiting one has made in its folder, once it has."""
        await eventually(lambda: self.made() != [])
        (name,) = self.made()
        return name

    def made(self) -> list[str]:
        """The files of the waiting one."""
        with contextlib.suppress(OSError, ValueError):
            (pid,) = marked(self.marker)
            return os.listdir(f"/proc/{pid}/cwd")
        return []


async def test_it_serves_one_run(sandbox: Sandbox) -> None:
    spares = Spares(sandbox, NAMED)
    spares.prepare()
    name = await spares.name()
    assert (await spares.run(b"first")).stdout.decode() == f"{name} first\n"
    other, _, read = (await spares.run(b"second")).stdout.decode().partition(" ")
    assert (other != name, read) == (True, "second\n")
    assert os.listdir(sandbox.left) == [other]


async def test_it_may_be_asked_before_it_has_started(sandbox: Sandbox) -> None:
    spares = Spares(sandbox, NAMED)
    for _ in range(2):
        sandbox.clear()
        spares.prepare()
        name, _, read = (await spares.run(b"x" * MB)).stdout.decode().partition(" ")
        assert len(read) == MB + 1
        assert os.listdir(sandbox.left) == [name]


@pytest.mark.slow
async def test_another_program_ends_it(sandbox: Sandbox) -> None:
    spares = Spares(sandbox, NAMED)
    spares.prepare()
    name = await spares.name()
    # The same program with another environment is another program.
    assert name not in (await spares.run(env={"A": "b"})).stdout.decode()
    spares.prepare()
    process = await sandbox.start(["/bin/cat"], env={}, limits=GENEROUS)
    assert marked(spares.marker) == []
    await process.kill()
    assert (await spares.run()).exit.code == 0


@pytest.mark.slow
async def test_limits_begin_with_its_input(sandbox: Sandbox) -> None:
    code = """
        import sys, time
        def spend(seconds):
            end = time.process_time() + seconds
            while time.process_time() < end: pass
        spend(0.4)
        open("ready", "w").close()
        spend(float(sys.stdin.read()))
        time.sleep(0.5)  # as NAMED
    """
    spares = Spares(sandbox, code)
    for seconds, stopped in (("0", None), ("60", "cpu")):
        spares.prepare()
        await eventually(lambda: spares.made() == ["ready"])
        limits = Limits(cpu_s=0.3, wall_s=60, memory_bytes=1 << 30)
        end = (await spares.run(seconds.encode(), limits)).exit
        assert end.stopped == stopped
        assert end.cpu_s > 0.4  # its start is part of what it cost


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["wall", "memory", "output"])
async def test_each_limit_holds(sandbox: Sandbox, limit: str) -> None:
    code = """
        import sys, time
        sys.stdin.read()
        x = bytearray(200 << 20)
        print("x" * 2000, flush=True)
        time.sleep(60)
    """
    limits = Limits(
        cpu_s=30,
        wall_s=0.3 if limit == "wall" else 60,
        memory_bytes=(100 if limit == "memory" else 1000) * MB,
        output_bytes=1000 if limit == "output" else 1 << 20,
    )
    spares = Spares(sandbox, code)
    spares.prepare()
    finished = await spares.run(b"", limits)
    assert finished.exit.stopped == limit
    assert marked(spares.marker) == []


@pytest.mark.slow
@pytest.mark.parametrize("noticed", [True, False])
async def test_one_that_died_costs_no_run(sandbox: Sandbox, noticed: bool) -> None:
    spares = Spares(sandbox, NAMED)
    spares.prepare()
    name = await spares.name()
    (pid,) = marked(spares.marker)
    os.kill(pid, signal.SIGKILL)
    if noticed:
        process = sandbox._process  # noqa: SLF001 - it alone knows what our loop has heard
        assert process is not None
        await process.wait()
    else:
        until(lambda: not running(pid))  # our own loop must not hear of its end
    finished = await spares.run(b"input")
    assert finished.exit.code == 0
    other, _, read = finished.stdout.decode().partition(" ")
    assert (other != name, read) == (True, "input\n")


async def test_one_that_does_not_wait_costs_no_run(sandbox: Sandbox) -> None:
    spares = Spares(sandbox, "print('done')")
    spares.prepare()
    assert (await spares.run(b"input")).stdout == b"done\n"


async def test_one_that_cannot_be_started(sandbox: Sandbox) -> None:
    program = ["/no/such/lean"]
    sandbox.prepare(program, env={})
    with pytest.raises(SandboxError, match="/no/such/lean"):
        await sandbox.run(program, env={}, limits=GENEROUS)
    spares = Spares(sandbox, NAMED)
    assert (await spares.run()).exit.code == 0


async def test_cancelling_its_run_ends_it(sandbox: Sandbox) -> None:
    spares = Spares(sandbox, "import sys, time; sys.stdin.read(); open('on', 'w'); time.sleep(60)")
    spares.prepare()
    task = asyncio.create_task(spares.run())
    await eventually(lambda: spares.made() == ["on"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert marked(spares.marker) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="knows poll by its number there")
async def test_it_is_not_looked_at(sandbox: Sandbox) -> None:
    spares = Spares(sandbox, NAMED)
    spares.prepare()
    await spares.name()
    (inner,) = children(sandbox.supervisor.pid)

    def in_poll_for_ever() -> bool:
        number, *arguments = Path(f"/proc/{inner}/syscall").read_text().split()
        return number == "7" and int(arguments[2], 16) & 0xFFFFFFFF == 0xFFFFFFFF

    with contextlib.suppress(PermissionError):  # only root may look
        await eventually(in_poll_for_ever)


@pytest.mark.parametrize("mode", MODES)
async def test_it_ends_with_its_sandbox(mode: str) -> None:
    async with opened(mode) as sandbox:
        spares = Spares(sandbox, NAMED)
        spares.prepare()
        await spares.name()
        await sandbox.close()
        assert marked(spares.marker) == []
        with pytest.raises(SandboxError):
            spares.prepare()
