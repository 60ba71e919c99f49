"""Memory that a delegated cgroup counts, against a tree of plain files in the place of a real one.

A kernel that shares out memory below a cgroup of version 2 was never at hand for these tests: what
the kernel would count, and that it ends a program, is written into the files by the tests.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.lean.sandboxes import (
    GENEROUS,
    MB,
    MODES,
    marked,
    new_marker,
    opened,
    output,
    python,
    run,
)
from support.waiting import eventually

from leanq.lean.sandbox import cgroup
from leanq.lean.sandbox.cgroup import Cgroup, delegated
from leanq.lean.sandbox.sandbox import Exit, Limits, Sandbox

FILES = {
    "cgroup.procs": "",
    "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n",
    "memory.max": "max\n",
    "memory.oom.group": "0\n",
    "memory.stat": "anon 0\nfile 0\nkernel_stack 0\npagetables 0\nsock 0\n",
    "memory.swap.current": "0\n",
}
SMALL = Limits(cpu_s=30, wall_s=60, memory_bytes=100 * MB)


def fill(folder: Path) -> None:
    """What a kernel would have in a cgroup."""
    for name, text in FILES.items():
        (folder / name).write_text(text)


class Tree:
    """The cgroups that a process sees, of which its own is delegated unless a test breaks that."""

    def __init__(self, folder: Path, own: str = "system.slice/leanq.service") -> None:
        self.root, self.proc = folder / "cgroup", folder / "proc"
        self.own = self.root / own
        self.own.mkdir(parents=True)
        self.proc.mkdir()
        (self.root / "cgroup.controllers").write_text("cpu memory pids\n")
        (self.proc / "cgroup").write_text(f"1:name=systemd:/x\n0::/{own}\n")
        fill(self.own)
        (self.own / "cgroup.procs").write_text("12\n34\n")
        (self.own / "cgroup.subtree_control").write_text("")
        os.setxattr(self.own, "user.delegate", b"1")

    def delegated(self) -> Path | None:
        return delegated(self.root, self.proc)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    try:
        return Tree(tmp_path)
    except OSError:
        pytest.skip("files have no attributes of users' here")


def test_a_delegated_cgroup_is_shared_out(tree: Tree) -> None:
    assert tree.delegated() == tree.own
    assert (tree.own / "leanq-worker" / "cgroup.procs").read_text() == "34"
    assert (tree.own / "cgroup.subtree_control").read_text() == "+memory"


def test_another_worker_in_it_finds_the_same(tree: Tree) -> None:
    (tree.own / "leanq-worker").mkdir()
    (tree.proc / "cgroup").write_text("0::/system.slice/leanq.service/leanq-worker\n")
    assert tree.delegated() == tree.own


def test_a_containers_own_is_delegated_where_it_can_be_written_to(tmp_path: Path) -> None:
    tree = Tree(tmp_path, own="")
    os.removexattr(tree.own, "user.delegate")
    assert tree.delegated() == tree.own


BROKEN: dict[str, Callable[[Tree], object]] = {
    "version 1": lambda tree: (tree.root / "cgroup.controllers").unlink(),
    "without memory": lambda tree: (tree.root / "cgroup.controllers").write_text("cpu\n"),
    "elsewhere": lambda tree: (tree.proc / "cgroup").write_text("0::/gone\n"),
    "none": lambda tree: (tree.proc / "cgroup").write_text("1:memory:/x\n"),
    "another's": lambda tree: os.removexattr(tree.own, "user.delegate"),
    "refused": lambda tree: (
        (tree.own / "cgroup.subtree_control").unlink(),
        (tree.own / "cgroup.subtree_control").mkdir(),
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_where_none_is_delegated_there_is_none(tree: Tree, how: str) -> None:
    BROKEN[how](tree)
    if how == "another's" and os.geteuid() != 0:
        pytest.skip("what belongs to this user is taken for this user's")
    assert tree.delegated() is None


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cgroup of each sandbox that is opened from now on."""
    folder = tmp_path / "group"
    folder.mkdir()
    fill(folder)
    monkeypatch.setattr(cgroup, "make", lambda: folder)
    return folder


def test_each_sandbox_has_one_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "delegated", lambda: tmp_path)
    one, two = cgroup.make(), cgroup.make()
    assert one is not None
    assert two is not None
    assert one != two
    assert (one / "memory.oom.group").read_text() == "1"
    # A real one goes with the files in it.
    (one / "memory.oom.group").unlink()
    cgroup.remove(one)
    assert not one.exists()
    monkeypatch.setattr(cgroup, "delegated", lambda: tmp_path / "gone")
    assert cgroup.make() is None


