"""The supervisor: a process beside the worker that starts programs, watches and reaps them.

It is two processes, so that either can go first::

    worker ── socket ──┐
      └─ outer         │   waits for inner, or ends it a second after the worker has gone; then
           │           │   ends what is left, removes its folders
           └─ inner ◄──┘   pid 1 of its own namespace where the machine allows it
                └─ program, one at a time, and whatever it starts

Inner ends everything when the worker closes the socket or dies, when outer dies, and after each
program (``leanq.lean.sandbox.monitor``). It sleeps in ``poll`` while nothing runs, and wakes at
once when a program ends. If it is pid 1, each program comes with a *holder*, which is pid 1 of the
program's own namespace and ends with it. Beside a fork of a zygote, pid 1 is one of
:mod:`leanq.lean.sandbox.first_process`.

As pid 1 it is certain: the kernel kills a namespace with its pid 1, however that ended. Without
a pid namespace, both are subreapers and look for descendants in /proc. That leaves two holes:
a SIGKILL of outer *and* inner in the same moment, and a program that forks faster than the walk.
Without Landlock's signal scope (ABI 6), such a program can also kill its supervisors itself.

It runs in an isolated Python, without the rest of the package. Messages are JSON, one per packet::

    worker → inner   {"folders", "readable", "hidden", "nice", "namespaces",
                      "cgroup"}   once
                     {"start": {"argv", "env", "limits", "report", "stays"}}
                         with the program's standard input, output and error as descriptors
                     {"further": {"argv", "text", "limits"}} for a fork that waits
                     {"limit": limits, "stays"}, {"renew": limits, "is_told"}, {"stop": reason}
    inner → worker   {"isolation": [...], "scratch": path}, {"started": true} where a report is
                     wanted, {"renewed": {"cpu_s", "memory_bytes"}}, {"refused": text},
                     {"exit": {the arguments of Exit.of}, "limited": if it ever was,
                         "waits": whether its process can go on with a further text}
                         the first two of a program with its scratch folder as a descriptor,
                         where that is in memory

Limits are {"cpu_s", "wall_s", "memory_bytes", "look_s", "scratch_bytes"}. They are null for a
program that is to wait for its input. Until limits come it is neither limited nor looked at, so
that waiting costs nothing. ``stays`` says whether a fork may wait behind its text for a further
one. Each message wakes a process that has lost its caches, so few are sent.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

from leanq.lean.sandbox import isolation
from leanq.lean.sandbox.cgroup import Cgroup, children
from leanq.lean.sandbox.monitor import IGNORED, MESSAGE_BYTES, GoOn, Monitor, end_all, tell
from leanq.lean.sandbox.scratch import Scratch, empty
from leanq.lean.sandbox.walls import Walls

# Where programs find their scratch folder in a root of their own.
_SCRATCH = "/run/scratch"
# The namespaces to try, best first. Containers may mask /proc, and then refuse a new one, or allow
# no mounts at all. A pid namespace without its own /proc is of no use: a program that looks itself
# up there, as Lean does, would find another.
_ATTEMPTS = (
    "user pid mount net ipc",
    "pid mount net ipc",
    "user mount net ipc",
    "user net ipc",
    "",
)
BY_MIDDLE = ("user", "pid")  # they have to be there before inner is
_LEAVING_MS = 1000  # for inner to end by itself: all that it would do, outer does as well
REFUSED = 3  # exit status: the machine does not allow these namespaces

# Does the work within the namespaces; returns an exit status.
Inner = Callable[[socket.socket, dict[str, Any], Sequence[str], Sequence[int]], int]


def keep_programs(
    channel: socket.socket,
    hello: dict[str, Any],
    namespaces: Sequence[str],
    fatal: Sequence[int],
    *,
    go_on: GoOn | None = None,
) -> int:
    """Takes the last steps inside, then keeps programs, as inner; returns its exit status."""
    base = hello["folders"][0]
    scratch = _SCRATCH if "mount" in namespaces else base
    # Out of sight behind the walls.
    group = Cgroup(hello["cgroup"])
    if "user" in namespaces:
        isolation.forbid_user_namespaces()
    try:
        isolation.unshare([each for each in namespaces if each not in BY_MIDDLE])
        isolation.keep_to_itself()
        walls = Walls(
            namespaces,
            scratch=scratch,
            base=base,
            readable=hello["readable"],
            hidden=hello["hidden"],
        )
    except OSError:
        if namespaces:
            return REFUSED
        raise
    isolation.adopt_orphans()
    if os.getpid() != 1 and not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        raise OSError("this kernel has neither pid namespaces for us nor /proc/PID/task/*/children")
    if not namespaces:
        isolation.renounce_privileges()
    # Objects made until here stay for good: this process has many short forks.
    gc.freeze()
    gc.disable()
    kinds = [*walls.report, *(["cgroup"] if hello["cgroup"] else [])]
    tell(channel, {"isolation": kinds, "scratch": scratch})
    holds = Scratch(scratch, in_memory="mount" in namespaces)
    Monitor(channel, walls, holds, group, hello["nice"], go_on).serve(fatal)
    return 0


def middle(
    inner: Inner,
    channel: socket.socket,
    hello: dict[str, Any],
    namespaces: Sequence[str],
    fatal: Sequence[int],
) -> int:
    """Enters the namespaces and leaves inner in them, as a child of this process's parent, which
    adopts orphans. Returns the exit status of this process."""
    try:
        isolation.unshare([each for each in namespaces if each in BY_MIDDLE])
    except OSError:
        return REFUSED
    if os.fork() > 0:
        return 0
    status = 0
    try:
        status = inner(channel, hello, namespaces, fatal)
    except Exception as error:
        tell(channel, {"refused": f"{type(error).__name__}: {error}"})
    finally:
        end_all({})
        os._exit(status)


def _watch(channel: socket.socket, worker: int) -> None:
    """Waits for inner's end. Ends inner if it does not see that the worker has gone, as while it
    imports a library, or is stopped. ``worker``: the worker's pidfd."""
    try:
        inner = children()[0]
        pidfd = os.pidfd_open(inner)
    except (OSError, IndexError):  # it has ended, or this kernel tells no children
        return
    poll = select.poll()
    poll.register(channel.fileno(), 0)  # it tells nothing but that the other end is closed
    for fd in (pidfd, worker):
        poll.register(fd, select.POLLIN)
    if pidfd not in {fd for fd, _ in poll.poll()}:
        alone = select.poll()
        alone.register(pidfd, select.POLLIN)
        if not alone.poll(_LEAVING_MS):
            os.kill(inner, signal.SIGKILL)
    os.close(pidfd)


def main(inner: Inner = keep_programs) -> None:
    """Runs the outer process. Its standard input is the socket to the worker."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    channel = socket.socket(fileno=0)
    # A fork of the worker could hold the socket open, so the worker itself is watched as well.
    fatal = [os.pidfd_open(os.getppid()), os.pidfd_open(os.getpid())]
    packet = channel.recv(MESSAGE_BYTES)
    if not packet:
        return
    hello = json.loads(packet)
    isolation.adopt_orphans()
    for namespaces in _ATTEMPTS if hello["namespaces"] else ("",):
        pid = os.fork()
        if pid == 0:
            os._exit(middle(inner, channel, hello, namespaces.split(), fatal))
        _, status = os.waitpid(pid, 0)
        if status == 0:
            _watch(channel, fatal[0])
            _, status = os.waitpid(-1, 0)  # inner, our eldest child: the first to be found
        if os.waitstatus_to_exitcode(status) != REFUSED:
            break
    end_all({})
    if group := hello.get("cgroup"):
        with contextlib.suppress(OSError):
            os.rmdir(group)
    for folder in hello["folders"]:
        with contextlib.suppress(OSError):  # the worker removes it too
            empty(folder)
            os.rmdir(folder)
