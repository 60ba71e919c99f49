"""A queue of a test's own on a real server, with its keys laid open and its time to be set."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
import redis
from msgspec import msgpack, structs

import leanq.queue.shard
from leanq.queue.records import read_record
from leanq.queue.requests import Reason, Reply, Verdict
from leanq.queue.results import (
    Claimed,
    Job,
    Settlement,
    Submission,
    Submitted,
    is_record,
    read_stats,
)
from leanq.queue.scripts import LARGE_BYTES, script_text
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_reply, unpack_reply
from support.queue.queues import Queue

LEASE_MS = 10_000
# Keys that nothing else counts.
_UNCOUNTED = {
    "clock",
    "minutes",
    "accounts",
    "account",
    "upload",
    "scaler",
    "snap",
    "making",
    "hot",
    "texts",
}
LARGE = b"x" * (LARGE_BYTES + 1)


def with_test_clock(name: str) -> str:
    """The script, which takes the time from a key."""
    return re.sub(
        r"local time = .*\n  return .*",
        "return tonumber(redis.call('GET', tag .. ':clock'))",
        script_text(name),
    )


def set_clock(server: redis.Redis, tag: str, now_ms: int) -> None:
    """Sets the time that scripts see."""
    server.mset({f"{tag}:clock": now_ms, f"{lasting_of(tag)}:clock": now_ms})


def lasting_of(tag: str) -> str:
    """How the keys begin that outlast the requests of a queue with this tag."""
    return tag[: tag.index("}") + 1]


def at_the_time_of(job: Job, other: Job) -> Job:
    """The job as if its claim's answer had come with that of the other."""
    return structs.replace(job, answered_s=other.answered_s)


