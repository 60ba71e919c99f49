"""A client of one shard: it sends requests in batches, and awaits thousands of replies.

Everything here runs in one event loop. A *submitter*, a *reader* and a *watchdog* share a table of
outstanding requests; docs/internals/producer.md says what each does. None of them gives a request
up because a connection broke. Submit is idempotent by request id, so it may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache, partial

from leanq.errors import (
    ClosedError,
    LeanQError,
    LostError,
    NotPermittedError,
    NoWorkerError,
    QueueFullError,
    UnavailableError,
    UnknownEnvironmentError,
)
from leanq.producer.outstanding import Outstanding, OutstandingRequests, conflict
from leanq.producer.route import RouteOptions, RouteTasks, Waiter
from leanq.queue.client_queue import ClientQueue
from leanq.queue.connection import RETRY_AFTER_S
from leanq.queue.results import VERSION, Became, Submission, Submitted, Unreadable
from leanq.queue.scripts import LARGE_BATCH_BYTES, LARGE_BYTES, script_text
from leanq.queue.shard import backoff_s, check_shape, in_batches

log = logging.getLogger("leanq.client")

# A script that moves megabytes delays all other clients, so each call is bounded in bytes.
_BATCH_BYTES = 512 << 10
_BATCH_REQUESTS = 1000
_MAX_SILENCE_S = 60.0
_ENVIRONMENT_RETRY_S = 1.0
_WARN_OF_FULL_S = 60.0
_NOT_PERMITTED_S = 3.0
# More than the size of any reply has.
_MOST_DIGITS = 18


class Submitter:
    """Sends requests and withdrawals: all that gathered during its last call, as one batch.

    ``client``: the name of the client's inbox. ``on_trouble``: called when a submit is slow.
    """

    def __init__(
        self,
        queue: ClientQueue,
        client: str,
        requests: OutstandingRequests,
        options: RouteOptions,
        on_trouble: Callable[[], None] | None,
    ) -> None:
        self._queue = queue
        self._client = client
        self._requests = requests
        self._options = options
        self._on_trouble = on_trouble
        self._outbox: deque[Outstanding] = deque()
        self._withdrawn: list[str] = []
        self._sending = asyncio.Lock()
        self._work = asyncio.Event()
        self._warn_of_full_at_s = 0.0

    def send(self, entry: Outstanding) -> None:
        """Sends a request with the next batch, unless it has ended by then."""
        if entry.request_id in self._requests:
            self._outbox.append(entry)
            self._work.set()

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Withdraws requests from the queue, behind the next batch."""
        self._withdrawn += request_ids
        self._work.set()

    def drop_unsent(self) -> None:
        self._outbox.clear()

    async def has_work(self) -> None:
        await self._work.wait()
        self._work.clear()

    async def send_batch(self) -> bool:
        """Sends a batch of all that gathered; returns False if there was nothing.

        After an UnavailableError it keeps what was not sent.
        """
        # Send one batch at a time: no request may reach the server after its own withdrawal.
        async with self._sending:
            if not (self._outbox or self._withdrawn):
                return False
            try:
                if batch := self._next_batch():
                    await self._submit(batch)
                if request_ids := self._withdrawn[:_BATCH_REQUESTS]:
                    await self._queue.cancel(request_ids)
                    del self._withdrawn[: len(request_ids)]
            except UnavailableError:
                self._work.set()
                raise
            return True

    def _next_batch(self) -> list[tuple[Outstanding, Submission]]:
        batch: list[tuple[Outstanding, Submission]] = []
        size = large = 0
        while (
            self._outbox
            and len(batch) < _BATCH_REQUESTS
            and size < _BATCH_BYTES
            and large < LARGE_BATCH_BYTES
        ):
            entry = self._outbox.popleft()
            if entry.submission and entry.request_id in self._requests:
                batch.append((entry, entry.submission))
                body_bytes = len(entry.submission.body)
                if body_bytes > LARGE_BYTES:
                    large += body_bytes
                else:
                    size += body_bytes
        return batch

    async def _submit(self, batch: list[tuple[Outstanding, Submission]]) -> None:
        known = ""
        slow = None
        if self._on_trouble:
            # No answer for a while may mean a network that drops all packets.
            loop = asyncio.get_running_loop()
            slow = loop.call_later(self._options.timings.slow_submit_s, self._on_trouble)
        try:
            answers = await self._queue.submit(self._client, [s for _, s in batch])
            if Became.UNKNOWN_ENVIRONMENT in answers:
                known = await self._queue.shard.known()
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
            self._answered(entry, submission, answer, known, now_s)

    def _answered(
        self,
        entry: Outstanding,
        submission: Submission,
        answer: Submitted,
        known: str,
        now_s: float,
    ) -> None:
        match answer:
            case Became.QUEUED | Became.ATTACHED:
                self._requests.acknowledge(entry)
                if submission.deadline_ms:
                    # Allow a little more, since the server's clock ticks in milliseconds.
                    entry.expires_at_s = now_s + submission.deadline_ms / 1000 + 0.1
                entry.ask_later(now_s)
            case Unreadable(version):
                self._requests.acknowledge(entry)
                entry.ask_later(now_s)
                warn_of_unreadable(version)
            case Became.CONFLICT:
                self._requests.end(entry.request_id, conflict(entry.request_id))
            case Became.FULL:
                where = f"for tenant {submission.tenant!r} in {submission.environment!r}"
                self._refused(entry, f"the queue is full {where}", RETRY_AFTER_S)
            case Became.UNKNOWN_ENVIRONMENT if entry.known:
                # The server has lost its data, and workers of other environments came back sooner.
                self._send_later(entry, _ENVIRONMENT_RETRY_S)
            case Became.UNKNOWN_ENVIRONMENT:
                text = f"no worker has ever offered the environment {submission.environment!r}"
                self._requests.end(entry.request_id, UnknownEnvironmentError(f"{text}; {known}"))
            case bytes():
                entry.known = True
                self._requests.end_with_bytes(entry.request_id, answer)

    def _refused(self, entry: Outstanding, why: str, after_s: float) -> None:
        if self._options.when_full == "raise":
            error = QueueFullError(f"{why}; retry after {after_s:g} s", after_s)
            self._requests.end(entry.request_id, error)
            return
        if time.monotonic() >= self._warn_of_full_at_s:
            log.warning("%s; meanwhile this client tries again every %g s", why, after_s)
            self._warn_of_full_at_s = time.monotonic() + _WARN_OF_FULL_S
        self._send_later(entry, after_s)

    def _send_later(self, entry: Outstanding, after_s: float) -> None:
        asyncio.get_running_loop().call_later(after_s, self.send, entry)


