"""Ways out of a fork, into its zygote or into another fork: each is tried."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import textwrap
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from support.lean.preloaded_standin import ENDLESS, KEPT
from support.lean.python_zygote import (
    FIRST_FORK,
    family,
    forked,
    own_pid,
    private_bytes,
    python_in_place_of_lean,
    python_zygote,
)
from support.lean.sandboxes import GENEROUS, MB, PYTHON, children, needs, running
from support.waiting import eventually

from leanq.errors import SandboxError
from leanq.lean.run.zygote_client import Zygote
from leanq.lean.sandbox.sandbox import Finished, Limits, Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

# For programs: system calls by number (x86-64), and what they set errno to.
CALL = """
import ctypes, errno, os, struct
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    ctypes.set_errno(0)
    got = libc.syscall(*(ctypes.c_long(a) for a in arguments))
    return got if got >= 0 else -ctypes.get_errno()
def vector(address, size):
    found = ctypes.create_string_buffer(struct.pack("QQ", address, size))
    held.append(found)
    return ctypes.addressof(found)
held = []
"""
# The kernel's names for what a process may not see, or may not do.
REFUSED = {"EPERM", "EACCES", "ESRCH", "ENOENT", "ENOSYS", "EINVAL", "EBADF"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def zygote() -> AsyncIterator[Zygote]:
    async with python_zygote() as made:
        yield made


async def run(sandbox: Sandbox, program: str, limits: Limits = GENEROUS) -> Finished:
    code = CALL + textwrap.dedent(program)
    return await sandbox.run(["python"], env={}, limits=limits, stdin=code.encode())


async def said(sandbox: Sandbox, program: str) -> str:
    done = await run(sandbox, program)
    assert done.exit.code == 0, done
    return done.stdout.decode()


# What a fork has at the zygote's addresses is its own copy.
REMEMBERS = "print(ctypes.string_at(kept, size).decode(), flush=True)"
FORGETS = "ctypes.memset(kept, 120, size)\n" + REMEMBERS

# Each way into a process that is not one's own, by its number outside and inside.
WAYS = """
mine = ctypes.create_string_buffer(size)
for pid in {pids}:
    for name, mode in (("mem", "rb"), ("mem", "r+b"), ("maps", "rb"), ("environ", "rb")):
        try:
            with open(f"/proc/{{pid}}/{{name}}", mode) as file:
                if name == "mem":
                    file.seek(kept)
                    file.write(bytes(size)) if "+" in mode else file.read(size)
                elif not file.read(1):
                    continue
                print(pid, name, mode)
        except OSError as error:
            pass
    local, remote = vector(ctypes.addressof(mine), size), vector(kept, size)
    tries = {{
        "process_vm_readv": call(310, pid, local, 1, remote, 1, 0),
        "process_vm_writev": call(311, pid, local, 1, remote, 1, 0),
        "PTRACE_ATTACH": call(101, 16, pid, 0, 0),
        "PTRACE_SEIZE": call(101, 0x4206, pid, 0, 0),
        "kcmp": call(312, os.getpid(), pid, 1, 0, 0),
        "process_madvise": call(440, pid, remote, 1, 4, 0),
        "move_pages": call(279, pid, 0, 0, 0, 0, 0),
        "prlimit": call(302, pid, 7, remote, 0),
        "setpriority": call(141, 0, pid, 19),
        "sched_setaffinity": call(203, pid, 8, kept),
    }}
    fd = call(434, pid, 0)
    if fd >= 0:
        tries["pidfd_getfd"] = call(438, fd, 0, 0)
        os.close(fd)
    for name, got in tries.items():
        if got >= 0 or errno.errorcode[-got] not in {refused}:
            print(pid, name, got)
print("tried")
"""


def ways(pids: list[int]) -> str:
    return WAYS.format(pids=pids, refused=REFUSED)


async def test_a_fork_reaches_neither_the_zygote_nor_another_fork(zygote: Zygote) -> None:
    async with forked(zygote) as victim, forked(zygote) as attacker:
        needs(attacker, "seccomp")
        waits = asyncio.create_task(run(victim, f"import time; time.sleep(60)\n{REMEMBERS}"))
        # Its supervisors, what they run, and the first process beside each.
        await eventually(lambda: len(family(zygote)) >= 6)
        outside = family(zygote)
        found = await said(attacker, ways([*range(20), *outside]))
        lines = found.splitlines()
        assert "2 maps rb" in lines  # itself; its memory by this way only as root
        assert [line for line in lines if line[:2] not in ("0 ", "2 ")] == ["tried"]
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert set(family(zygote)) <= set(outside)
        assert (await said(victim, REMEMBERS)).strip() == KEPT.decode()


def is_stopped(pid: int) -> bool:
    return " T " in Path(f"/proc/{pid}/stat").read_text()


async def test_a_fork_that_is_given_up_twice_is_not_taken_for_the_next() -> None:
    async with python_zygote() as made:
        await eventually(lambda: len(family(made)) == 2)
        pid = own_pid(made)
        os.kill(pid, signal.SIGSTOP)
        given_up = asyncio.create_task(Sandbox.open(start=made.fork))
        for _ in range(2):
            await asyncio.sleep(0.1)
            given_up.cancel()
        os.kill(pid, signal.SIGCONT)
        async with forked(made) as sandbox:
            await asyncio.gather(given_up, return_exceptions=True)
            assert sandbox.supervisor.pid in family(made)


@pytest.mark.parametrize("forks", [1, 2])
async def test_a_zygote_outlives_a_moment_without_processes(forks: int) -> None:
    """At its second fork, the first one's own fork is refused before that of the zygote is."""
    async with python_zygote(scarce_at=FIRST_FORK + forks - 1) as made:
        for _ in range(forks):
            with pytest.raises(SandboxError, match="the zygote cannot"):
                await Sandbox.open(readable=PYTHON, start=made.fork)
            assert made.alive
        async with forked(made) as sandbox:
            assert sandbox.alive