@dataclass
class Dump:
    """Everything that the server holds of one queue, by the kind of key."""

    req: dict[str, dict[str, str]] = field(default_factory=dict)
    reply: dict[str, bytes] = field(default_factory=dict)
    lists: defaultdict[str, dict[str, list[str]]] = field(default_factory=lambda: defaultdict(dict))
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    work: dict[str, dict[str, int]] = field(default_factory=dict)
    warm: dict[str, dict[str, int]] = field(default_factory=dict)
    parked: dict[str, set[str]] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)
    isolating: dict[str, str] = field(default_factory=dict)
    inbox: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    disagreed: set[str] = field(default_factory=set)
    deadreq: set[str] = field(default_factory=set)
    run: dict[str, str] = field(default_factory=dict)
    joined: dict[str, list[str]] = field(default_factory=dict)
    verdict: dict[str, bytes] = field(default_factory=dict)
    affine: set[str] = field(default_factory=set)
    isolated: set[str] = field(default_factory=set)
    body: dict[str, bytes] = field(default_factory=dict)
    detached: set[str] = field(default_factory=set)
    shares: dict[str, dict[str, tuple[float, float | None]]] = field(default_factory=dict)
    snapshots: dict[str, tuple[int, int, list[str]]] = field(default_factory=dict)
    chunks: set[str] = field(default_factory=set)

    def check(self, remembered: Collection[str] = ()) -> None:
        """What holds between any two calls, whatever they were, until replies are collected.
        Those ``remembered`` were answered as they were submitted."""
        waiting, quarantined = self.lists["wait"], self.lists["quarantined"]
        listed = Counter(chain(*waiting.values(), *quarantined.values()))
        leased = Counter(chain(*self.work.values()))
        joined = Counter(chain(*self.joined.values()))
        for request_id, fields in self.req.items():
            status = fields["st"]
            places = {"queued": (1, 0, 0), "leased": (0, 1, 0), "joined": (0, 0, 1)}
            assert (listed[request_id], leased[request_id], joined[request_id]) == places[status], (
                request_id
            )
            assert status != "leased" or request_id in self.work[fields["w"]]
            assert status != "joined" or request_id in self.joined[fields["on"]]
        assert set(leased) | set(joined) <= set(self.req)
        for run in self.joined:
            assert self.req[run]["st"] == "leased"
        for name, run in self.run.items():
            assert (self.req[run]["st"], self.req[run]["d"]) == ("leased", name.split(":")[1])
        # What ended leaves at most its request id in a list, and runs on only for others.
        ghosts = {request_id for request_id, fields in self.req.items() if not fields["c"]}
        assert set(self.req) & set(self.reply) == ghosts <= set(self.joined)
        assert set(listed) <= set(self.req) | set(self.reply)
        # Each detached request has its body, and what ended has left none.
        assert set(self.body) == self.detached <= set(self.req)
        # Work whose worker is not in the fleet would never be reaped.
        assert set(self.work) <= set(self.workers)
        rings = [f"{place}:{t}" for place, ring in self.lists["ring"].items() for t in ring]
        rings += [f"{place}:{t}" for place, tenants in self.parked.items() for t in tenants]
        assert sorted(rings) == sorted(waiting)
        self.check_counts()
        # For each reply one client was told, once.
        told = {
            request_id: data if len(data) <= LARGE_BYTES else b"%d" % len(data)
            for request_id, data in self.reply.items()
            if request_id not in remembered
        }
        assert sorted(chain(*self.inbox.values())) == sorted(told.items())

    def check_counts(self) -> None:
        """What is counted is what is there, or what else is counted."""
        stats = Counter({name: int(n) for name, n in self.hashes.get("stats", {}).items()})
        tally = Counter({name: int(n) for name, n in self.hashes.get("tally", {}).items()})
        flying = [fields for fields in self.req.values() if fields["c"]]
        waiting = Counter(fields["l"] for fields in flying if fields["st"] == "queued")
        assert {k[8:]: n for k, n in stats.items() if k.startswith("waiting:") and n} == waiting
        ended = sum(n for name, n in stats.items() if name.startswith("verdict:"))
        assert stats["submitted"] - ended == len(flying)
        assert stats["submitted"] == sum(n for k, n in tally.items() if k.startswith("s:"))
        assert stats["joined"] == sum(fields["st"] == "joined" for fields in flying)
        # A run that was withdrawn is stopped, or goes on for others: neither is counted.
        withdrawn = range(stats["verdict:cancelled"] + 1)
        runs = sum(fields["st"] == "leased" for fields in self.req.values())
        left = stats["settled"] + stats["released"] + stats["reaped"] + runs
        assert stats["claimed"] - left in withdrawn
        by_scripts = sum(stats[f"verdict:{name}"] for name in ("cancelled", "expired", "poisoned"))
        assert stats["settled"] + stats["coalesced"] - (ended - by_scripts) in withdrawn
        alone = stats["claimed"] - sum(n for k, n in stats.items() if k.startswith("turn:"))
        assert 0 <= alone <= stats["released"] + stats["reaped"]
        assert stats["warm_hits"] + stats["warm_misses"] <= stats["claimed"]
        tenants = [name for name in tally if re.match("u:[^:]*:.", name)]
        assert stats["tenants"] == len(tenants)
        for name, n in tally.items():
            if name.startswith("u_ms:"):
                assert n >= sum(tally[k] for k in tally if k.startswith(f"u:{name[5:]}:"))
        counted = {name: int(n) for name, n in self.hashes.get("withdrawn", {}).items()}
        assert counted == self.withdrawn()
        assert self.dead | self.disagreed == self.deadreq
        assert tally["snapshot_bytes"] == sum(size for _, size, _ in self.snapshots.values())
        assert self.chunks <= {each for _, _, chunks in self.snapshots.values() for each in chunks}

    def withdrawn(self) -> dict[str, int]:
        """Per list how many of its entries are no request that waits there."""
        waits: Counter[str] = Counter()
        for request_id, fields in self.req.items():
            if fields["st"] == "queued" and "to" not in fields:
                line = f"wait:{fields['l']}:{fields['p']}:{fields['t']}"
                isolated = request_id in self.isolated
                waits[f"quarantined:{fields['l']}" if isolated else line] += 1
        found = {}
        for kind in ("wait", "quarantined"):
            for rest, request_ids in self.lists[kind].items():
                if count := len(request_ids) - waits[f"{kind}:{rest}"]:
                    found[f"{kind}:{rest}"] = count
        return found


