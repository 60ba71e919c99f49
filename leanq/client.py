"""Clients: ``LeanQClient`` for threads and scripts, ``AsyncLeanQClient`` for asyncio.

Both send requests in batches, hold at most two connections to each shard, and wait for any number
of replies with one blocking read. Both survive a restart of Redis while they wait. A route that
most clients never take is imported only where it is taken.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, Unpack, get_args

from msgspec import Struct

from leanq.errors import ClosedError, InvalidRequestError, LeanQError, UsageError
from leanq.producer import arguments
from leanq.producer.future_client import FutureClient, LeanQFuture
from leanq.producer.request_builder import (
    DEFAULT_ENVIRONMENT,
    Check,
    InEnvironment,
    PreparedRequest,
    RequestBuilder,
    SubmitOptions,
)
from leanq.producer.route import (
    CallingBack,
    ClientTimings,
    Clusters,
    Gateway,
    NoWorker,
    Route,
    RouteOptions,
    WhenFull,
    is_gateway,
)
from leanq.producer.shard_router import ShardRouter
from leanq.producer.stream import WINDOW, ReplyOrError, Result, astream
from leanq.queue.requests import Reply
from leanq.queue.settings import Settings, without_password
from leanq.queue.tasks import to_its_end

if TYPE_CHECKING:
    from leanq.campaigns.client import AsyncCampaignsClient, CampaignsClient
    from leanq.fleet.tracing import Role

__all__ = ["AsyncLeanQClient", "LeanQClient", "LeanQFuture"]

_T = TypeVar("_T")


class _Client:
    """The common parts of both clients: their arguments and their clusters."""

    timings: ClassVar[ClientTimings] = ClientTimings()
    shares_ends: ClassVar[bool] = False
    role: ClassVar[Role] = "client"

    def __init__(
        self,
        url: str | Settings | Sequence[str | Settings] | None = None,
        *,
        weights: Sequence[float] | None = None,
        tenant: str = "default",
        when_full: WhenFull = "wait",
        unavailable_timeout_s: float = 120.0,
        no_worker: NoWorker = "warn",
        key: str | None = None,
        insecure_http: bool = False,
        record: bool | str | os.PathLike[str] = False,
    ) -> None:
        environ: Mapping[str, str] = os.environ
        if url is None:
            from leanq.queue.up_file import find_queue

            environ = find_queue(environ)
            url = environ["LEANQ_URL"]
        self._gateway: Gateway | None = None
        if isinstance(url, str) and is_gateway(url):
            key = os.environ.get("LEANQ_KEY") if key is None else key
            self._gateway = Gateway.checked(url, key, insecure_http=insecure_http)
            # A client needs to know nothing of the queue behind the gateway.
            url = Settings.load("unix:///-", {})
        elif key is not None:
            raise UsageError("a key is for a gateway, https://HOST; a Redis has it in its URL")
        self._clusters = Clusters.load(url, weights, environ)
        arguments.one_of("when_full", when_full, get_args(WhenFull))
        arguments.one_of("no_worker", no_worker, get_args(NoWorker))
        timeout_s = arguments.number("unavailable_timeout_s", unavailable_timeout_s)
        if not timeout_s >= 0:
            raise InvalidRequestError(
                f"unavailable_timeout_s must be at least 0, got {timeout_s:g}"
            )
        self._options = RouteOptions(
            when_full, timeout_s, no_worker, self.timings, self.shares_ends
        )
        # The settings for single requests are the same for all clusters.
        self.settings = self._clusters.each[0]
        self._builder = RequestBuilder(self.settings, tenant, seals=self._gateway is not None)
        self.tenant = tenant
        self._journals: Path | None = None
        if record is not False:
            from leanq.producer.recording import folder_of

            self._journals = folder_of(record)
        self._made()

    def _made(self) -> None:
        """Called once the arguments are checked."""

    def __repr__(self) -> str:
        urls = [self._gateway.url] if self._gateway else [each.url for each in self.clusters]
        return f"<{type(self).__name__} of {', '.join(map(without_password, urls))}>"

    @property
    def clusters(self) -> Sequence[Settings]:
        """The settings of each cluster; most clients have one."""
        return () if self._gateway else self._clusters.each

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes the share of new requests by URL, from now on. Other clusters keep their weights.

        Requests in flight finish where they are. A step goes to the cluster of its state, whatever
        its weight.

        Raises:
            UsageError: a URL that the client was not given, a weight below 0, or all weights 0.
        """
        self._clusters.change(weights)

    def _campaigns(self) -> CampaignsClient:
        if self._gateway:
            raise UsageError(
                f"{self._gateway.shown} is a gateway, and campaigns as jobs need RQ's Redis; "
                "'leanq campaign run' checks a data set through a gateway"
            )
        # Most clients run no campaigns, and need no readers of data sets.
        from leanq.campaigns.client import CampaignsClient

        return CampaignsClient(self.clusters, self.tenant)

    def _new_route(self) -> Route:
        from leanq.fleet.tracing import tracer

        route = self._route_to_queue()
        if made := tracer(self.role):
            from leanq.producer.traced_route import TracedRoute

            route = TracedRoute(route, made, begins=self.role == "client")
        if self._journals is None:
            return route
        from leanq.producer.recording import RecordingRoute

        return RecordingRoute(route, self._journals)

    def _route_to_queue(self) -> Route:
        if self._gateway:
            # This is half of a client's imports.
            from leanq.producer.gateway_route import GatewayRoute

            return GatewayRoute(self._gateway, self._options)
        if len(self._clusters.each) > 1:
            from leanq.producer.cluster_router import ClusterRouter

            return ClusterRouter(self._clusters, self._options)
        return ShardRouter.to(self.settings, self._options)