async def test_a_zygote_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanq.lean.run.zygote_client.FORK_TIMEOUT_S", 2.0)
    async with python_zygote() as made:
        await eventually(lambda: len(family(made)) == 2)
        pid = own_pid(made)
        os.kill(pid, signal.SIGSTOP)
        try:
            await eventually(lambda: is_stopped(pid))
            began_s = time.monotonic()
            forks = [Sandbox.open(readable=PYTHON, start=made.fork) for _ in range(6)]
            came = await asyncio.gather(*forks, return_exceptions=True)
            assert all(isinstance(each, SandboxError) for each in came)
            assert not made.alive
            assert time.monotonic() - began_s < 6 * 2.0
        finally:
            os.kill(pid, signal.SIGCONT)


async def test_a_zygote_is_ended_while_it_imports() -> None:
    """It looks at nothing else meanwhile, and may take minutes."""
    before = set(children(os.getpid()))

    def importing() -> list[int]:
        outer = set(children(os.getpid())) - before
        inner = [pid for each in outer for pid in children(each)]
        return [pid for pid in inner if is_first_of_namespace(pid)]

    with python_in_place_of_lean():
        opens = asyncio.create_task(Zygote.open(None, [], [], ENDLESS, {}))
        await eventually(lambda: bool(importing()))
    [pid] = importing()
    began_s = time.monotonic()
    opens.cancel()
    await asyncio.gather(opens, return_exceptions=True)
    assert time.monotonic() - began_s < 20.0
    assert not running(pid)
    assert set(children(os.getpid())) <= before


def is_first_of_namespace(pid: int) -> bool:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("NSpid:")]
        return line.split()[1:] != ["1"] and line.split()[-1] == "1"
    return False


async def test_two_may_close_a_sandbox_at_once(zygote: Zygote) -> None:
    sandbox = await Sandbox.open(start=zygote.fork)
    async with asyncio.timeout(10):
        await asyncio.gather(sandbox.close(), sandbox.close())


@pytest.mark.parametrize("which", ["zygote", "sandbox"])
async def test_what_is_cancelled_while_it_closes_is_closed_then(which: str) -> None:
    async with python_zygote() as made:
        sandbox = await Sandbox.open(readable=PYTHON, start=made.fork)
        closed, folder = (
            (made, made.scratch) if which == "zygote" else (sandbox, sandbox.left.resolve())
        )
        closing = asyncio.create_task(closed.close())
        for _ in range(3):
            await asyncio.sleep(0)
            assert not closing.done()
            closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not closed.alive
        assert not folder.exists()
        await sandbox.close()


async def test_a_zygote_that_is_closed_keeps_nobody_waiting_for_a_fork() -> None:
    loop = asyncio.get_running_loop()
    async with python_zygote() as made:
        await eventually(lambda: len(family(made)) == 2)
        pid = own_pid(made)
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: is_stopped(pid))
        forks = asyncio.create_task(Sandbox.open(start=made.fork))
        await asyncio.sleep(0.2)
        closes = asyncio.create_task(made.close())
        try:
            async with asyncio.timeout(10):
                with pytest.raises(SandboxError):
                    await forks
        finally:
            os.kill(pid, signal.SIGCONT)
        await closes
        # Who gets the socket's number is heard.
        pairs = [socket.socketpair() for _ in range(8)]
        for each, other in pairs:
            heard = asyncio.Event()
            loop.add_reader(each, heard.set)
            other.send(b"x")
            async with asyncio.timeout(10):
                await heard.wait()
            loop.remove_reader(each)
        for pair in pairs:
            for each in pair:
                each.close()


@pytest.mark.slow
async def test_a_fork_signals_none_but_itself(zygote: Zygote) -> None:
    async with forked(zygote) as victim, forked(zygote) as attacker:
        waits = asyncio.create_task(run(victim, "import time; time.sleep(2); print('alive')"))
        await eventually(lambda: len(family(zygote)) >= 6)
        pids = [-1, 0, 1, *family(zygote)]
        done = await run(
            attacker,
            f"""
            import signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for pid in {pids}:
                for number in (15, 9) if pid not in (0,) else (15,):
                    try: os.kill(pid, number)
                    except OSError: pass
            print("here", flush=True)
            """,
        )
        assert done.stdout == b"here\n"
        assert (await waits).stdout == b"alive\n"
        assert zygote.alive


