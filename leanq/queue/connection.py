"""A connection to the server that holds a shard, on which calls take turns.

In a cluster it follows the shard's hash slot. MOVED names the slot's node and means that nothing
was done, so the call is made there. While a slot is moving (ASK, TRYAGAIN) it is out of reach: a
script on either side would see half of the shard's keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio as redis
from hiredis import pack_command
from redis import exceptions as redis_errors
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from leanq.errors import (
    LoginError,
    NotPermittedError,
    QueueFullError,
    RefusedError,
    UnavailableError,
    UsageError,
)
from leanq.queue.metrics import count
from leanq.queue.scripts import Library, digest_of, library_of
from leanq.queue.settings import each_host, without_password
from leanq.queue.tasks import to_its_end

_T = TypeVar("_T")

RETRY_AFTER_S = 1.0
"""Seconds that a client should wait after it met a full queue or a full memory."""

_COMMAND_TIMEOUT_S = 20.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_REDIRECTIONS = 5
_READ_BYTES = 1 << 20
_LARGE_BYTES = 4096
_PIECE_BYTES = 256 << 10
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PLACE_IN_SCRIPT = re.compile(r" script: \w+, on @user_(script|function):\d+\.?\Z")
# Errors of a server that lacks the library, has no libraries, or lets this user call none.
_NO_FUNCTION = re.compile(r"(?i)function not found|unknown command|'fcall'")
# Errors of a server that got no password.
_NO_LOGIN = re.compile(r"(?i)already authenticated|authentication required|\bnoauth\b")
_LOADED_ALREADY = "already exists"
# Errors of a cluster or a server that will mend them by itself.
_PASSING = (
    redis_errors.AskError,
    redis_errors.TryAgainError,
    redis_errors.ClusterDownError,
    redis_errors.MasterDownError,
)
_SCRIPTS_S = 60.0
_UNREACHABLE = (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError)


class Address:
    """Tells where a shard is: at a host that the user named, or on another node of a cluster.

    ``written`` returns where it is by now, if that is written down. Raises UsageError if the URL
    cannot make a connection.
    """

    def __init__(self, url: str, written: Callable[[], str | None] | None = None) -> None:
        self._written = written
        # The others are asked when the current host is gone.
        self.url, *others = each_host(url)
        self._others = deque(others)
        for each in (self.url, *others):
            pool = _new_client(each).connection_pool
            for option in _FILES:
                _check_file(each, option, pool.connection_kwargs.get(option))

    @property
    def count(self) -> int:
        return 1 + len(self._others)

    @property
    def name(self) -> str:
        """Returns the URL without the password, for people to read."""
        return without_password(self.url)

    def learn(self, addresses: Iterable[tuple[str, int]]) -> None:
        for host, port in addresses:
            url = self._at(host, port)
            if url != self.url and url not in self._others:
                self._others.append(url)

    def look_again(self) -> None:
        """Goes to the place that is written down, if there is one."""
        if self._written and (url := self._written()):
            self.url = url

    def move(self, host: str, port: int) -> None:
        self._go(self._at(host, port))

    def ask_another(self) -> None:
        """Goes to another host, which may know who took over from this one."""
        if self._others:
            self._go(self._others[0])

    def _go(self, url: str) -> None:
        if url in self._others:
            self._others.remove(url)
        if url != self.url:
            self._others.append(self.url)
        self.url = url

    def _at(self, host: str, port: int) -> str:
        parts = urlsplit(self.url)
        # A node that does not know its own name leaves it out.
        host = host if host not in ("", "?") else parts.hostname or ""
        login, at, _ = parts.netloc.rpartition("@")
        host = f"[{host}]" if ":" in host else host
        return urlunsplit(parts._replace(netloc=f"{login}{at}{host}:{port}"))


class Link:
    """One connection, made at its first use; calls on it take turns."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._turn = asyncio.Lock()
        self._client: redis.Redis | None = None
        self._url = ""
        # The server's name and version.
        self._server = ""
        # How often it was closed: a call that began before leaves no connection behind.
        self._closings = 0
        # The monotonic time until which EVALSHA replaces FCALL, by the library's name.
        self._scripts_until_s: dict[str, float] = {}
        # The scripts loaded for users who may only call them.
        self._loaded: tuple[str, ...] = ()

    async def call(self, work: Callable[[redis.Redis], Awaitable[_T]], block_s: float = 0.0) -> _T:
        """Calls ``work`` with the connection, and returns its result.

        ``work`` may block for ``block_s`` seconds. Nothing is repeated unless it certainly did not
        happen.

        Raises:
            QueueFullError: the server is out of memory.
            RefusedError: the server answered with an error.
            UnavailableError: no answer; the call may or may not have happened.
        """
        closings = self._closings
        async with self._turn:
            sent_on, url = "", self._address.url
            for _ in range(_MAX_REDIRECTIONS):
                try:
                    async with asyncio.timeout(_COMMAND_TIMEOUT_S + block_s):
                        return await work(await self._connect(closings))
                except asyncio.CancelledError:
                    # redis-py may not have got back its connection, and it has only one.
                    await self._disconnect()
                    raise
                except redis_errors.MovedError as error:
                    self._address.move(error.host, error.port)
                except redis_errors.OutOfMemoryError:
                    count("leanq_redis_errors_total", "out of memory")
                    raise QueueFullError(
                        f"the server at {self._address.name} is out of memory; try again later",
                        RETRY_AFTER_S,
                    ) from None
                except (redis_errors.RedisError, OSError, asyncio.IncompleteReadError) as error:
                    count("leanq_redis_errors_total", _kind(error))
                    # redis-py wraps this error when it makes a connection.
                    if redis_errors.AuthenticationError in (type(error), type(error.__cause__)):
                        await self._disconnect()
                        raise _login_refused(self._address, error) from None
                    if _is_forbidden(error):
                        raise _not_permitted(self._address, error) from None
                    failed = f"no answer from {self._address.name}: {_text(error)}"
                    if isinstance(error, redis_errors.ReadOnlyError):
                        # This was a master once. The same name may lead to another server by now.
                        self._address.ask_another()
                        await self._disconnect()
                        if self._address.count > 1:
                            # Nothing was done, so another server may be asked at once.
                            sent_on = f"{failed}; no other server that was named takes writes"
                            continue
                    elif not isinstance(error, redis_errors.ResponseError):
                        await self._disconnect()
                    elif not isinstance(error, _PASSING):
                        raise RefusedError(
                            f"{self._address.name} ({self._server or 'of an unknown version'}) "
                            f"answers with an error: {_text(error)}"
                        ) from None
                    raise UnavailableError(failed) from None
            raise UnavailableError(
                sent_on or f"the cluster of {without_password(url)} sends from node to node"
            )

    async def ask(self, *commands: Sequence[Any], block_s: float = 0.0) -> list[Any]:
        """Sends commands at once, and returns the server's answers as they are on the wire.

        It serves frequent commands: redis-py's own methods cost three times as much. Raises as
        ``call``.
        """

        async def converse(client: redis.Redis) -> list[Any]:
            return await _converse(client.connection, commands)

        return await self.call(converse, block_s)

    async def run(
        self,
        script: str,
        key: str,
        args: Sequence[Any],
        uploads: Sequence[Sequence[Any]] = (),
        *,
        comes: bool,
    ) -> Any:
        """Runs a script and returns its answer; raises as ``call``.

        The script runs as a function if the server has its library or lets this user load it.
        Otherwise it runs as a script, which costs the server more. ``uploads`` are commands sent
        before it that put values into the server's memory. The script has to detect uploads that a
        full memory refused.

        ``comes``: others load it for users who may not. Otherwise such a user lacks a right.
        """
        return await self.call(
            lambda client: self._evaluated(client, script, key, args, uploads, comes)
        )

    async def load(self, scripts: Iterable[str]) -> None:
        """Loads scripts for users who may call but not load them; raises as ``call``.

        Each goes as a library, or as a script if the server or this user has no libraries. They are
        loaded again when this connection finds that the server has lost them.
        """
        self._loaded = tuple(scripts)
        await self.call(self._load)

    async def _load(self, client: redis.Redis) -> None:
        for script in self._loaded:
            if not await _has_loaded(client, library_of(script)):
                await _converse(client.connection, [("SCRIPT", "LOAD", script)])

    async def _evaluated(
        self,
        client: redis.Redis,
        script: str,
        key: str,
        args: Sequence[Any],
        uploads: Sequence[Sequence[Any]],
        comes: bool,
    ) -> Any:
        library = library_of(script)
        if time.monotonic() >= self._scripts_until_s.get(library.function, 0.0):
            function = ("FCALL", library.function, 1, key, *args)
            try:
                return (await _converse(client.connection, [*uploads, function], len(uploads)))[-1]
            except redis_errors.ResponseError as error:
                if not _NO_FUNCTION.search(str(error)):
                    raise
            # The server has the uploads by now.
            uploads = ()
            if await _has_loaded(client, library):
                await self._load(client)
                return (await _converse(client.connection, [function]))[0]
            # Another user, who has not come yet, may have to load the library.
            self._scripts_until_s[library.function] = time.monotonic() + _SCRIPTS_S
        evaluate = ("EVALSHA", digest_of(script), 1, key, *args)
        try:
            return (await _converse(client.connection, [*uploads, evaluate], len(uploads)))[-1]
        except redis_errors.NoScriptError:
            pass
        try:
            await _converse(client.connection, [("SCRIPT", "LOAD", script)])
        except redis_errors.NoPermissionError:
            # The user who loads the script may load it as a library.
            self._scripts_until_s.pop(library.function, None)
            if not comes:
                raise
            raise UnavailableError(
                f"{self._address.name} has not this release's scripts yet, which its workers load "
                "(and its scaler), and this user may not"
            ) from None
        await self._load(client)
        return (await _converse(client.connection, [evaluate]))[0]

    async def close(self) -> None:
        """Closes the connection; calls under way fail, as do those that wait for their turn."""
        self._closings += 1
        await self._disconnect()

    async def _connect(self, closings: int) -> redis.Redis:
        self._check_open(closings)
        if self._client and self._url == self._address.url:
            return self._client
        await self._disconnect()
        self._address.look_again()
        for left in reversed(range(self._address.count)):
            # The address may change while this connection is made.
            url = self._address.url
            client = _new_client(url)
            try:
                await client.initialize()
                await self._learn_nodes(client)
                self._check_open(closings)
            except BaseException as error:
                await to_its_end(client.aclose(close_connection_pool=True))
                if not left or not isinstance(error, _UNREACHABLE):
                    raise
                self._address.ask_another()
            else:
                self._client, self._url = client, url
                break
        return client

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client:
            await to_its_end(client.aclose(close_connection_pool=True))

    def _check_open(self, closings: int) -> None:
        if closings != self._closings:
            raise UnavailableError(f"the connection to {self._address.name} was closed meanwhile")

    async def _learn_nodes(self, client: Any) -> None:
        # Some managed servers refuse CLUSTER, so ask only servers in cluster mode.
        with contextlib.suppress(redis_errors.ResponseError):
            hello = _about(await client.execute_command("HELLO"))
            name, version = hello.get(b"server"), hello[b"version"]
            self._server = b" ".join((name or b"a server", version)).decode(errors="replace")
            if hello.get(b"mode") == b"cluster":
                ranges = await client.execute_command("CLUSTER", "SLOTS")
                nodes = [node for _, _, *nodes in ranges for node in nodes]
                self._address.learn((str(host or b"", "ascii"), port) for host, port, *_ in nodes)


