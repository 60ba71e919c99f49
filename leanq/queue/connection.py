"""A connection to the server that holds a shard, on which calls take turns.

In a cluster it follows the shard's hash slot. MOVED says where the slot is and that nothing was
done, so the call is made there. A slot that is just being moved (ASK, TRYAGAIN) is out of reach
until it has arrived: a script on either side would see half of the shard's keys.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio as redis
from redis import exceptions as redis_errors
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from leanq.errors import QueueFullError, UnavailableError, UsageError
from leanq.queue.metrics import count
from leanq.queue.scripts import digest_of
from leanq.queue.settings import each_host, without_password

_T = TypeVar("_T")

RETRY_AFTER_S = 1.0
"""How long, in seconds, a client that meets a full queue or memory should wait."""

_COMMAND_TIMEOUT_S = 20.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_REDIRECTIONS = 5
_READ_BYTES = 1 << 20
_UNREACHABLE = (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError)


class Address:
    """Where a shard is: at one of the hosts that the user named, or on another node of a cluster.

    Raises:
        UsageError: not a URL that a connection can be made from.
    """

    def __init__(self, url: str) -> None:
        # The others are asked when this one is gone.
        self.url, *others = each_host(url)
        self._others = deque(others)
        for each in (self.url, *others):
            _new_client(each)

    @property
    def count(self) -> int:
        """How many hosts are known."""
        return 1 + len(self._others)

    @property
    def name(self) -> str:
        """For people to read."""
        return without_password(self.url)

    def learn(self, addresses: Iterable[tuple[str, int]]) -> None:
        """The nodes of the cluster, as it tells them."""
        for host, port in addresses:
            url = self._at(host, port)
            if url != self.url and url not in self._others:
                self._others.append(url)

    def move(self, host: str, port: int) -> None:
        """The slot is there."""
        self._go(self._at(host, port))

    def ask_another(self) -> None:
        """The node is gone or a replica by now, and others may know who took over."""
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
    """One connection, made when first needed; calls on it take turns."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._turn = asyncio.Lock()
        self._client: redis.Redis | None = None
        self._url = ""

    async def call(self, work: Callable[[redis.Redis], Awaitable[_T]], block_s: float = 0.0) -> _T:
        """What ``work`` makes of the connection; it may block for ``block_s`` seconds.

        Nothing is tried again but what certainly did not happen.

        Raises:
            QueueFullError: the server is out of memory.
            UnavailableError: no answer; the call may or may not have happened.
        """
        async with self._turn:
            for _ in range(_MAX_REDIRECTIONS):
                try:
                    async with asyncio.timeout(_COMMAND_TIMEOUT_S + block_s):
                        return await work(await self._connect())
                except asyncio.CancelledError:
                    # The client library may not have got its connection back, and it has but one.
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
                    failed = f"no answer from {self._address.name}: {_text(error)}"
                    if _is_forbidden(error):
                        failed = (
                            f"{self._address.name} does not let this user do that: {_text(error)}; "
                            "deploy/users.acl has a user for each role"
                        )
                    count("leanq_redis_errors_total", _kind(error))
                    if isinstance(error, redis_errors.ReadOnlyError):
                        # It was a master once. The same name may lead to another server by now.
                        self._address.ask_another()
                        await self._disconnect()
                        if self._address.count > 1:
                            # Nothing was done, so another may be asked at once.
                            continue
                    elif not isinstance(error, redis_errors.ResponseError):
                        await self._disconnect()
                    raise UnavailableError(failed) from None
            raise UnavailableError(f"the cluster of {self._address.name} sends from node to node")

    async def ask(self, *commands: Sequence[Any], block_s: float = 0.0) -> list[Any]:
        """What the server answers to the commands, which it gets at once: as it is on the wire.

        For what is asked often: the client library's own methods cost three times as much. Raises
        as :meth:`call`.
        """

        async def converse(client: redis.Redis) -> list[Any]:
            return await _converse(client.connection, commands)

        return await self.call(converse, block_s)

    async def run(self, script: str, key: str, args: Sequence[Any]) -> Any:
        """What a script answers; raises as :meth:`call`."""
        digest = digest_of(script)
        evaluate = ("EVALSHA", digest, 1, key, *args)

        async def converse(client: redis.Redis) -> Any:
            try:
                return (await _converse(client.connection, [evaluate]))[0]
            except redis_errors.NoScriptError:
                load = ("SCRIPT", "LOAD", script)
                return (await _converse(client.connection, [load, evaluate]))[1]

        return await self.call(converse)

    async def close(self) -> None:
        """Closes the connection; a call under way fails."""
        await self._disconnect()

    async def _connect(self) -> redis.Redis:
        if self._client and self._url == self._address.url:
            return self._client
        await self._disconnect()
        for left in reversed(range(self._address.count)):
            # The place may change while this connection is made.
            url = self._address.url
            client = _new_client(url)
            try:
                await client.initialize()
                await self._learn_nodes(client)
            except BaseException as error:
                await client.aclose(close_connection_pool=True)
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
            await client.aclose(close_connection_pool=True)

    async def _learn_nodes(self, client: Any) -> None:
        # Managed servers that are no clusters refuse CLUSTER, so it is asked only where it is one.
        with contextlib.suppress(redis_errors.ResponseError):
            hello = await client.execute_command("HELLO")
            if not isinstance(hello, dict):
                hello = dict(zip(hello[::2], hello[1::2], strict=True))
            if hello.get(b"mode") == b"cluster":
                ranges = await client.execute_command("CLUSTER", "SLOTS")
                nodes = [node for _, _, *nodes in ranges for node in nodes]
                self._address.learn((str(host or b"", "ascii"), port) for host, port, *_ in nodes)


