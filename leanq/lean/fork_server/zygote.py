"""The zygote: a process that has imported a header, and is forked into supervisors of its own kind.

It takes the place of the inner process of :mod:`leanq.lean.sandbox.supervisor`, in the same
namespaces, and runs no text but the header::

    worker ── socket ──┐
      └─ outer         │
           └─ zygote ◄─┘   has imported the header
                ├─ inner   forked from it, in namespaces of its own, for one slot of the worker
                │    └─ a fork of inner, in which Lean goes on behind the header
                └─ inner   …

So each slot has its usual walls, limits and messages. The worker sends the zygote one end of a
slot's socket, and gets a descriptor that tells when the slot's inner process has ended::

    worker → zygote  {"folders", "namespaces", "env", "program", "libraries", "arguments", "header"}
                     {"fork": true} with a socket, in which the first message to inner stands
    zygote → worker  {"ready": the exit code of the header's run, "memory_bytes": its own,
                      "unwatched": why nobody sees what texts evaluate, or ""}
                     {"forked": true} with a pidfd; or {"refused": text}

Without a process namespace it refuses, since a candidate could look into it there.
"""

from __future__ import annotations

import functools
import json
import os
import select
import socket
from collections.abc import Sequence
from typing import Any, NoReturn

from leanq.lean.fork_server import prefix_process
from leanq.lean.fork_server.preloaded import Preloaded, PreloadError, own_arguments
from leanq.lean.sandbox import isolation, supervisor
from leanq.lean.sandbox.monitor import MESSAGE_BYTES, tell
from leanq.lean.sandbox.supervisor import BY_MIDDLE, REFUSED, keep_programs, middle
from leanq.lean.sandbox.usage import children, own_memory_bytes


def preload(
    channel: socket.socket,
    hello: dict[str, Any],
    namespaces: Sequence[str],
    fatal: Sequence[int],
) -> int:
    """Does the work of a zygote in the place of an inner process; returns its exit status."""
    if not {"pid", "mount"} <= set(namespaces):
        return REFUSED
    try:
        isolation.unshare([each for each in namespaces if each not in BY_MIDDLE])
        isolation.mount_proc()
    except OSError:
        return REFUSED
    # Standard input becomes Lean's.
    channel = socket.socket(fileno=os.dup(channel.detach()))
    os.chdir(hello["folders"][0])
    os.environ.clear()
    os.environ.update(hello["env"])

    def when_ready(code: int) -> NoReturn:
        ready = {"ready": code, "memory_bytes": own_memory_bytes()}
        tell(channel, {**ready, "unwatched": preloaded.unwatched})
        _Zygote(channel, preloaded, namespaces, fatal).serve()
        os._exit(0)

    try:
        header = hello["header"].encode()
        program, libraries, arguments = hello["program"], hello["libraries"], hello["arguments"]
        preloaded = Preloaded(program, libraries, arguments, header, when_ready)
        preloaded.run()
    except PreloadError as error:
        tell(channel, {"refused": str(error)})
    return 0


class _Zygote:
    """Forks inner processes, and reaps them."""

    def __init__(
        self,
        channel: socket.socket,
        preloaded: Preloaded,
        namespaces: Sequence[str],
        fatal: Sequence[int],
    ) -> None:
        self._channel = channel
        self._preloaded = preloaded
        self._namespaces = namespaces
        self._fatal = fatal
        self._inner: dict[int, int] = {}  # the pidfds of inner processes, by their pids

    def serve(self) -> None:
        """Obeys until the worker closes the socket, or one of the fatal pidfds reports."""
        self._poll = select.poll()
        for fd in (self._channel.fileno(), *self._fatal):
            self._poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            if not ready.isdisjoint(self._fatal):
                return
            for pid in [pid for pid, pidfd in self._inner.items() if pidfd in ready]:
                pidfd = self._inner.pop(pid)
                self._poll.unregister(pidfd)
                os.close(pidfd)
                os.waitpid(pid, 0)
            if self._channel.fileno() in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """Forks an inner process; returns False if the worker has gone."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
        except OSError:
            return False
        if not packet:
            return False
        try:
            pid = os.fork()
            if pid == 0:
                self._become_middle(fds[0])
        except OSError as error:
            tell(self._channel, {"refused": f"the zygote cannot fork: {error.strerror}"})
            return True
        finally:
            for fd in fds:
                os.close(fd)
        _, status = os.waitpid(pid, 0)
        [inner] = set(children()) - self._inner.keys() or [0]
        if not inner:
            tell(self._channel, {"refused": f"the zygote cannot isolate its forks ({status})"})
            return True
        pidfd = self._inner[inner] = os.pidfd_open(inner)
        self._poll.register(pidfd, select.POLLIN)
        socket.send_fds(self._channel, [json.dumps({"forked": True}).encode()], [pidfd])
        return True

    def _become_middle(self, fd: int) -> NoReturn:
        status = 1
        try:
            for pidfd in self._inner.values():
                os.close(pidfd)
            self._channel.close()
            inner = functools.partial(keep_programs, go_on=self._go_on)
            channel = socket.socket(fileno=fd)
            hello = json.loads(channel.recv(MESSAGE_BYTES))
            status = middle(inner, channel, hello, self._namespaces, self._fatal)
        finally:
            os._exit(status)

    def _go_on(self, argv: Sequence[str], reports: int, stays: bool) -> NoReturn:
        own = own_arguments(argv)
        if own[-1:] == [prefix_process.FLAG]:
            prefix_process.serve(self._preloaded, own[:-1])
        self._preloaded.go_on(own, reports, stays=stays)


def main() -> None:
    """The outer process, as :func:`leanq.lean.sandbox.supervisor.main`."""
    supervisor.main(preload)
