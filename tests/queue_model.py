"""The queue as plain Python: what the scripts must do, one request at a time.

A ring is a dict from tenant to its waiting rids, whose order is the tenants' turn. As on the
server, a request that was withdrawn or expired stays in its list until a claim passes over it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from leanq.transitions import Returning, Submission


@dataclass
class Flying:
    """A request in flight; ``token`` and ``worker`` say who has it while it is leased."""

    sub: Submission
    client: str
    deadline: float
    attempts: int = 0
    token: str | None = None
    worker: str = ""


class Model:
    def __init__(self, lease_ms: int, max_attempts: int, max_waiting: int) -> None:
        self.lease_ms, self.max_attempts, self.max_waiting = lease_ms, max_attempts, max_waiting
        self.now = 1_000_000
        self.flying: dict[str, Flying] = {}
        self.verdicts: dict[str, str] = {}
        self.winners: dict[str, str] = {}
        self.told: defaultdict[str, set[str]] = defaultdict(set)
        self.rings: defaultdict[tuple[str, int], dict[str, list[str]]] = defaultdict(dict)
        self.suspects: defaultdict[str, list[str]] = defaultdict(list)
        self.work: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.leases: dict[str, int] = {}
        self.fleet: set[str] = set()
        self.lanes: set[str] = set()
        self.isolating: dict[str, str] = {}
        self.turns: Counter[str] = Counter()
        self.heard = self.truce = 0
        # What the last claim took that stood in no line.
        self.redeemed: set[str] = set()

    def join(self, worker: str, lanes: Iterable[str]) -> None:
        self.leases[worker] = self.now + self.lease_ms
        self.fleet.add(worker)
        self.lanes |= set(lanes)

    def submit(self, client: str, sub: Submission) -> str:
        ring = self.rings[sub.lane, sub.level]
        if sub.rid in self.verdicts:
            return "reply"
        if sub.rid in self.flying:
            self.flying[sub.rid].client = client
            return "attached"
        if self.lanes and sub.lane not in self.lanes:
            return "unknown"
        if len(ring.get(sub.tenant, ())) >= self.max_waiting:
            return "full"
        deadline = self.now + sub.deadline_ms if sub.deadline_ms else float("inf")
        self.flying[sub.rid] = Flying(sub, client, deadline)
        self._enter(sub)
        return "queued"

    def submitted(self) -> None:
        """The batch is over."""

    def settle(self, worker: str, rid: str, token: str, warm: bool) -> bool:
        if rid in self.flying and self.flying[rid].token == token:
            del self.work[worker][rid]
            self.winners[rid] = token
            self._end(rid, "accepted")
        return self.winners.get(rid) == token

    def claim(
        self, worker: str, lanes: Sequence[str], want: int, busy: int
    ) -> tuple[list[str], bool, bool]:
        """The rids, whether the one runs alone, and whether the worker is to empty itself."""
        self.leases[worker] = self.now + self.lease_ms
        for lane in lanes if want else ():
            suspects = self.suspects[lane]
            while suspects and not self._waits(suspects[0]):
                suspects.pop(0)
            if suspects and busy == 0:
                if self.isolating.get(lane) == worker:
                    del self.isolating[lane]
                return [suspects.pop(0)], True, False
            if suspects and self.isolating.setdefault(lane, worker) == worker:
                return [], False, True
        return self._draw(worker, lanes, want), False, False

    def lease(self, worker: str, rid: str, token: str) -> None:
        """What a claim does with each of its rids."""
        item = self.flying[rid]
        item.token, item.worker, item.attempts = token, worker, item.attempts + 1
        self.work[worker][rid] = self.now + item.sub.longest_run_ms

    def release(self, worker: str, rid: str, token: str, how: Returning) -> bool:
        held = rid in self.flying and self.flying[rid].token == token
        if held:
            self._requeue(rid, how == "charge", how == "defer")
        return held

    def leave(self, worker: str) -> None:
        if not self.work[worker]:
            self.leases.pop(worker, None)
            self.fleet.discard(worker)

    def cancel(self, rid: str) -> bool:
        item = self.flying.get(rid)
        if item and item.token:
            del self.work[item.worker][rid]
        return bool(item) and self._end(rid, "cancelled")

    def lookup(self, client: str, rid: str) -> str:
        if item := self.flying.get(rid):
            item.client = client
            if item.token or self._waits(rid):
                return "in flight"
        return "reply" if rid in self.verdicts else "unknown"

    def renew(self, worker: str) -> list[str]:
        """The rids that overran."""
        self.leases[worker] = self.now + self.lease_ms
        overrun: list[str] = []
        if self.judges():
            overrun = [rid for rid in self._by_age(worker) if self.work[worker][rid] <= self.now]
        for rid in overrun:
            self._requeue(rid, charge=True)
        return overrun

    def judges(self) -> bool:
        """Whether leases are judged now. After a silence they are not, for half a lease."""
        if self.heard and self.now - self.heard > self.lease_ms / 2:
            self.truce = self.now + self.lease_ms // 2
        self.heard = self.now
        return self.now >= self.truce

    def reap(self) -> Counter[str] | None:
        """What became of the requests of whoever is overdue the longest, by name."""
        if not self.judges():
            return None
        worker = min((end, worker) for worker, end in self.leases.items())[1]
        ends = Counter(self._requeue(rid, charge=True) for rid in self._by_age(worker))
        self.leave(worker)
        return ends

    def route(self, item: Flying) -> dict[str, str]:
        """The fields of the request's hash that are about warm workers."""
        return {}

    def _by_age(self, worker: str) -> list[str]:
        return sorted(self.work[worker], key=lambda rid: (self.work[worker][rid], rid))

    def _enter(self, sub: Submission) -> None:
        self.rings[sub.lane, sub.level].setdefault(sub.tenant, []).append(sub.rid)

    def _draw(self, worker: str, lanes: Sequence[str], want: int) -> list[str]:
        rids: list[str] = []
        for lane in lanes:
            while len(rids) < want and (rid := self._pick(worker, lane)):
                rids.append(rid)
        return rids

    def _pick(self, worker: str, lane: str) -> str | None:
        """Seven picks of eight to the most urgent level, the eighth goes round the levels."""
        turn = self.turns[lane]
        first = turn // 8 % 3 if turn % 8 == 7 else 0
        for level in (first, 0, 1, 2):
            ring = self.rings[lane, level]
            while ring:
                tenant = next(iter(ring))
                line = ring.pop(tenant)
                rid = self._choose(worker, lane, line)
                if line:
                    ring[tenant] = line
                if rid:
                    self.turns[lane] += 1
                    return rid
        return None

    def _choose(self, worker: str, lane: str, line: list[str]) -> str | None:
        """Takes the next one out of a tenant's line; None where it waits no more."""
        rid = line.pop(0)
        return rid if self._waits(rid) else None

    def _waits(self, rid: str) -> bool:
        if rid in self.flying and self.flying[rid].deadline < self.now:
            self._end(rid, "expired")
        return rid in self.flying

    def _requeue(self, rid: str, charge: bool, defer: bool = False) -> str:
        item = self.flying[rid]
        del self.work[item.worker][rid]
        item.attempts -= not charge
        if item.attempts >= self.max_attempts:
            self._end(rid, "poisoned")
            return "poisoned"
        item.token = None
        if 0 < item.attempts == self.max_attempts - 1:
            suspects = self.suspects[item.sub.lane]
            suspects.insert(len(suspects) if defer else 0, rid)
        else:
            self._go_back(item.sub, defer)
        return "queued"

    def _go_back(self, sub: Submission, defer: bool = False) -> None:
        ring = self.rings[sub.lane, sub.level]
        if waiting := ring.get(sub.tenant):
            waiting.insert(len(waiting) if defer else 0, sub.rid)
        else:
            new = {sub.tenant: [sub.rid]}
            self.rings[sub.lane, sub.level] = {**ring, **new} if defer else {**new, **ring}

    def _end(self, rid: str, verdict: str) -> bool:
        self.told[self.flying.pop(rid).client].add(rid)
        assert rid not in self.verdicts
        self.verdicts[rid] = verdict
        return True


