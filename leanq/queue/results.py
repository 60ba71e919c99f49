"""The values of the queue's transitions. Those made for each request are msgspec structs, which are
three times faster to construct."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, NamedTuple, Self

import msgspec
from msgspec import Struct

from leanq.queue.metrics import BUCKETS_S
from leanq.queue.requests import Reply, content_of

# The most digits of a counter.
_MOST_DIGITS = 18
_minutes = msgspec.msgpack.Decoder(tuple[int, dict[str, int]])
# Counters of environments, and of snapshots.
_TALLY = re.compile(r"[scfwrtu]:|[wrtu]_ms:|snapshot|minute$")
# Counters by environment that are also summed over all environments, and the sums' names.
_SUMMED = {"f:": "verdict", "c:": "reason"}


VERSION = 3
"""The version of the records that this release writes and reads; ``lua/parts/record.lua`` has the
same."""
# Releases with these have another queue, beside this one's.
EARLY_VERSIONS = (1, 2)
# A look counts the requests of the first so many tenants of a priority.
_TENANTS_COUNTED = 1000
# Where replies begin.
_REPLY = 0x80


def is_record(data: bytes) -> bool:
    """Returns whether ``data`` is a request in flight rather than the reply in its place."""
    return data[0] < _REPLY if data else False


class Submission(Struct, frozen=True):
    """One request on its way in. Times are in milliseconds; ``deadline_ms`` 0 means none.

    While one of several with the same ``digest`` runs in their environment, the others wait for its
    reply. A request whose digest is ``""`` shares its run with none.

    ``affinity``: up to two names for what makes a worker fast at it, the strongest first. Each has
    up to 32 letters, digits, ``_`` and ``-``.
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


def is_reply_to(item: Submission, reply: Reply, *, anywhere: bool) -> bool:
    """Returns whether a reply may be to this submission rather than to another of its id.

    Args:
        anywhere: whether it may come from another environment, as a remembered verdict may.
    """
    wanted = content_of(item.environment, item.digest)
    if not reply.content or not wanted:
        return True
    return reply.content == wanted or (anywhere and reply.content.startswith(f"{item.digest} "))


class Became(Enum):
    """The outcome of a submission, numbered as in the script ``submit``.

    QUEUED: the request waits in its list, or for an identical one that runs. ATTACHED: its id was
    in flight already, and its reply will come to this client. FULL: too many requests of this
    tenant wait in this environment. UNKNOWN_ENVIRONMENT: workers have offered environments, but
    never this one. CONFLICT: its id is in flight with other content; nothing has changed.
    """

    QUEUED = 1
    ATTACHED = 2
    FULL = 3
    UNKNOWN_ENVIRONMENT = 4
    CONFLICT = 5


class Unreadable(Struct, frozen=True):
    """A request in flight whose record another release wrote, or which is damaged (version 0)."""

    version: int


def unreadable_of(answer: int) -> Unreadable:
    """Returns what a negative answer of the scripts ``submit`` and ``lookup`` means."""
    return Unreadable(-1 - answer)


Submitted = Became | Unreadable | bytes
"""What became of a submission. Bytes are a reply that is there already."""


class Job(Struct, frozen=True):
    """A claimed request.

    Attributes:
        body: the request's bytes; None if the server has lost them.
        isolated: nothing may run beside it on this worker.
        detached_bytes: the body's size, if it lay apart from the record.
        lost: earlier attempts, as ``lua/parts/requeue.lua`` writes them.
        submitted_ms, claimed_ms: when, in milliseconds since 1970 by the server's clock.
        answered_s: when the claim's answer came, by this process's monotonic clock.
    """

    request_id: str
    environment: str
    token: str
    attempts: int
    queued_s: float
    body: bytes | None
    isolated: bool
    detached_bytes: int = 0
    tenant: str = ""
    digest: str = ""
    lost: str = ""
    submitted_ms: int = 0
    claimed_ms: int = 0
    answered_s: float = 0.0


