"""Where a client's requests go, and their path: a waiter for each, a route for all, its tasks."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from msgspec import Struct

from leanq.errors import ClosedError, LeanQError, UsageError
from leanq.producer import arguments
from leanq.producer.request_builder import PreparedRequest
from leanq.queue.requests import Reply
from leanq.queue.settings import Settings, each_cluster, without_password

# Where a client's requests go: to one or several clusters, or to a gateway.

_MAX_WEIGHT = 1e9
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Clusters:
    """A client's clusters and their weights, which any thread may change at any time.

    Raises:
        UsageError: no cluster, one twice, unlike numbers of shards, or weights out of range.
    """

    def __init__(self, each: Sequence[tuple[Settings, float]]) -> None:
        self.each = tuple(settings for settings, _ in each)
        if not each:
            raise UsageError("a client needs at least one URL")
        if len({settings.url for settings in self.each}) < len(self.each):
            raise UsageError("a cluster is named twice")
        if len({settings.shards for settings in self.each}) > 1:
            raise UsageError("clusters of one client must have the same number of shards")
        self._weights = _checked({settings.url: weight for settings, weight in each})

    @classmethod
    def load(
        cls,
        url: str | Settings | Sequence[str | Settings],
        weights: Sequence[float] | None,
        environ: Mapping[str, str],
    ) -> Clusters:
        """Returns the clusters at ``url``: a URL, several, or a text that names several."""
        named: list[tuple[str | Settings, float | None]]
        if isinstance(url, str):
            named = [*each_cluster(url)]
        elif isinstance(url, Settings):
            named = [(url, None)]
        elif isinstance(url, Sequence) and all(isinstance(each, str | Settings) for each in url):
            named = [(each, None) for each in url]
        else:
            raise arguments.wrong_type("url", "a URL, Settings, or a list of these", url)
        if weights is not None:
            if not isinstance(weights, Sequence):
                raise arguments.wrong_type("weights", "a list of numbers", weights)
            if any(weight is not None for _, weight in named):
                raise UsageError("the weights stand in the URL and beside it; give them once")
            if len(weights) != len(named):
                raise UsageError(f"there are {len(weights)} weights for {len(named)} clusters")
            numbers = [arguments.number("a weight", weight) for weight in weights]
            named = [(each, weight) for (each, _), weight in zip(named, numbers, strict=True)]
        return cls(
            [
                (
                    each if isinstance(each, Settings) else Settings.load(each, environ),
                    1.0 if weight is None else weight,
                )
                for each, weight in named
            ]
        )

    def weight(self, url: str) -> float:
        return self._weights[url]

    def change(self, weights: Mapping[str, float]) -> None:
        """Changes the weights of the clusters at these URLs. The others keep theirs.

        Raises:
            UsageError: not a cluster of this client, or weights out of range.
        """
        if not isinstance(weights, Mapping):
            raise arguments.wrong_type("weights", "numbers by URL (dict)", weights)
        for url in weights:
            if arguments.text("a URL", url) not in self._weights:
                raise UsageError(f"the client has no cluster {without_password(url)!r}")
        changed = {url: arguments.number("a weight", weight) for url, weight in weights.items()}
        # Replace the dict, so that no other thread reads it half changed.
        self._weights = _checked({**self._weights, **changed})


def _checked(weights: dict[str, float]) -> dict[str, float]:
    for url, weight in weights.items():
        if not 0 <= weight <= _MAX_WEIGHT:
            name = without_password(url)
            raise UsageError(
                f"the weight of {name} is {weight:g}; it must lie in 0 to {_MAX_WEIGHT:g}"
            )
    if not any(weights.values()):
        raise UsageError("all weights are 0; at least one weight must be positive")
    return weights


def is_gateway(url: str) -> bool:
    return url.startswith(("https://", "http://"))


@dataclass(frozen=True)
class Gateway:
    url: str
    key: str | None = field(repr=False)

    @property
    def is_loopback(self) -> bool:
        """Whether the gateway is on this machine, so that no proxy stands in between."""
        return _is_loopback(_host_of(self.url) or "")

    @property
    def shown(self) -> str:
        """The URL for people, with the proxy on the way there."""
        proxy = None if self.is_loopback else _proxy_to(self.url)
        return f"{self.url} (by the proxy {without_password(proxy)})" if proxy else self.url

    @classmethod
    def checked(cls, url: str, key: str | None, *, insecure_http: bool) -> Gateway:
        """Checks the URL; raises UsageError if it is malformed or would show the key to others."""
        host = _host_of(url)
        if host is None:
            # The message leaves the URL out, since it may hold a password.
            raise UsageError(
                "the URL of a gateway is https://HOST:PORT/PATH, without a name, a password, ? or "
                "#; its key is given by key= or LEANQ_KEY"
            )
        if url.startswith("http://") and not (insecure_http or host in _LOOPBACK):
            raise UsageError(
                f"http://{host} would send the key and the texts in clear; use https://, or "
                "insecure_http=True (--insecure-http) if the network is trusted"
            )
        return cls(url.rstrip("/"), key)


def _host_of(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    more = "@" in parts.netloc or parts.query or parts.fragment
    return None if more else parts.hostname


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def _proxy_to(url: str) -> str | None:
    """Returns the proxy that the environment names for a URL."""
    parts, proxies = urlsplit(url), getproxies()
    if proxy_bypass(parts.hostname or ""):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")


WhenFull = Literal["wait", "raise"]
"""A submit that meets a full queue tries again later, or ends with QueueFullError."""

NoWorker = Literal["warn", "wait", "raise"]
"""A client whose requests wait for an environment without a living worker warns and waits, waits in
silence, or ends them with NoWorkerError."""


@dataclass(frozen=True)
class ClientTimings:
    """A client's intervals and time limits, in seconds.

    Attributes:
        block_s: one blocking read of the inbox.
        silence_s: silence after which the client asks the server for a request; doubled each time,
            up to a minute.
        slow_submit_s: a submit without an answer, before its cluster is probed.
        probe_s: an answer to a probe of a cluster.
        no_worker_s: without any reply from an environment, before its workers are counted.
        close_s: the last calls of a client that is closed.
    """

    block_s: float = 5.0
    silence_s: float = 5.0
    slow_submit_s: float = 2.0
    probe_s: float = 3.0
    no_worker_s: float = 5.0
    close_s: float = 10.0


@dataclass(frozen=True)
class RouteOptions:
    """A client's choices for its way to the queue, see ``leanq.LeanQClient``.

    ``shares_ends``: whether the client still hears of a request's end after another client attaches
    to the request.
    """

    when_full: WhenFull = "wait"
    unavailable_timeout_s: float = 120.0
    no_worker: NoWorker = "warn"
    timings: ClientTimings = ClientTimings()
    shares_ends: bool = False


class Waiter(Protocol):
    """Waits for the end of one request; called in the event loop of its route."""

    def acknowledged(self) -> None:
        """Notes that the queue has taken the request in; may be called several times, or never."""

    def ended(self, end: Reply | LeanQError) -> None:
        """Takes the end of the request; called once, unless the request was cancelled before."""


class CallingBack(Struct, eq=False):
    """A waiter that calls functions."""

    ended: Callable[[Reply | LeanQError], None]
    acknowledged: Callable[[], None] = lambda: None


class Route(Protocol):
    """Carries a client's requests. All methods are called in one event loop."""

    async def open(self) -> None:
        """Opens the route; raises UnavailableError when no server answers."""

    def send(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        """Submits a request."""

    def attach(self, request_id: str, waiter: Waiter) -> None:
        """Waits for a request that was submitted before."""

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        """Withdraws a request; returns False if it has ended already."""

    async def close(self, *, withdraw: bool) -> None:
        """Ends every outstanding request; ``withdraw`` also withdraws them from the queue."""


class RouteTasks:
    """Runs tasks until they end or their route is closed.

    When a task has raised, ``on_fault`` gets a function that makes an error. It has to end the
    outstanding requests with that, which would otherwise hang.
    """

    def __init__(self, on_fault: Callable[[Callable[[], LeanQError]], None]) -> None:
        self._on_fault = on_fault
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()):
            self._on_fault(partial(failed, fault))