def _about(hello: Any) -> dict[bytes, Any]:
    """Returns the server's fields of HELLO; raises redis-py's ConnectionError for nonsense."""
    if isinstance(hello, list):
        hello = {k: v for k, v in zip(hello[::2], hello[1::2], strict=False) if type(k) is bytes}
    if not isinstance(hello, dict) or b"version" not in hello:
        raise redis_errors.ConnectionError("what answers there is no Redis")
    return hello


def _new_client(url: str) -> redis.Redis:
    make: Callable[..., ConnectionPool] = ConnectionPool.from_url
    extra = {} if url.startswith("unix:") else {"socket_keepalive": True}
    try:
        pool = make(
            url,
            max_connections=1,
            # Link has a timeout around whole calls: redis-py's can swallow a cancellation before
            # Python 3.12.
            socket_timeout=None,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_read_size=_READ_BYTES,
            # redis-py 8 begins with HELLO 3 by itself, which some proxies do not know.
            protocol=2,
            # Never resend a script whose answer was lost.
            retry=Retry(NoBackoff(), 0),
            **extra,
        )
        # Check the options now; an unknown one would only show at the first call.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError) as error:
        unknown = re.search(r"unexpected keyword argument ('\w+')", str(error))
        why = f"redis-py knows no option {unknown[1]} for it" if unknown else str(error)
        raise UsageError(f"not a Redis URL: {without_password(url)!r}: {why}") from None
    return redis.Redis(connection_pool=pool, single_connection_client=True)