def dump(server: redis.Redis, tag: str) -> Dump:
    weights = f"{lasting_of(tag)}:weights"
    names = sorted(key.decode() for key in server.scan_iter(f"{tag}:*", count=10_000))
    names += [weights] if server.exists(weights) else []
    pipe = server.pipeline(transaction=False)
    for name in names:
        match name[name.rindex("}") + 2 :].partition(":")[0]:
            case "deadreq" | "phase" | "stats" | "paused" | "weights" | "shares" | "account":
                pipe.hgetall(name)
            case "info" | "environments" | "fingerprints" | "withdrawn" | "hot" | "texts":
                pipe.hgetall(name)
            case "snaps" | "scaler":
                pipe.hgetall(name)
            case "parked":
                pipe.smembers(name)
            case "wait" | "ring" | "quarantined" | "wakeup" | "stop":
                pipe.lrange(name, 0, -1)
            case "processing" | "workers" | "dead" | "disagreed" | "joined" | "warm":
                pipe.zrange(name, 0, -1, withscores=True)
            case "minutes" | "accounts":
                pipe.zrange(name, 0, -1, withscores=True)
            case "inbox":
                pipe.xrange(name)
            case _:
                pipe.get(name)
    found, places = Dump(), dict[str, str]()
    for name, value in zip(names, pipe.execute(), strict=True):
        kind, _, rest = name[name.rindex("}") + 2 :].partition(":")
        match kind:
            case "req" if is_record(value):
                found.req[rest] = _record(rest, value)
                found.detached |= {rest} if value[1] == 2 else set()
            case "req":
                found.reply[rest] = value
            case "phase":
                for name, text in _texts(value).items():
                    if name.startswith("r:"):
                        found.run[name.removeprefix("r:")] = text
                    else:
                        places[name] = text
            case "stats":
                counters, tallies = read_stats(value.items())
                found.hashes["stats"] = {name: str(n) for name, n in counters.items()}
                found.hashes["tally"] = {name: str(n) for name, n in tallies.items()}
                flags = (name for name in _texts(value) if name.startswith("affinity:"))
                found.affine = {name.removeprefix("affinity:") for name in flags}
            case "info" | "environments" | "fingerprints" | "withdrawn":
                found.hashes[kind] = _texts(value)
            case "paused" | "weights":
                found.hashes[kind] = _texts(value)
            case "shares":
                found.shares[rest] = {t: _account(text) for t, text in _texts(value).items()}
            case "parked":
                found.parked[rest] = {tenant.decode() for tenant in value}
            case "wakeup":
                # A token may bring a request along, whose record is no text.
                found.lists[kind][rest] = [item.partition(b"\0")[0].decode() for item in value]
            case "wait" | "ring" | "quarantined" | "stop":
                found.lists[kind][rest] = [item.decode() for item in value]
            case "processing":
                found.work[rest] = {request_id.decode(): int(score) for request_id, score in value}
            case "warm":
                found.warm[rest] = {worker.decode(): int(score) for worker, score in value}
            case "workers":
                found.workers = {worker.decode(): int(score) for worker, score in value}
            case "inbox":
                entries = [pair for _, fields in value for pair in fields.items()]
                found.inbox[rest] = [(request_id.decode(), data) for request_id, data in entries]
            case "dead":
                found.dead = {request_id.decode() for request_id, _ in value}
            case "disagreed":
                found.disagreed = {request_id.decode() for request_id, _ in value}
            case "verdict":
                found.verdict[rest] = value
            case "joined":
                found.joined[rest] = [request_id.decode() for request_id, _ in value]
            case "deadreq":
                found.deadreq.add(rest)
            case "snaps":
                found.snapshots = {k.decode(): msgpack.decode(row) for k, row in value.items()}
            case "chunk":
                found.chunks.add(rest)
            case "body":
                found.body[rest] = value
            case "isolating":
                found.isolating[rest] = value.decode()
            case other:
                assert other in _UNCOUNTED, f"an unknown key: {name}"
    for request_id, place in places.items():
        # What was withdrawn and runs on for others has its reply in the place of its record.
        fields = (
            found.req.setdefault(request_id, {"c": ""})
            if place[0] == "l"
            else found.req[request_id]
        )
        if place[0] == "l" and place.split("\0")[9]:
            found.detached.add(request_id)
        if place == "i":
            found.isolated.add(request_id)
        else:
            _put(fields, place)
    return found


