"""The network of a simulation, and the server behind it.

Commands and answers travel as bytes, in order, and take simulated time. The server is a real one,
on the real scripts; a socket beside the simulated network leads to it, and it answers at once.
Three things are kept from it: the time, which scripts are told; times-to-live, which end by that
time; and blocking, since a command that blocks would block the simulation.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import deque
from collections.abc import Sequence
from hashlib import sha1
from pathlib import Path
from typing import Any

import hiredis
import msgpack
from simulation.loop import BEGINNING_S, EPOCH_S, Host, SimulatedLoop

# What stands before each script: the simulation's clock, and ends of keys by it.
_SHIM = """
local server, now_us = redis, tonumber(redis.call('GET', '~now'))
local redis = {sha1hex = server.sha1hex, error_reply = server.error_reply,
  status_reply = server.status_reply, pcall = server.pcall}
local function ends_after(key, ms)
  server.call('ZADD', '~ends', now_us + ms * 1000, key)
end
function redis.call(name, key, ...)
  if name == 'TIME' then
    local us = now_us % 1000000
    return {string.format('%d', (now_us - us) / 1000000), string.format('%d', us)}
  elseif name == 'PEXPIRE' then
    local there = server.call('EXISTS', key)
    if there == 1 then ends_after(key, (...)) end
    return there
  elseif name == 'PERSIST' then
    return server.call('ZREM', '~ends', key)
  elseif name == 'RENAME' then
    local ends = server.call('ZSCORE', '~ends', key)
    server.call('ZREM', '~ends', key)
    if ends then server.call('ZADD', '~ends', ends, (...)) end
  elseif name == 'SET' then
    local value, px, ms = ...
    if px == 'PX' then ends_after(key, ms) else server.call('ZREM', '~ends', key) end
    return server.call('SET', key, value)
  elseif name == 'XADD' then
    local id = string.format('%d', now_us / 1000) .. '-*'
    local first = (...)
    if first == 'NOMKSTREAM' then
      if server.call('EXISTS', key) == 0 then return false end
      return redis.call('XADD', key, select(2, ...))
    end
    local added = server.pcall('XADD', key, id, select(2, ...))
    if type(added) ~= 'table' then return added end
    local last = server.call('XINFO', 'STREAM', key)
    for i = 1, #last, 2 do
      if last[i] == 'last-generated-id' then id = string.match(last[i + 1], '^%d+') .. '-*' end
    end
    return server.call('XADD', key, id, select(2, ...))
  end
  if key == nil then return server.call(name) end
  return server.call(name, key, ...)
end
"""
# Before a script that may write: what has ended by now goes.
_ENDS = """
for _, key in ipairs(server.call('ZRANGEBYSCORE', '~ends', '-inf', now_us)) do
  server.call('DEL', key) server.call('ZREM', '~ends', key)