Times = tuple[int, int]
"""How long a request waited and how long it ran, in milliseconds, as counted."""


class Settlement(Struct, frozen=True):
    """The end of a request, as the holder of ``token`` reports it.

    Attributes:
        outcome: the verdict, or another word that is counted as its end.
        reason: the reply's reason, to be counted; ``""`` for none.
        fingerprint: the environment's fingerprint if the reply holds on any machine and so may be
            remembered; else ``""``.
        warm: whether its worker would be fast now at others with the same first affinity.
        way: how Lean got its prefix, to be counted; ``""`` for none.
        times: how long it waited and ran, see ``times_of``; sent with the next heartbeat.
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


def times_of(waited_s: float, ran_s: float) -> Times:
    """Returns how long a request waited and ran, to two digits.

    The fewer different times there are, the less a heartbeat has to send.
    """
    return _rounded_ms(waited_s), _rounded_ms(ran_s)


def _rounded_ms(s: float) -> int:
    ms = int(s * 1000 + 0.5)
    if ms < 100:
        return max(0, ms)
    unit = int(10 ** (len(str(ms)) - 2))
    return (ms + unit // 2) // unit * unit


def tallies_of(times: Mapping[tuple[str, Times], int]) -> dict[str, int]:
    """Returns the tallies (see ``Status``) of results with these times."""
    tallies = Counter[str]()
    for (environment, (waited_ms, ran_ms)), n in times.items():
        for what, ms in (("w", waited_ms), ("r", ran_ms), ("t", waited_ms + ran_ms)):
            tallies[f"{what}_ms:{environment}"] += n * ms
            # A bucket also holds values equal to its edge.
            tallies[f"{what}:{environment}:{bisect_left(BUCKETS_S, ms / 1000)}"] += n
    return tallies


Returning = Literal["requeue", "retry", "defer"]
"""How unfinished work goes back.

``requeue`` puts it at the front of its waiting list. ``retry`` does the same and counts the
attempt. ``defer`` puts it at the end, where another worker finds it."""


@dataclass(slots=True, frozen=True)
class Claimed:
    """The result of one ``WorkerQueue.claim``.

    Attributes:
        accepted: per settlement, whether it counted (False: the lease was lost before).
        held: size of the worker's processing list on the server.
        must_empty: the worker should take nothing until it is empty, and then run a quarantined
            request alone.
    """

    accepted: tuple[bool, ...]
    jobs: tuple[Job, ...]
    held: int
    must_empty: bool


@dataclass(slots=True, frozen=True)
class Renewed:
    """The answer to a heartbeat.

    Attributes:
        lapsed: some worker is due to be reaped.
        timed_out: ids of requests taken from this worker.
        known: False after the server forgot this worker, which should then join again.
        waiting: how many requests wait in the environments that were named, without those where
            operators hold everything back.
    """

    held: int
    lapsed: bool
    timed_out: tuple[str, ...]
    known: bool
    workers: int = field(default=0, compare=False)
    waiting: int = field(default=0, compare=False)


@dataclass(slots=True, frozen=True)
class Reaped:
    """The result of the reaper; ``more``: whether to call again.

    ``expiry_grace_s``: seconds in which no lease is judged, since no worker could be heard before.
    """

    requeued: int
    poisoned: int
    more: bool
    expiry_grace_s: float = 0.0


@dataclass(slots=True, frozen=True)
class DeadLetter:
    """A request that took down too many workers, or one on which kernels disagree.

    Attributes:
        submission: the request as it would be sent again.
        died_s: when it ended, in seconds since 1970 by the server's clock.
        reply: the packed reply of a request on which kernels disagree.
    """

    submission: Submission
    client: str
    attempts: int
    worker: str
    died_s: float
    reply: bytes = b""


@dataclass(slots=True, frozen=True)
class Wakeup:
    """There may be requests to claim."""


@dataclass(slots=True, frozen=True)
class Stop:
    """A request that this worker holds is no longer wanted."""

    request_id: str


class Use(NamedTuple):
    """How much of ``what`` runs have used, as the account of a day has it.

    Attributes:
        tenant, campaign: ``""`` for none, and for those beyond the names that a day has room for.
        what: ``attempts``, ``cpu_ms``, or a verdict or another word for the end of a result.
    """

    environment: str
    tenant: str
    campaign: str
    what: str


def read_account(account: Iterable[tuple[bytes, bytes]]) -> tuple[int, dict[Use, int]]:
    """Returns the account of a day: since when it was kept (ms), and what runs cost.

    Entries that cannot be read are left out.
    """
    since_ms, uses = 0, dict[Use, int]()
    for raw, text in account:
        name = raw.decode(errors="replace").split(":")
        if not text.isdigit() or len(text) > _MOST_DIGITS:
            continue
        if name == ["since"]:
            since_ms = int(text)
        elif len(name) == len(Use._fields) and name[0] and name[-1]:
            uses[Use(*name)] = int(text)
    return since_ms, uses


def read_minute(data: bytes) -> dict[str, int]:
    """Returns the totals of one minute as the scripts noted them; empty if unreadable."""
    try:
        minute, totals = _minutes.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return {"minute": minute, **totals}


def read_stats(stats: Iterable[tuple[bytes, bytes]]) -> tuple[dict[str, int], dict[str, int]]:
    """Splits the server's counts into the counters and the tallies of a ``Status``."""
    counters, tallies = dict[str, int](), dict[str, int]()
    for raw, number in stats:
        name = raw.decode(errors="replace")
        if name and not name.startswith(("affinity:", "left:")):
            (tallies if _TALLY.match(name) else counters)[name] = _count(number)
    for name, n in tallies.items():
        if kind := _SUMMED.get(name[:2]):
            total = f"{kind}:{name.rpartition(':')[2]}"
            counters[total] = counters.get(total, 0) + n
    return counters, tallies


