"""The history of a run, and its checker, in the manner of Jepsen's total-queue test.

Each client appends what it does and sees to a file of its own, a line in one write, so that a
client that is killed has told everything that it knew. An event is ``[kind, time, who, …]`` with
the time of the monotonic clock, in seconds, which is the same for all processes of a machine.

| kind | then | told |
| --- | --- | --- |
| ``attempt`` | request id, digest of the right answer | before the request is handed over |
| ``ack`` | request id | the server has said that it has the request |
| ``missing`` | request id | the server knows neither the request nor its reply |
| ``reply`` | request id, lease token, verdict, digest, attempts | a reply is visible, wherever |
| ``end`` | request id, error, digest | a future ends; without an error, with that answer |
| ``trouble`` | error | a call failed, which is not to be seen in any future |
| ``killed`` | a client | it is no more |
| ``forgot`` | since | a failover lost what was written from then to now |
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import redis.asyncio as redis

from leanq.client import LeanQClient
from leanq.errors import QueueError, RequestError, WireError
from leanq.producer.shard_client import ShardClient
from leanq.producer.shard_router import ShardRouter, StateLocator
from leanq.producer.worker_watch import WorkerWatch
from leanq.queue.connection import Address, Link
from leanq.queue.queue import Queue
from leanq.queue.requests import Reply
from leanq.queue.results import Attached, Queued, Submission, Submitted
from leanq.queue.settings import Settings
from leanq.queue.wire import unpack_reply

_T = TypeVar("_T")
Event = Sequence[Any]

# What the old server said may be written down a little after its end.
_LATE_S = 1.0


class Journal:
    """Where one client, or who else takes part, appends its events."""

    def __init__(self, path: Path, who: str) -> None:
        self.who = who
        self._handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        # A predecessor may have been killed in the middle of a line.
        os.write(self._handle, b"\n")

    def note(self, kind: str, *rows: Sequence[object]) -> None:
        """One event of this kind for each row."""
        now = round(time.monotonic(), 4)
        lines = (json.dumps([kind, now, self.who, *row]) + "\n" for row in rows)
        os.write(self._handle, "".join(lines).encode())

    def close(self) -> None:
        os.close(self._handle)


class WritingClient(LeanQClient):
    """A client that writes down what it does, and all that it sees."""

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self.journal = journal
        super().__init__(settings)

    def _new_route(self) -> ShardRouter:
        queue = _WritingQueue(self.settings, self.journal)
        shard_client = ShardClient(
            queue,
            when_full=self._when_full,
            unavailable_timeout_s=self._unavailable_timeout_s,
            timings=self.timings,
        )
        watch = WorkerWatch(queue, [shard_client], no_worker="wait", every_s=60.0)
        locator = StateLocator([queue], self._unavailable_timeout_s)
        return ShardRouter([shard_client], locator, watch)

    def ask(self, requests: Sequence[tuple[str, bytes, float]]) -> list[Future[bytes]]:
        """Echoes of (request id, payload, delay in seconds)."""
        self.journal.note(
            "attempt", *((request_id, digest(payload)) for request_id, payload, _ in requests)
        )
        futures: list[Future[bytes]] = []
        for number, (request_id, payload, delay_s) in enumerate(requests):
            tenant = f"{self.journal.who}-{number % 3}"
            future = self.echo(
                payload, delay_s, request_id=request_id, tenant=tenant, priority=number % 3
            )
            future.add_done_callback(partial(self._ended, request_id))
            futures.append(future)
        return futures

    def take_over(self, request_ids: Sequence[str]) -> list[Future[Reply]]:
        """The replies that a predecessor did not see any more."""
        futures: list[Future[Reply]] = []
        for future in self.attach(request_ids):
            future.add_done_callback(partial(self._ended, future.request_id))
            futures.append(future)
        return futures

    def _ended(self, request_id: str, future: Future[bytes] | Future[Reply]) -> None:
        if error := future.exception():
            self.journal.note("end", (request_id, type(error).__name__, ""))
            return
        answer = future.result()
        if isinstance(answer, Reply):
            if answer.verdict:
                # For its predecessor it would have been an error.
                self.journal.note("end", (request_id, RequestError.__name__, ""))
                return
            answer = answer.payload or b""
        self.journal.note("end", (request_id, "", digest(answer)))


class _WritingQueue(Queue):
    """Sees every reply, those that no future takes included, and every failed call."""

    def __init__(self, settings: Settings, journal: Journal) -> None:
        super().__init__(settings)
        self._journal = journal
        self._commands = _WritingLink(settings, journal)
        self._blocking = _WritingLink(settings, journal)

    async def submit(self, client: str, batch: Sequence[Submission]) -> list[Submitted]:
        answers = await super().submit(client, batch)
        pairs = list(zip((item.request_id for item in batch), answers, strict=True))
        self._saw((request_id, answer) for request_id, answer in pairs if isinstance(answer, bytes))
        taken = [
            (request_id,)
            for request_id, answer in pairs
            if isinstance(answer, bytes | Queued | Attached)
        ]
        self._journal.note("ack", *taken)
        return answers

    async def lookup(self, client: str, request_ids: Sequence[str]) -> list[bytes | bool]:
        answers = await super().lookup(client, request_ids)
        pairs = list(zip(request_ids, answers, strict=True))
        self._saw((request_id, answer) for request_id, answer in pairs if isinstance(answer, bytes))
        self._journal.note(
            "missing", *((request_id,) for request_id, answer in pairs if answer is False)
        )
        return answers

    async def replies(self, request_ids: Sequence[str]) -> list[bytes | None]:
        answers = await super().replies(request_ids)
        self._saw(
            (request_id, answer)
            for request_id, answer in zip(request_ids, answers, strict=True)
            if answer
        )
        return answers

    async def read_inbox(
        self, client: str, after: str, block_ms: int
    ) -> tuple[str, list[tuple[str, bytes]]]:
        reached, pairs = await super().read_inbox(client, after, block_ms)
        self._saw((request_id, answer) for request_id, answer in pairs if not answer.isdigit())
        return reached, pairs

    def _saw(self, pairs: Iterable[tuple[str, bytes]]) -> None:
        self._journal.note("reply", *(reply_row(request_id, data) for request_id, data in pairs))


class _WritingLink(Link):
    def __init__(self, settings: Settings, journal: Journal) -> None:
        super().__init__(Address(settings.url))
        self._journal = journal

    async def call(self, work: Callable[[redis.Redis], Awaitable[_T]], block_s: float = 0.0) -> _T:
        try:
            return await super().call(work, block_s)
        except QueueError as error:
            self._journal.note("trouble", (type(error).__name__,))
            raise


def reply_row(request_id: str, data: bytes) -> tuple[str, str, str, str, int]:
    """What a ``reply`` event tells of a reply's bytes."""
    try:
        reply = unpack_reply(request_id, data)
    except WireError:
        return request_id, "", "unreadable", digest(data), 0
    token: str = msgpack.unpackb(data)[0]
    verdict = reply.verdict or ("error" if reply.error else "")
    return request_id, token, verdict, digest(reply.payload), reply.attempts


