"""Ways out of the sandbox, into the next run, or onto others' cost: each is tried."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from support.lean.sandboxes import (
    GENEROUS,
    MB,
    MODES,
    PYTHON,
    children,
    needs,
    opened,
    output,
    python,
    run,
)
from support.waiting import eventually

from leanq.errors import SandboxError
from leanq.lean.sandbox.sandbox import Sandbox

# For programs in Python: system calls by number (x86-64), and what they set errno to.
CALL = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        def call(*arguments):
            ctypes.set_errno(0)
            got = libc.syscall(*map(ctypes.c_long, arguments))
            return got if got >= 0 else -ctypes.get_errno()
"""


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODES)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """One for all tests of the module, since each run in it begins clean."""
    async with opened(request.param) as sandbox:
        yield sandbox


# Unix sockets, by path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["STREAM", "DGRAM", "SEQPACKET"])
async def test_no_socket_outside_is_reached_by_its_path(
    mode: str, kind: str, tmp_path: Path
) -> None:
    code = """
        import socket, sys
        try:
            client = socket.socket(socket.AF_UNIX, getattr(socket, f"SOCK_{sys.argv[2]}"))
            client.connect(sys.argv[1]); client.send(b"run this"); print("sent")
        except OSError as error: print(type(error).__name__)
    """
    path = tmp_path / "shown" / "server"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, getattr(socket, f"SOCK_{kind}")) as server:
        server.bind(str(path))
        if kind != "DGRAM":
            server.listen()
        # Even in a folder that programs may read.
        async with opened(mode, path.parent) as sandbox:
            needs(sandbox, "seccomp")
            assert await output(sandbox, code, str(path), kind) == "PermissionError"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(1) if kind == "DGRAM" else server.accept()


async def test_a_link_to_a_server_hides_what_it_leads_to(tmp_path: Path) -> None:
    shown, real, linked = tmp_path / "shown", tmp_path / "shown" / "real", tmp_path / "linked"
    real.mkdir(parents=True)
    (real / "secret").write_text("secret")
    linked.symlink_to(real)
    sandbox = await Sandbox.open(readable=[*PYTHON, shown], hidden=[linked])
    try:
        needs(sandbox, "root")
        code = """
            import sys
            for path in sys.argv[1:]:
                try: print(open(path).read())
                except OSError as error: print(type(error).__name__)
        """
        said = await output(sandbox, code, str(real / "secret"), str(linked / "secret"))
        assert "secret" not in said
    finally:
        await sandbox.close()


# Networks


