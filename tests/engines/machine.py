"""What the courses on real engines share: processes with deadlines, and a machine left as it was.

A course runs in a process and mount namespace of its own. Whatever way it ends, its daemons,
containers and mounts end with it; bridges, packet filter rules and cgroups, which belong to no
namespace here, are compared with those of before and removed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_INSIDE, _WITHIN = "ENGINES_FOLDER", "ENGINES_WITHIN_S"
# Courses that overlap would take one another's bridges for their own.
_LOCK = "/tmp/leanq-engines.lock"
_CGROUPS = Path("/sys/fs/cgroup")
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_NO_RULES = """*filter
:INPUT ACCEPT
:FORWARD ACCEPT
:OUTPUT ACCEPT
COMMIT
*nat
:PREROUTING ACCEPT
:INPUT ACCEPT
:OUTPUT ACCEPT
:POSTROUTING ACCEPT
COMMIT
"""


class Unavailable(Exception):  # noqa: N818
    """What a course needs cannot be had here; says what."""


class NoEngine(Unavailable):
    """An engine cannot be had here; another one may."""


class OutOfTime(Exception):  # noqa: N818
    """The seconds of ``--within`` have passed, and all was good so far."""


def run(
    *command: str | Path,
    timeout_s: float = 60.0,
    codes: Sequence[int] = (0,),
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
    text: str | None = None,
) -> str:
    """The standard output of a program; fails, with all that it said, after another exit code or
    when it takes longer."""
    words = [str(word) for word in command]
    shown = " ".join(words)
    shown = shown if len(shown) < 300 else f"{shown[:300]} …"
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=dict(environ),
            cwd=folder,
            input=text,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = b"".join(filter(None, (error.stdout, error.stderr))).decode(errors="replace")
        raise AssertionError(f"not within {timeout_s:g} s: {shown}\n{said}") from None
    if done.returncode not in codes:
        raise AssertionError(f"code {done.returncode}: {shown}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def until(condition: Callable[[], bool], deadline_s: float = 60.0, every_s: float = 0.25) -> None:
    """Waits until ``condition`` holds; fails after the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {condition}"
        time.sleep(every_s)


def install(packages: Sequence[str], programs: Sequence[str], deadline_s: float) -> None:
    """Has the programs there, from Debian's packages where they are not; raises NoEngine."""
    lacking = [program for program in programs if shutil.which(program) is None]
    if not lacking:
        return
    try:
        run("apt-get", "update", "-q", timeout_s=deadline_s)
        command = ("apt-get", "install", "-y", "-q", "--no-install-recommends", *packages)
        run(
            *command,
            timeout_s=deadline_s,
            environ=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        )
    except AssertionError as error:
        last = str(error).strip().splitlines()[-1]
        raise NoEngine(f"{', '.join(lacking)} cannot be installed: {last}") from None


def in_namespaces(module: str, course: Callable[[Path], None]) -> int:
    """Runs ``course`` with a folder to work in, in namespaces of its own; returns the exit code.

    A course that is skipped has code 0 if this machine can have no engine, and else code 1.
    The folder is new, and gone in the end, unless ``--folder FOLDER`` names one: what was fetched
    and made there is then taken again. ``--within SECONDS`` ends a course that is good so far.
    """
    if _INSIDE in os.environ:
        return _inside(course)
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--within", type=float, default=0.0)
    options = parser.parse_args()
    if why := _hindrance():
        # No engine can be installed or started on such a machine.
        print(f"SKIPPED: {why}", flush=True)
        return 0
    with contextlib.ExitStack() as at_end:
        lock = at_end.enter_context(Path(_LOCK).open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("SKIPPED: another course is under way on this machine", flush=True)
            return 1
        if options.folder:
            folder = options.folder.resolve()
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = Path(
                at_end.enter_context(tempfile.TemporaryDirectory(prefix="leanq-engines-"))
            )
        at_end.enter_context(_network_and_cgroups_as_before())
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        inside = subprocess.Popen(
            [*command, sys.executable, "-m", module],
            env=os.environ | {_INSIDE: str(folder), _WITHIN: str(options.within)},
        )

        def stop(*_: object) -> None:
            # `unshare` itself ignores it.
            with contextlib.suppress(OSError):
                for pid in (
                    Path(f"/proc/{inside.pid}/task/{inside.pid}/children").read_text().split()
                ):
                    os.kill(int(pid), signal.SIGTERM)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        return inside.wait()


def _inside(course: Callable[[Path], None]) -> int:
    within_s = float(os.environ[_WITHIN])

    def out_of_time(*_: object) -> None:
        raise OutOfTime(f"the rest: not within {within_s:.0f} s on this machine")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, within_s)
    try:
        course(Path(os.environ[_INSIDE]))
    except (NoEngine, OutOfTime) as why:
        print(f"SKIPPED: {why}", flush=True)
    except Unavailable as why:
        print(f"SKIPPED: {why}", flush=True)
        return 1
    return 0


def _hindrance() -> str:
    release = Path("/etc/os-release")
    if os.geteuid() != 0:
        return "needs root, for an engine of its own"
    if not release.exists() or "VERSION_CODENAME=bookworm" not in release.read_text():
        return "needs Debian bookworm, whose packages it is made from"
    done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False)
    return "" if done.returncode == 0 else "needs the right to make namespaces and mounts"


@contextlib.contextmanager
def _network_and_cgroups_as_before() -> Iterator[None]:
    links, groups, rules = _links(), set(_cgroups()), _rules()
    forward = _FORWARD.read_text()
    try:
        yield
    finally:
        for link in _links() - links:
            subprocess.run(["ip", "link", "delete", link], capture_output=True, check=False)
        if shutil.which("iptables-restore"):
            subprocess.run(["iptables-restore"], input=rules, text=True, check=False)
        _FORWARD.write_text(forward)
        for group in sorted(set(_cgroups()) - groups, reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()


def _links() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def _rules() -> str:
    """The packet filter's, as they can be restored; empty tables where there are none."""
    if shutil.which("iptables-save"):
        done = subprocess.run(["iptables-save"], capture_output=True, text=True, check=False)
        if done.stdout:
            return done.stdout
    return _NO_RULES


def _cgroups() -> Iterator[Path]:
    for path, _, _ in os.walk(_CGROUPS):
        yield Path(path)