def _check_file(url: str, option: str, path: str | None) -> None:
    # Without this check each connection would fail as if the server did not answer.
    if path is None:
        return
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UsageError(
            f"{option}={path} of {without_password(url)!r} cannot be read: {error.strerror}"
        ) from None


async def _has_loaded(client: redis.Redis, library: Library) -> bool:
    """Loads a library; returns whether it is there now."""
    try:
        await _converse(client.connection, [("FUNCTION", "LOAD", library.text)])
    except redis_errors.ReadOnlyError:
        raise
    except redis_errors.ResponseError as error:
        return _LOADED_ALREADY in str(error)
    return True


async def _converse(
    connection: Any, commands: Sequence[Sequence[Any]], uploads: int = 0
) -> list[Any]:
    """Returns the answers to commands; a full memory may refuse the first ``uploads`` of them."""
    if await _is_stale(connection):
        # The server has closed the connection, and nothing was asked on it yet.
        await connection.disconnect()
    for packed in _pieces(commands):
        await connection.send_packed_command(packed, check_health=False)
    answers: list[Any] = []
    refused: redis_errors.ResponseError | None = None
    for number in range(len(commands)):
        try:
            answers.append(await connection.read_response(disable_decoding=True))
        except redis_errors.ResponseError as error:
            if number < uploads and isinstance(error, redis_errors.OutOfMemoryError):
                continue
            # Read the other answers as well, so that the next call does not get them.
            refused = refused or error
    if refused:
        raise refused
    return answers


