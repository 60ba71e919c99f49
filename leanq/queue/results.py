"""What goes into the queue's transitions and what comes out of them: plain values.

Types created once per request are msgspec structs: three times faster to construct.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Self

import msgspec
from msgspec import Struct

from leanq.queue.metrics import BUCKETS_S
from leanq.queue.requests import Reply, content_of
from leanq.queue.scripts import LARGE_BYTES

# Kind, attempts, priority; submitted, deadline, longest run (ms); then six texts and the body.
_RECORD = struct.Struct(">BBBddd")
_RECORD_TEXTS = 6
_WHOLE, _DETACHED = 1, 2
_IN_FLIGHT = (b"\x01", b"\x02")
# Of a counter.
_MOST_DIGITS = 18
_minutes = msgspec.msgpack.Decoder(tuple[int, dict[str, int]])
# Counters of environments, and of snapshots.
_TALLY = re.compile(r"[scfwrtu]:|[wrtu]_ms:|snapshot|minute$")
# What is counted by environment, and also of all environments together.
_SUMMED = {"f:": "verdict", "c:": "reason"}


class SubmissionGroup(NamedTuple):
    """What requests of one batch have in common, as the script ``submit`` takes it. ``detached``:
    their bodies are too large for a script."""

    environment: str
    priority: int
    deadline_ms: int
    run_ms: int
    affinity: tuple[str, ...]
    detached: bool


class Submission(Struct, frozen=True):
    """One request on its way in. Times in milliseconds; ``deadline_ms`` 0 means none.

    While one of several with the same ``digest`` runs in their environment, the others wait for its
    reply; ``""`` is shared with none. ``affinity``: up to two names of what makes a worker fast at
    it, the strongest first; each up to 32 letters, digits, ``_`` and ``-``.
    """

    request_id: str
    environment: str
    tenant: str
    priority: int
    deadline_ms: int
    longest_run_ms: int
    body: bytes
    digest: str = ""
    affinity: tuple[str, ...] = ()


def is_reply_to(item: Submission, reply: Reply, *, remembers: bool) -> bool:
    """Returns whether a reply may be to this submission, and not to another one of its id.

    Args:
        remembers: whether verdicts are remembered, and so may come from another environment.
    """
    wanted = content_of(item.environment, item.digest)
    if not reply.content or not wanted:
        return True
    return reply.content == wanted or (remembers and reply.content.startswith(f"{item.digest} "))


_of_kind = attrgetter("environment", "priority", "deadline_ms", "longest_run_ms", "affinity")


def kind_of(item: Submission) -> tuple[str, int, int, int, tuple[str, ...], bool]:
    """Returns the fields of the :class:`SubmissionGroup` to which a submission belongs."""
    return (*_of_kind(item), len(item.body) > LARGE_BYTES)


@dataclass(slots=True, frozen=True)
class Queued:
    """The request waits in its list, or for an identical one that runs."""


@dataclass(slots=True, frozen=True)
class Attached:
    """The request id was in flight already; its reply will come to this client."""


@dataclass(slots=True, frozen=True)
class Conflict:
    """The request id is in flight with other content, of which nothing has changed."""


@dataclass(slots=True, frozen=True)
class Full:
    """Too many requests of this tenant wait in this environment."""

    retry_after_s: float


@dataclass(slots=True, frozen=True)
class UnknownEnvironment:
    """Workers have offered environments, and never this one."""


Submitted = Queued | Attached | Conflict | Full | UnknownEnvironment | bytes
"""What became of a submission; bytes are the reply that is there already."""


class Job(Struct, frozen=True):
    """A claimed request. ``isolated``: nothing may run beside it on this worker. ``body``: None
    where the server has lost it; ``detached_bytes``: its size, where it lay apart from the record.
    ``digest``: that of its :class:`Submission`.
    """

    request_id: str
    environment: str
    token: str
    attempts: int
    queued_s: float
    body: bytes | None
    isolated: bool
    detached_bytes: int = 0
    digest: str = ""


Times = tuple[int, int]
"""How long a request waited and how long it ran, in milliseconds, as it is counted."""


class EndGroup(NamedTuple):
    """What settlements of one call have in common, as ``claim`` and ``exchange`` take it; see
    :class:`Settlement`. ``uploaded``: their replies are too large for a script."""

    outcome: str
    reason: str
    warm: bool
    way: str
    fingerprint: str
    uploaded: bool


class Settlement(Struct, frozen=True):
    """The end of a request, as the holder of ``token`` tells it.

    Attributes:
        outcome: the verdict, or what else is counted as its end.
        reason: the reply's, to be counted; ``""`` for none.
        fingerprint: that of the environment where the reply holds on any machine, and so may be
            remembered; else ``""``.
        warm: its worker would be fast now at others with the same first affinity.
        way: what is to be counted of how Lean came by its prefix.
        times: how long it waited and ran, see :func:`times_of`; told with the next heartbeat.
        cpu_ms: the CPU time that Lean and the judge took for it.
    """

    request_id: str
    token: str
    outcome: str
    reply: bytes
    fingerprint: str = ""
    warm: bool = False
    way: str = ""
    times: Times = (0, 0)
    reason: str = ""
    cpu_ms: int = 0


_of_end = attrgetter("outcome", "reason", "warm", "way", "fingerprint")


def end_of(item: Settlement) -> tuple[str, str, bool, str, str, bool]:
    """Returns the fields of the :class:`EndGroup` to which a settlement belongs."""
    return (*_of_end(item), len(item.reply) > LARGE_BYTES)


def times_of(waited_s: float, ran_s: float) -> Times:
    """Returns how long a request waited and ran, to two digits.

    The fewer of these there are, the less a heartbeat has to tell.
    """
    return _rounded_ms(waited_s), _rounded_ms(ran_s)


def _rounded_ms(s: float) -> int:
    ms = int(s * 1000 + 0.5)
    if ms < 100:
        return max(0, ms)
    unit = int(10 ** (len(str(ms)) - 2))
    return (ms + unit // 2) // unit * unit


def tallies_of(times: Mapping[tuple[str, Times], int]) -> dict[str, int]:
    """The tallies (see :class:`Status`) of so many results of an environment with such times."""
    tallies = Counter[str]()
    for (environment, (waited_ms, ran_ms)), n in times.items():
        for what, ms in (("w", waited_ms), ("r", ran_ms), ("t", waited_ms + ran_ms)):
            tallies[f"{what}_ms:{environment}"] += n * ms
            # A bucket holds what is at most its edge.
            tallies[f"{what}:{environment}:{bisect_left(BUCKETS_S, ms / 1000)}"] += n
    return tallies


Returning = Literal["requeue", "retry", "defer"]
"""How unfinished work goes back: to the front of its waiting list; there too, and the attempt
counts; or to the end, where another worker finds it."""


@dataclass(slots=True, frozen=True)
class Claimed:
    """What a call of :meth:`Queue.claim` brought.

    Attributes:
        accepted: per settlement, whether it counted (False: the lease was lost before).
        held: size of the worker's processing list on the server.
        must_empty: the worker should take nothing until it is empty, to run a quarantined request
            alone.
    """

    accepted: tuple[bool, ...]
    jobs: tuple[Job, ...]
    held: int
    must_empty: bool


@dataclass(slots=True, frozen=True)
class Renewed:
    """``lapsed``: some worker is due to be reaped. ``timed_out``: request ids taken from this one.
    ``known``: False after the server forgot this worker, which should join again. ``workers``: how
    many there are. ``waiting``: how many requests wait in the environments that were named."""

    held: int
    lapsed: bool
    timed_out: tuple[str, ...]
    known: bool
    workers: int = field(default=0, compare=False)
    waiting: int = field(default=0, compare=False)


@dataclass(slots=True, frozen=True)
class Reaped:
    """``more``: call again. ``expiry_grace_s``: no lease is judged for so long, for before no
    worker could be heard."""

    requeued: int
    poisoned: int
    more: bool
    expiry_grace_s: float = 0.0


@dataclass(slots=True, frozen=True)
class DeadLetter:
    """A request that took down too many workers: ``worker`` was the last, ``died_s`` is when,
    in seconds since 1970 by the server's clock. ``submission`` is what would be sent again."""

    submission: Submission
    client: str
    attempts: int
    worker: str
    died_s: float