class TaskRoute(ABC):
    """The common part of routes that answer each request by a task in this process.

    ``closed``: what an outstanding request is told when the route closes.
    """

    def __init__(self, closed: str) -> None:
        self._closed = closed
        self._tasks: dict[Waiter, asyncio.Task[None]] = {}
        # The callers of these requests know already that they have ended.
        self._withdrawn: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def answer(self, prepared: PreparedRequest[Any], waiter: Waiter) -> Reply:
        """Returns the reply to a request, or raises its error."""

    def send(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(prepared, waiter))
        self._tasks[waiter] = task
        task.add_done_callback(lambda _: self._tasks.pop(waiter, None))

    async def _serve(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        end: Reply | LeanQError
        try:
            end = await self.answer(prepared, waiter)
        except LeanQError as error:
            end = error
        except Exception as fault:
            end = failed(fault)
        waiter.ended(end)

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        task = self._tasks.pop(waiter, None)
        if task is None or not task.cancel():
            return False
        self._withdrawn.add(task)
        task.add_done_callback(self._withdrawn.discard)
        return True

    async def close(self, *, withdraw: bool) -> None:
        outstanding = dict(self._tasks)
        for task in outstanding.values():
            task.cancel()
        await asyncio.gather(*outstanding.values(), *self._withdrawn, return_exceptions=True)
        for waiter, task in outstanding.items():
            if task.cancelled():
                waiter.ended(ClosedError(self._closed))


def failed(fault: BaseException) -> LeanQError:
    """Returns the error that ends a request because leanq itself has a defect."""
    text = " ".join(str(fault).split())
    error = LeanQError(f"the client failed: {type(fault).__name__}: {text}")
    error.__cause__ = fault
    return error
