"""What programs in a sandbox get and give, their limits, and opening."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from support.lean.sandboxes import (
    DAEMON,
    GENEROUS,
    MB,
    MODES,
    PYTHON,
    marked,
    needs,
    new_marker,
    opened,
    output,
    python,
    run,
)
from support.paths import ROOT

from leanq.errors import SandboxError
from leanq.lean.sandbox.sandbox import Exit, Limits, Sandbox, python_program

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODES)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """One for all tests of the module, since each run in it begins clean."""
    async with opened(request.param) as sandbox:
        yield sandbox


async def test_exit_codes_and_signals(sandbox: Sandbox) -> None:
    finished = await run(sandbox, "raise SystemExit(7)")
    assert (finished.exit.code, finished.exit.signal, finished.exit.stopped) == (7, None, None)
    finished = await run(sandbox, "import os; os.kill(os.getpid(), 10)")
    assert (finished.exit.code, finished.exit.signal, finished.exit.stopped) == (None, 10, None)


async def test_big_input_and_both_outputs(sandbox: Sandbox) -> None:
    data = os.urandom(3 * MB)
    code = """
        import sys
        data = sys.stdin.buffer.read()
        sys.stderr.buffer.write(data[::-1])
        sys.stdout.buffer.write(data)
    """
    finished = await run(sandbox, code, stdin=data)
    assert finished.stdout == data
    assert finished.stderr == data[::-1]


async def test_input_that_is_not_read(sandbox: Sandbox) -> None:
    finished = await run(sandbox, "print('done')", stdin=bytes(2 * MB))
    assert finished.stdout == b"done\n"


async def test_a_program_gets_what_it_is_given_and_nothing_else(sandbox: Sandbox) -> None:
    code = """
        import os, resource, signal
        fds = []
        for fd in range(1000):
            try: os.fstat(fd)
            except OSError: continue
            fds.append(fd)
        print(dict(os.environb), fds, os.getsid(0) == os.getpid(), os.getcwd())
        print(resource.getrlimit(resource.RLIMIT_CORE))
        names = ["SIGHUP", "SIGCHLD"]
        print([n for n in names if signal.getsignal(getattr(signal, n)) != signal.SIG_DFL])
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    env = {"ONLY": "thïs"}
    argv = python(code)
    finished = await sandbox.run(argv, env=env, limits=GENEROUS)
    first, *rest = finished.stdout.decode().splitlines()
    assert "b'ONLY': b'th\\xc3\\xafs'" in first
    assert not any(name in first for name in ("PATH", "HOME", "USER"))
    assert first.endswith(f"[0, 1, 2] True {sandbox.scratch}")
    assert rest == ["(0, 0)", "[]", "True", "True"]


@pytest.mark.parametrize("wrong", ["argv", "size"])
async def test_what_cannot_be_started_is_named(sandbox: Sandbox, wrong: str) -> None:
    argv = ["/no/such/lean" if wrong == "argv" else "/bin/true"]
    env = {"LARGE": "x" * MB} if wrong == "size" else {}
    with pytest.raises(SandboxError, match="/no/such" if wrong != "size" else "/bin/true"):
        await sandbox.run(argv, env=env, limits=GENEROUS)
    assert await output(sandbox, "print('still usable')") == "still usable"


async def test_one_program_at_a_time(sandbox: Sandbox) -> None:
    process = await sandbox.start(["/bin/cat"], env={}, limits=GENEROUS)
    with pytest.raises(SandboxError, match="already"):
        await run(sandbox, "")
    assert (await process.kill()).stopped == "killed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        # A child of a child is busy, and no process waits for it yet.
        """
        import os, time
        if os.fork() == 0:
            if os.fork() == 0:
                while True: pass
            time.sleep(60)
        time.sleep(60)
        """,
        # A daemon that has left everything is busy.
        DAEMON.format(body="while True: pass") + "    time.sleep(60)",
        # Many short children are busy one after another, and are waited for.
        """
        import os, time
        while True:
            if os.fork() == 0:
                end = time.process_time() + 0.03
                while time.process_time() < end: pass
                os._exit(0)
            os.wait()
        """,
        # No process wants to wait for them, and the kernel would add their times to none.
        """
        import os, signal, time
        try: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        except OSError: pass
        while True:
            if os.fork() == 0:
                end = time.process_time() + 0.1
                while time.process_time() < end: pass
                os._exit(0)
            try: os.wait()
            except ChildProcessError: pass
        """,
    ],
    ids=["grandchild", "daemon", "children", "unwaited"],
)
async def test_cpu_of_all_descendants(sandbox: Sandbox, code: str) -> None:
    marker = new_marker()
    limits = Limits(cpu_s=0.25, wall_s=60, memory_bytes=1 << 30)
    finished = await run(sandbox, code, marker, limits=limits)
    assert finished.exit.stopped == "cpu"
    assert finished.exit.cpu_s > 0.25
    assert marked(marker) == []


