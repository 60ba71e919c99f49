"""Loose pinning as plain Python, on top of the queue's model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from queue_model import Flying, Model

from leanq.transitions import Submission

STEAL_MS, PASS_MS, WINDOW, MOST_WARM, COLD = 100, 2000, 16, 16, 3


class WarmModel(Model):
    """Promises are lists of rids by worker; a guard is a lane's time and worker, '' for nobody."""

    def __init__(self, lease_ms: int, max_attempts: int, max_waiting: int) -> None:
        super().__init__(lease_ms, max_attempts, max_waiting)
        self.warm: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.vacant: dict[str, int] = {}
        self.promises: dict[str, list[str]] = {}
        self.tills: dict[str, int] = {}
        self.guards: dict[str, tuple[int, str]] = {}
        # By rid: whom it is promised to, and when a warmer one first went before it.
        self.to: dict[str, str] = {}
        self.passed: dict[str, int] = {}
        self.counts = Counter[str]()
        self.again_ms = 0
        self._promisees: defaultdict[str, set[str]] = defaultdict(set)

    def _enter(self, sub: Submission) -> None:
        worker = self._warm_worker(sub)
        if worker is None:
            super()._enter(sub)
            return
        self.to[sub.rid] = worker
        self.vacant[worker] -= 1
        self.promises.setdefault(worker, []).append(sub.rid)
        self.tills.setdefault(worker, self.now + STEAL_MS)
        self._promisees[sub.lane].add(worker)

    def _warm_worker(self, sub: Submission) -> str | None:
        if sub.affinity:
            self.guards.setdefault(sub.lane, (0, ""))
        if self.suspects[sub.lane] or any(self.rings[sub.lane, level] for level in range(3)):
            return None
        for name in sub.affinity:
            seen = self.warm[f"{sub.lane}:{name}"]
            for worker in sorted(seen, key=lambda worker: (seen[worker], worker), reverse=True):
                if self.vacant.get(worker, 0) > 0 and self.leases[worker] > self.now:
                    return worker
        return None

    def submitted(self) -> None:
        promisees = set().union(*self._promisees.values())
        for lane in self._promisees:
            until, guard = self.guards[lane]
            if until <= self.now or guard in promisees:
                self.guards[lane] = (self.now + STEAL_MS, "")
        self._promisees.clear()

    def settle(self, worker: str, rid: str, token: str, warm: bool) -> bool:
        item = self.flying.get(rid)
        if item and item.token == token and warm:
            for name in item.sub.affinity:
                seen = self.warm[f"{item.sub.lane}:{name}"]
                seen[worker] = self.now
                if len(seen) > MOST_WARM:
                    del seen[min(seen, key=lambda worker: (seen[worker], worker))]
        return super().settle(worker, rid, token, warm)

    def claim(
        self, worker: str, lanes: Sequence[str], want: int, busy: int
    ) -> tuple[list[str], bool, bool]:
        self.again_ms = 0
        pinned = [lane for lane in lanes if lane in self.guards]
        if pinned:
            late = sorted((till, name) for name, till in self.tills.items() if till <= self.now)
            for _, other in reversed(late):
                if other != worker:
                    self.counts["steals"] += self._recall(other)
        rids, alone, hold = super().claim(worker, lanes, want, busy)
        self.redeemed = {rid for rid in rids if self.to.pop(rid, None)}
        for rid in rids:
            sub = self.flying[rid].sub
            if sub.affinity:
                rank = self._rank(worker, sub)
                self.counts["warm_misses" if rank == COLD else "warm_hits"] += 1
        if pinned:
            self._recall(worker)
            left = 0 if alone or hold else want - len(rids)
            if left:
                self.vacant[worker] = left
            waits = [self._watch(worker, lane, left > 0, bool(self.redeemed)) for lane in pinned]
            self.again_ms = min(filter(None, waits), default=0)
        return rids, alone, hold

    def leave(self, worker: str) -> None:
        if not self.work[worker]:
            self._recall(worker)
        super().leave(worker)

    def _draw(self, worker: str, lanes: Sequence[str], want: int) -> list[str]:
        rids: list[str] = []
        if any(lane in self.guards for lane in lanes):
            line = self.promises.get(worker, [])
            while line and len(rids) < want:
                rid = line.pop(0)
                if self._waits(rid) and self.to.get(rid) == worker:
                    rids.append(rid)
        return rids + super()._draw(worker, lanes, want - len(rids))

    def _choose(self, worker: str, lane: str, line: list[str]) -> str | None:
        if lane not in self.guards:
            return super()._choose(worker, lane, line)
        best, best_rank = None, COLD + 1
        for place in range(WINDOW):
            while place < len(line) and not self._waits(line[place]):
                del line[place]
            if place == len(line):
                break
            rank = self._rank(worker, self.flying[line[place]].sub)
            if rank < best_rank:
                best, best_rank = place, rank
            if best_rank == 1 or self.now - self.passed.get(line[place], self.now) >= PASS_MS:
                break
        if best is None:
            return None
        for rid in line[:best]:
            self.passed.setdefault(rid, self.now)
        return line.pop(best)

    def _rank(self, worker: str, sub: Submission) -> int:
        names = enumerate(sub.affinity, 1)
        warm = (rank for rank, name in names if worker in self.warm[f"{sub.lane}:{name}"])
        return next(warm, COLD)

    def _recall(self, worker: str) -> int:
        rids = [rid for rid in self.promises.pop(worker, []) if self.to.get(rid) == worker]
        for rid in reversed(rids):
            del self.to[rid]
            self._go_back(self.flying[rid].sub)
        self.tills.pop(worker, None)
        self.vacant.pop(worker, None)
        return len(rids)

    def _watch(self, worker: str, lane: str, free: bool, redeemed: bool) -> int:
        soonest = min(self.tills.values(), default=0)
        until, guard = self.guards[lane]
        guarded = until > self.now
        if (guarded and guard not in {worker, ""}) or not (soonest or guarded):
            return 0
        if free and not redeemed:
            till = max(soonest or until, self.now + 1)
            self.guards[lane] = (till, worker)
            return till - self.now
        if guard == worker:
            self.guards[lane] = (0, "")
        return 0

    def _end(self, rid: str, verdict: str) -> bool:
        self.to.pop(rid, None)
        return super()._end(rid, verdict)

    def route(self, item: Flying) -> dict[str, str]:
        rid = item.sub.rid
        fields = {
            "a": " ".join(item.sub.affinity),
            "to": self.to.get(rid, ""),
            "by": str(self.passed.get(rid, "")),
        }
        return {name: text for name, text in fields.items() if text}