def read_jobs(answer: Mapping[str, Any], tokens: Iterable[str]) -> tuple[Job, ...]:
    """The requests that the scripts ``claim`` and ``reconcile`` give out, and whose leases have
    these tokens; those that are detached without their bodies."""
    now_ms, alone = answer["now_ms"], set(answer["isolated"])
    rows = zip(answer["request_ids"], answer["records"], tokens, strict=False)
    return tuple(_read_job(now_ms, n in alone, *row) for n, row in enumerate(rows, 1))


def _read_job(now_ms: float, isolated: bool, request_id: bytes, record: bytes, token: str) -> Job:
    kind, attempts, _, submitted_ms, _, _ = _RECORD.unpack_from(record)
    begin = end = before = record.index(0, _RECORD.size)
    for _ in range(_RECORD_TEXTS - 1):
        before, end = end, record.index(0, end + 1)
    body = record[end + 1 :]
    return Job(
        request_id.decode(errors="replace"),
        record[_RECORD.size : begin].decode(errors="replace"),
        token,
        attempts + 1,
        (now_ms - submitted_ms) / 1000,
        body if kind == _WHOLE else None,
        isolated,
        0 if kind == _WHOLE else int(body),
        record[before + 1 : end].decode(errors="replace"),
    )


@dataclass(slots=True, frozen=True)
class Wakeup:
    """Requests may wait."""