async def _is_stale(connection: Any) -> bool:
    """Returns whether a connection has an end or answers that nobody asked for."""
    if hasattr(connection, "can_read"):
        return bool(await connection.can_read())
    # redis-py before 8 tells an end by an error.
    try:
        return bool(await connection.can_read_destructive())
    except redis_errors.ConnectionError:
        return True


def _pieces(commands: Sequence[Sequence[Any]]) -> Iterator[Sequence[bytes]]:
    """Yields the bytes of commands in pieces, each ending with the command that makes it large.

    The server works on one piece while the next is sent.
    """
    piece: list[bytes] = []
    size_bytes = 0
    for command in commands:
        packed = _packed(command)
        piece += packed
        size_bytes += sum(map(len, packed))
        if size_bytes >= _PIECE_BYTES:
            yield piece
            piece, size_bytes = [], 0
    if piece:
        yield piece


def _packed(command: Sequence[Any]) -> Sequence[bytes]:
    """Returns the bytes of a command.

    hiredis takes a seventh of redis-py's time, but would copy large values once more.
    """
    if not [value for value in command if type(value) is bytes and len(value) > _LARGE_BYTES]:
        return (pack_command(tuple(command)),)
    packed: list[bytes] = []
    between = [b"*%d\r\n" % len(command)]
    for value in command:
        data = value if type(value) is bytes else str(value).encode()
        if len(data) > _LARGE_BYTES:
            between.append(b"$%d\r\n" % len(data))
            packed += (b"".join(between), data)
            between = [b"\r\n"]
        else:
            between.append(b"$%d\r\n%b\r\n" % (len(data), data))
    packed.append(b"".join(between))
    return packed


def _text(error: Exception) -> str:
    if isinstance(error, redis_errors.AskError):
        return f"slot {error.slot_id} is being moved to another node"
    # Callers have no use for the place in a script.
    text = _PLACE_IN_SCRIPT.sub("", " ".join(str(error).split()))
    return text or type(error).__name__


def _is_forbidden(error: Exception) -> bool:
    # Inside a script, Redis 7.0 and Valkey report this in words of their own.
    return isinstance(error, redis_errors.NoPermissionError) or (
        isinstance(error, redis_errors.ResponseError)
        and str(error).startswith(("ACL failure", "The user executing the script can't"))
    )


def _not_permitted(address: Address, error: Exception) -> NotPermittedError:
    user = urlsplit(address.url).username or "default"
    right = f"the user {user!r} lacks a right: {_text(error)}"
    return NotPermittedError(
        f"{address.name} does not let this user do that: {right}; deploy/users.acl has a user for "
        "each role, with patterns of keys that begin with the prefix",
        right,
    )


def _login_refused(address: Address, error: Exception) -> LoginError:
    where = "LEANQ_PASSWORD"
    if address.url.startswith("unix:"):
        where = "the URL, unix://:PASSWORD@PATH"
    if _NO_LOGIN.search(str(error)):
        why = f"no password was given; set it in {where}"
        return LoginError(f"{address.name} asks for a password: {why}", why)
    user = urlsplit(address.url).username or "default"
    why = f"the password of the user {user!r} is refused, or there is no such user"
    return LoginError(f"{address.name}: {why}; see LEANQ_URL and LEANQ_PASSWORD", why)


def _kind(error: Exception) -> str:
    """Returns one of a few words for the kind of error."""
    if isinstance(error, redis_errors.ReadOnlyError):
        return "read only"
    if isinstance(error, TimeoutError | redis_errors.TimeoutError):
        return "timeout"
    if isinstance(error, redis_errors.ResponseError):
        return "refused"
    return "connection"
