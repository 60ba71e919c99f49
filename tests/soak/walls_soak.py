"""The soak of the sandbox: hostile programs beside innocent ones, in the slots of one driver.

Innocent programs' verdicts are known, and may not change. Whatever the hostile ones try, no
listener outside hears a byte, and afterwards no process, file, mount or System V object is left.
``make soak-walls`` runs 2,000 of each, the tests a fiftieth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shlex
import socket
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.lean.sandboxes import children, marked
from support.lean.sites import Site, check, new_site

from leanq.lean.driver import Driver
from leanq.lean.environment import open_environment
from leanq.queue.requests import Request

_SLOTS = 4
_AT_ONCE = 6

# What an innocent one does: it uses its disk and its memory, and says what is known beforehand.
_INNOCENT = """
yes | head -c {bytes} > file
[ "$(wc -c < file)" = {bytes} ] || exit 3
[ "$(ls | wc -l)" = 2 ] || exit 4
{rest}
"""
_TAKEN = ": > LeanqSubmission.olean"
_ERROR = r"""printf '%s\n' '{"severity":"error","pos":{"line":1,"column":0},"data":"no"}'; exit 1"""

_HOSTILE_SHELL = (
    ":(){ :|:& };:",
    "kill -9 -1; kill -9 1",
    "trap '' TERM INT HUP; while :; do :; done",
    "yes | head -c 200000000",
    "yes > big; yes > bigger",
    "i=0; while :; do i=$((i+1)); : > f$i; done",
    "setsid sleep 100 & (setsid sleep 100 &) ; exit 0",
    "ln -s /etc/passwd LeanqSubmission.olean",
    "mkfifo LeanqSubmission.olean",
    "mkdir LeanqSubmission.olean; chmod 0 LeanqSubmission.olean .",
    "mkdir -p a/b; chmod 0 a/b a; exit 1",
    "cat /etc/shadow /proc/1/environ /proc/*/mem; ls /root /home /opt",
    "mount -t tmpfs x . ; unshare -r true; chroot / true",
    "exec 1>&- 2>&-; sleep 2",
    "ulimit -n 3; ulimit -f 0; echo x > y",
    "renice 19 -p $PPID; renice 19 -u 0; taskset -p 1 $PPID",
)
_HOSTILE_PYTHON = (
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "import mmap\nx = [mmap.mmap(-1, 1 << 28, flags=34) for _ in range(64)]\n"
    "for m in x:\n    for at in range(0, len(m), 4096): m[at] = 1",
    "import os\nfd = os.memfd_create('x')\nwhile True: os.write(fd, bytes(1 << 20))",
    "import mmap\nwhile True:\n    m = mmap.mmap(-1, 1 << 26); m.write(bytes(1 << 26))",
    "import os\nf = open('f', 'wb'); os.unlink('f')\nwhile True: f.write(bytes(1 << 20))",
    "import ctypes\nl = ctypes.CDLL(None)\n"
    "for n in range(200): l.shmget(n, 9, 0o1666); l.semget(n, 1, 0o1666); l.msgget(n, 0o1666)",
    "import ctypes\nl = ctypes.CDLL(None)\nfor n in range(600): l.syscall(n, *[-1] * 6)",
    "import os\nfor p in range(1, 70000):\n    try: os.kill(p, 9)\n    except OSError: pass",
    "import os\nfor p in os.listdir('/proc'):\n"
    "    for n in ('mem', 'oom_score_adj', 'coredump_filter'):\n"
    "        try: open(f'/proc/{p}/{n}', 'wb').write(b'1')\n        except OSError: pass",
    "import os\nwhile True:\n    os.mkdir('d'); os.chdir('d')",
    "import os\nr = [os.pipe() for _ in range(400)]\n"
    "for _, w in r:\n    os.set_blocking(w, False)\n    try: os.write(w, bytes(1 << 20))\n"
    "    except OSError: pass\nimport time; time.sleep(2)",
    "import resource, os\nfor p in (1, os.getppid()):\n    for n in range(16):\n"
    "        try: resource.prlimit(p, n, (1, 1))\n        except Exception: pass",
    "import fcntl, os\nfd = os.open('/etc/passwd', os.O_RDONLY)\n"
    "fcntl.flock(fd, fcntl.LOCK_EX)\nimport time; time.sleep(2)",
)
_CALL_OUT = """
import socket, sys
for family, kind, place in {places}:
    try:
        s = socket.socket(family, kind); s.connect(place); s.send(b"out")
    except OSError: pass