async def test_no_datagram_leaves(sandbox: Sandbox) -> None:
    needs(sandbox, "seccomp", "net-ns")
    code = """
        import socket, sys
        try:
            client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            client.sendto(b"out", ("127.0.0.1", int(sys.argv[1]))); print("sent")
        except OSError: print("refused")
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        assert await output(sandbox, code, str(server.getsockname()[1])) == "refused"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(1)


# Files


async def test_a_root_of_its_own_holds_what_is_needed_and_nothing_else(sandbox: Sandbox) -> None:
    needs(sandbox, "root")
    code = "import os; print(*sorted(os.listdir('/')), *sorted(os.listdir('/dev')), sep='\\n')"
    found = set((await output(sandbox, code)).split())
    given = {path.parts[1] for each in PYTHON for path in (each, each.resolve())}
    expected = {"bin", "sbin", "lib", "lib32", "lib64", "usr", "etc", "sys", "proc", "dev", "run"}
    assert found <= {*expected, *given, "null", "random", "urandom"}
    code = "import os; print(*os.listdir('/etc'), *os.listdir('/proc'))"
    found = set((await output(sandbox, code)).split())
    etc = {"passwd", "group", "nsswitch.conf", "localtime", "ld.so.cache", "alternatives"}
    assert {each for each in found if not each.isdigit()} <= {*etc, "self", "thread-self"}
    # The program and what holds it; no other process is there.
    assert {each for each in found if each.isdigit()} == {"1", "2"}


async def test_what_stands_in_etc_and_opt_is_not_read(sandbox: Sandbox) -> None:
    needs(sandbox, "root", landlock=1)
    outside = [path for path in ("/etc/shadow", "/etc/hostname", "/etc/ssl", "/opt") if _is(path)]
    if not outside:
        pytest.skip("nothing to read there")
    code = """
        import os, sys
        for path in sys.argv[1:]:
            try: print(os.listdir(path) if os.path.isdir(path) else open(path).read())
            except OSError: pass
    """
    assert await output(sandbox, code, *outside) == ""


async def test_no_setuid_program_gains_anything(sandbox: Sandbox) -> None:
    needs(sandbox, "root")
    code = """
        import os
        for line in open("/proc/self/mountinfo"):
            place, options = line.split()[4:6]
            if "nosuid" not in options: print(place, options)
        print(*[line for line in open("/proc/self/status") if line.startswith("NoNewPrivs")])
    """
    assert (await output(sandbox, code)).split() == ["NoNewPrivs:", "1"]


async def test_everything_but_scratch_is_read_only(sandbox: Sandbox) -> None:
    needs(sandbox, "root")
    code = """
        import os
        for line in open("/proc/self/mountinfo"):
            place, options = line.split()[4:6]
            if options.split(",")[0] != "ro": print(place)
        for folder in ("/", "/dev", "/run", "/tmp", "/usr", "/usr/bin", "/usr/lib"):
            if os.access(folder, os.W_OK): print(folder)
    """
    # The /proc behind its own is the supervisor's, which it cannot reach.
    assert set((await output(sandbox, code)).split()) <= {"/run/scratch"}


@pytest.mark.slow
async def test_no_folder_but_scratch_can_be_written(sandbox: Sandbox) -> None:
    needs(sandbox, "root")
    code = """
        import os
        for folder, names, files in os.walk("/", followlinks=False):
            if folder in ("/proc", "/run/scratch"): names.clear()
            if os.access(folder, os.W_OK): print(folder)
    """
    assert set((await output(sandbox, code)).split()) <= {"/run/scratch"}


async def test_no_device_but_null_and_random_numbers(sandbox: Sandbox) -> None:
    needs(sandbox, "root")
    code = """
        import os, stat
        print(*sorted(os.listdir("/dev")))
        open("/dev/null", "w").write("x"); open("/dev/urandom", "rb").read(1)
        try: os.mknod("zero", 0o600 | stat.S_IFCHR, os.makedev(1, 5)); print("made")
        except OSError: pass
    """
    assert await output(sandbox, code) == "null random urandom"


# What stays for the next run


async def test_nothing_of_system_v_is_left_or_had(sandbox: Sandbox) -> None:
    needs(sandbox, "seccomp", "ipc-ns")
    code = (
        CALL
        + """
        print(call(29, 77, 4096, 0o1666), call(68, 77, 0o1666), call(64, 77, 1, 0o1666))
        print(call(248, 0, 0, 0, 0, -4), call(240, 0, 0x40, 0o600, 0))
    """
    )
    before = _ipc_objects()
    assert (await output(sandbox, code)).split() == ["-1"] * 5
    assert _ipc_objects() == before


async def test_each_run_has_namespaces_of_its_own(sandbox: Sandbox) -> None:
    needs(sandbox, "root")
    code = """
        import os
        print(*[os.readlink(f"/proc/self/ns/{each}") for each in ("pid", "ipc", "mnt")])
    """
    first, second = [(await output(sandbox, code)).split() for _ in range(2)]
    ours = [os.readlink(f"/proc/self/ns/{each}") for each in ("pid", "ipc", "mnt")]
    assert not {*first, *second} & set(ours)
    # A number can come again, but not while the one before is there.
    assert (await output(sandbox, "import os; print(os.getpid())")) == "2"


async def test_files_do_not_stay(sandbox: Sandbox) -> None:
    write = """
        import os
        open("left", "w").write("x")
        try: os.chmod(".", 0o777)
        except PermissionError: pass
    """
    await output(sandbox, write)
    assert os.listdir(sandbox.left) == ["left"]
    read = "import os; print(os.listdir('.'), oct(os.stat('.').st_mode & 0o777))"
    assert await output(sandbox, read) == "[] 0o700"


async def test_what_a_run_lowers_for_itself_ends_with_it(sandbox: Sandbox) -> None:
    lower = """
        import os, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        try: os.nice(5)
        except OSError: pass
    """
    state = """
        import os, resource
        print(os.getpriority(0, 0), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    """
    before = await output(sandbox, state)
    await run(sandbox, lower)
    assert await output(sandbox, state) == before


# Memory that no process shows


@pytest.mark.parametrize(
    "attempt",
    [
        "os.memfd_create('x')",
        "mmap.mmap(-1, 1 << 20)",
        "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20)",
        "print(call(29, 0, 1 << 20, 0o1600)) or fail()",
        "print(call(447, 0)) or fail()",
        "socket.socketpair()",
        "print(call(278, 1, 0, 0, 0)) or fail()",
    ],
    ids=["memfd", "shared", "zero", "shm", "secret", "sockets", "vmsplice"],
)
async def test_there_is_no_memory_outside_of_what_is_counted(
    sandbox: Sandbox, attempt: str
) -> None:
    needs(sandbox, "seccomp")
    code = (
        CALL
        + f"""
        import mmap, os, socket
        def fail(): raise OSError
        try: {attempt}; print("had")
        except OSError: pass
    """
    )
    assert "had" not in await output(sandbox, code)


async def test_what_pipes_can_hold_is_memory(sandbox: Sandbox) -> None:
    """Of small processes, which have little else."""
    code = """
        import os, time
        for _ in range(100): os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
        time.sleep(60)
    """
    finished = await run(sandbox, code, limits=replace(GENEROUS, memory_bytes=45 * MB, wall_s=20))
    assert finished.exit.stopped == "memory"


async def test_a_run_takes_little_of_what_its_user_may_have_in_all(sandbox: Sandbox) -> None:
    """A user who may watch no more files, for all 220,000 for each GB are watched, has no event
    loop: and the worker's user is that of its programs."""
    needs(sandbox, "user-ns")
    code = """
        import resource
        for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_SIGPENDING):
            print(resource.getrlimit(limit)[1])
    """
    files, processes, signals = map(int, (await output(sandbox, code)).split())
    assert (files // 2) ** 2 * (processes - 2 * (os.cpu_count() or 1)) <= 600_000
    assert signals <= 256


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """128 MB of them, as an operator of databases may have put aside."""
    number = Path("/proc/sys/vm/nr_hugepages")
    before = number.read_text() if number.exists() else ""
    try:
        number.write_text("64")
    except OSError:
        pytest.skip("no huge pages can be put aside here")
    try:
        if int(number.read_text()) < 64:
            pytest.skip("no huge pages can be put aside here")
        yield
    finally:
        number.write_text(before)


@pytest.mark.usefixtures("huge_pages")
async def test_huge_pages_are_memory(sandbox: Sandbox) -> None:
    code = """
        import mmap, time
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000
        area = mmap.mmap(-1, 120 << 20, flags=flags)
        for at in range(0, len(area), 2 << 20): area[at] = 1
        time.sleep(60)
    """
    finished = await run(sandbox, code, limits=replace(GENEROUS, memory_bytes=60 * MB, wall_s=20))
    assert finished.exit.stopped == "memory"


async def test_swap_and_page_tables_are_memory(sandbox: Sandbox) -> None:
    # A page of every 2 MiB: 140 MB of pages, and page tables take as much.
    code = """
        import mmap, time
        area = mmap.mmap(-1, 70 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
        area.madvise(15)
        for at in range(0, len(area), 2 << 20): area[at] = 1
        time.sleep(60)
    """
    finished = await run(sandbox, code, limits=replace(GENEROUS, memory_bytes=210 * MB))
    assert finished.exit.stopped == "memory"


# The disk


FILL = """
    import errno, os
    try:
        with open("big", "wb") as file:
            for _ in range(4096): file.write(bytes(1 << 20)); file.flush()
    except OSError as error: print(errno.errorcode[error.errno], flush=True)
    {then}
"""


@pytest.mark.parametrize("then", ["raise SystemExit(1)", "os._exit(0)", "os.kill(os.getpid(), 6)"])
async def test_who_fills_the_scratch_disk_is_ended_for_it(sandbox: Sandbox, then: str) -> None:
    needs(sandbox, "root")
    limits = replace(GENEROUS, scratch_bytes=32 * MB)
    for _ in range(2):
        finished = await run(sandbox, FILL.format(then=then), limits=limits)
        assert finished.exit.stopped == "scratch"
        assert 32 * MB < finished.exit.scratch_bytes <= 40 * MB


async def test_a_file_without_a_name_fills_it_too(sandbox: Sandbox) -> None:
    needs(sandbox, "root")
    code = """
        import os, time
        file = open("big", "wb"); os.unlink("big")
        try:
            for _ in range(4096): file.write(bytes(1 << 20)); file.flush()
        except OSError: pass
        time.sleep(60)
    """
    limits = replace(GENEROUS, scratch_bytes=32 * MB)
    assert (await run(sandbox, code, limits=limits)).exit.stopped == "scratch"


@pytest.mark.slow
async def test_who_leaves_many_files_holds_up_nothing_else(sandbox: Sandbox) -> None:
    """Whoever lets go of them last, once the supervisor has, removes them."""
    needs(sandbox, "root")
    [inner] = children(sandbox.supervisor.pid)
    mounts = Path(f"/proc/{inner}/mountinfo")
    code = "import os\nfor n in range(50_000): os.close(os.open(str(n), os.O_CREAT | os.O_WRONLY))"
    finished = await run(sandbox, code, limits=replace(GENEROUS, scratch_bytes=1 << 30))
    assert finished.exit.code == 0
    await eventually(lambda: " /run/scratch " not in mounts.read_text())
    began_s = time.thread_time()
    sandbox.clear()
    assert time.thread_time() - began_s < 0.03


async def test_a_neighbour_has_all_of_its_own_disk(sandbox: Sandbox) -> None:
    needs(sandbox, "root")
    limits = replace(GENEROUS, scratch_bytes=32 * MB)
    process = await sandbox.start(
        python(FILL.format(then="import time; time.sleep(60)")),
        env={},
        limits=replace(limits, scratch_bytes=float("inf"), look_s=60),
    )
    try:
        async with opened("namespaces") as other:
            fill = "open('mine', 'wb').write(bytes(30 << 20))"
            finished = await run(other, fill, limits=limits)
            assert (finished.exit.code, finished.exit.stopped) == (0, None)
    finally:
        await process.kill()


async def test_scratch_is_no_memory_of_the_program(sandbox: Sandbox) -> None:
    needs(sandbox, "root")
    code = """
        import mmap, time
        with open("file", "wb+") as file:
            file.truncate(128 << 20)
            view = mmap.mmap(file.fileno(), 0)
            view[:] = bytes(len(view))
            time.sleep(0.3)
    """
    limits = replace(GENEROUS, memory_bytes=300 * MB, scratch_bytes=200 * MB)
    finished = await run(sandbox, code, limits=limits)
    assert (finished.exit.code, finished.exit.stopped) == (0, None)
    limits = replace(limits, scratch_bytes=64 * MB)
    assert (await run(sandbox, code, limits=limits)).exit.stopped == "scratch"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


async def test_a_full_disk_of_the_machines_is_no_verdict(small_disk: Path) -> None:
    limits = replace(GENEROUS, scratch_bytes=256 * MB)
    sandbox = await Sandbox.open(readable=PYTHON, namespaces=False, scratch_root=small_disk)
    try:
        others = small_disk / "others"
        others.write_bytes(bytes(7 * MB + MB // 2))
        write = "open('mine', 'wb').write(bytes(2 << 20))"
        with pytest.raises(SandboxError, match="is full"):
            await run(sandbox, write, limits=limits)
        others.unlink()
        assert (await run(sandbox, write, limits=limits)).exit.code == 0
    finally:
        await sandbox.close()


def _is(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
        return bool(os.listdir(path)) if stat.S_ISDIR(mode) else True
    except OSError:
        return False


def _ipc_objects() -> list[list[str]]:
    """Every System V object of the machine."""
    kinds = [Path(f"/proc/sysvipc/{kind}") for kind in ("shm", "sem", "msg")]
    return [each.read_text().splitlines()[1:] for each in kinds if each.exists()]