class Fairness:
    """Watches claims: while two tenants wait in a level, neither gets two more than the other."""

    def __init__(self, model: Model) -> None:
        self.model = model
        # Per pair of tenants how far the one is ahead, the least and the most that it ever was.
        self.leads: dict[tuple[object, ...], tuple[int, int, int]] = {}

    def stale_lists(self) -> set[tuple[str, int, str]]:
        """Wait lists in which some rid waits no more."""
        model = self.model
        return {
            (*place, tenant)
            for place, ring in model.rings.items()
            for tenant, rids in ring.items()
            for rid in rids
            if rid not in model.flying or model.flying[rid].deadline < model.now
        }

    def check(self, rids: list[str], stale: set[tuple[str, int, str]]) -> None:
        """Takes a claim's rids in; ``stale`` are the stale lists before it."""
        subs = [self.model.flying[rid].sub for rid in rids]
        served = Counter((sub.lane, sub.level, sub.tenant) for sub in subs)
        tenants = sorted({item.sub.tenant for item in self.model.flying.values()})
        for place, ring in self.model.rings.items():
            for pair in combinations(tenants, 2):
                both = [(*place, tenant) for tenant in pair]
                # Whose list ran empty, or passed over what waits no more, begins anew.
                if any(name in stale for name in both) or not all(t in ring for t in pair):
                    self.leads.pop((place, pair), None)
                    continue
                lead, low, high = self.leads.get((place, pair), (0, 0, 0))
                lead += served[both[0]] - served[both[1]]
                low, high = min(low, lead), max(high, lead)
                self.leads[place, pair] = (lead, low, high)
                assert high - low <= 1, f"{pair} in {place}"
