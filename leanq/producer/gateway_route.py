"""The route through an HTTP gateway, for clients that do not reach the Redis.

Requests that gather go out together, as the lines of one ``/v1/batch``, and their results arrive as
they end. Each line is named by its request id, so a request that is sent again stays the same one.
A connection that breaks, or a gateway that ends, costs time alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import httpx2

from leanq import errors
from leanq.errors import (
    ClosedError,
    InvalidRequestError,
    LeanQError,
    LostError,
    NotPermittedError,
    QueueError,
    QueueFullError,
    RequestError,
    UnavailableError,
    UsageError,
)
from leanq.producer.outstanding import Awaited
from leanq.producer.request_builder import PreparedRequest
from leanq.producer.route import Gateway, RouteOptions, RouteTasks, Waiter
from leanq.queue.requests import (
    DeclarationTime,
    Failure,
    Message,
    Profile,
    Reply,
    Sorry,
    Tactic,
    Theorem,
)
from leanq.queue.settings import MAX_REQUEST_BYTES
from leanq.queue.shard import backoff_s

# The lines of one batch, and the batches at a time: each lasts as long as its slowest request.
_BATCH = 500
_BATCHES = 128
_CONNECTIONS = 256
# A connection that is silent for longer is broken: a gateway sends signs of life more often.
_SILENCE_S = 60.0
_WAIT_S = 25
_CONNECT_S = 10.0
# Fields of a check that are sent unchanged.
_FIELDS = (
    *("timeout_s", "memory_mb", "scratch_mb", "allow_axioms", "audit", "trust_programs"),
    *("code", "target", "theorems", "holes", "state", "tactic", "traceparent"),
    *("statements", "campaign"),
)


# How a gateway tells its problems. Other answers are a proxy's.
_PROBLEM = "application/problem+json"
_TOO_LARGE = (413, 414, 431)
# A connection that fails, or brings what is no HTTP.
_BROKEN = (httpx2.RequestError, httpx2.InvalidURL, httpx2.StreamError)


class _TooLargeError(InvalidRequestError):
    """A proxy refuses a request for its size."""


@dataclass(slots=True)
class _Sent:
    """A request whose end is awaited; ``prepared`` is None where only its id is known."""

    request_id: str
    waiter: Waiter
    prepared: PreparedRequest[Any] | None = None


_Http = TypeVar("_Http", httpx2.Client, httpx2.AsyncClient)


def connection(kind: type[_Http], gateway: Gateway, **how: Any) -> _Http:
    """Returns a client of this kind for a gateway. Raises UsageError if it cannot be made."""
    headers = {"Authorization": f"Bearer {gateway.key}"} if gateway.key else {}
    try:
        return kind(
            base_url=gateway.url,
            headers=headers,
            # A key for this machine must not leave it. Of the environment's settings for HTTP,
            # those for certificates alone count then.
            trust_env=not gateway.is_loopback,
            verify=httpx2.create_ssl_context(trust_env=True),
            **how,
        )
    except (ImportError, ValueError, OSError, httpx2.InvalidURL) as error:
        raise UsageError(
            f"no connection to {gateway.shown} can be made with the environment's settings for "
            f"HTTP: {error}; name an http:// proxy in HTTPS_PROXY or ALL_PROXY, or the gateway's "
            "host in NO_PROXY, and an existing file in SSL_CERT_FILE"
        ) from None


class GatewayRoute:
    def __init__(self, gateway: Gateway, options: RouteOptions) -> None:
        self._url = gateway.shown
        self._http = connection(
            httpx2.AsyncClient,
            gateway,
            timeout=httpx2.Timeout(_SILENCE_S, connect=_CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_BATCHES),
        )
        self._unavailable_timeout_s = options.unavailable_timeout_s
        self._close_s = options.timings.close_s
        self._outstanding = Awaited[_Sent]()
        self._outbox: deque[_Sent] = deque()
        self._work = asyncio.Event()
        self._room = asyncio.Semaphore(_BATCHES)
        self._tasks = RouteTasks(self._outstanding.refuse)
        self._rng = random.Random()

    async def open(self) -> None:
        """Opens the route; raises UnavailableError, and UsageError if the key is refused."""
        try:
            # No request has this id: the gateway must only answer that.
            with contextlib.suppress(LostError):
                raise _foreign(await self._asked("GET", "/v1/requests/0"))
        except BaseException as error:
            await self._http.aclose()
            if isinstance(error, _BROKEN):
                raise unavailable(self._url, error) from None
            raise
        self._tasks.spawn(self._send_forever())

    def send(self, prepared: PreparedRequest[Any], waiter: Waiter) -> None:
        sent = _Sent(prepared.submission.request_id, waiter, prepared)
        request = prepared.request
        if request.op == "echo":
            waiter.ended(InvalidRequestError("a gateway serves no echo; give the client a Redis"))
        elif self._outstanding.enter(sent):
            if request.op in ("export", "import"):
                self._tasks.spawn(self._ask(sent, partial(self._moved, prepared)))
            else:
                self._outbox.append(sent)
                self._work.set()

    def attach(self, request_id: str, waiter: Waiter) -> None:
        sent = _Sent(request_id, waiter)
        if self._outstanding.enter(sent):
            self._tasks.spawn(self._ask(sent, partial(self._fetched, request_id)))

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        if not self._outstanding.withdraw(request_id, waiter):
            return False
        self._tasks.spawn(self._withdraw(request_id))
        return True

    async def close(self, *, withdraw: bool) -> None:
        names = list(self._outstanding)
        error = partial(ClosedError, "the client was closed before the request ended")
        self._outstanding.refuse(error)
        await self._tasks.cancel()
        if withdraw:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._close_s):
                    await asyncio.gather(*map(self._withdraw, names))
        await self._http.aclose()

    def _end(self, sent: _Sent, end: Reply | LeanQError) -> None:
        if self._outstanding.holds(sent):
            self._outstanding.end(sent.request_id, end)

    # Batches

    async def _send_forever(self) -> None:
        while True:
            await self._work.wait()
            await self._room.acquire()
            gathered = [self._outbox.popleft() for _ in range(min(_BATCH, len(self._outbox)))]
            # Some may be withdrawn by now.
            batch = [sent for sent in gathered if self._outstanding.holds(sent)]
            if not self._outbox:
                self._work.clear()
            begun = asyncio.Event()
            self._tasks.spawn(self._batch(batch, begun))
            # Let others gather meanwhile, or each would be a batch of its own.
            await begun.wait()

    async def _batch(self, batch: list[_Sent], begun: asyncio.Event) -> None:
        try:
            give_up_s = time.monotonic() + self._unavailable_timeout_s
            for pause_s in backoff_s(self._rng) if batch else ():
                try:
                    async for _ in self._results(batch, begun):
                        give_up_s = time.monotonic() + self._unavailable_timeout_s
                except (*_BROKEN, UnavailableError) as error:
                    if time.monotonic() > give_up_s:
                        self._end_each(batch, partial(unavailable, self._url, error))
                        return
                except _TooLargeError as error:
                    # Which request it was, only a batch of each half tells.
                    if batch[1:]:
                        self._outbox.extendleft(reversed(batch[len(batch) // 2 :]))
                        self._work.set()
                        batch = batch[: len(batch) // 2]
                    else:
                        self._end_each(batch, partial(_too_large, batch[0], str(error)))
                except LeanQError as error:
                    self._end_each(batch, partial(type(error), str(error)))
                    return
                batch = [sent for sent in batch if self._outstanding.holds(sent)]
                if not batch:
                    return
                begun.set()
                await asyncio.sleep(pause_s)
        finally:
            begun.set()
            self._room.release()

    async def _results(self, batch: list[_Sent], begun: asyncio.Event) -> AsyncIterator[None]:
        """Sends the requests, and ends each with its result; yields after each result."""
        lines = "".join(f"{json.dumps(_line(sent))}\n" for sent in batch)
        headers = {"Content-Type": "application/x-ndjson", "Accept": "text/event-stream"}
        async with self._http.stream("POST", "/v1/batch", content=lines, headers=headers) as answer:
            if not answer.is_success:
                await answer.aread()
                raise problem_in(answer)
            _check_kind(answer, "text/event-stream")
            begun.set()
            for sent in batch:
                sent.waiter.acknowledged()
            async for line in answer.aiter_lines():
                # Other lines name an event's kind, or only show that the gateway is alive.
                if not line.startswith('data: {"index"'):
                    continue
                with _reading(answer):
                    found = json.loads(line.removeprefix("data: "))
                    number = found["index"]
                    if number is None:
                        # The gateway ends: the caller sends the rest again.
                        return
                    sent = batch[number]
                    if result := found.get("result"):
                        end: Reply | LeanQError = reply_of(result)
                    else:
                        end = error_of(found["problem"])
                # If the gateway ends or has no queue, the request is sent again.
                if not isinstance(end, UnavailableError | ClosedError):
                    self._end(sent, end)
                yield

    def _end_each(self, batch: list[_Sent], error: Callable[[], LeanQError]) -> None:
        for sent in batch:
            self._end(sent, error())

    # Single requests

    async def _ask(self, sent: _Sent, ask: Callable[[], Coroutine[Any, Any, Reply]]) -> None:
        give_up_s = time.monotonic() + self._unavailable_timeout_s
        for pause_s in backoff_s(self._rng):
            try:
                self._end(sent, await ask())
            except (*_BROKEN, UnavailableError) as error:
                if time.monotonic() > give_up_s:
                    self._end(sent, unavailable(self._url, error))
                    return
                await asyncio.sleep(pause_s)
            except _TooLargeError as error:
                self._end(sent, _too_large(sent, str(error)))
                return
            except LeanQError as error:
                self._end(sent, error)
                return
            else:
                return

    async def _moved(self, prepared: PreparedRequest[Any]) -> Reply:
        request, environment = prepared.request, prepared.submission.environment
        where = {"environment": environment} if environment else {}
        if request.op == "export":
            path = f"/v1/states/{request.state}/export"
            answer = await self._asked("GET", path, params=where, timeout=None)
            _check_kind(answer, "application/octet-stream")
            return Reply(payload=answer.content)
        how = {"headers": {"Content-Type": "application/octet-stream"}, "timeout": None}
        answer = await self._asked(
            "POST", "/v1/states", params=where, content=request.payload, **how
        )
        with _reading(answer):
            return Reply(state=str(answer.json()["state"]))

    async def _fetched(self, name: str) -> Reply:
        while True:
            answer = await self._asked("GET", f"/v1/requests/{name}", params={"wait": _WAIT_S})
            with _reading(answer):
                found = answer.json()
                if answer.status_code == httpx2.codes.OK:
                    return reply_of(found)
                if found["status"] != "pending":
                    raise ValueError(found["status"])

    async def _withdraw(self, name: str) -> None:
        with contextlib.suppress(*_BROKEN, _TooLargeError, LeanQError):
            await self._asked("DELETE", f"/v1/requests/{name}")

    async def _asked(self, method: str, path: str, **how: Any) -> httpx2.Response:
        answer = await self._http.request(method, path, **how)
        if not answer.is_success:
            raise problem_in(answer)
        return answer


def _line(sent: _Sent) -> Mapping[str, Any]:
    assert sent.prepared
    request, submission = sent.prepared.request, sent.prepared.submission
    line: dict[str, Any] = {"op": request.op, "request_id": sent.request_id}
    line |= {name: value for name in _FIELDS if (value := getattr(request, name)) not in ("", ())}
    for name in ("goals", "profile"):
        if getattr(request, name):
            line[name] = True
    line["priority"] = submission.priority
    if submission.environment:
        line["environment"] = submission.environment
    if submission.deadline_ms:
        line["deadline_s"] = submission.deadline_ms / 1000
    return line


def reply_of(result: Mapping[str, Any]) -> Reply:
    """Returns the reply that a gateway shows as ``result``; an older one lacks some fields."""
    found = {name: result[name] for name in Reply.__struct_fields__ if name in result}
    for name, part in _PARTS.items():
        found[name] = tuple(part(**each) for each in found.get(name, ()))
    for name in ("axioms", "goals"):
        if found.get(name) is not None:
            found[name] = tuple(found[name])
    if profile := found.get("profile"):
        found["profile"] = profile_of(profile)
    rows = found.get("tactics", ())
    found["tactics"] = tuple(Tactic(**{**row, "goals": tuple(row["goals"])}) for row in rows)
    return Reply(**found)


def profile_of(profile: Mapping[str, Any]) -> Profile:
    rows = (
        DeclarationTime(**{**each, "parts": tuple(each["parts"].items())})
        for each in profile["declarations"]
    )
    return Profile(tuple(rows), profile["import_ms"], profile["unfinished"])


_PARTS: Mapping[str, type[Message | Sorry | Theorem | Failure]] = {
    "messages": Message,
    "sorries": Sorry,
    "theorems": Theorem,
    "failed": Failure,
}
# As the gateway names them; those that need more than a text are made below.
_KINDS: Mapping[str, type[LeanQError]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.removesuffix("Error")).lower(): kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type)
    and issubclass(kind, UsageError | QueueError | ClosedError | RequestError)
    and not issubclass(kind, NotPermittedError | QueueFullError)
} | {"malformed": InvalidRequestError}


def problem_in(answer: httpx2.Response) -> LeanQError:
    """Returns the error that an answer shows. One that is not the gateway's own is the network's,
    which a client waits out, unless it says that this request is too large."""
    if answer.headers.get("Content-Type", "").startswith(_PROBLEM):
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            problem = answer.json()
            if problem["status"] == answer.status_code:
                return error_of(problem)
    if answer.status_code in _TOO_LARGE:
        return _TooLargeError(
            f"a proxy before the gateway refuses the request for its size ({answer.status_code})"
        )
    return _foreign(answer)


def _foreign(answer: httpx2.Response) -> UnavailableError:
    kind = answer.headers.get("Content-Type", "")
    said = "" if "html" in kind else answer.text if answer.is_closed else ""
    words = " ".join(said[:200].split())
    return UnavailableError(
        f"something other than a gateway of leanq answers ({answer.status_code}"
        f"{' ' + kind[:60] if kind else ''}){': ' + words if words else ''}; look at the proxy in "
        "between, or at the URL"
    )


def _check_kind(answer: httpx2.Response, kind: str) -> None:
    """Raises UnavailableError unless the answer's body is of this kind."""
    if not answer.headers.get("Content-Type", "").startswith(kind):
        raise _foreign(answer)