end
"""
# Copies all keys into the other database.
_COPY = b"""
for _, key in ipairs(redis.call('KEYS', '*')) do redis.call('COPY', key, key, 'DB', 1) end
return 1
"""
# ARGV has, for each that waits, the number of its lists (or 0 and a stream) and their names.
# Returns what there is for whom, [which, list, value] or [which], packed in one text.
_SERVE = b"""
local out, i, which = {}, 1, 0
while i <= #ARGV do
  local n = tonumber(ARGV[i])
  which = which + 1
  if n == 0 then
    if redis.call('EXISTS', ARGV[i + 1]) == 1 and redis.call('XLEN', ARGV[i + 1]) > 0 then
      out[#out + 1] = {which}
    end
    i = i + 2
  else
    for k = i + 1, i + n do
      local value = redis.call('LPOP', ARGV[k])
      if value then out[#out + 1] = {which, ARGV[k], value} break end
    end
    i = i + n + 1
  end
end
return cmsgpack.pack(out)
"""
_FULL = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
_READS = frozenset(
    (b"GET", b"MGET", b"SET", b"HGET", b"HMGET", b"XTRIM", b"XREAD", b"TIME", b"HELLO", b"PEXPIRE")
)


class RealServer:
    """The server that executes; one for any number of simulations, one after another."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._reader = hiredis.Reader()
        self.resp3 = False

    def close(self) -> None:
        self._socket.close()

    def ask(self, *command: Any) -> Any:
        """The answer to one command, as Python has it; raises what the server says is wrong."""
        (answer,) = self._converse(hiredis.pack_command(command), 1)[1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask_raw(
        self, now_us: int, command: Sequence[Any], after: Sequence[Any] = ()
    ) -> tuple[bytes, Any, Any]:
        """The answer to a command at a time of the simulation, as it is on the wire and as Python
        has it; and that to the command ``after`` it, which is a text."""
        commands = [("SET", "~now", b"%d" % now_us), tuple(command)]
        if after:
            commands.append(tuple(after))
        raw, answers = self._converse(b"".join(map(hiredis.pack_command, commands)), len(commands))
        rest = len(b"$%d\r\n" % len(answers[2])) + len(answers[2]) + 2 if after else 0
        # Before it stands the +OK to the first one.
        return raw[5 : len(raw) - rest], answers[1], answers[2] if after else None

    def _converse(self, packed: bytes, count: int) -> tuple[bytes, list[Any]]:
        self._socket.sendall(packed)
        raw, answers = b"", []
        while True:
            while (answer := self._reader.gets()) is not False:
                answers.append(answer)
            if len(answers) == count:
                return raw, answers
            data = self._socket.recv(1 << 20)
            assert data, "the server has ended"
            raw += data
            self._reader.feed(data)


class Connection(asyncio.Transport):
    """One connection of a host, as asyncio's streams see it, and its end at the server.

    Attributes:
        host: whose it is.
        swallows: whether what is sent on it, either way, arrives nowhere.
        loses_answer: whether the connection breaks before the next script's answer arrives.
    """

    def __init__(self, network: Network, host: Host, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.host, self._network, self._protocol = host, network, protocol
        self.swallows = self.loses_answer = False
        self._open = True
        self._there_s = self._back_s = 0.0
        self._requests = hiredis.Reader()
        self.commands: deque[list[bytes]] = deque()
        # A command that blocks, and the alarm at its end.
        self.blocked: tuple[list[bytes], asyncio.TimerHandle | None] | None = None

    def write(self, data: Any) -> None:
        if self._open and not self.swallows:
            self._there_s = self._network.later(self, self._there_s, self._arrived, bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return not self._open

    def close(self) -> None:
        self._end(None)

    abort = close

    def cut(self) -> None:
        """The connection breaks, which the host sees at once."""
        self._end(ConnectionResetError("the connection was cut"))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def answer(self, data: bytes) -> None:
        """The server has answered."""
        if self._open and not self.swallows:
            self._back_s = self._network.later(self, self._back_s, self._received, data)

    def _end(self, error: Exception | None) -> None:
        if self._open:
            self._open = False
            self._network.server.drop(self)
            self._network.connections.pop(self, None)
            loop = self._network.loop
            loop.call_soon(self._protocol.connection_lost, error, context=self.host.context)

    def _arrived(self, data: bytes) -> None:
        if self._open:
            self._requests.feed(data)
            while (command := self._requests.gets()) is not False:
                self.commands.append(command)
            self._network.server.serve(self)

    def _received(self, data: bytes) -> None:
        if self._open:
            loop = self._network.loop
            loop.call_soon(self._protocol.data_received, data, context=self.host.context)


class Network:
    """Delivers, late at times.

    Attributes:
        connections: those that are open, the oldest first.
        delays_s: what all that a host sends and gets takes beside the usual.
    """

    def __init__(self, loop: SimulatedLoop, real: RealServer, rng: random.Random) -> None:
        self.loop, self._rng = loop, rng
        self.connections: dict[Connection, None] = {}
        self.delays_s: dict[Host, float] = {}
        self.server = Server(self, real)
        loop.connect = self._connect

    def of(self, host: Host) -> list[Connection]:
        """The connections of a host."""
        return [connection for connection in self.connections if connection.host is host]

    def later(self, connection: Connection, after_s: float, call: Any, data: bytes) -> float:
        """Calls with what travels, after all that travelled before; returns when."""
        delay_s = self._rng.uniform(0.0001, 0.001) + self.delays_s.get(connection.host, 0.0)
        # Not at the same time, since of two timers either may come first.
        when_s = max(after_s + 1e-6, self.loop.time() + delay_s)
        self.loop.outside(when_s, call, data)
        return when_s

    async def _connect(self, host: Host, factory: Any) -> tuple[Connection, asyncio.Protocol]:
        await asyncio.sleep(self._rng.uniform(0.0002, 0.002))
        if not (self.server.up and host.alive):
            raise ConnectionRefusedError("connection refused")
        protocol = factory()
        connection = Connection(self, host, protocol)
        self.connections[connection] = None
        protocol.connection_made(connection)
        return connection, protocol


class Server:
    """The server, as the network sees it.

    Attributes:
        up: whether it takes connections.
        frozen: whether it answers nothing.
        full: whether its memory is.
        ahead_s: how far its clock is ahead of the time.
    """

    def __init__(self, network: Network, real: RealServer) -> None:
        self._network, self._real = network, real
        self.up, self.frozen, self.full, self.ahead_s = True, False, False, 0.0
        self._blocked: dict[Connection, None] = {}
        self._served: list[Connection] = []
        # What was taken from lists for those that wait.
        self._found: list[tuple[Connection, list[bytes]]] = []
        # The names that clients know scripts by → the scripts as they are executed.
        self._scripts: dict[bytes, bytes] = {}
        self._refused_when_full: set[bytes] = set()
        real.ask("FLUSHALL")
        self._own = {text: real.ask("SCRIPT", "LOAD", text) for text in (_SERVE, _COPY)}

    @property
    def now_us(self) -> int:
        """The time of its clock."""
        passed_s = self._network.loop.time() - BEGINNING_S
        return round((EPOCH_S + passed_s + self.ahead_s) * 1e6)

    def stop(self) -> None:
        """It ends, and with it all connections."""
        self.up, self._scripts = False, {}
        for connection in list(self._network.connections):
            connection.cut()

    def replicate(self) -> None:
        """The replica has all that was written up to now, and gets nothing more."""
        self._run(_COPY)

    def promote(self) -> None:
        """The replica takes over."""
        self._real.ask("SWAPDB", 0, 1)
        self._real.ask("SELECT", 1)
        self._real.ask("FLUSHDB")
        self._real.ask("SELECT", 0)
        self.up = True

    def ask(self, *command: Any) -> Any:
        """The answer to a command of the simulation's own."""
        return self._real.ask_raw(self.now_us, command)[1]

    def thaw(self) -> None:
        """It answers again."""
        self.frozen = False
        served, self._served = self._served, []
        for connection in served:
            self.serve(connection)

    def drop(self, connection: Connection) -> None:
        """The connection is no more."""
        connection.commands.clear()
        self._blocked.pop(connection, None)

    def serve(self, connection: Connection) -> None:
        """Executes what has arrived on a connection."""
        if self.frozen:
            self._served.append(connection)
            return
        answers = b""
        while connection.commands and not connection.blocked:
            command = connection.commands.popleft()
            name = command[0].upper()
            answer = self._execute(connection, name, command)
            if connection.loses_answer and name == b"EVALSHA":
                connection.cut()
                break
            answers += answer
        if answers:
            connection.answer(answers)
        if found := self._found:
            self._found = []
            for waiting, texts in found:
                self._give(waiting, texts)

    def _execute(self, connection: Connection, name: bytes, command: list[bytes]) -> bytes:
        """The answer on the wire; empty for what blocks."""
        if name == b"EVALSHA":
            known = self._scripts.get(command[1])
            if known is None:
                return b"-NOSCRIPT No matching script.\r\n"
            if self.full and command[1] in self._refused_when_full:
                return _FULL
            command = [b"EVALSHA", known, *command[2:]]
        elif name == b"SCRIPT" and command[1].upper() == b"LOAD":
            digest = sha1(command[2], usedforsecurity=False).hexdigest().encode()
            self._scripts[digest] = self._real.ask("SCRIPT", "LOAD", shimmed(command[2]))
            first = command[2].partition(b"\n")[0]
            if b"allow-oom" not in first and b"no-writes" not in first:
                self._refused_when_full.add(digest)
            return b"$40\r\n%s\r\n" % digest
        elif name in (b"FCALL", b"FUNCTION"):
            # A library has the same text as its script, and would outlive this simulation.
            return b"-ERR unknown command\r\n"
        elif name == b"TIME":
            seconds, us = (b"%d" % part for part in divmod(self.now_us, 1_000_000))
            return b"*2\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(seconds), seconds, len(us), us)
        elif name == b"HELLO" and len(command) > 1:
            self._real.resp3 = command[1] == b"3"
        elif name == b"PEXPIRE":
            # Only an inbox's, which has its end from its first entry on.
            ends_us = self.now_us + int(command[2]) * 1000
            command = [b"ZADD", b"~ends", b"XX", b"%d" % ends_us, command[1]]
        elif name == b"SET":
            # An upload.
            if self.full:
                return _FULL
            _, key, value, px, ms = command
            assert px == b"PX"
            self.ask("ZADD", "~ends", self.now_us + int(ms) * 1000, key)
            command = [b"SET", key, value]
        elif name == b"BLPOP":
            return self._block(connection, command, float(command[-1]))
        elif name == b"XREAD" and b"BLOCK" in command:
            at = command.index(b"BLOCK")
            block_s = float(command[at + 1]) / 1000
            command = command[:at] + command[at + 2 :]
            raw, entries, _ = self._real.ask_raw(self.now_us, command)
            return raw if entries else self._block(connection, command, block_s)
        return self._ask(command, name not in _READS and bool(self._blocked))

    def _block(self, connection: Connection, command: list[bytes], block_s: float) -> bytes:
        loop = self._network.loop
        ends_s = loop.time() + block_s
        alarm = loop.outside(ends_s, self._unblock, connection, None) if block_s else None
        connection.blocked = (command, alarm)
        self._blocked[connection] = None
        if command[0].upper() == b"BLPOP":
            # There may be something already.
            self._ask([b"PING"], wakes=True)
        return b""

    def _ask(self, command: Sequence[Any], wakes: bool) -> bytes:
        """The answer on the wire; ``wakes``: what it leaves for those that wait is theirs, who
        waited longest first."""
        if not wakes:
            return self._real.ask_raw(self.now_us, command)[0]
        waiting = list(self._blocked)
        asked: list[bytes] = []
        for connection in waiting:
            assert connection.blocked
            blocked, _ = connection.blocked
            if blocked[0].upper() == b"BLPOP":
                asked += (b"%d" % (len(blocked) - 2), *blocked[1:-1])
            else:
                asked += (b"0", blocked[-2])
        serve = ("EVALSHA", self._own[_SERVE], 0, *asked)
        raw, _, packed = self._real.ask_raw(self.now_us, command, serve)
        self._found += (
            (waiting[which - 1], texts) for which, *texts in msgpack.unpackb(packed, raw=True)
        )
        return raw

    def _give(self, connection: Connection, found: list[bytes]) -> None:
        """What there was for a connection that waited."""
        if connection.blocked is None:
            # It has been cut meanwhile, and a token with it.
            return
        if found:
            name, value = found
            lengths = (len(name), name, len(value), value)
            self._unblock(connection, b"*2\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % lengths)
        else:
            raw, entries, _ = self._real.ask_raw(self.now_us, connection.blocked[0])
            if entries:
                self._unblock(connection, raw)

    def _unblock(self, connection: Connection, answer: bytes | None) -> None:
        if self.frozen:
            # It notices when it goes on.
            loop = self._network.loop
            loop.outside(loop.time() + 0.1, self._unblock, connection, answer)
            return
        if connection.blocked and connection in self._blocked:
            if alarm := connection.blocked[1]:
                alarm.cancel()
            del self._blocked[connection]
            connection.blocked = None
            nothing = b"_\r\n" if self._real.resp3 else b"*-1\r\n"
            connection.answer(nothing if answer is None else answer)
            self.serve(connection)

    def _run(self, text: bytes, *args: Any) -> Any:
        return self._real.ask("EVALSHA", self._own[text], 0, *args)


def shimmed(text: bytes) -> bytes:
    """A script as it is executed here."""
    flags, _, body = text.partition(b"\n")
    assert flags.startswith(b"#!"), "a script without flags"
    ends = "" if b"no-writes" in flags else _ENDS
    return b"%s%s%s%s" % (flags, _SHIM.encode(), ends.encode(), body)