def test_limits_are_above_what_was_held_at_a_renewal(tmp_path: Path) -> None:
    fill(tmp_path)
    group = Cgroup(str(tmp_path))
    group.begin()
    group.limit(100 * MB, 32 * MB)
    assert int((tmp_path / "memory.max").read_text()) == (100 + 32 + 64) * MB
    (tmp_path / "memory.stat").write_text(f"anon {70 * MB}\npagetables {MB}\nfile {900 * MB}\n")
    (tmp_path / "memory.swap.current").write_text(f"{9 * MB}\n")
    assert group.held_bytes() == 80 * MB
    assert not group.is_over()
    group.renew()
    group.limit(100 * MB, float("inf"))
    assert (tmp_path / "memory.max").read_text() == "max"
    (tmp_path / "memory.stat").write_text(f"anon {172 * MB}\n")
    assert group.is_over()
    group.begin()
    assert (group.is_over(), group.peak_bytes) == (False, 181 * MB)


@pytest.mark.parametrize("mode", MODES)
async def test_a_program_is_in_its_cgroup_and_its_supervisor_is_not(mode: str, group: Path) -> None:
    async with opened(mode) as sandbox:
        assert "cgroup" in sandbox.isolation
        assert (group / "cgroup.procs").read_text() == ""
        assert await output(sandbox, "print('runs')") == "runs"
        # Itself, in whatever namespace.
        assert (group / "cgroup.procs").read_text() == "0"
        await run(sandbox, "", limits=replace(SMALL, scratch_bytes=32 * MB))
        assert int((group / "memory.max").read_text()) == (100 + 32 + 64) * MB


PROGRAMS = {
    "ends": "print('done')",
    "fails": "raise SystemExit(3)",
    "memory": "x = bytearray(400 << 20)\nimport time; time.sleep(60)",
    "cpu": "while True: pass",
    "wall": "import time; time.sleep(60)",
}
LIMITS = {"cpu": replace(SMALL, cpu_s=0.2), "wall": replace(SMALL, wall_s=0.2)}


@pytest.mark.parametrize(
    "name",
    [
        "ends",
        "memory",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fails", "cpu", "wall")),
    ],
)
async def test_verdicts_are_those_of_a_machine_without(
    name: str, group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end() -> tuple[object, ...]:
        async with opened("namespaces") as sandbox:
            found = (await run(sandbox, PROGRAMS[name], limits=LIMITS.get(name, SMALL))).exit
            return found.code, found.signal, found.stopped

    with_one = await end()
    monkeypatch.setattr(cgroup, "make", lambda: None)
    assert with_one == await end()


async def started(sandbox: Sandbox, marker: str) -> asyncio.Task[Exit]:
    """A program that holds little and waits."""
    argv = python("import time; time.sleep(60)", marker)
    process = await sandbox.start(argv, env={}, limits=SMALL)
    return asyncio.create_task(process.wait())


@pytest.mark.parametrize("mode", MODES)
async def test_what_no_process_shows_is_memory_too(mode: str, group: Path) -> None:
    async with opened(mode) as sandbox:
        ending = await started(sandbox, new_marker())
        (group / "memory.stat").write_text(f"anon {MB}\nsock {120 * MB}\n")
        end = await ending
        assert end.stopped == "memory"
        assert end.peak_bytes == 121 * MB
        (group / "memory.stat").write_text(FILES["memory.stat"])
        assert (await run(sandbox, "", limits=SMALL)).exit.stopped is None


@pytest.mark.parametrize("mode", MODES)
async def test_what_the_kernel_ends_for_its_memory_is_no_crash(mode: str, group: Path) -> None:
    events = FILES["memory.events"]
    async with opened(mode) as sandbox:
        marker = new_marker()
        ending = await started(sandbox, marker)
        await eventually(lambda: marked(marker) != [])
        (group / "memory.events").write_text(events.replace("oom_kill 0", "oom_kill 2"))
        for pid in marked(marker):
            os.kill(pid, signal.SIGKILL)
        end = await ending
        assert (end.stopped, end.signal) == ("memory", signal.SIGKILL)
        assert end.peak_bytes == SMALL.memory_bytes
        # What was ended before is another program's.
        code = "import os; os.kill(os.getpid(), 9)"
        finished = await run(sandbox, code, limits=GENEROUS)
        assert (finished.exit.stopped, finished.exit.signal) == (None, signal.SIGKILL)
