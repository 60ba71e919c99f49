"""Nothing of a program outlives its request or the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.lean.sandboxes import (
    DAEMON,
    MODES,
    PYTHON,
    children,
    marked,
    needs,
    new_marker,
    opened,
    output,
    run,
    running,
)
from support.paths import ROOT
from support.waiting import eventually

from leanq.errors import SandboxError
from leanq.lean.sandbox.sandbox import Sandbox

DAEMON_AND_PARENT = DAEMON.format(body="time.sleep(60)") + "    time.sleep(60)"


@pytest.fixture(params=MODES)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with opened(request.param) as sandbox:
        yield sandbox


async def test_a_daemon_ends_with_its_program(sandbox: Sandbox) -> None:
    marker = new_marker()
    finished = await run(sandbox, DAEMON.format(body="time.sleep(60)"), marker)
    assert finished.exit.code == 0  # and the daemon holds the pipes open
    assert marked(marker) == []


async def test_many_daemons(sandbox: Sandbox) -> None:
    marker = new_marker()
    code = """
        import os, time
        for _ in range(50):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0: time.sleep(60)
                os._exit(0)
    """
    assert (await run(sandbox, code, marker)).exit.code == 0
    assert marked(marker) == []


@pytest.mark.parametrize("early", [True, False], ids=["while starting", "while running"])
async def test_cancelling(sandbox: Sandbox, early: bool) -> None:
    marker = new_marker()
    task = asyncio.create_task(run(sandbox, DAEMON_AND_PARENT, marker))
    task.add_done_callback(lambda _: left.extend(marked(marker)))
    left: list[int] = []
    if early:
        await asyncio.sleep(0)  # the order to start is under way
    else:
        await eventually(lambda: len(marked(marker)) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left == marked(marker) == []
    assert await output(sandbox, "print('still usable')") == "still usable"


async def test_a_hasty_second_cancellation_changes_nothing(sandbox: Sandbox) -> None:
    marker = new_marker()
    task = asyncio.create_task(run(sandbox, "import time; time.sleep(60)", marker))
    await eventually(lambda: marked(marker) != [])
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert marked(marker) == []


@pytest.mark.slow
@pytest.mark.parametrize("which", ["outer", "inner"])
async def test_the_supervisor_is_killed(sandbox: Sandbox, which: str) -> None:
    marker = new_marker()
    task = asyncio.create_task(run(sandbox, DAEMON_AND_PARENT, marker))
    await eventually(lambda: len(marked(marker)) == 2)
    outer = sandbox.supervisor.pid
    victim = outer if which == "outer" else children(outer)[0]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(SandboxError, match="died"):
        await task
    assert not sandbox.alive
    await eventually(lambda: marked(marker) == [])
    with pytest.raises(SandboxError, match="died"):
        await run(sandbox, "")


async def test_a_close_that_is_cancelled_leaves_no_folder(sandbox: Sandbox) -> None:
    """As where a second interrupt ends the worker at once."""
    folder = sandbox.left
    assert folder.exists()
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not folder.exists()


async def test_the_supervisor_minds_only_its_worker(sandbox: Sandbox) -> None:
    outer = sandbox.supervisor.pid
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        for pid in (outer, *children(outer)):
            os.kill(pid, signum)
    assert await output(sandbox, "print('here')") == "here"


@pytest.mark.parametrize(
    "attempt",
    [
        "resource.prlimit(pid, resource.RLIMIT_NOFILE, (50, 50))",
        "resource.prlimit(pid, resource.RLIMIT_CPU, (50, 50))",
        "os.setpriority(os.PRIO_PROCESS, pid, 19)",
        "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
        "os.sched_setaffinity(pid, [min(os.sched_getaffinity(0))])",
        "os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))",
    ],
)
async def test_the_supervisor_keeps_its_limits_and_its_scheduling(
    sandbox: Sandbox, attempt: str
) -> None:
    needs(sandbox, "seccomp")
    code = f"""
        import os, resource
        for pid in (os.getppid(), 1):
            try: {attempt}; print("done")
            except OSError: pass
    """
    assert await output(sandbox, code) == ""
    state = """
        import os
        print(os.getpriority(0, 0), os.sched_getscheduler(0), len(os.sched_getaffinity(0)))
    """
    ours = os.getpriority(0, 0), os.sched_getscheduler(0), len(os.sched_getaffinity(0))
    expected = " ".join(map(str, ours))
    assert await output(sandbox, state) == expected


@pytest.mark.parametrize("mode", MODES)
async def test_no_signal_reaches_the_supervisor(mode: str) -> None:
    async with opened(mode) as sandbox:
        needs(sandbox, "pid-ns", landlock=6)
        code = """
            import os, signal
            for number in range(1, signal.NSIG):
                try: os.kill(os.getppid(), number)
                except PermissionError: pass
        """
        assert await output(sandbox, code) == ""
        assert await output(sandbox, "print('still usable')") == "still usable"


WORKER = """
    import asyncio, sys
    from pathlib import Path
    from leanq.lean.sandbox.sandbox import Limits, Sandbox

    async def main(mode, daemon, marker, *readable):
        sandbox, waiting = [
            await Sandbox.open(
                readable=[Path(path) for path in readable], namespaces=mode == "namespaces"
            )
            for _ in range(2)
        ]
        folders = [sandbox.left, waiting.left]
        argv = [sys.executable, "-I", "-S", "-c", daemon, marker]
        limits = Limits(cpu_s=30, wall_s=60, memory_bytes=1 << 30)
        process = await sandbox.start(argv, env={}, limits=limits)
        await process.read()
        waiting.prepare(["/bin/sh", "-c", "read x", marker], env={})
        print(*folders, flush=True)
        await process.wait()

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_the_worker_is_killed(mode: str) -> None:
    marker = new_marker()
    code, daemon = textwrap.dedent(WORKER), textwrap.dedent(DAEMON_AND_PARENT)
    argv = [sys.executable, "-c", code, mode, daemon, marker, *map(str, PYTHON)]
    root = ROOT
    worker = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, cwd=root)
    assert worker.stdout is not None
    folders = [Path(path) for path in (await worker.stdout.readline()).decode().split()]
    assert [folder.is_dir() for folder in folders] == [True, True]

    def supervisors() -> list[int]:
        outers = children(worker.pid)
        return [*outers, *(inner for outer in outers for inner in children(outer))]

    try:
        # The process between outer and inner may not be reaped yet.
        await eventually(lambda: len(supervisors()) == 4)
        ends = supervisors()
        # The worker itself, the program, its daemon, and one that waits for its input.
        await eventually(lambda: len(marked(marker)) == 4)
    finally:
        worker.kill()
        assert await worker.wait() == -signal.SIGKILL
    await eventually(lambda: marked(marker) == [])
    await eventually(lambda: not any(map(running, ends)))
    assert not any(folder.exists() for folder in folders)
