"""The queue as plain Python: what the scripts must do, one request at a time.

A ring is a dict from tenant to its waiting rids, whose order is the tenants' turn. As on the
server, a request that was withdrawn or expired stays in its list until a claim passes over it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from leanq.transitions import Submission


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
        ring.setdefault(sub.tenant, []).append(sub.rid)
        return "queued"

    def settle(self, worker: str, rid: str, token: str) -> bool:
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
        rids: list[str] = []
        for lane in lanes:
            while len(rids) < want and (rid := self._pick(lane)):
                rids.append(rid)
        return rids, False, False

    def lease(self, worker: str, rid: str, token: str) -> None:
        """What a claim does with each of its rids."""
        item = self.flying[rid]
        item.token, item.worker, item.attempts = token, worker, item.attempts + 1
        self.work[worker][rid] = self.now + item.sub.longest_run_ms

    def release(self, worker: str, rid: str, token: str, charge: bool) -> bool:
        held = rid in self.flying and self.flying[rid].token == token
        if held:
            self._requeue(rid, charge)
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
        overrun = [rid for rid in self._by_age(worker) if self.work[worker][rid] <= self.now]
        for rid in overrun:
            self._requeue(rid, charge=True)
        return overrun

    def reap(self) -> Counter[str]:
        """What became of the requests of whoever is overdue the longest, by name."""
        worker = min((end, worker) for worker, end in self.leases.items())[1]
        ends = Counter(self._requeue(rid, charge=True) for rid in self._by_age(worker))
        self.leave(worker)
        return ends

    def _by_age(self, worker: str) -> list[str]:
        return sorted(self.work[worker], key=lambda rid: (self.work[worker][rid], rid))

    def _pick(self, lane: str) -> str | None:
        """Seven picks of eight to the most urgent level, the eighth goes round the levels."""
        turn = self.turns[lane]
        first = turn // 8 % 3 if turn % 8 == 7 else 0
        for level in (first, 0, 1, 2):
            ring = self.rings[lane, level]
            while ring:
                tenant = next(iter(ring))
                rid, *rest = ring.pop(tenant)
                if rest:
                    ring[tenant] = rest
                if self._waits(rid):
                    self.turns[lane] += 1
                    return rid
        return None

    def _waits(self, rid: str) -> bool:
        if rid in self.flying and self.flying[rid].deadline < self.now:
            self._end(rid, "expired")
        return rid in self.flying

    def _requeue(self, rid: str, charge: bool) -> str:
        item = self.flying[rid]
        del self.work[item.worker][rid]
        item.attempts -= not charge
        if item.attempts >= self.max_attempts:
            self._end(rid, "poisoned")
            return "poisoned"
        item.token = None
        ring = self.rings[item.sub.lane, item.sub.level]
        if 0 < item.attempts == self.max_attempts - 1:
            self.suspects[item.sub.lane].insert(0, rid)
        elif waiting := ring.get(item.sub.tenant):
            waiting.insert(0, rid)
        else:
            self.rings[item.sub.lane, item.sub.level] = {item.sub.tenant: [rid], **ring}
        return "queued"

    def _end(self, rid: str, verdict: str) -> bool:
        self.told[self.flying.pop(rid).client].add(rid)
        assert rid not in self.verdicts
        self.verdicts[rid] = verdict
        return True
