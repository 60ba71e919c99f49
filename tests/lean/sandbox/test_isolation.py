"""What a program in a sandbox cannot see, change or reach."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.lean.sandboxes import (
    MODES,
    PYTHON,
    children,
    marked,
    needs,
    new_marker,
    opened,
    output,
    run,
)
from support.waiting import eventually

from leanq.lean.sandbox.sandbox import Sandbox, probe


@pytest.fixture(params=MODES)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with opened(request.param) as sandbox:
        yield sandbox


@pytest.mark.parametrize("mode", MODES)
async def test_the_worker_and_the_supervisor_cannot_be_looked_into(mode: str) -> None:
    code = """
        import os, sys
        for pid in ["self", *sys.argv[1:], os.getppid()]:
            for name in ("environ", "mem"):
                try: open(f"/proc/{pid}/{name}", "rb"); print(pid)
                except OSError: pass
    """
    async with opened(mode, Path("/proc")) as sandbox:
        needs(sandbox, "pid-ns", "user-ns", landlock=1)
        outer = sandbox.supervisor.pid
        pids = [str(pid) for pid in (os.getpid(), outer, *children(outer))]
        assert set((await output(sandbox, code, *pids)).split()) == {"self"}


async def test_the_worker_cannot_be_signalled(sandbox: Sandbox) -> None:
    needs(sandbox, "pid-ns", landlock=6)
    code = """
        import os, sys
        for pid in map(int, sys.argv[1:]):
            try: os.kill(pid, 0); print("signalled", pid)
            except (PermissionError, ProcessLookupError): pass
    """
    outer = sandbox.supervisor.pid
    assert await output(sandbox, code, str(os.getpid()), str(outer)) == ""


async def test_files_outside_cannot_be_changed(sandbox: Sandbox, tmp_path: Path) -> None:
    needs(sandbox, "read-only", landlock=1)
    target = tmp_path / "file"
    target.write_text("ours")
    code = """
        import os, sys
        for act in (lambda p: open(p, "w"), os.unlink, lambda p: os.mkdir(p + ".d")):
            try: act(sys.argv[1]); print("done")
            except OSError: pass
        open("inside", "w").write("theirs")
        os.rename("inside", "moved")
    """
    assert await output(sandbox, code, str(target)) == ""
    assert target.read_text() == "ours"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (sandbox.left / "moved").read_text() == "theirs"


@pytest.mark.parametrize("mode", MODES)
async def test_modes_times_and_owners_outside_cannot_be_changed(mode: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("ours")
    file.chmod(0o755)
    code = """
        import os, sys
        path = sys.argv[1]
        fd = os.open(path, os.O_RDONLY)
        for act in (
            lambda: os.chmod(path, 0),
            lambda: os.fchmod(fd, 0),
            lambda: os.utime(path, (1, 1)),
            lambda: os.utime(fd),
            lambda: os.chown(path, os.getuid(), os.getgid()),
            lambda: os.setxattr(path, "user.x", b"x"),
        ):
            try: act(); print("done")
            except OSError: pass
    """
    before = file.stat()
    async with opened(mode, tmp_path) as sandbox:
        needs(sandbox, "read-only", "seccomp")
        assert await output(sandbox, code, str(file)) == ""
    after = file.stat()
    assert after.st_mode == before.st_mode
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)


async def test_files_outside_cannot_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    needs(sandbox, landlock=1)
    (tmp_path / "secret").write_text("secret")
    code = """
        import sys
        try: print(open(sys.argv[1]).read())
        except OSError as error: print(error.strerror)
    """
    expected = "No such file or directory" if "root" in sandbox.isolation else "Permission denied"
    assert await output(sandbox, code, str(tmp_path / "secret")) == expected


async def test_no_capabilities_by_a_namespace_of_its_own(sandbox: Sandbox) -> None:
    needs(sandbox, "user-ns")
    code = "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))"
    assert await output(sandbox, code) == "-1"


async def test_no_tcp_to_this_machine(sandbox: Sandbox) -> None:
    needs(sandbox, "net-ns", landlock=4)
    code = """
        import socket, sys
        try: socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10); print("connected")
        except OSError as error: print("refused")
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 10).close()
        assert await output(sandbox, code, str(port)) == "refused"


async def test_hidden_folders(tmp_path: Path) -> None:
    hidden, shown = tmp_path / "hidden", tmp_path / "shown"
    for folder in (hidden, shown):
        folder.mkdir()
        (folder / "file").write_text("secret")
    code = """
        import sys
        for path in sys.argv[1:]:
            try: print(open(path).read())
            except OSError as error: print(type(error).__name__)
    """
    paths = [str(folder / "file") for folder in (hidden, shown)]
    sandbox = await Sandbox.open(readable=[*PYTHON, tmp_path], hidden=[hidden, tmp_path / "absent"])
    try:
        needs(sandbox, "mount-ns")
        assert (await output(sandbox, code, *paths)).split() == ["PermissionError", "secret"]
    finally:
        await sandbox.close()


def theirs(marker: str) -> list[str]:
    """The files of a program in its scratch folder."""
    (pid,) = marked(marker)
    return os.listdir(f"/proc/{pid}/cwd")


async def test_two_sandboxes() -> None:
    marker = new_marker()
    one, two = await asyncio.gather(*(Sandbox.open(readable=PYTHON) for _ in range(2)))
    try:
        needs(one, landlock=1)
        code = "import time; open('theirs', 'w'); time.sleep(60)"
        sleeper = asyncio.create_task(run(two, code, marker))
        await eventually(lambda: len(marked(marker)) == 1 and theirs(marker) == ["theirs"])
        (pid,) = marked(marker)
        code = """
            import os, sys
            for act in (os.listdir, lambda p: open(p + "/theirs"), lambda p: open(p + "/x", "w")):
                try: act(sys.argv[1]); print("done")
                except OSError: pass
            try: os.kill(int(sys.argv[2]), 9)
            except OSError: pass
        """
        assert await output(one, code, f"/proc/{pid}/cwd", str(pid)) == ""
        assert marked(marker) == [pid]
        assert theirs(marker) == ["theirs"]
        sleeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeper
    finally:
        await asyncio.gather(one.close(), two.close())


def test_probe() -> None:
    kinds = probe()
    assert all(isinstance(kind, str) for kind in kinds)
    assert ("pid-ns" in kinds) <= ("mount-ns" in kinds)


def test_no_wall_is_missing_that_the_machine_allows() -> None:
    """Else the tests that need a wall would be left out where it is broken."""
    kinds = probe()
    landlock = ctypes.CDLL(None).syscall(444, None, 0, 1)  # landlock_create_ruleset: its version
    assert (f"landlock-{landlock}" in kinds) == (landlock > 0)
    if Path("/proc/sys/kernel/seccomp/actions_avail").exists():
        assert "seccomp" in kinds
    enter = ["unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork"]
    if not shutil.which("unshare"):
        pytest.skip("no program unshare")
    if subprocess.run([*enter, "--mount-proc", "true"], check=False).returncode == 0:
        namespaces = {f"{each}-ns" for each in ("user", "pid", "mount", "net", "ipc")}
        assert {*namespaces, "root", "read-only"} <= set(kinds)