def _count(number: bytes) -> int:
    """Reads a count as scripts do: what is no number counts as 0."""
    try:
        return int(float(number))
    except (ValueError, OverflowError):
        return 0


@dataclass(slots=True, frozen=True)
class WorkerRow:
    worker: str
    lease_s: float
    held: int
    info: bytes


@dataclass(slots=True, frozen=True)
class PriorityRow:
    """The waiting requests of one environment and priority.

    Attributes:
        tenants: how many tenants they belong to; ``fullest`` is the one with most, of each shard.
        held: how many belong to tenants that are held back; ``oldest_s`` leaves these out.
    """

    environment: str
    priority: int
    tenants: int
    waiting: int
    oldest_s: float
    held: int = 0
    fullest: Mapping[str, int] = field(default_factory=dict)


class OthersRow(NamedTuple):
    """Requests of one environment that another release wrote, and that wait.

    Attributes:
        version: of their records; 0 if they are damaged.
        workers: how many workers of early releases are alive; nobody else takes such requests.
    """

    version: int
    environment: str
    waiting: int
    workers: int = 0

    @property
    def text(self) -> str:
        """Returns what waits, and what to do."""
        what = f"{self.waiting:,} of {self.environment} with records of version {self.version}"
        if not self.version:
            return f"{what}: damaged, so no worker reads them; submit them again"
        what = f"{what}, of another release (this one reads {VERSION})"
        if self.workers:
            return f"{what}; {self.workers} of its workers are alive and serve them"
        return f"{what}; start a worker of that release, or withdraw them and submit with this one"


@dataclass(slots=True, frozen=True)
class MemoryRow:
    """One look at a replay memory, see ``leanq.trainers.ReplayStats``."""

    entries: int
    size_bytes: int
    written: int
    evicted: int
    dropped: int

    @classmethod
    def of(cls, about: Mapping[bytes, bytes]) -> Self:
        """Reads a memory's counters, which anybody may have written."""

        def read(name: bytes) -> int:
            found = about.get(name, b"")
            return int(found) if found.isdigit() and len(found) <= _MOST_DIGITS else 0

        written, evicted = max(0, read(b"last") - read(b"base")), read(b"evicted")
        size_bytes = read(b"bytes") + read(b"slot_bytes")
        return cls(max(0, written - evicted), size_bytes, written, evicted, read(b"dropped"))