class AsyncLeanQClient(_Client):
    """The asyncio client: an async context manager, for one event loop.

    Cancelling a task that waits for a reply withdraws its request.

    Examples:
        >>> async def verdicts(codes):
        ...     async with AsyncLeanQClient() as lean:
        ...         one = await lean.check(codes[0])
        ...         return one.verdict, [result.verdict async for result in lean.amap(codes)]
        >>> theorem = "theorem t (p : Prop) (h : p) : p := "
        >>> asyncio.run(verdicts([theorem + "h", theorem + "sorry"]))
        ('accepted', ['accepted', 'incomplete'])

    Its arguments are those of ``LeanQClient``.

    Raises:
        UsageError: a malformed argument, or no URL and neither ``LEANQ_URL`` nor ``leanq up``.
            Entering it raises UnavailableError where no server answers.
    """

    _route: Route | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._route is not None:
            raise UsageError(
                "an AsyncLeanQClient that is open belongs to its event loop and cannot be pickled; "
                "pickle it before 'async with', or use a LeanQClient"
            )
        return {**self.__dict__, "_loop": None}

    async def __aenter__(self) -> Self:
        route = self._new_route()
        await route.open()
        # Keep the loop: before Python 3.12, asking for it costs a system call on each request.
        self._loop = asyncio.get_running_loop()
        self._route = route
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, *, withdraw: bool = True) -> None:
        """Ends the client. Withdraws outstanding requests from the queue, or lets them run on.

        A cancellation waits for that, ten seconds at most where a server is silent.
        """
        route, self._route = self._route, None
        if route:
            # Or else requests would wait for ever, and connections stay open.
            await to_its_end(route.close(withdraw=withdraw))

    async def check(self, code: str, **options: Unpack[Check]) -> Reply:
        """Returns Lean's verdict on ``code``; arguments and errors as ``LeanQClient.check``."""
        return await self._reply(self._builder.check(code, options))

    def amap(
        self,
        codes: Iterable[str] | AsyncIterable[str],
        *,
        window: int = WINDOW,
        ordered: bool = True,
        **options: Unpack[Check],
    ) -> AsyncGenerator[Result, None]:
        """Yields Lean's verdicts on any number of codes; as ``LeanQClient.amap``."""
        shared = self._builder.shared(options)
        make = self._builder.checks(shared)

        def send(code: str, done: Callable[[ReplyOrError], None]) -> Callable[[], object]:
            prepared = make(code)

            def ended(end: Reply | LeanQError) -> None:
                done(prepared.read(end) if isinstance(end, Reply) else end)

            route, waiter = self._open_route(), CallingBack(ended)
            route.send(prepared, waiter)
            return lambda: route.cancel(prepared.submission.request_id, waiter)

        return astream(send, shared.get("env", DEFAULT_ENVIRONMENT), codes, window, ordered)

    async def verify(
        self,
        target: str | None,
        code: str,
        *,
        theorems: Iterable[str] = (),
        holes: Iterable[str] = (),
        **options: Unpack[Check],
    ) -> Reply:
        """Returns whether ``code`` proves a target; as ``LeanQClient.verify``."""
        return await self._reply(self._builder.verify(target, code, theorems, holes, options))

    async def step(self, state: str, tactic: str, **options: Unpack[Check]) -> Reply:
        """Returns ``state`` after ``tactic``; as ``LeanQClient.step``."""
        return await self._reply(self._builder.step(state, tactic, options))

    async def export(self, state: str, **options: Unpack[InEnvironment]) -> bytes:
        """Returns bytes that mean the same state anywhere; as ``LeanQClient.export``."""
        return await self._reply(self._builder.export(state, options))

    async def import_(self, exported: bytes, **options: Unpack[InEnvironment]) -> str:
        """Returns the state that was exported; as ``LeanQClient.import_``."""
        return await self._reply(self._builder.import_(exported, options))

    async def echo(
        self, payload: bytes, delay_s: float = 0.0, **options: Unpack[SubmitOptions]
    ) -> bytes:
        """Returns the same bytes after ``delay_s`` seconds, from a worker with the echo driver."""
        return await self._reply(self._builder.echo(payload, delay_s, options))

    async def attach(self, request_id: str) -> Reply:
        """Returns the reply to a request submitted before; raises LostError if it is unknown."""
        request_id = self._builder.request_id(request_id)
        route, waiter = self._open_route(), _Awaiting(self._loop.create_future())
        route.attach(request_id, waiter)
        return await self._end(request_id, waiter, lambda reply: reply)

    @property
    def campaigns(self) -> AsyncCampaignsClient:
        """Runs whole data sets as campaigns, which go on without this client.

        See ``AsyncCampaignsClient``.
        """
        from leanq.campaigns.client import AsyncCampaignsClient

        return AsyncCampaignsClient(self._campaigns())

    def _reply(self, prepared: PreparedRequest[_T]) -> Coroutine[Any, Any, _T]:
        route, waiter = self._open_route(), _Awaiting(self._loop.create_future())
        route.send(prepared, waiter)
        return self._end(prepared.submission.request_id, waiter, prepared.read)

    async def _end(self, request_id: str, waiter: _Awaiting, read: Callable[[Reply], _T]) -> _T:
        route = self._open_route()
        try:
            return read(await waiter.future)
        except asyncio.CancelledError:
            route.cancel(request_id, waiter)
            raise

    def _open_route(self) -> Route:
        if self._route is None:
            raise ClosedError("the client is not open; enter it with 'async with'")
        return self._route