def _record(request_id: str, data: bytes) -> dict[str, str]:
    (sub, client), attempts = read_record(request_id, data), data[2]
    fields = {
        "l": sub.environment,
        "t": sub.tenant,
        "p": str(sub.priority),
        "c": client,
        "n": str(attempts),
    }
    route = {"d": sub.digest, "a": " ".join(sub.affinity)}
    return {**fields, "st": "queued", **{name: text for name, text in route.items() if text}}


def _put(fields: dict[str, str], place: str) -> None:
    """Adds where the request is, and the attempt that this is."""
    kind, texts = place[0], place[1:].split("\0")
    match kind:
        case "l":
            token, worker, client, environment, solo, digest, *_ = texts
            assert client == fields["c"]
            fields |= {"st": "leased", "tok": token, "w": worker, "l": environment}
            fields |= {"d": digest} if digest else {}
            fields |= {"solo": "1"} if solo else {}
        case "j":
            run, worker, _ = texts
            fields |= {"st": "joined", "on": run, "w": worker}
        case "r":
            fields["to"] = texts[0]
        case other:
            assert other == "p", f"an unknown place: {place!r}"
            fields["by"] = texts[0]
    if kind in "lj" and "n" in fields:
        fields["n"] = str(int(fields["n"]) + 1)


def _account(text: str) -> tuple[float, float | None]:
    time, mean = text.split()
    return float(time), None if mean == "-" else float(mean)


def _texts(value: dict[bytes, bytes]) -> dict[str, str]:
    # A hash that is to be indexed holds one long value for that, under no name.
    return {k.decode(): v.decode(errors="replace") for k, v in value.items() if k}


def submission(request_id: str, **fields: Any) -> Submission:
    """A request for environment ``a`` that may run for a minute, but for ``fields``."""
    usual = Submission(request_id, "a", "t", 1, deadline_ms=0, longest_run_ms=60_000, body=b"body")
    return structs.replace(usual, **fields)


def settlement(
    job: Job,
    verdict: Verdict = "accepted",
    *,
    reason: Reason | None = None,
    warm: bool = False,
    payload: bytes | None = None,
) -> Settlement:
    made = Reply(verdict, reason=reason, attempts=job.attempts, payload=payload)
    reply = pack_reply(job.token, made)
    return Settlement(job.request_id, job.token, verdict, reply, warm=warm, reason=reason or "")