@dataclass(slots=True, frozen=True)
class Status:
    """One look at a shard or a whole queue.

    Attributes:
        tallies: counters of environments, which ``leanq.fleet.stats.read_total`` reads; also
            ``snapshot_bytes`` and ``snapshots_evicted``.
        paused: environments (``e:ENVIRONMENT``) and tenants (``t:TENANT``) that are held back, and
            since when, in seconds since 1970.
        decisions: the scaler's last decision on each environment, as JSON.
        memories: the replay memories, up to a hundred of each shard.
        others: waiting requests that other releases wrote.
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
    others: tuple[OthersRow, ...] = ()

    @property
    def unaccounted(self) -> int:
        """Returns how many requests neither wait nor run nor have ended: they were lost.

        0 if there are more tenants than a look counts.
        """
        if any(row.tenants > _TENANTS_COUNTED for row in self.priorities):
            return 0
        ended = sum(n for name, n in self.counters.items() if name.startswith("verdict:"))
        left = sum(row.waiting for row in self.others if row.version not in EARLY_VERSIONS)
        waiting = sum(row.waiting for row in self.priorities) + sum(self.quarantined.values())
        running = sum(row.held for row in self.workers) + self.counters.get("joined", 0)
        return self.counters.get("submitted", 0) - ended - waiting - left - running


def added(rows: Iterable[OthersRow]) -> tuple[OthersRow, ...]:
    """Returns the rows of several shards, one for each version and environment."""
    found: dict[tuple[int, str], OthersRow] = {}
    for row in rows:
        known = found.get(row[:2], OthersRow(*row[:2], waiting=0))
        waiting, workers = known.waiting + row.waiting, max(known.workers, row.workers)
        found[row[:2]] = OthersRow(*row[:2], waiting, workers)
    return tuple(found[place] for place in sorted(found))


def merged(shards: Sequence[Status]) -> Status:
    """Merges the looks at all shards of a queue.

    A worker's lease is its shortest, tenants are the most in one shard, and all else is added up.
    """
    counters, quarantined, tallies = Counter[str](), Counter[str](), Counter[str]()
    workers: dict[str, WorkerRow] = {}
    priorities: dict[tuple[str, int], PriorityRow] = {}
    for shard in shards:
        counters.update(shard.counters)
        quarantined.update(shard.quarantined)
        tallies.update({k: n for k, n in shard.tallies.items() if k != "minute"})
        for row in shard.workers:
            known = workers.get(row.worker, replace(row, held=0))
            lease_s, held = min(row.lease_s, known.lease_s), row.held + known.held
            workers[row.worker] = replace(row, lease_s=lease_s, held=held)
        for priority in shard.priorities:
            place = (priority.environment, priority.priority)
            seen = priorities.get(place, PriorityRow(*place, tenants=0, waiting=0, oldest_s=0.0))
            priorities[place] = PriorityRow(
                *place,
                tenants=max(priority.tenants, seen.tenants),
                waiting=priority.waiting + seen.waiting,
                held=priority.held + seen.held,
                oldest_s=max(priority.oldest_s, seen.oldest_s),
                fullest=dict(Counter(priority.fullest) + Counter(seen.fullest)),
            )
    names = ("environments", "paused", "decisions", "weights", "memories")
    same: Any = {name: dict(ChainMap(*(getattr(each, name) for each in shards))) for name in names}
    return Status(
        counters=counters,
        workers=tuple(workers.values()),
        priorities=tuple(priorities.values()),
        quarantined=quarantined,
        dead=sum(shard.dead for shard in shards),
        others=added(row for shard in shards for row in shard.others),
        tallies=tallies,
        **same,
    )