class _Awaiting(Struct, eq=False):
    """The waiter of a task."""

    future: asyncio.Future[Reply]

    def acknowledged(self) -> None:
        pass

    def ended(self, end: Reply | LeanQError) -> None:
        if self.future.done():
            return
        if isinstance(end, LeanQError):
            self.future.set_exception(end)
        else:
            self.future.set_result(end)


class LeanQClient(_Client, FutureClient):
    """The client for threads: its methods return futures at once.

    It may be used from any thread, inside a running event loop, and in a notebook. After
    ``os.fork()`` the child works on with connections of its own; the futures that it
    inherited belong to the parent, and raise UsageError in the child. A copy by pickle
    connects at its first use; it holds the URL's password, or the key.

    Examples:
        >>> theorem = "theorem t (p : Prop) (h : p) : p := "
        >>> with LeanQClient() as lean:
        ...     verdicts = [each.verdict for each in lean.map([theorem + "h", theorem + "no"])]
        ...     [hole] = lean.check(theorem + "by sorry").result().sorries
        ...     step = lean.step(hole.state, "exact h").result()
        >>> verdicts, hole.goal, step.verdict
        (['accepted', 'rejected'], 'p : Prop\\nh : p\\n⊢ p', 'accepted')

    Args:
        url: the Redis, or ``Settings`` with further choices; or a gateway, ``https://HOST``
            or, on this machine, ``http://``. Several Redises are clusters, and each request goes
            to one of them; one text can name them: ``redis://A*3 redis://B*1``. By default
            ``LEANQ_URL``, else inside Ray the queue of the cluster's scaler, else that of the
            ``leanq up`` that runs.
        weights: how new requests are divided between the clusters, in proportion; 0 sends
            none. Equal by default.
        tenant: the tenant of requests that name none; tenants are served round-robin.
        when_full: what a submit does when the queue is full: ``"wait"`` and try again, or
            ``"raise"`` QueueFullError as the end of its future.
        unavailable_timeout_s: how long the server may be out of reach, in seconds, before
            outstanding requests end with UnavailableError.
        no_worker: what the client does when requests wait and no worker is alive for their
            environment: ``"warn"`` in the log ``leanq.client`` and wait for one, ``"wait"`` in
            silence, or ``"raise"`` NoWorkerError as the end of their futures, after some seconds.
            A paused environment is never an error.
        key: the key for a gateway; by default ``LEANQ_KEY``.
        insecure_http: True to speak to a gateway on another machine without TLS.
        record: a folder in which each check, verification and step that ends is kept as training
            data, for ``leanq export-traces``; True is ``leanq-record`` here.

    A gateway knows the caller's tenant by the key. It always waits if the queue is full or no
    worker is alive, and has no echo.

    Raises:
        UsageError: a malformed argument, or no URL and neither ``LEANQ_URL`` nor ``leanq up``; a
            gateway that refuses the key.
        UnavailableError: no server answers at the URL, or at none of several.
    """

    def _made(self) -> None:
        FutureClient.__init__(self, self._builder, self._new_route, kind="client")

    @property
    def campaigns(self) -> CampaignsClient:
        """Runs whole data sets as campaigns, which go on without this client.

        See ``CampaignsClient``.
        """
        return self._campaigns()

    def attach(self, request_ids: Iterable[str]) -> list[LeanQFuture[Reply]]:
        """Returns futures for requests submitted before, perhaps by a client that died.

        A future ends with LostError if the server knows neither its request nor its reply.

        Examples:
            >>> with LeanQClient() as first:
            ...     future = first.check("theorem t (p : Prop) (h : p) : p := h")
            ...     verdict = future.result().verdict
            >>> [again] = lean.attach([future.request_id])
            >>> again.result().verdict == verdict
            True
        """
        futures: list[LeanQFuture[Reply]] = [
            LeanQFuture(self._builder.request_id(request_id))
            for request_id in arguments.texts("request_ids", request_ids)
        ]
        for future in futures:
            self._send(future, None, lambda reply: reply)
        return futures