@pytest.mark.slow
async def test_no_child_is_too_short_to_count(sandbox: Sandbox) -> None:
    needs(sandbox, "seccomp")
    code = """
        import os, signal, time
        try: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        except OSError: pass
        for _ in range(60):
            if os.fork() == 0:
                while time.process_time() < 0.01: pass
                os._exit(0)
            try: os.wait()
            except ChildProcessError: pass
    """
    assert (await run(sandbox, code)).exit.cpu_s > 0.6


async def test_what_no_process_waits_for_counts_on_when_it_is_gone() -> None:
    code = """
        import os, signal, time
        from leanq.lean.sandbox.cgroup import UsageSampler
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        sampler = UsageSampler()
        for _ in range(3):
            (seen, done), (ends, lets_go) = os.pipe(), os.pipe()
            if os.fork() == 0:
                os.close(lets_go)
                while time.process_time() < 0.07: pass
                os.write(done, b"x")
                os.read(ends, 1)
                os._exit(0)
            os.read(seen, 1)
            sampler.sample()
            os.close(lets_go)
            try: os.wait()
            except ChildProcessError: pass
        sampler.conclude()
        print(sampler.cpu_s)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    assert float(done.stdout) >= 0.15


async def test_cpu_is_exact_at_the_end(sandbox: Sandbox) -> None:
    code = """
        import time
        while time.process_time() < 0.2: pass
        print(time.process_time())
    """
    finished = await run(sandbox, code)
    assert finished.exit.cpu_s >= float(finished.stdout)
    assert finished.exit.wall_s > 0.1


async def test_memory(sandbox: Sandbox) -> None:
    limits = Limits(cpu_s=30, wall_s=60, memory_bytes=100 * MB)
    code = "x = bytearray(400 << 20)\nimport time; time.sleep(60)"
    finished = await run(sandbox, code, limits=limits)
    assert finished.exit.stopped == "memory"
    assert finished.exit.peak_bytes > 100 * MB


async def test_memory_of_threads_whose_first_has_ended(sandbox: Sandbox) -> None:
    code = """
        import _thread, ctypes, time
        def hold():
            time.sleep(0.1)
            held = b"x" * (400 << 20)
            time.sleep(60)
        _thread.start_new_thread(hold, ())
        ctypes.CDLL(None).syscall(60, 0)
    """
    low = replace(GENEROUS, memory_bytes=200 * MB)
    assert (await run(sandbox, code, limits=low)).exit.stopped == "memory"


@pytest.mark.parametrize("name", ["RssAnon:0kB", "RssAnon:zkB", "VmSwap:zkB", ") R 1 1 1"])
async def test_no_name_of_a_program_hides_its_memory(sandbox: Sandbox, name: str) -> None:
    code = f"""
        import ctypes, time
        ctypes.CDLL(None).prctl(15, {name.encode()}, 0, 0, 0)
        x = bytearray(400 << 20)
        time.sleep(60)
    """
    low = replace(GENEROUS, memory_bytes=200 * MB)
    assert (await run(sandbox, code, limits=low)).exit.stopped == "memory"


@pytest.mark.slow
async def test_who_has_many_processes_pays_for_looking_at_them(sandbox: Sandbox) -> None:
    code = """
        import os, time
        for _ in range(400): os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
        time.sleep(60)
    """
    limits = replace(GENEROUS, cpu_s=1, wall_s=60, look_s=0.025)
    end = (await run(sandbox, code, limits=limits)).exit
    assert end.stopped == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["threads", "processes"])
async def test_too_many_tasks_end_a_program(sandbox: Sandbox, what: str) -> None:
    """Which the kernel refuses to any user but root, where it can count them apart."""
    start = {
        "threads": "_thread.start_new_thread(time.sleep, (60,))",
        "processes": 'os.posix_spawn("/bin/sleep", ["sleep", "60"], {})',
    }
    code = f"""
        import _thread, os, time
        _thread.stack_size(65536)
        try:
            for _ in range(1200): {start[what]}
        except (OSError, RuntimeError): print("refused", flush=True); os._exit(0)
        time.sleep(60)
    """
    done = await run(sandbox, code, limits=replace(GENEROUS, memory_bytes=8 << 30))
    assert done.stdout == b"refused\n" or done.exit.stopped == "processes"


async def test_mapped_files_are_not_memory(sandbox: Sandbox) -> None:
    code = """
        import mmap, os, time
        with open("file", "wb+") as file:
            file.truncate(128 << 20)
            view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            print(sum(view[::4096]))
            time.sleep(0.2)
    """
    limits = Limits(cpu_s=30, wall_s=60, memory_bytes=64 * MB)
    finished = await run(sandbox, code, limits=limits)
    assert (finished.exit.code, finished.exit.stopped) == (0, None)
    assert 0 < finished.exit.peak_bytes < 64 * MB


async def test_wall(sandbox: Sandbox) -> None:
    marker = new_marker()
    limits = Limits(cpu_s=30, wall_s=0.2, memory_bytes=1 << 30)
    finished = await run(sandbox, "import time; time.sleep(60)", marker, limits=limits)
    assert (finished.exit.stopped, finished.exit.signal) == ("wall", 9)
    assert marked(marker) == []


@pytest.mark.parametrize(
    ("code", "waits"),
    [
        ("import time; time.sleep(600)", True),
        ("while True: pass", False),
        # As on a machine where others want the processors, too.
        ("import time\nwhile True: sum(range(200_000)); time.sleep(0.05)", False),
    ],
)
async def test_what_waits_at_its_wall_limit_is_told_apart(
    sandbox: Sandbox, code: str, waits: bool
) -> None:
    limits = Limits(cpu_s=30, wall_s=1.5, memory_bytes=1 << 30)
    end = (await run(sandbox, code, limits=limits)).exit
    assert end.stopped == "wall"
    assert (end.waited_s > 0.5 * end.wall_s) == waits


@pytest.mark.parametrize("count", [10**9, 3000], ids=["endless", "short"])
async def test_output(sandbox: Sandbox, count: int) -> None:
    limits = Limits(cpu_s=30, wall_s=60, memory_bytes=1 << 30, output_bytes=1000)
    code = f"import os\nfor _ in range({count}): os.write(1, b'x')"
    finished = await run(sandbox, code, limits=limits)
    assert finished.exit.stopped == "output"
    assert finished.stdout == b"x" * 1000


async def test_a_dialogue(sandbox: Sandbox) -> None:
    code = """
        import sys
        for line in sys.stdin:
            print("error of", line, end="", file=sys.stderr, flush=True)
            print("heard", line, end="", flush=True)
    """
    argv = python(code)
    process = await sandbox.start(argv, env={}, limits=GENEROUS)
    for word in (b"one\n", b"two\n"):
        process.write(word)
        answer = b""
        while not answer.endswith(b"\n"):
            answer += await process.read(4)
        assert answer == b"heard " + word
    process.write_eof()
    assert await process.read() == b""
    exit_ = await process.wait()
    assert (exit_.code, process.ended) == (0, True)
    assert (await process.finished()).stderr == b"error of one\nerror of two\n"
    assert await process.kill() == exit_


async def test_a_tail_of_standard_error_is_no_output(sandbox: Sandbox) -> None:
    limits = Limits(cpu_s=30, wall_s=60, memory_bytes=1 << 30, output_bytes=1000)
    code = "import sys; sys.stderr.write('x' * 500_000 + 'end')"
    process = await sandbox.start(python(code), env={}, limits=limits)
    finished = await process.finished()
    assert finished.exit.stopped is None
    assert len(finished.stderr) == 1 << 16
    assert finished.stderr.endswith(b"xend")


SPENDS = """
    import sys, time
    for line in sys.stdin:
        end = time.process_time() + float(line)
        while time.process_time() < end: pass
        print("done", flush=True)