class Shard:
    """The queue with arguments that tests do not care about filled in."""

    def __init__(self, settings: Settings, server: redis.Redis) -> None:
        self.settings = settings
        self.server = server
        self.queue = Queue(settings)
        self.tag = self.queue.keys.tag
        self._tokens = itertools.count()
        self.now_ms = 1_000_000_000
        self.advance(0)

    def advance(self, ms: int) -> None:
        self.now_ms += ms
        set_clock(self.server, self.tag, self.now_ms)

    def is_waited_for(self) -> bool:
        """Whether a connection of this test waits on the server, which other tests share."""
        first = self.server.client_id()
        return any(
            "b" in client["flags"]
            for client in self.server.client_list()
            if int(client["id"]) > first
        )

    def harm(self, place: str) -> None:
        """Puts what any process may write into a key, or (``KEY FIELD``) into a hash's field."""
        key, _, field = place.partition(" ")
        if field:
            self.server.hset(f"{self.tag}:{key}", field, "nonsense")
        else:
            self.server.delete(f"{self.tag}:{key}")
            self.server.set(f"{self.tag}:{key}", "of another kind")

    async def submit(self, *request_ids: str, client: str = "c", **fields: Any) -> list[Submitted]:
        return await self.queue.submit(
            client, [submission(request_id, **fields) for request_id in request_ids]
        )

    async def claim(
        self,
        worker: str = "w",
        want: int = 10,
        *,
        environments: Sequence[str] = ("a",),
        busy: int = 0,
        settle: Sequence[Settlement] = (),
    ) -> Claimed:
        token = f"{next(self._tokens)}:"
        return await self.queue.claim(
            worker, environments, want, busy=busy, token=token, settlements=settle
        )

    async def job(self, worker: str = "w", **options: Any) -> Job:
        """The one request that a claim brings."""
        (job,) = (await self.claim(worker, 1, **options)).jobs
        return job

    async def settle(self, *jobs: Job, worker: str = "w") -> tuple[bool, ...]:
        return (await self.claim(worker, 0, settle=[settlement(job) for job in jobs])).accepted

    async def warm(self, worker: str, *affinity: str, environment: str = "a") -> None:
        """Makes the worker warm."""
        request_ids = [f"{name} {worker}" for name in affinity]
        for request_id, name in zip(request_ids, affinity, strict=True):
            await self.submit(request_id, environment=environment, affinity=(name,))
        jobs = (await self.claim(worker, len(request_ids), environments=[environment])).jobs
        assert [job.request_id for job in jobs] == request_ids
        ended = [settlement(job, warm=True) for job in jobs]
        await self.claim(worker, 0, environments=[environment], settle=ended)

    async def quarantined(self, request_id: str, **fields: Any) -> None:
        """Submits a request and fails it until its next attempt is the last."""
        await self.submit(request_id, **fields)
        environment = str(fields.get("environment", "a"))
        for _ in range(self.settings.max_attempts - 1):
            (job,) = (await self.claim("killed", 1, environments=[environment])).jobs
            assert job.request_id == request_id
            await self.queue.release("killed", [(request_id, job.token)], how="retry")

    async def end(self, request_id: str) -> tuple[str | None, int, float] | None:
        """A reply's verdict, attempts, and seconds in the queue; None where there is none."""
        (data,) = await self.queue.replies([request_id])
        if data is None:
            return None
        reply = unpack_reply(request_id, data)
        return reply.verdict, reply.attempts, reply.queued_s

    async def lapse(self) -> None:
        """Lets all leases lapse while a worker looks all the time."""
        for _ in range(3):
            self.advance(int(self.queue.settings.lease_s * 500))
            await self.queue.renew("watcher")
        await self.queue.release("watcher", [], leave=True)

    def dump(self) -> Dump:
        return dump(self.server, self.tag)

    def wakeup(self, environment: str = "a") -> int:
        return len(self.dump().lists["wakeup"].get(environment, ()))


@contextlib.asynccontextmanager
async def open_shard(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shard]:
    monkeypatch.setattr(leanq.queue.shard, "script_text", with_test_clock)
    with redis.Redis.from_url(settings.url) as server:
        shard = Shard(settings, server)
        try:
            yield shard
        finally:
            await shard.queue.close()
            server.delete("-", *server.scan_iter(f"{lasting_of(shard.tag)}*", count=10_000))