@dataclass(slots=True, frozen=True)
class Stop:
    """A request that this worker holds is no longer wanted."""

    request_id: str


def read_claimed(answer: Mapping[str, Any], token: str, settled: int) -> Claimed:
    """What the script ``claim`` answers to so many settlements; its leases have this token."""
    accepted = [True] * settled
    for number in answer["fenced"]:
        accepted[number - 1] = False
    return Claimed(
        accepted=tuple(accepted),
        jobs=read_jobs(answer, repeat(token)),
        held=answer["held"],
        must_empty=answer["must_empty"] == 1,
    )


def read_exchanged(answer: Mapping[str, Any], token: str) -> Claimed:
    """Returns what the script ``exchange`` answers, whose lease has this token."""
    request_id, record = answer["request_id"], answer["record"]
    jobs = (_read_job(answer["now_ms"], False, request_id, record, token),) if request_id else ()
    return Claimed(accepted=(True,), jobs=jobs, held=answer["held"], must_empty=False)


def is_record(data: bytes) -> bool:
    """Returns whether this is a request in flight, and not the reply that takes its place."""
    return data.startswith(_IN_FLIGHT)


def read_record(request_id: str, data: bytes) -> tuple[Submission, str]:
    """A request and its client, from its record in Redis; ``lua/parts/record.lua`` has the
    layout. The body of a detached one is left empty.

    Its deadline is left out, since it counted from when it was submitted.
    """
    kind, _, priority, _, _, run_ms = _RECORD.unpack_from(data)
    *texts, body = data[_RECORD.size :].split(b"\0", 6)
    environment, client, first, second, tenant, digest = (
        text.decode(errors="replace") for text in texts
    )
    body = b"" if kind == _DETACHED else body
    affinity = tuple(name for name in (first, second) if name)
    return Submission(
        request_id, environment, tenant, priority, 0, int(run_ms), body, digest, affinity
    ), client


class InFlight(Struct, frozen=True):
    """A request that has not ended, for people to look at.

    Attributes:
        attempts: how many have ended.
        submitted_s: when, in seconds since 1970 by the server's clock.
        worker: which of the workers holds it; ``""`` where none does.
        running_s: for how long that one has held it, in seconds.
    """

    request_id: str
    environment: str
    tenant: str
    priority: int
    attempts: int
    submitted_s: float
    worker: str = ""
    running_s: float = 0.0


def read_in_flight(request_id: str, data: bytes) -> tuple[InFlight, float]:
    """What a record says of a request, of which its first kilobyte is enough, and for how many
    seconds a worker may hold it.

    Raises:
        ValueError: it is no record.
    """
    if not is_record(data) or len(data) < _RECORD.size:
        raise ValueError(f"{request_id} has no record")
    _, attempts, priority, submitted_ms, _, run_ms = _RECORD.unpack_from(data)
    texts = [text.decode(errors="replace") for text in data[_RECORD.size :].split(b"\0", 6)]
    if len(texts) < 6:
        raise ValueError(f"the record of {request_id} is cut short")
    environment, tenant = texts[0], texts[4]
    found = InFlight(request_id, environment, tenant, priority, attempts, submitted_ms / 1000)
    return found, run_ms / 1000


def read_minute(data: bytes) -> dict[str, int]:
    """The totals of one minute as the scripts noted them; empty where they cannot be read."""
    try:
        minute, totals = _minutes.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {"minute": minute, **totals}


def read_stats(stats: Iterable[tuple[bytes, bytes]]) -> tuple[dict[str, int], dict[str, int]]:
    """The counters and the tallies of a :class:`Status` in what the scripts count."""
    counters, tallies = dict[str, int](), dict[str, int]()
    for raw, number in stats:
        name = raw.decode(errors="replace")
        if name and not name.startswith("affinity:"):
            (tallies if _TALLY.match(name) else counters)[name] = int(float(number))
    for name, n in tallies.items():
        if kind := _SUMMED.get(name[:2]):
            total = f"{kind}:{name.rpartition(':')[2]}"
            counters[total] = counters.get(total, 0) + n
    return counters, tallies


@dataclass(slots=True, frozen=True)
class WorkerRow:
    worker: str
    lease_s: float
    held: int
    info: bytes