@cache
def warn_of_unreadable(version: int) -> None:
    """Warns once per process of requests in flight that this release cannot read."""
    log.warning(
        "requests that this client waits for are in flight with records of version %d, of another "
        "release of leanq; this one reads version %d, and asks for their replies every few "
        "seconds; their workers, and best this client too, have to be of that release",
        *(version, VERSION),
    )


class ShardClient:
    """Sends requests to one shard, and tells each one's waiter once how it ended.

    Args:
        queue: the shard; closed in the end.
        on_trouble: called when a call fails, or a submit is slow.
    """

    def __init__(
        self,
        queue: ClientQueue,
        options: RouteOptions,
        on_trouble: Callable[[], None] | None = None,
    ) -> None:
        self.client = ("+" if options.shares_ends else "") + secrets.token_urlsafe(12)
        self._queue = queue
        self._unavailable_timeout_s = options.unavailable_timeout_s
        self._timings = options.timings
        self._note_trouble = on_trouble or (lambda: None)
        remembers = queue.shard.settings.remember_s > 0
        self.outstanding = OutstandingRequests(remembers=remembers, on_idle=self._note_idle)
        self._submitter = Submitter(queue, self.client, self.outstanding, options, on_trouble)
        self._reading = asyncio.Event()
        self._ask = asyncio.Event()
        self._tasks = RouteTasks(self.outstanding.refuse)
        self._rng = random.Random()
        # Since when the calls of each task fail: the server may answer one and not the other.
        self.down_since: dict[str, float] = {}

    async def open(self) -> None:
        """Starts the three tasks; raises as ``Shard.environments`` and ``check_shape``."""
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
        request_id, silence_s = submission.request_id, self._timings.silence_s
        entry = Outstanding(request_id, submission, waiter, silence_s)
        if self.outstanding.enter(entry):
            self._reading.set()
            self._submitter.send(entry)

    def attach(self, request_id: str, waiter: Waiter) -> None:
        """Waits for a request that was submitted before, perhaps by a client that died."""
        entry = Outstanding(request_id, None, waiter, self._timings.silence_s)
        if self.outstanding.enter(entry):
            self._reading.set()
            self._ask.set()

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        if not self.outstanding.withdraw(request_id, waiter):
            return False
        self._submitter.withdraw([request_id])
        return True

    def give_up(self, environment: str, text: str) -> None:
        """Ends all requests of an environment with NoWorkerError, and withdraws them."""
        for request_id, entry in list(self.outstanding.items()):
            if entry.submission and entry.submission.environment == environment:
                self._submitter.withdraw([request_id])
                self.outstanding.end(request_id, NoWorkerError(text))

    async def close(self, *, withdraw: bool) -> None:
        """Ends all outstanding requests; ``withdraw`` cancels them, or else they run on."""
        error = partial(ClosedError, "the client was closed before the request ended")
        self.outstanding.over = error
        if withdraw:
            self._submitter.withdraw(self.outstanding)
            self._end_all(error)
        try:
            with contextlib.suppress(LeanQError, TimeoutError):
                async with asyncio.timeout(self._timings.close_s):
                    # Requests that are to run on may still be unsent.
                    await self._send_gathered()
                    await self._queue.drop_inbox(self.client)
        finally:
            await self._tasks.cancel()
            self._end_all(error)
            await self._queue.shard.close()

    def _end_all(self, error: Callable[[], LeanQError]) -> None:
        self._submitter.drop_unsent()
        self.outstanding.end_all(error)

    # The three tasks

    async def _submit_forever(self) -> None:
        pauses = backoff_s(self._rng)
        while True:
            await self._submitter.has_work()
            try:
                await self._send_gathered()
                pauses = backoff_s(self._rng)
            except UnavailableError as error:
                self._note_down("submit", error)
                await asyncio.sleep(next(pauses))

    async def _send_gathered(self) -> None:
        there_was_work = True
        while there_was_work:
            there_was_work = await self._submitter.send_batch()
            self.down_since.pop("submit", None)

    async def _read_forever(self) -> None:
        position, block_ms = "0-0", int(self._timings.block_s * 1000)
        # Extend the inbox's time-to-live at intervals: a read may bring only one reply.
        extend_every_s, extend_at_s = self._queue.shard.settings.reply_ttl_s / 4, 0.0
        pauses = backoff_s(self._rng)
        while True:
            await self._reading.wait()
            asked_s = time.monotonic()
            extend = asked_s >= extend_at_s
            try:
                reached, pairs = await self._queue.read_inbox(
                    self.client, position, block_ms, extend=extend
                )
                if extend and pairs:
                    extend_at_s = asked_s + extend_every_s
                await self._take(pairs)
            except UnavailableError as error:
                self._note_down("read", error)
                await asyncio.sleep(next(pauses))
                continue
            # Move on only now that all is taken: the next read drops the entries up to here.
            position = reached
            self.down_since.pop("read", None)
            pauses = backoff_s(self._rng)
            # Let callers that got a reply send more before the next read: one turn of the loop for
            # them, one for the submitter.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def _take(self, pairs: list[tuple[str, bytes]]) -> None:
        """Ends requests with their replies; of large ones only the size came, so it fetches these.

        After an UnavailableError the same pairs come again.
        """
        large: list[tuple[str, int]] = []
        for request_id, data in pairs:
            if data.isdigit():
                # Any process may have written it, and int() refuses thousands of digits.
                large.append((request_id, int(data[:_MOST_DIGITS])))
            else:
                self.outstanding.end_with_bytes(request_id, data)
        awaited = (each for each in large if each[0] in self.outstanding)
        for request_ids in in_batches(awaited, LARGE_BATCH_BYTES):
            replies = await self._queue.replies(request_ids)
            for request_id, reply in zip(request_ids, replies, strict=True):
                if reply:
                    self.outstanding.end_with_bytes(request_id, reply)

    async def _watch_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rng.uniform(0.5, 1.0)):
                    await self._ask.wait()
            self._ask.clear()
            now_s = time.monotonic()
            due = [entry for entry in self.outstanding.values() if entry.is_due(now_s)]
            try:
                for start in range(0, len(due), _BATCH_REQUESTS):
                    await self._ask_for(due[start : start + _BATCH_REQUESTS])
            except UnavailableError:
                self._note_trouble()

    async def _ask_for(self, entries: list[Outstanding]) -> None:
        answers = await self._queue.lookup(self.client, [entry.request_id for entry in entries])
        now_s = time.monotonic()
        for entry, answer in zip(entries, answers, strict=True):
            if isinstance(answer, bytes):
                self.outstanding.end_with_bytes(entry.request_id, answer)
            elif isinstance(answer, Unreadable):
                # Nobody can add this client to the record, so its inbox will not have the reply.
                self.outstanding.acknowledge(entry)
                warn_of_unreadable(answer.version)
                entry.ask_later(now_s)
            elif answer:
                self.outstanding.acknowledge(entry)
                entry.silence_s = min(_MAX_SILENCE_S, 2 * entry.silence_s)
                entry.ask_later(now_s)
            elif entry.submission is None:
                text = "the server does not know {}: it never did, or its reply has gone"
                error = LostError(text.format(entry.request_id))
                self.outstanding.end(entry.request_id, error)
            else:
                entry.ask_at_s = 0.0
                self._submitter.send(entry)

    # The server's health

    def _note_idle(self) -> None:
        self._reading.clear()
        self.down_since.clear()

    def _note_down(self, task: str, error: UnavailableError) -> None:
        self._note_trouble()
        now = time.monotonic()
        if not self.outstanding:
            # No caller waits for the withdrawals.
            return
        down_s = now - self.down_since.setdefault(task, now)
        if isinstance(error, NotPermittedError):
            # Rights load in a moment, or are missing until a person grants them.
            if down_s > min(_NOT_PERMITTED_S, self._unavailable_timeout_s):
                self._end_all(partial(NotPermittedError, str(error), error.right))
        elif down_s > self._unavailable_timeout_s:
            text = f"{error} (for {self._unavailable_timeout_s:g} s)"
            self._end_all(partial(UnavailableError, text))