async def test_what_a_fork_changes_is_its_own(zygote: Zygote) -> None:
    async with forked(zygote) as one, forked(zygote) as other:
        assert (await said(one, FORGETS)).strip() == "x" * len(KEPT)
        for sandbox in (one, other):
            assert (await said(sandbox, REMEMBERS)).strip() == KEPT.decode()


async def test_a_fork_has_three_descriptors_one_for_reports_and_libuvs_pipe(zygote: Zygote) -> None:
    """Whatever closes the pipe's numbers in a fork's own forks must close nothing else."""
    program = """
    os.write(pipe[1], b"x")
    assert os.read(pipe[0], 9) == b"x"
    for fd in range(1024):
        try: os.fstat(fd)
        except OSError: continue
        if fd not in (*pipe, reports): print(fd, end=" ")
    """
    async with forked(zygote) as sandbox:
        assert (await said(sandbox, program)).split() == ["0", "1", "2"]


async def test_orphans_spend_the_time_of_a_fork(zygote: Zygote) -> None:
    """No sample sees most of them, and the first process of the namespace reaps them."""
    program = """
    import time
    for _ in range(100):
        ends, end = os.pipe()
        if not (child := os.fork()):
            if not os.fork():
                while time.process_time() < 0.005: pass
            os._exit(0)
        os.close(end)
        os.waitpid(child, 0)
        os.read(ends, 1)
        os.close(ends)
    """
    async with forked(zygote) as sandbox:
        done = await run(sandbox, program)
        assert done.exit.code == 0, done
        assert done.exit.cpu_s > 100 * 0.005


async def test_a_fork_makes_no_ring_and_no_shared_memory(zygote: Zygote) -> None:
    program = """
    calls = {"io_uring_setup": (425, 8, kept), "io_uring_enter": (426, 0, 1, 0, 0, 0),
             "io_uring_register": (427, 0, 0, 0, 0), "shmget": (29, 77, 4096, 0o1666),
             "memfd_create": (319, kept, 0), "userfaultfd": (323, 0), "bpf": (321, 0, 0, 0),
             "perf_event_open": (298, kept, 0, -1, -1, 0), "keyctl": (250, 0, -3, 1),
             "socket": (41, 1, 1, 0), "unshare": (272, 0x10000000), "setns": (308, 0, 0)}
    for name, arguments in calls.items():
        if (got := call(*arguments)) >= 0: print(name, got)
    """
    async with forked(zygote) as sandbox:
        needs(sandbox, "seccomp")
        assert await said(sandbox, program) == ""


HOSTILE = {
    "abort": ("os.abort()", "signal"),
    "segfault": ("ctypes.string_at(0)", "signal"),
    "kill": ("os.kill(os.getpid(), 9)", "signal"),
    "exit": ("os._exit(7)", "code"),
    "loop": ("while True: pass", "cpu"),
    "sleep": ("import time; time.sleep(100)", "wall"),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "memory"),
    "copies": ("while True:\n    if os.fork(): os.wait(); break", None),
    "bomb": ("while True:\n    try: os.fork()\n    except OSError: pass", None),
    "threads": (
        "import threading, time\nfor _ in range(2000):\n"
        "    try: threading.Thread(target=time.sleep, args=(50,)).start()\n"
        "    except RuntimeError: break",
        None,
    ),
    "orphans": ("import time\nfor _ in range(50):\n    if not os.fork(): time.sleep(50)", None),
    "unmaps": (
        "for n in range(3000): call(11, kept - kept % 4096 + (n - 1500) * 4096, 4096)",
        None,
    ),
    "stops": ("os.kill(os.getpid(), 19)", "wall"),
}


QUICK = ("kill", "loop", "memory", "orphans")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in HOSTILE]
)
async def test_a_hostile_fork_costs_itself_alone(zygote: Zygote, name: str) -> None:
    program, expected = HOSTILE[name]
    wall_s = 3.0 if expected == "wall" else 60.0
    low = replace(GENEROUS, cpu_s=0.5, wall_s=wall_s, memory_bytes=100 * MB)
    async with forked(zygote) as sandbox:
        assert (await said(sandbox, REMEMBERS)).strip() == KEPT.decode()
        pid, before = own_pid(zygote), len(family(zygote))
        held = private_bytes(pid)
        for _ in range(3):
            end = (await run(sandbox, program, low)).exit
            match expected:
                case "signal":
                    assert end.signal is not None
                case "code":
                    assert end.code == 7
                case str():
                    assert end.stopped == expected
        assert (await said(sandbox, REMEMBERS)).strip() == KEPT.decode()
        assert (own_pid(zygote), len(family(zygote))) == (pid, before)
        assert private_bytes(pid) <= held + MB
