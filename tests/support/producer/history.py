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
| ``forgot`` | since, until | a failover lost what was written between these times; no process \
reached its new server before |
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgpack
import redis.asyncio as redis

from leanq.client import LeanQClient
from leanq.errors import QueueError, RequestError, WireError
from leanq.producer.cluster_router import ClusterRouter
from leanq.producer.request_builder import SubmitOptions
from leanq.producer.route import Clusters, Route, RouteOptions
from leanq.producer.shard_router import ShardRouter
from leanq.queue.connection import Address, Link
from leanq.queue.requests import LEAN_VERDICTS, Reply
from leanq.queue.results import Became, Submission, Submitted
from leanq.queue.settings import Settings
from leanq.queue.wire import unpack_reply
from support.queue.queues import Queue

_T = TypeVar("_T")
Event = Sequence[Any]

# What the old server said may be written down a little after its end.
_LATE_S = 1.0
_LEANS = LEAN_VERDICTS | {"unjudged"}
_NAMED = re.compile(r"\bn\d+\b")


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


class Notes(Protocol):
    """Where events are written down, as in a :class:`Journal`."""

    def note(self, kind: str, *rows: Sequence[object]) -> None:
        """One event of this kind for each row."""


def writing_router(
    settings: Settings,
    journal: Notes,
    options: RouteOptions,
    on_trouble: Callable[[], None] | None = None,
) -> ShardRouter:
    """The route to one cluster, which writes down all that comes that way."""
    queues = [WritingQueue(settings, journal, shard) for shard in range(settings.shards)]
    return ShardRouter(queues, replace(options, no_worker="wait"), on_trouble)


class WritingRoute:
    """The way to the queue of a client that writes down all that it sees."""

    journal: Notes

    def _new_route(self) -> Route:
        return writing_router(self.settings, self.journal, self._options)


@dataclass(frozen=True)
class Question:
    """A request whose right answer is known: an echo of ``payload``, or a Lean text ``code``."""

    request_id: str
    right: bytes
    delay_s: float = 0.0
    code: str = ""
    audit: bool = False


class WritingClient(WritingRoute, LeanQClient):
    """A client that writes down what it does, and all that it sees."""

    def __init__(self, settings: Settings | Sequence[Settings], journal: Journal) -> None:
        self.journal = journal
        super().__init__(settings)

    def ask(self, questions: Sequence[Question]) -> list[Future[Any]]:
        """Sends these."""
        self.journal.note("attempt", *((each.request_id, digest(each.right)) for each in questions))
        futures: list[Future[Any]] = []
        for number, each in enumerate(questions):
            given: SubmitOptions = {
                "request_id": each.request_id,
                "tenant": f"{self.journal.who}-{number % 3}",
                "priority": number % 3,
            }
            future: Future[Any] = (
                self.check(each.code, audit=each.audit, **given)
                if each.code
                else self.echo(each.right, each.delay_s, **given)
            )
            future.add_done_callback(partial(self._ended, each.request_id))
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
        outcome, what = result_of(answer) if isinstance(answer, Reply) else ("", digest(answer))
        # For an echo's own caller such an outcome is an error.
        error = RequestError.__name__ if outcome else ""
        self.journal.note("end", (request_id, error, "" if error else what))


class WritingClusterClient(WritingClient):
    """A client of several clusters. What comes from the one with number n stands in the journal by
    the name ``WHO@n``."""

    def __init__(self, clusters: Sequence[Settings], journal: Journal, path: Path) -> None:
        self._notes_by_cluster = [Journal(path, f"{journal.who}@{n}") for n in range(len(clusters))]
        super().__init__(clusters, journal)

    def _new_route(self) -> Route:
        return _WritingClusterRouter(self._notes_by_cluster, self._clusters, self._options)


class _WritingClusterRouter(ClusterRouter):
    def __init__(
        self, journals: Sequence[Notes], clusters: Clusters, options: RouteOptions
    ) -> None:
        super().__init__(clusters, replace(options, no_worker="wait"))
        for cluster, journal in zip(self.clusters, journals, strict=True):
            cluster.router = writing_router(
                cluster.settings, journal, options, partial(self.look_after, cluster)
            )


class WritingQueue(Queue):
    """Sees every reply, those that no future takes included, and every failed call."""

    def __init__(self, settings: Settings, journal: Notes, shard: int = 0) -> None:
        super().__init__(settings, shard)
        self._journal = journal
        address = Address(settings.url)
        self._commands = _WritingLink(address, journal)
        self._blocking = _WritingLink(address, journal)

    async def submit(self, client: str, batch: Sequence[Submission]) -> list[Submitted]:
        answers = await super().submit(client, batch)
        pairs = list(zip((item.request_id for item in batch), answers, strict=True))
        self._saw((request_id, answer) for request_id, answer in pairs if isinstance(answer, bytes))
        taken = [
            (request_id,)
            for request_id, answer in pairs
            if isinstance(answer, bytes) or answer in (Became.QUEUED, Became.ATTACHED)
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
        self, client: str, after: str, block_ms: int, *, extend: bool = True
    ) -> tuple[str, list[tuple[str, bytes]]]:
        reached, pairs = await super().read_inbox(client, after, block_ms, extend=extend)
        self._saw((request_id, answer) for request_id, answer in pairs if not answer.isdigit())
        return reached, pairs

    def _saw(self, pairs: Iterable[tuple[str, bytes]]) -> None:
        self._journal.note("reply", *(reply_row(request_id, data) for request_id, data in pairs))


class _WritingLink(Link):
    def __init__(self, address: Address, journal: Notes) -> None:
        super().__init__(address)
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
    return request_id, token, *result_of(reply), reply.attempts


