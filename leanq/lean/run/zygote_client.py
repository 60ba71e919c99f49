"""The worker's side of one zygote: makes it, forks it and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leanq.errors import SandboxError
from leanq.lean.sandbox.monitor import MESSAGE_BYTES
from leanq.lean.sandbox.sandbox import Supervisor, spawn
from leanq.lean.sandbox.scratch import empty
from leanq.queue.tasks import to_its_end

FORK_TIMEOUT_S = 30.0
"""The time for a fork; a zygote that takes longer hangs."""

_ZYGOTE = "leanq.lean.run.zygote"
# Importing maps the files of a whole library, from a disk that may be cold.
_READY_TIMEOUT_S = 900.0


class HeaderFailsError(SandboxError):
    """A header with errors has messages about its whole text, so nothing goes on behind it."""


@dataclass(eq=False)
class Zygote:
    """A process that has imported a header. Its outer process removes ``scratch``."""

    _channel: socket.socket
    supervisor: Supervisor
    scratch: Path
    memory_bytes: int = 0
    unwatched: str = ""
    alive: bool = True
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _readable: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def open(
        cls,
        program: Path | None,
        libraries: Sequence[Path],
        arguments: Sequence[str],
        header: str,
        env: Mapping[str, str],
    ) -> Zygote:
        """Imports a header; raises SandboxError if that is not possible here."""
        scratch = Path(tempfile.mkdtemp(prefix="leanq-"))
        hello = {
            "folders": [str(scratch)],
            "namespaces": True,
            "env": {**env, "HOME": str(scratch), "TMPDIR": str(scratch)},
            "program": str(program or ""),
            "libraries": [str(each) for each in libraries],
            "arguments": list(arguments),
            "header": header,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.send(json.dumps(hello).encode())
            zygote = cls(ours, spawn(theirs, _ZYGOTE), scratch)
        ours.setblocking(False)
        try:
            ready, _ = await zygote._answer(_READY_TIMEOUT_S)
            if ready.get("ready") != 0:
                if code := ready.get("ready"):
                    raise HeaderFailsError(f"alone it ends with code {code}")
                raise SandboxError(ready.get("refused", "the process that preloads has died"))
            zygote.memory_bytes, zygote.unwatched = ready["memory_bytes"], ready["unwatched"]
        except BaseException:
            await zygote.close()
            raise
        return zygote

    async def fork(self, channel: socket.socket) -> Supervisor:
        """Returns a supervisor whose programs begin behind the header, for :meth:`Sandbox.open`.
        Raises SandboxError if the zygote has died, or the machine has no room for a fork now."""
        asked = asyncio.create_task(self._fork(channel))
        try:
            # The next question would take an unread answer for its own.
            return await to_its_end(asked)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                supervisor = asked.result()
                supervisor.kill()
                await supervisor.end()
            raise

    async def _fork(self, channel: socket.socket) -> Supervisor:
        async with self._one_at_a_time:
            if not self.alive:  # or each of those in line would wait for it once more
                raise SandboxError("the fork server has died")
            try:
                socket.send_fds(self._channel, [b'{"fork": true}'], [channel.fileno()])
            except OSError as error:
                self.alive = False
                raise SandboxError(f"the fork server has died: {error}") from error
            answer, fds = await self._answer(FORK_TIMEOUT_S)
        if "refused" in answer:
            raise SandboxError(answer["refused"])
        if "forked" not in answer:
            self.alive = False
            raise SandboxError("the fork server has died")
        return Supervisor(fds[0])

    async def close(self) -> None:
        """Ends it and all that was forked from it. A cancellation waits until then."""
        await to_its_end(self._close())

    async def _close(self) -> None:
        self.alive = False
        # A watched socket that is closed would leave its number watched, and nothing that gets the
        # number next would be heard.
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel)
        self._channel.close()
        self._readable.set()
        await self.supervisor.end()
        if self.scratch.exists():
            empty(str(self.scratch))
            self.scratch.rmdir()

    async def _answer(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        """Returns its next message; empty if it has died or does not answer."""
        if self._channel.fileno() < 0:
            return {}, []
        self._readable.clear()
        self._loop.add_reader(self._channel, self._readable.set)
        try:
            async with asyncio.timeout(timeout_s):
                await self._readable.wait()
            packet, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
        except (TimeoutError, OSError):
            return {}, []
        finally:
            if self._channel.fileno() >= 0:
                self._loop.remove_reader(self._channel)
        return (json.loads(packet) if packet else {}), list(fds)
