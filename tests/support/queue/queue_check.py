"""That the server holds exactly what the model says."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from leanq.queue.requests import Reply
from leanq.queue.results import Status
from leanq.queue.scripts import LARGE_BYTES
from leanq.queue.wire import pack_reply, unpack_reply
from support.queue.queue_model import Flying, Model
from support.queue.shards import Dump

# Those of the ends that the scripts themselves give.
_REASONS = {"cancelled": "withdrawn", "expired": "deadline", "poisoned": "too_many_deaths"}


def _fields(item: Flying, model: Model) -> dict[str, str]:
    leased = item.status == "leased"
    run = model.flying[item.run] if item.run else item
    # One that was withdrawn and runs on for others has only its lease.
    record = {
        **model.route(item),
        "t": item.sub.tenant,
        "p": str(item.sub.priority),
        "n": str(item.attempts),
    }
    return {
        **(record if item.client else {}),
        "l": item.sub.environment,
        "c": item.client,
        "st": item.status,
        **({"d": item.sub.digest} if item.sub.digest else {}),
        **({"tok": item.token or ""} if leased else {}),
        **({"w": run.worker} if item.status != "queued" else {}),
        **({"solo": "1"} if item.solo else {}),
        **({"on": item.run} if item.run else {}),
    }


def _is_by(token: str, reply: bytes) -> bool:
    return reply.startswith(pack_reply(token, Reply())[: 2 + len(token)])


def compare(found: Dump, model: Model) -> None:
    assert found.req == {
        request_id: _fields(item, model) for request_id, item in model.flying.items()
    }
    assert found.run == {":".join(place): run for place, run in model.runs.items()}
    assert found.joined == {
        request_id: request_ids for request_id, request_ids in model.joined.items() if request_ids
    }
    assert found.body == {
        request_id: item.sub.body
        for request_id, item in model.flying.items()
        if len(item.sub.body) > LARGE_BYTES
    }
    replies = {
        request_id: unpack_reply(request_id, data) for request_id, data in found.reply.items()
    }
    assert {request_id: reply.verdict for request_id, reply in replies.items()} == model.verdicts
    for reply in replies.values():
        assert reply.reason == _REASONS.get(reply.verdict or "")
    assert all(
        _is_by(token, found.reply[request_id]) for request_id, token in model.winners.items()
    )
    memory = {":".join(key): token for key, token in model.memory.items()}
    assert found.verdict.keys() == memory.keys()
    assert all(_is_by(memory[key], found.verdict[key]) for key in memory)
    assert found.hashes.get("fingerprints", {}) == model.prints
    rings = {
        f"{environment}:{priority}": ring
        for (environment, priority), ring in model.rings.items()
        if ring
    }
    assert found.lists["ring"] == {place: list(ring) for place, ring in rings.items()}
    parked = {
        f"{environment}:{priority}": ring
        for (environment, priority), ring in model.parked.items()
        if ring
    }
    assert found.parked == {place: set(ring) for place, ring in parked.items()}
    assert found.lists["wait"] == {
        f"{place}:{tenant}": request_ids
        for lines in (rings, parked)
        for place, ring in lines.items()
        for tenant, request_ids in ring.items()
    }
    assert {(k[0], k[2:]) for k in found.hashes.get("paused", {})} == {
        (kind[0], name) for kind, name in model.paused
    }
    assert found.lists["quarantined"] == {k: v for k, v in model.quarantined.items() if v}
    assert found.work == {worker: work for worker, work in model.work.items() if work}
    assert (found.workers, found.isolating) == (model.leases, model.isolating)
    assert set(found.hashes.get("info", ())) == model.fleet
    assert {
        c: {request_id for request_id, _ in pairs} for c, pairs in found.inbox.items()
    } == model.told
    poisoned = {
        request_id for request_id, verdict in model.verdicts.items() if verdict == "poisoned"
    }
    assert found.dead == poisoned
    stats = defaultdict(int, {k: int(n) for k, n in found.hashes.get("stats", {}).items()})
    ended = [model.verdicts[request_id] for request_id in model.verdicts.keys() - model.remembered]
    assert Counter(ended) == {k[8:]: n for k, n in stats.items() if k.startswith("verdict:")}
    reasons = Counter(_REASONS[verdict] for verdict in ended if verdict in _REASONS)
    assert reasons == {k[7:]: n for k, n in stats.items() if k.startswith("reason:")}
    tallies = {k: int(n) for k, n in found.hashes.get("tally", {}).items()}
    used = {tuple(k[2:].split(":")): int(n) for k, n in tallies.items() if k.startswith("u:")}
    assert used == {place: n for place, n in model.cpu_ms.items() if n}
    assert {k: float(v) for k, v in found.hashes.get("weights", {}).items()} == model.weights
    accounts = {
        f"{environment}:{priority}": {
            tenant: (account.time, account.mean) for tenant, account in shares.accounts.items()
        }
        for (environment, priority), shares in model.shares.items()
        if shares.accounts
    }
    assert {ring: each for ring, each in found.shares.items() if each} == accounts
    saved = (model.coalesced, len(model.remembered))
    assert (stats["coalesced"], stats["remembered"]) == saved


def check_status(status: Status, found: Dump, model: Model) -> None:
    """What waits is counted without what was withdrawn, whose age does not count either."""
    rows = {(row.environment, row.priority): row for row in status.priorities}
    places = {place for rings in (model.rings, model.parked) for place in rings if rings[place]}
    assert rows.keys() == places
    for place, row in rows.items():
        assert (row.waiting, row.held) == model.waiting(*place)
        fronts = [model.first_submitted(line) for line in model.rings[place].values()]
        oldest_ms = max(0, model.now - min(fronts, default=model.now))
        assert row.oldest_s == oldest_ms / 1000
    isolated = Counter(found.req[request_id]["l"] for request_id in found.isolated)
    assert status.quarantined == isolated


def check_wakeups(found: Dump, model: Model, woken: Collection[str]) -> None:
    """Where work waits, a worker is or will be woken, and none where an operator holds it back."""
    for environment in model.environments | {
        item.sub.environment for item in model.flying.values()
    }:
        queued = [
            w
            for w in model.flying.values()
            if w.status == "queued"
            and w.sub.environment == environment
            and not {("environment", environment), ("tenant", w.sub.tenant)} & model.paused
        ]
        tokens = len(found.lists["wakeup"].get(environment, ()))
        assert tokens <= (0 if ("environment", environment) in model.paused else 16)
        in_time = {w.sub.request_id for w in queued if w.deadline >= model.now}
        assert tokens or in_time <= set(model.quarantined[environment]) or environment in woken
