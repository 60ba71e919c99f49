"""A client of one shard: it sends requests in batches, and awaits thousands of replies.

Everything here runs in one event loop. Three tasks share a table of outstanding requests:

- the *submitter* sends all requests that gathered during its last call as one batch;
- the *reader* blocks on the client's inbox and ends the requests whose replies arrive;
- the *watchdog* asks the server for silent requests, and sends again those that it no longer
  knows. That is safe: submit is idempotent by request id.

None of them gives a request up because a connection broke. Outstanding requests end with an error
only if the server is out of reach for ``unavailable_timeout_s``. They also end if for some seconds
it refuses a right that the client's user needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial

from msgspec import Struct

from leanq.errors import (
    ClosedError,
    ConflictError,
    InvalidRequestError,
    LeanQError,
    LostError,
    NotPermittedError,
    NoWorkerError,
    QueueFullError,
    RequestError,
    UnavailableError,
    UnknownEnvironmentError,
    WireError,
)
from leanq.producer.route import ClientTimings, Waiter, WhenFull
from leanq.producer.route_tasks import RouteTasks
from leanq.queue import wire
from leanq.queue.client_queue import ClientQueue
from leanq.queue.requests import Reply
from leanq.queue.results import (
    Attached,
    Conflict,
    Full,
    Queued,
    Submission,
    Submitted,
    UnknownEnvironment,
    is_reply_to,
)
from leanq.queue.scripts import LARGE_BATCH_BYTES, LARGE_BYTES, script_text
from leanq.queue.shape import check_shape
from leanq.queue.shard import backoff_s, in_batches

log = logging.getLogger("leanq.client")

# A script that moves megabytes delays all other clients, so each call is bounded in bytes.
_BATCH_BYTES = 512 << 10
_BATCH_REQUESTS = 1000
_MAX_SILENCE_S = 60.0
_ENVIRONMENT_RETRY_S = 1.0
_WARN_OF_FULL_S = 60.0
_NOT_PERMITTED_S = 3.0

Replies = list[tuple[str, bytes]]


class Inbox:
    """The inbox of ``client`` in one shard; each read goes on where the last one ended."""

    def __init__(self, queue: ClientQueue, client: str, block_s: float) -> None:
        self._queue = queue
        self._client = client
        self._block_ms = int(block_s * 1000)
        self._position = "0-0"
        # Extend at intervals: a read may bring only one reply.
        self._extend_every_s = queue.shard.settings.reply_ttl_s / 4
        self._extend_at_s = 0.0

    async def read(self, awaited: Callable[[str], bool]) -> AsyncIterator[Replies]:
        """Waits some seconds for replies, and yields lists of (request id, bytes).

        It fetches large replies only for ids that are ``awaited``. It raises UnavailableError; the
        next read then begins with the same replies.
        """
        asked_s = time.monotonic()
        extend = asked_s >= self._extend_at_s
        reached, pairs = await self._queue.read_inbox(
            self._client, self._position, self._block_ms, extend=extend
        )
        if extend and pairs:
            self._extend_at_s = asked_s + self._extend_every_s
        small: Replies = []
        large: Replies = []
        for pair in pairs:
            (large if pair[1].isdigit() else small).append(pair)
        yield small
        sizes = ((request_id, int(size)) for request_id, size in large if awaited(request_id))
        for request_ids in in_batches(sizes, LARGE_BATCH_BYTES):
            replies = await self._queue.replies(request_ids)
            yield [
                (request_id, data)
                for request_id, data in zip(request_ids, replies, strict=True)
                if data
            ]
        # Move on only now that all is taken: the next read drops the entries up to here.
        self._position = reached


class _Outstanding(Struct, eq=False):
    """A request whose end is awaited. Times are by the monotonic clock.

    Attributes:
        submission: the request; None if only its request id is known.
        waiter: waits for its end.
        silence_s: how long to wait for a reply before asking the server for it.
        ask_at_s: when to ask; 0 until the request is sent.
        expires_at_s: when its deadline has passed.
        known: whether the server has taken it in.
    """

    request_id: str
    submission: Submission | None
    waiter: Waiter
    silence_s: float
    ask_at_s: float = 0.0
    expires_at_s: float = math.inf
    known: bool = False


class ShardClient:
    """Sends requests to one shard, and tells each one's waiter once how it ended.

    Args:
        queue: the shard; closed in the end.
        when_full: whether a submit that meets a full queue waits or raises.
        unavailable_timeout_s: how long the server may be out of reach before outstanding requests
            end with UnavailableError.
        timings: how long it waits for what.
        shares_ends: whether this client still hears of a request's end after another client
            attaches to the request.
        on_trouble: called when a call fails, or a submit is slow.
    """

    def __init__(
        self,
        queue: ClientQueue,
        *,
        when_full: WhenFull,
        unavailable_timeout_s: float,
        timings: ClientTimings,
        shares_ends: bool = False,
        on_trouble: Callable[[], None] | None = None,
    ) -> None:
        self.client = ("+" if shares_ends else "") + secrets.token_urlsafe(12)
        self._queue = queue
        self._when_full: WhenFull = when_full
        self._unavailable_timeout_s = unavailable_timeout_s
        self._timings = timings
        self._on_trouble = on_trouble
        self._environments_answered: set[str] = set()
        self.outstanding: dict[str, _Outstanding] = {}
        self._outbox: deque[_Outstanding] = deque()
        self._withdrawn: list[str] = []
        self._sending = asyncio.Lock()
        self._work = asyncio.Event()
        self._reading = asyncio.Event()
        self._ask = asyncio.Event()
        self._tasks = RouteTasks(self._close_with)
        self._rng = random.Random()
        self.down_since: float | None = None
        self._warn_of_full_at_s = 0.0
        # The error that ends each request, once requests are refused.
        self.over: Callable[[], LeanQError] | None = None

    async def open(self) -> None:
        """Starts the three tasks.

        Raises:
            UnavailableError: no server answers.
            UsageError: the fleet serves the queue with another number of shards.
        """
        # Read the script now: that imports modules, and a fork during an import inherits half of
        # it.
        script_text("submit")
        try:
            await self._queue.shard.environments()
            if self._queue.shard.keys.shard == 0:
                # A server may forbid this user to look at the shape.
                with contextlib.suppress(UnavailableError):
                    await check_shape(self._queue.shard)
        except BaseException:
            await self._queue.shard.close()
            raise
        self.start()

    def start(self) -> None:
        """Starts the tasks even if no server answers; they try until one does."""
        for loop in (self._submit_forever, self._read_forever, self._watch_forever):
            self._tasks.spawn(loop())

    def send(self, submission: Submission, waiter: Waiter) -> None:
        """Submits a request with the next batch."""
        request_id, silence_s = submission.request_id, self._timings.silence_s
        entry = _Outstanding(request_id, submission, waiter, silence_s)
        if self._enter(entry):
            self._outbox.append(entry)
            self._work.set()

    def attach(self, request_id: str, waiter: Waiter) -> None:
        """Waits for a request that was submitted before, perhaps by a client that died."""
        if self._enter(_Outstanding(request_id, None, waiter, self._timings.silence_s)):
            self._ask.set()

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        """Withdraws a request; its waiter hears no more. Returns False if it has ended already."""
        entry = self.outstanding.get(request_id)
        if entry is None or entry.waiter is not waiter:
            return False
        del self.outstanding[request_id]
        self._withdrawn.append(request_id)
        self._work.set()
        if not self.outstanding:
            self._note_idle()
        return True

    def waiting(self) -> Mapping[tuple[str, str], int]:
        """Counts the requests that are acknowledged and not answered, by environment and tenant."""
        return Counter(
            (entry.submission.environment, entry.submission.tenant)
            for entry in self.outstanding.values()
            if entry.submission and entry.known
        )

    def take_answered(self) -> AbstractSet[str]:
        """Returns the environments of requests that have ended since the last call."""
        answered, self._environments_answered = self._environments_answered, set()
        return answered

    def give_up(self, environment: str, text: str) -> None:
        """Ends all requests of an environment with NoWorkerError, and withdraws them."""
        for request_id, entry in list(self.outstanding.items()):
            if entry.submission and entry.submission.environment == environment:
                self._withdrawn.append(request_id)
                self._end(request_id, NoWorkerError(text))
        self._work.set()

    async def close(self, *, withdraw: bool) -> None:
        """Ends all outstanding requests; ``withdraw`` cancels them, or else they run on."""
        self.over = partial(ClosedError, "the client was closed before the request ended")
        if withdraw:
            self._withdrawn += self.outstanding
            self._end_all(self.over)
        try:
            with contextlib.suppress(LeanQError, TimeoutError):
                async with asyncio.timeout(self._timings.close_s):
                    # Requests that are to run on may still be unsent.
                    await self._send_gathered()
                    await self._queue.drop_inbox(self.client)
        finally:
            await self._tasks.cancel()
            self._end_all(self.over)
            await self._queue.shard.close()

    def _close_with(self, error: Callable[[], LeanQError]) -> None:
        """Ends each request with an error, and refuses all later ones with it."""
        self.over = error
        self._end_all(error)

    def _enter(self, entry: _Outstanding) -> bool:
        if self.over:
            entry.waiter.ended(self.over())
            return False
        if entry.request_id in self.outstanding:
            entry.waiter.ended(
                InvalidRequestError(f"this client already waits for request {entry.request_id}")
            )
            return False
        self.outstanding[entry.request_id] = entry
        self._reading.set()
        return True

    def _end(self, request_id: str, end: Reply | LeanQError) -> None:
        entry = self.outstanding.pop(request_id, None)
        if entry:
            if entry.submission:
                self._environments_answered.add(entry.submission.environment)
            entry.waiter.ended(end)
            if not self.outstanding:
                self._note_idle()

    def _end_all(self, error: Callable[[], LeanQError]) -> None:
        """Ends each with an error of its own, since raising one adds to its traceback."""
        self._outbox.clear()
        for request_id in list(self.outstanding):
            self._end(request_id, error())

    def _note_idle(self) -> None:
        self._reading.clear()
        self.down_since = None

    def _end_with_bytes(self, request_id: str, data: bytes) -> None:
        try:
            reply = wire.unpack_reply(request_id, data)
        except WireError as error:
            self._end(
                request_id, RequestError(f"the reply to {request_id} cannot be read: {error}")
            )
            return
        entry = self.outstanding.get(request_id)
        if entry and entry.submission:
            remembers = self._queue.shard.settings.remember_s > 0
            if not is_reply_to(entry.submission, reply, remembers=remembers):
                self._end(request_id, conflict(request_id))
                return
        self._end(request_id, reply if reply.error is None else RequestError(reply.error))

    # The submitter

    async def _submit_forever(self) -> None:
        pauses = backoff_s(self._rng)
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                await self._send_gathered()
                pauses = backoff_s(self._rng)
            except UnavailableError as error:
                self._note_down(error)
                self._work.set()
                await asyncio.sleep(next(pauses))

    async def _send_gathered(self) -> None:
        # Send one batch at a time: no request may reach the server after its own withdrawal.
        async with self._sending:
            while self._outbox or self._withdrawn:
                if batch := self._next_batch():
                    await self._submit(batch)
                if request_ids := self._withdrawn[:_BATCH_REQUESTS]:
                    await self._queue.cancel(request_ids)
                    del self._withdrawn[: len(request_ids)]
                self._note_up()

    def _next_batch(self) -> list[tuple[_Outstanding, Submission]]:
        batch: list[tuple[_Outstanding, Submission]] = []
        size = large = 0
        while (
            self._outbox
            and len(batch) < _BATCH_REQUESTS
            and size < _BATCH_BYTES
            and large < LARGE_BATCH_BYTES
        ):
            entry = self._outbox.popleft()
            if entry.submission and entry.request_id in self.outstanding:
                batch.append((entry, entry.submission))
                body_bytes = len(entry.submission.body)
                if body_bytes > LARGE_BYTES:
                    large += body_bytes
                else:
                    size += body_bytes
        return batch

    async def _submit(self, batch: list[tuple[_Outstanding, Submission]]) -> None:
        environments: list[str] = []
        slow = None
        if self._on_trouble:
            # No answer for a while may mean a network that drops all packets.
            loop = asyncio.get_running_loop()
            slow = loop.call_later(self._timings.slow_submit_s, self._on_trouble)
        try:
            answers = await self._queue.submit(self.client, [s for _, s in batch])
            if UnknownEnvironment() in answers:
                environments = await self._queue.shard.environments()
        except QueueFullError as error:
            for entry, _ in batch:
                self._refused(entry, str(error), error.retry_after_s)
            return
        except UnavailableError:
            self._outbox.extendleft(entry for entry, _ in reversed(batch))
            raise
        finally:
            if slow:
                slow.cancel()
        now_s = time.monotonic()
        for (entry, submission), answer in zip(batch, answers, strict=True):
            self._answered(entry, submission, answer, environments, now_s)

    def _answered(
        self,
        entry: _Outstanding,
        submission: Submission,
        answer: Submitted,
        environments: list[str],
        now_s: float,
    ) -> None:
        match answer:
            case Queued() | Attached():
                self._acknowledged(entry)
                if submission.deadline_ms:
                    # Allow a little more, since the server's clock ticks in milliseconds.
                    entry.expires_at_s = now_s + submission.deadline_ms / 1000 + 0.1
                self._ask_later(entry, now_s)
            case Conflict():
                self._end(entry.request_id, conflict(entry.request_id))
            case Full(retry_after_s):
                where = f"for tenant {submission.tenant!r} in {submission.environment!r}"
                self._refused(entry, f"the queue is full {where}", retry_after_s)
            case UnknownEnvironment() if entry.known:
                # The server has lost its data, and workers of other environments came back sooner.
                self._send_later(entry, _ENVIRONMENT_RETRY_S)
            case UnknownEnvironment():
                text = f"no worker has ever offered the environment {submission.environment!r}"
                known = ", ".join(environments)
                self._end(entry.request_id, UnknownEnvironmentError(f"{text}; known: {known}"))
            case bytes():
                self._end_with_bytes(entry.request_id, answer)

    def _acknowledged(self, entry: _Outstanding) -> None:
        entry.known = True
        # The request may have been withdrawn meanwhile, and its waiter may wait elsewhere.
        if self.outstanding.get(entry.request_id) is entry:
            entry.waiter.acknowledged()

    def _refused(self, entry: _Outstanding, why: str, after_s: float) -> None:
        if self._when_full == "raise":
            error = QueueFullError(f"{why}; retry after {after_s:g} s", after_s)
            self._end(entry.request_id, error)
            return
        if time.monotonic() >= self._warn_of_full_at_s:
            log.warning("%s; meanwhile this client tries again every %g s", why, after_s)
            self._warn_of_full_at_s = time.monotonic() + _WARN_OF_FULL_S
        self._send_later(entry, after_s)

    def _send_later(self, entry: _Outstanding, after_s: float) -> None:
        asyncio.get_running_loop().call_later(after_s, self._send_again, entry)

    def _send_again(self, entry: _Outstanding) -> None:
        if entry.request_id in self.outstanding:
            self._outbox.append(entry)
            self._work.set()

    # The reader

    async def _read_forever(self) -> None:
        inbox = Inbox(self._queue, self.client, self._timings.block_s)
        pauses = backoff_s(self._rng)
        while True:
            await self._reading.wait()
            try:
                async for replies in inbox.read(self.outstanding.__contains__):
                    for request_id, data in replies:
                        self._end_with_bytes(request_id, data)
            except UnavailableError as error:
                self._note_down(error)
                await asyncio.sleep(next(pauses))
                continue
            self._note_up()
            pauses = backoff_s(self._rng)
            # Let callers that got a reply send more before the next read: one turn of the loop for
            # them, one for the submitter.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    # The watchdog

    async def _watch_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rng.uniform(0.5, 1.0)):
                    await self._ask.wait()
            self._ask.clear()
            now = time.monotonic()
            due = [e for e in self.outstanding.values() if self._is_due(e, now)]
            try:
                for start in range(0, len(due), _BATCH_REQUESTS):
                    await self._ask_for(due[start : start + _BATCH_REQUESTS])
            except UnavailableError:
                self._note_trouble()

    @staticmethod
    def _is_due(entry: _Outstanding, now_s: float) -> bool:
        sent = entry.submission is None or entry.ask_at_s > 0
        return sent and entry.ask_at_s <= now_s

    async def _ask_for(self, entries: list[_Outstanding]) -> None:
        answers = await self._queue.lookup(self.client, [entry.request_id for entry in entries])
        now_s = time.monotonic()
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, bytes):
                self._end_with_bytes(entry.request_id, answer)
            elif answer:
                self._acknowledged(entry)
                entry.silence_s = min(_MAX_SILENCE_S, 2 * entry.silence_s)
                self._ask_later(entry, now_s)
            elif entry.submission is None:
                text = "the server does not know {}: it never did, or its reply has gone"
                self._end(entry.request_id, LostError(text.format(entry.request_id)))
            else:
                entry.ask_at_s = 0.0
                self._send_again(entry)

    @staticmethod
    def _ask_later(entry: _Outstanding, now_s: float) -> None:
        entry.ask_at_s = now_s + entry.silence_s
        if now_s < entry.expires_at_s:
            entry.ask_at_s = min(entry.ask_at_s, entry.expires_at_s)

    # The server's health

    def _note_up(self) -> None:
        self.down_since = None

    def _note_trouble(self) -> None:
        if self._on_trouble:
            self._on_trouble()

    def _note_down(self, error: UnavailableError) -> None:
        self._note_trouble()
        now = time.monotonic()
        if not self.outstanding:
            # No caller waits for the withdrawals.
            return
        if self.down_since is None:
            self.down_since = now
            return
        down_s = now - self.down_since
        if isinstance(error, NotPermittedError):
            # Rights load in a moment, or are missing until a person grants them.
            if down_s > min(_NOT_PERMITTED_S, self._unavailable_timeout_s):
                self._end_all(partial(NotPermittedError, str(error), error.right))
        elif down_s > self._unavailable_timeout_s:
            text = f"{error} (for {self._unavailable_timeout_s:g} s)"
            self._end_all(partial(UnavailableError, text))


def conflict(name: str) -> ConflictError:
    """Returns the error of a request whose name another one has taken."""
    return ConflictError(
        f"the request id {name!r} is that of a request with other content, which stays as it is; "
        "give this one another id"
    )