def read(path: Path) -> Iterator[Event]:
    """The events of one file, without those that were not written to their end."""
    with path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def open_ends(path: Path) -> list[str]:
    """The request ids that were attempted and whose ends no client has seen."""
    request_ids: dict[str, None] = {}
    for kind, _, _, *rest in read(path):
        if kind == "attempt":
            request_ids[rest[0]] = None
        elif kind == "end":
            request_ids.pop(rest[0], None)
    return list(request_ids)


def digest(answer: bytes | None) -> str:
    return "" if answer is None else hashlib.blake2b(answer, digest_size=8).hexdigest()


@dataclass(slots=True)
class _Story:
    """What was told of one request id."""

    right: str | None = None
    attempted_by: set[str] = field(default_factory=set)
    acks: list[float] = field(default_factory=list)
    missing_s: float = 0.0
    # Token → result, when it was first and last seen. A result is a verdict and a digest.
    replies: dict[str, tuple[tuple[str, str], float, float]] = field(default_factory=dict)
    results: set[tuple[str, str]] = field(default_factory=set)
    ends: int = 0
    attempts: int = 0
    kept: bool = False


@dataclass
class Findings:
    """What became of the requests of a run; the lists hold request ids.

    Attributes:
        ended: with the right answer, in a future that a client held.
        undecided: the server never said that it had it, and its client was killed.
        orphaned: a failover forgot it, and its client was killed before it noticed.
        again: answered a second time, the same, since a failover forgot the first.
        lost: a client that lives on sent it, or the server had it; and it did not end.
        poisoned: those of the lost that took down too many workers.
        forgotten: the server had it and did not know it later; its client may have mended that.
        conflicting: two replies that differ in what they say.
        duplicated: two replies that say the same, without a failover that explains it.
        unexpected: an answer to what no client asked, or a wrong one.
        gone: ended, and its reply could not be looked up afterwards.
        errors: ends with an error, and ``troubles``, calls that failed in between, by class.
    """

    attempted: int = 0
    acknowledged: int = 0
    ended: int = 0
    recovered: int = 0
    charged: int = 0
    undecided: list[str] = field(default_factory=list)
    orphaned: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    poisoned: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    conflicting: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)

    @property
    def faults(self) -> dict[str, list[str]]:
        """What must be empty and is not."""
        names = ("lost", "forgotten", "conflicting", "duplicated", "unexpected", "gone")
        return {name: request_ids for name in names if (request_ids := getattr(self, name))}

    def rows(self) -> list[tuple[str, str]]:
        """The table: what is counted, and how many."""
        return [
            ("attempted", f"{self.attempted:,}"),
            ("acknowledged", f"{self.acknowledged:,}"),
            ("ended with the right answer", f"{self.ended:,}"),
            ("… of these recovered: more than one attempt", f"{self.recovered:,}"),
            ("… of these answered again after a failover", f"{len(self.again):,}"),
            ("undecided: never acknowledged, its client killed", f"{len(self.undecided):,}"),
            ("orphaned: a failover forgot it, its client killed", f"{len(self.orphaned):,}"),
            ("**lost**", _few(self.lost)),
            ("… of these poisoned", _few(self.poisoned)),
            ("**forgotten** by a server that had it", _few(self.forgotten)),
            ("**conflicting**", _few(self.conflicting)),
            ("**duplicated**", _few(self.duplicated)),
            ("**unexpected**", _few(self.unexpected)),
            ("**gone** before the time-to-live of replies", _few(self.gone)),
            ("futures that ended with an error", _by_class(self.errors)),
            ("failed calls that no future saw", _by_class(self.troubles)),
        ]


