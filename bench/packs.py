"""Measures a cold import from a slow disk, before and after packing the environment.

    python bench/packs.py LEAN [--latency-ms 2]

LEAN is the program of a toolchain with a full library. A FUSE file system of this program stands
for a network disk: each look, open and read there takes the latency, and none is remembered from
the mount before. It counts them. Needs Debian's fuse, and ``pip install mfusepy``. Prints a table.
"""

from __future__ import annotations

import argparse
import collections
import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import mfusepy

from leanq.lean.environment import Environment, open_environment, pack_environment

_TEXT = "import Std\ntheorem t (a b : Nat) : a + b = b + a := by omega\n"
_READ_BYTES = 1 << 17


class _Slow(mfusepy.Operations):
    """Shows a folder, each operation after a pause.

    Args:
        root: the folder.
        latency_s: the pause.
    """

    use_ns = True

    def __init__(self, root: Path, latency_s: float) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._root = root
        self.latency_s = latency_s

    def _asked(self, what: str, path: str) -> str:
        self.counts[what] += 1
        time.sleep(self.latency_s)
        return f"{self._root}{path}"

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        try:
            status = os.lstat(self._asked("stat", path))
        except OSError as error:
            raise mfusepy.FuseOSError(error.errno or errno.EIO) from None
        names = ("st_mode", "st_ino", "st_nlink", "st_size", "st_uid", "st_gid")
        found = {name: getattr(status, name) for name in names}
        return found | {f"st_{kind}time": getattr(status, f"st_{kind}time_ns") for kind in "amc"}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._asked("list", path))]

    def readlink(self, path: str) -> str:
        return os.readlink(self._asked("stat", path))

    def open(self, path: str, flags: int) -> int:
        return os.open(self._asked("open", path), os.O_RDONLY)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._asked("read", path)
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)


class SlowMount:
    """A mount of a folder, for as long as the context lasts."""

    def __init__(self, root: Path, at: Path, latency_s: float) -> None:
        self.slow = _Slow(root, latency_s)
        self.at = at
        at.mkdir()
        how = {"foreground": True, "ro": True, "max_read": _READ_BYTES}
        self._thread = threading.Thread(
            target=mfusepy.FUSE, args=(self.slow, str(at)), kwargs=how, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        end_s = time.monotonic() + 30
        while not os.path.ismount(self.at):
            if time.monotonic() > end_s:
                sys.exit("the file system is not mounted within 30 s")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["fusermount", "-u", str(self.at)], check=True)
        self._thread.join(30)


def _checked(environment: Environment, folder: Path) -> None:
    (folder / "T.lean").write_text(_TEXT)
    command = (*environment.toolchain.command, "T.lean")
    subprocess.run(command, env=environment.process_env(), cwd=folder, check=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lean", type=Path)
    parser.add_argument("--latency-ms", type=float, default=2.0)
    options = parser.parse_args()
    latency_s = options.latency_ms / 1000
    prefix = options.lean.resolve().parents[1]
    rows: list[tuple[str, float, collections.Counter[str]]] = []
    with tempfile.TemporaryDirectory(prefix="leanq-packs-") as scratch:
        here = Path(scratch)

        def noted(what: str, mount: SlowMount, work: Callable[[], None]) -> None:
            mount.slow.counts.clear()
            began_s = time.monotonic()
            work()
            rows.append((what, time.monotonic() - began_s, mount.slow.counts.copy()))

        with SlowMount(prefix, here / "a", latency_s) as mount:
            lean = str(mount.at / "bin" / "lean")

            def open_it() -> None:
                open_environment("a", None, lean=lean, cache=here / "cache-a", environ=os.environ)

            noted("a worker opens the environment there", mount, open_it)
        with SlowMount(prefix, here / "b", latency_s) as mount:
            lean = str(mount.at / "bin" / "lean")
            command = (lean, "T.lean")
            (here / "T.lean").write_text(_TEXT)
            noted(
                "plain Lean imports Std from there",
                mount,
                lambda: subprocess.run(command, cwd=here, check=True) and None,
            )
        packs = here / "packs"
        packs.mkdir()
        empty = here / "empty"
        empty.mkdir()
        (empty / "Mine.olean").write_bytes(b"")
        whole = open_environment("w", empty, lean=str(options.lean), cache=here / "cache-w")
        began_s = time.monotonic()
        pack_environment(whole, packs / "w.tar.zst")
        packed_s = time.monotonic() - began_s
        size_mb = (packs / "w.tar.zst").stat().st_size / 1e6
        opened: list[Environment] = []
        with SlowMount(packs, here / "c", latency_s) as mount:

            def unpack() -> None:
                opened.append(open_environment("c", mount.at / "w.tar.zst", cache=here / "cache-c"))

            noted("a worker unpacks the pack from there", mount, unpack)
            noted("the next worker of the node", mount, unpack)
            noted("plain Lean imports Std, unpacked", mount, lambda: _checked(opened[0], here))
    print(f"Packing took {packed_s:.1f} s; the pack has {size_mb:.0f} MB.\n")
    print(f"| {options.latency_ms:g} ms for each | seconds | stat, list | open | read |")
    print("| --- | --- | --- | --- | --- |")
    for what, seconds, counts in rows:
        looks = counts["stat"] + counts["list"]
        print(f"| {what} | {seconds:.1f} | {looks:,} | {counts['open']:,} | {counts['read']:,} |")


if __name__ == "__main__":
    main()