def _new_client(url: str) -> redis.Redis:
    make: Callable[..., ConnectionPool] = ConnectionPool.from_url
    extra = {} if url.startswith("unix:") else {"socket_keepalive": True}
    try:
        pool = make(
            url,
            max_connections=1,
            # Ours is around whole calls: redis-py's can swallow a cancellation before Python 3.12.
            socket_timeout=None,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_read_size=_READ_BYTES,
            # A script whose answer was lost must not be sent again behind our back.
            retry=Retry(NoBackoff(), 0),
            **extra,
        )
        # An option that no connection knows would otherwise show at the first call.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError) as error:
        raise UsageError(f"not a Redis URL: {without_password(url)!r}: {error}") from None
    return redis.Redis(connection_pool=pool, single_connection_client=True)


async def _converse(connection: Any, commands: Sequence[Sequence[Any]]) -> list[Any]:
    if await connection.can_read():
        # The server has closed it meanwhile, and nothing was asked on it yet.
        await connection.disconnect()
    packed = [part for command in commands for part in connection.pack_command(*command)]
    await connection.send_packed_command(packed, check_health=False)
    answers: list[Any] = []
    refused: redis_errors.ResponseError | None = None
    for _ in commands:
        try:
            answers.append(await connection.read_response(disable_decoding=True))
        except redis_errors.ResponseError as error:
            # The answers to the others are on their way, and are not the next call's.
            refused = refused or error
    if refused:
        raise refused
    return answers


def _text(error: Exception) -> str:
    if isinstance(error, redis_errors.AskError):
        return f"slot {error.slot_id} is being moved to another node"
    return " ".join(str(error).split()) or type(error).__name__


def _is_forbidden(error: Exception) -> bool:
    # Inside of a script, Redis 7.0 and Valkey have words of their own for it.
    return isinstance(error, redis_errors.NoPermissionError) or (
        isinstance(error, redis_errors.ResponseError)
        and str(error).startswith(("ACL failure", "The user executing the script can't"))
    )


def _kind(error: Exception) -> str:
    """One of a few words for what went wrong."""
    if isinstance(error, redis_errors.ReadOnlyError):
        return "read only"
    if isinstance(error, TimeoutError | redis_errors.TimeoutError):
        return "timeout"
    if isinstance(error, redis_errors.ResponseError):
        return "refused"
    return "connection"