"""


@pytest.mark.slow
async def test_renewed_limits(sandbox: Sandbox) -> None:
    limits = Limits(cpu_s=0.3, wall_s=60, memory_bytes=1 << 30)
    process = await sandbox.start(python(SPENDS), env={}, limits=limits)
    for _ in range(3):  # more than the limit in all
        process.write(b"0.15\n")
        assert await process.read() == b"done\n"
        assert 0.1 < (await process.renew(limits)).cpu_s < 0.3
    process.write(b"60\n")
    exit_ = await process.wait()
    assert exit_.stopped == "cpu"
    assert exit_.cpu_s > 0.6
    with pytest.raises(SandboxError, match="ended"):
        await process.renew(limits)


@pytest.mark.slow
async def test_limits_renewed_without_waiting(sandbox: Sandbox) -> None:
    limits = Limits(cpu_s=0.6, wall_s=60, memory_bytes=1 << 30)
    process = await sandbox.start(python(SPENDS), env={}, limits=limits)
    for _ in range(6):  # more than the limit in all
        process.write(b"0.15\n")
        assert await process.read() == b"done\n"
        process.renew_untold(limits)
    # It is told of the usage since then.
    process.write(b"0.15\n")
    assert await process.read() == b"done\n"
    assert 0.1 < (await process.renew(limits)).cpu_s < 0.6
    process.renew_untold(limits)
    process.write(b"60\n")
    assert (await process.wait()).stopped == "cpu"
    with pytest.raises(SandboxError, match="ended"):
        process.renew_untold(limits)


async def test_renewed_limits_count_memory_above_what_is_held(sandbox: Sandbox) -> None:
    code = """
        import sys
        held = []
        for line in sys.stdin:
            held.append(bytearray(int(line) << 20))
            print("done", flush=True)
    """
    roomy = Limits(cpu_s=30, wall_s=60, memory_bytes=1 << 30)
    process = await sandbox.start(python(code), env={}, limits=roomy)
    limits = Limits(cpu_s=30, wall_s=60, memory_bytes=60 * MB)
    for count in range(1, 4):
        process.write(b"40\n")
        assert await process.read() == b"done\n"
        assert 40 * count < (await process.renew(limits)).memory_bytes / MB < 40 * count + 30
    process.write(b"80\n")
    while await process.read():
        process.write(b"80\n")
    assert (await process.wait()).stopped == "memory"


async def test_renewal_of_a_program_that_ends_meanwhile(sandbox: Sandbox) -> None:
    process = await sandbox.start(["/bin/cat"], env={}, limits=GENEROUS)
    killing = asyncio.create_task(process.kill())
    await asyncio.sleep(0)  # the order to stop is under way
    with pytest.raises(SandboxError, match="ended"):
        await process.renew(GENEROUS)
    assert isinstance(await killing, Exit)


@pytest.mark.slow
async def test_clearing(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")
    code = """
        import os, sys
        os.symlink(sys.argv[1], "link")
        os.makedirs("shut/inner")
        open("shut/inner/file", "w").close()
        os.mkfifo(b"\\xff fifo")
        for i in range(300): open(f"file{i}", "w").close()
        def shut(path):
            try: os.chmod(path, 0)
            except PermissionError: os.mkdir(path + "/shut", 0)
        shut("shut/inner")
        shut("shut")
        for _ in range(1200):
            os.mkdir("deep" * 10)
            os.chdir("deep" * 10)
        shut(".")
    """
    assert await output(sandbox, code, str(tmp_path)) == ""
    assert len(os.listdir(sandbox.left)) == 304
    sandbox.clear()
    assert os.listdir(sandbox.left) == []
    assert await output(sandbox, "import os; print(os.listdir())") == "[]"
    assert os.listdir(tmp_path) == ["kept"]


async def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="/no/such/toolchain"):
        await Sandbox.open(readable=[Path("/no/such/toolchain")], scratch_root=tmp_path)
    with pytest.raises(SandboxError, match="scratch"):
        await Sandbox.open(scratch_root=tmp_path / "absent")
    with pytest.raises(SandboxError, match="hide"):
        await Sandbox.open(hidden=[tmp_path.parent], scratch_root=tmp_path)
    assert os.listdir(tmp_path) == []


async def test_a_python_that_was_named_by_a_roundabout_path_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    around = tmp_path.joinpath("left", "again")
    around.mkdir(parents=True)
    program = Path(sys.executable)
    path = os.path.relpath(program.parent, around)
    monkeypatch.setattr(sys, "executable", f"{around}/{path}/{program.name}")
    sandbox = await Sandbox.open(readable=PYTHON)
    try:
        argv = [python_program(), "-I", "-S", "-c", "print('runs')"]
        done = await sandbox.run(argv, env={}, limits=GENEROUS)
        assert done.stdout == b"runs\n"
    finally:
        await sandbox.close()


@pytest.mark.parametrize(("nice", "policy"), [(5, os.SCHED_OTHER), (19, os.SCHED_IDLE)])
async def test_the_nicest_programs_take_what_nobody_else_wants(nice: int, policy: int) -> None:
    code = "import os; print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))"
    # The tests themselves may run under `nice`.
    least = min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    sandbox = await Sandbox.open(readable=PYTHON, nice=nice)
    try:
        assert (await run(sandbox, code)).stdout.split() == [b"%d" % least, b"%d" % policy]
    finally:
        await sandbox.close()