def check(events: Iterable[Event], *, looked_up: bool = False) -> Findings:
    """Judges a history. ``looked_up``: ``keys`` has told of every reply that the server kept."""
    found = Findings()
    stories: defaultdict[str, _Story] = defaultdict(_Story)
    killed: set[str] = set()
    forgot: list[tuple[float, float]] = []
    for kind, at_s, who, *rest in events:
        match kind, rest:
            case "attempt", [request_id, right]:
                story = stories[request_id]
                story.right = right
                story.attempted_by.add(who)
            case "ack", [request_id]:
                stories[request_id].acks.append(at_s)
            case "missing", [request_id]:
                stories[request_id].missing_s = max(stories[request_id].missing_s, at_s)
            case "reply", [request_id, token, verdict, answer, attempts]:
                _reply(stories[request_id], at_s, token, (verdict, answer), attempts)
                stories[request_id].kept |= who == "keys"
            case "end", [request_id, "", answer]:
                stories[request_id].ends += 1
                stories[request_id].results.add(("", answer))
            case "end", [request_id, error, _]:
                # Its request id is known, or else a reply would be unexpected that is none.
                found.errors[error] += 1
            case "trouble", [error]:
                found.troubles[error] += 1
            case "killed", [client]:
                killed.add(client)
            case "forgot", [since_s]:
                forgot.append((since_s, at_s + _LATE_S))
            case _:
                raise ValueError(f"not an event: {kind} {rest}")
    for request_id, story in stories.items():
        _judge(found, request_id, story, killed, forgot, looked_up)
    return found


def _reply(story: _Story, at_s: float, token: str, result: tuple[str, str], attempts: int) -> None:
    # Those told by the server itself carry no token; two of them are told apart by what they say.
    _, first_s, last_s = story.replies.get(token or str(result), (result, at_s, at_s))
    story.replies[token or str(result)] = (result, min(first_s, at_s), max(last_s, at_s))
    story.results.add(result)
    story.attempts = max(story.attempts, attempts)


def _judge(
    found: Findings,
    request_id: str,
    story: _Story,
    killed: set[str],
    forgot: list[tuple[float, float]],
    looked_up: bool,
) -> None:
    if story.right is None:
        found.unexpected.append(request_id)
        return
    found.attempted += 1
    found.acknowledged += bool(story.acks)
    # What a failover took back does not count.
    acknowledged = [at_s for at_s in story.acks if not _within(at_s, forgot)]
    if any(at_s < story.missing_s for at_s in acknowledged):
        found.forgotten.append(request_id)
    found.charged += max(0, story.attempts - 1)
    if any(not verdict and answer != story.right for verdict, answer in story.results):
        found.unexpected.append(request_id)
    if len(story.results) > 1:
        found.conflicting.append(request_id)
    elif story.ends > 1 or not _explained(story, forgot):
        found.duplicated.append(request_id)
    if ("poisoned", "") in story.results:
        found.poisoned.append(request_id)
    if story.ends and ("", story.right) in story.results:
        found.ended += 1
        found.recovered += story.attempts > 1
        if len(story.replies) > 1:
            found.again.append(request_id)
        seen_s = [first_s for _, first_s, _ in story.replies.values()]
        if looked_up and not story.kept and not any(_within(at_s, forgot) for at_s in seen_s):
            found.gone.append(request_id)
    elif acknowledged or not story.attempted_by <= killed:
        found.lost.append(request_id)
    else:
        (found.orphaned if story.acks else found.undecided).append(request_id)


def _explained(story: _Story, forgot: list[tuple[float, float]]) -> bool:
    """Whether between any two replies a failover forgot the earlier."""
    seen = sorted((first_s, last_s) for _, first_s, last_s in story.replies.values())
    return all(
        any(since <= first and last <= until <= next_ + _LATE_S for since, until in forgot)
        for (first, last), (next_, _) in pairwise(seen)
    )


def _within(at_s: float, forgot: list[tuple[float, float]]) -> bool:
    return any(since <= at_s <= until for since, until in forgot)


def _few(request_ids: list[str]) -> str:
    shown = ", ".join(request_ids[:3])
    return (
        f"**{len(request_ids):,}**: {shown}{' …' if len(request_ids) > 3 else ''}"
        if request_ids
        else "0"
    )


def _by_class(counts: Counter[str]) -> str:
    return ", ".join(f"{n:,} {name}" for name, n in counts.most_common()) or "0"