@contextlib.contextmanager
def _reading(answer: httpx2.Response) -> Iterator[None]:
    """Raises UnavailableError where the answer has another shape than a gateway's."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise _foreign(answer) from None


def _too_large(sent: _Sent, said: str) -> InvalidRequestError:
    size_mb = len(json.dumps(_line(sent))) / 1e6 if sent.prepared else 0.0
    return InvalidRequestError(
        f"{said}: it has {size_mb:.1f} MB; the gateway itself takes {MAX_REQUEST_BYTES >> 20} MiB. "
        "Let the proxy take as much (nginx: client_max_body_size), or send a shorter text"
    )


def error_of(problem: Mapping[str, Any]) -> LeanQError:
    """Returns the error that a gateway shows as ``problem``."""
    detail, status = str(problem.get("detail", "")), int(problem.get("status", 500))
    kind = str(problem.get("type", "")).removeprefix("urn:leanq:")
    if kind in _KINDS:
        return _KINDS[kind](detail)
    if kind == "not-permitted":
        return NotPermittedError(f"the gateway: {detail}", detail)
    if status == httpx2.codes.TOO_MANY_REQUESTS:
        return QueueFullError(detail, 1.0)
    if status >= httpx2.codes.INTERNAL_SERVER_ERROR:
        return UnavailableError(f"the gateway: {detail or status}")
    return UsageError(f"the gateway refuses the request ({status}): {detail}")


def unavailable(url: str, error: Exception) -> UnavailableError:
    why = str(error) or type(error).__name__
    return UnavailableError(f"no gateway answers at {url}: {why}")