"""


@dataclass
class Tally:
    """What became of the requests, and what was found afterwards."""

    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Listeners:
    """What could be reached from a sandbox, if anything could."""

    def __init__(self, folder: Path) -> None:
        name = f"\0leanq-{os.getpid()}"
        self.folder = folder
        self._opened = [
            self._bound(socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "stream")),
            self._bound(socket.AF_UNIX, socket.SOCK_DGRAM, str(folder / "datagram")),
            self._bound(socket.AF_UNIX, socket.SOCK_STREAM, name),
            self._bound(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            self._bound(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        ]

    def _bound(
        self, family: socket.AddressFamily, kind: socket.SocketKind, place: str | tuple[str, int]
    ) -> socket.socket:
        made = socket.socket(family, kind)
        made.bind(place)
        if kind == socket.SOCK_STREAM:
            made.listen()
        made.setblocking(False)
        return made

    @property
    def attack(self) -> str:
        """A program that calls all of them."""
        places = [(int(s.family), int(s.type), s.getsockname()) for s in self._opened]
        return _CALL_OUT.format(places=repr(places))

    def heard(self) -> list[str]:
        """What has come in until now."""
        found = []
        for each in self._opened:
            with contextlib.suppress(BlockingIOError):
                stream = each.type == socket.SOCK_STREAM
                found.append(f"{each}: {each.accept() if stream else each.recv(9)!r}")
        return found

    def close(self) -> None:
        for each in self._opened:
            each.close()


def _innocent(rng: random.Random) -> tuple[Request, tuple[str, str | None]]:
    size = rng.choice([1, 100_000, 20_000_000])
    rest, expected = rng.choice([(_TAKEN, "not_audited"), (_ERROR, "lean_error")])
    request = check(_INNOCENT.format(bytes=size, rest=rest), audit=False, timeout_s=60)
    return request, ("unjudged" if rest == _TAKEN else "rejected", expected)


def _hostile(rng: random.Random, attack: str) -> Request:
    python = [*_HOSTILE_PYTHON, attack, attack]
    kind = rng.randrange(len(_HOSTILE_SHELL) + len(python))
    if kind < len(_HOSTILE_SHELL):
        code = _HOSTILE_SHELL[kind]
    else:
        program = textwrap.dedent(python[kind - len(_HOSTILE_SHELL)])
        code = f"exec {sys.executable} -I -S -c {shlex.quote(program)}"
    return check(code, audit=False, timeout_s=0.3, wall_s=5, memory_mb=150, scratch_mb=40)


def _machine() -> dict[str, object]:
    """What a program could leave on the machine, apart from processes and files."""
    ipc = {kind: Path(f"/proc/sysvipc/{kind}") for kind in ("shm", "sem", "msg")}
    return {
        "mounts": sorted(Path("/proc/self/mounts").read_text().splitlines()),
        **{kind: path.read_text().splitlines()[1:] for kind, path in ipc.items() if path.exists()},
        "queues": sorted(os.listdir("/dev/mqueue")) if os.path.isdir("/dev/mqueue") else [],
        "shared": sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else [],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": os.sched_getaffinity(0),
    }


async def storm(site: Site, each: int, seed: int, tally: Tally) -> None:
    """``each`` hostile requests beside as many innocent ones, in one driver."""
    rng = random.Random(seed)
    before, ours = _machine(), set(children(os.getpid()))
    with tempfile.TemporaryDirectory() as folder:
        listeners = Listeners(Path(folder))
        driver = await site.driver(site.shell(), _SLOTS)
        try:
            await _run_all(driver, each, rng, listeners.attack, tally)
        finally:
            await driver.close()
            tally.wrong += listeners.heard()
            listeners.close()
    after = _machine()
    tally.wrong += [f"{what}: {after[what]}" for what in before if after[what] != before[what]]
    if left := set(children(os.getpid())) - ours:
        tally.wrong.append(f"processes: {left}")
    if left := [pid for place in _places(site) for pid in marked(place)]:
        tally.wrong.append(f"processes: {left}")


def _places(site: Site) -> Iterator[str]:
    """What stands in the arguments of every process of a hostile program in Python."""
    yield "-I\0-S\0-c\0import"


async def _run_all(
    driver: Driver, each: int, rng: random.Random, attack: str, tally: Tally
) -> None:
    todo: list[tuple[Request, tuple[str, str | None] | None]] = []
    for _ in range(each):
        todo += [_innocent(rng), (_hostile(rng, attack), None)]
    rng.shuffle(todo)
    waiting = iter(todo)

    async def work() -> None:
        for request, expected in waiting:
            reply = await driver.run(request)
            kind = "hostile" if expected is None else "innocent"
            tally.verdicts[f"{kind} {reply.verdict}"] += 1
            if reply.error or reply.verdict == "accepted":
                tally.wrong.append(f"{request.code}: {reply}")
            if expected not in (None, (reply.verdict, reply.reason)):
                tally.wrong.append(f"{request.code}: {reply}")

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))


async def _soak(each: int, seed: int) -> int:
    tally, began_s = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        async with new_site(open_environment("default", None), Path(folder)) as site:
            await storm(site, each, seed, tally)
    for kind, count in sorted(tally.verdicts.items()):
        print(f"{kind:24} {count}")
    print(f"{2 * each} requests in {time.monotonic() - began_s:.0f} s, seed {seed}")
    for wrong in tally.wrong[:20]:
        print("WRONG", wrong)
    return 1 if tally.wrong else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    sys.exit(asyncio.run(_soak(given.each, given.seed)))


if __name__ == "__main__":
    main()