def result_of(reply: Reply) -> tuple[str, str]:
    """An outcome that is leanq's own, or none and the digest of the answer: of what Lean says, the
    verdict and the names like ``n12`` in its messages."""
    if reply.verdict in _LEANS:
        named = {name for each in reply.messages for name in _NAMED.findall(each.text)}
        return "", digest(" ".join([str(reply.verdict), *sorted(named)]).encode())
    return reply.verdict or ("error" if reply.error else ""), digest(reply.payload)


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
    # When a reply was seen, and its token. A result is a verdict and a digest.
    sightings: list[tuple[float, str]] = field(default_factory=list)
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
        again: answered a second time, since a failover forgot the first, or by another cluster: the
            same, or an outcome of leanq's.
        lost: a client that lives on sent it, or the server had it; and it did not end.
        poisoned: those of the lost that took down too many workers.
        forgotten: the server had it and did not know it later; its client may have mended that.
        conflicting: two answers that differ, or two replies without a failover that explains it.
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
            ("… of these answered again", f"{len(self.again):,}"),
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


def check(events: Iterable[Event], *, looked_up: bool = False, late_s: float = _LATE_S) -> Findings:
    """Judges a history.

    Args:
        looked_up: ``keys`` has told of every reply that the server kept.
        late_s: for how long after its end what the old server said may still be written down.
    """
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
            case "forgot", [since_s, until_s]:
                forgot.append((since_s, until_s))
            case _:
                raise ValueError(f"not an event: {kind} {rest}")
    for request_id, story in stories.items():
        _judge(found, request_id, story, killed, forgot, looked_up, late_s)
    return found


def check_clusters(events: Iterable[Event], clusters: int) -> Findings:
    """Judges the history of clients with several clusters, each of which may give a request one
    reply; who told what of one of them says so, as in ``WHO@1``. All replies were looked up."""
    whole: list[Event] = []
    parts: list[list[Event]] = [[] for _ in range(clusters)]
    ends: Counter[str] = Counter()
    for kind, at_s, who, *rest in events:
        who, _, number = who.partition("@")
        event = [kind, at_s, who, *rest]
        whole.append(event)
        if kind == "end":
            # A future is of no cluster.
            ends[rest[0]] += not rest[1]
            continue
        for part in [parts[int(number)]] if number else parts:
            part.append(event)
    found, each = check(whole, looked_up=True), [check(part) for part in parts]
    for name in ("forgotten", "conflicting", "duplicated", "unexpected"):
        of_any = {request_id for one in each for request_id in getattr(one, name)}
        setattr(found, name, sorted(of_any))
    found.duplicated += (request_id for request_id, count in ends.items() if count > 1)
    return found


def _reply(story: _Story, at_s: float, token: str, result: tuple[str, str], attempts: int) -> None:
    # Those told by the server itself carry no token; two of them are told apart by what they say.
    story.sightings.append((at_s, token or str(result)))
    story.results.add(result)
    story.attempts = max(story.attempts, attempts)


def _judge(
    found: Findings,
    request_id: str,
    story: _Story,
    killed: set[str],
    forgot: list[tuple[float, float]],
    looked_up: bool,
    late_s: float,
) -> None:
    if story.right is None:
        found.unexpected.append(request_id)
        return
    found.attempted += 1
    found.acknowledged += bool(story.acks)
    # What a failover took back does not count.
    last_written = [(since_s, until_s + late_s) for since_s, until_s in forgot]
    acknowledged = [at_s for at_s in story.acks if not _within(at_s, last_written)]
    if any(at_s < story.missing_s for at_s in acknowledged):
        found.forgotten.append(request_id)
    found.charged += max(0, story.attempts - 1)
    if any(not verdict and answer != story.right for verdict, answer in story.results):
        found.unexpected.append(request_id)
    explained = _explained(story, forgot, late_s)
    answers = {answer for verdict, answer in story.results if not verdict}
    tokens = {token for _, token in story.sightings}
    # Where a failover explains the second reply, that may be an outcome of leanq's; one reply is
    # always the same.
    same = explained and len(tokens) >= len(story.results)
    if len(answers) > 1 or (len(story.results) > 1 and not same):
        found.conflicting.append(request_id)
    elif story.ends > 1 or not explained:
        found.duplicated.append(request_id)
    if ("poisoned", "") in story.results:
        found.poisoned.append(request_id)
    if story.ends and ("", story.right) in story.results:
        found.ended += 1
        found.recovered += story.attempts > 1
        if len(tokens) > 1:
            found.again.append(request_id)
        forgotten = any(_within(at_s, last_written) for at_s, _ in story.sightings)
        if looked_up and not story.kept and not forgotten:
            found.gone.append(request_id)
    elif acknowledged or not story.attempted_by <= killed:
        found.lost.append(request_id)
    else:
        (found.orphaned if story.acks else found.undecided).append(request_id)


def _explained(story: _Story, forgot: list[tuple[float, float]], late_s: float) -> bool:
    """Whether between a reply and each other one that was seen after it a failover forgot the
    earlier: that was seen in no other time, and the later one not before the old server's end."""
    # When the reply may have been written, if it is the one that was seen last.
    token, written_s, last_s = "", [0.0], 0.0
    left = sorted(forgot)
    for at_s, other in sorted(story.sightings):
        why = next(
            (
                (since, until)
                for since, until in left
                if any(since <= each for each in written_s)
                and last_s <= until + late_s
                and until <= at_s
            ),
            None,
        )
        if other == token:
            # Where the lease was not forgotten, it was written anew under the same token.
            written_s += [at_s] if why else []
        else:
            if token and not why:
                return False
            # A request is forgotten by each failover once.
            left = [each for each in left if each != why or not token]
            token, written_s = other, [at_s]
        last_s = at_s
    return True


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