@dataclass(slots=True, frozen=True)
class PriorityRow:
    """What waits in an environment with one priority, of ``tenants``. ``held`` of it is of tenants
    that are held back, whose age does not count for ``oldest_s``."""

    environment: str
    priority: int
    tenants: int
    waiting: int
    oldest_s: float
    held: int = 0


@dataclass(slots=True, frozen=True)
class MemoryRow:
    """What one look says of a replay memory.

    Attributes:
        entries, size_bytes: what it holds, and that of its reservoir with it.
        written, evicted, dropped: as of :class:`leanq.trainers.ReplayStats`.
    """

    entries: int
    size_bytes: int
    written: int
    evicted: int
    dropped: int

    @classmethod
    def of(cls, about: Mapping[bytes, bytes]) -> Self:
        """Returns what a memory's counters say; of counters that anybody may have written."""

        def read(name: bytes) -> int:
            found = about.get(name, b"")
            return int(found) if found.isdigit() and len(found) <= _MOST_DIGITS else 0

        written, evicted = max(0, read(b"last") - read(b"base")), read(b"evicted")
        size_bytes = read(b"bytes") + read(b"slot_bytes")
        return cls(max(0, written - evicted), size_bytes, written, evicted, read(b"dropped"))


@dataclass(slots=True, frozen=True)
class Status:
    """One look at a shard or a whole queue: counters by name, environments by name, and what waits.

    ``tallies`` are counters of environments: ``s:ENVIRONMENT`` requests taken in,
    ``f:ENVIRONMENT:VERDICT`` ended, ``c:ENVIRONMENT:REASON`` why, and of the times that they waited
    (w), ran (r) and took in all (t) ``w_ms:ENVIRONMENT`` the sum and ``w:ENVIRONMENT:N`` how many
    fell into the N-th bucket of :data:`leanq.queue.metrics.BUCKETS_S`; ``u_ms:ENVIRONMENT`` is the
    CPU time that was used, and ``u:ENVIRONMENT:TENANT`` (ms) by tenant. Beside these
    ``snapshot_bytes`` and ``snapshots_evicted``. ``paused``: environments (``e:ENVIRONMENT``) and
    tenants (``t:TENANT``) that are held back, and since when, in seconds since 1970. ``decisions``:
    the scaler's last decision on each environment, as JSON. ``weights``: those of tenants.
    ``memories``: the replay memories, up to a hundred of each shard.
    """

    counters: Mapping[str, int]
    environments: Mapping[str, bytes]
    workers: tuple[WorkerRow, ...]
    priorities: tuple[PriorityRow, ...]
    quarantined: Mapping[str, int]
    dead: int
    tallies: Mapping[str, int] = field(default_factory=dict)
    paused: Mapping[str, float] = field(default_factory=dict)
    decisions: Mapping[str, bytes] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    memories: Mapping[str, MemoryRow] = field(default_factory=dict)


def merged(shards: Sequence[Status]) -> Status:
    """The look at a queue of several shards: a worker's lease is its shortest, a priority's tenants
    those of the shard with most of them, and all else is added up."""
    counters, quarantined, tallies = Counter[str](), Counter[str](), Counter[str]()
    environments: dict[str, bytes] = {}
    paused: dict[str, float] = {}
    decisions: dict[str, bytes] = {}
    weights: dict[str, float] = {}
    memories: dict[str, MemoryRow] = {}
    workers: dict[str, WorkerRow] = {}
    priorities: dict[tuple[str, int], PriorityRow] = {}
    for shard in shards:
        counters.update(shard.counters)
        quarantined.update(shard.quarantined)
        tallies.update({k: n for k, n in shard.tallies.items() if k != "minute"})
        environments |= shard.environments
        paused |= shard.paused
        decisions |= shard.decisions
        weights |= shard.weights
        memories |= shard.memories
        for row in shard.workers:
            known = workers.get(row.worker, replace(row, held=0))
            lease_s, held = min(row.lease_s, known.lease_s), row.held + known.held
            workers[row.worker] = replace(row, lease_s=lease_s, held=held)
        for priority in shard.priorities:
            place = (priority.environment, priority.priority)
            seen = priorities.get(place, replace(priority, waiting=0, held=0))
            priorities[place] = replace(
                priority,
                tenants=max(priority.tenants, seen.tenants),
                waiting=priority.waiting + seen.waiting,
                held=priority.held + seen.held,
                oldest_s=max(priority.oldest_s, seen.oldest_s),
            )
    dead = sum(shard.dead for shard in shards)
    rows = tuple(workers.values()), tuple(priorities.values())
    return Status(
        counters,
        environments,
        *rows,
        quarantined,
        dead,
        tallies,
        paused,
        decisions,
        weights,
        memories,
    )
