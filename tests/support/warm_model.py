"""Loose pinning as plain Python, on top of the queue's model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from leanq.queue.results import Submission
from support.queue_model import Flying, Model

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
        # By rid, when a warmer one first went before it.
        self.bypassed: dict[str, int] = {}
        self.counts = Counter[str]()
        self.again_ms = 0
        self._promisees: defaultdict[str, set[str]] = defaultdict(set)

    def submit(self, client: str, sub: Submission) -> str:
        answer = super().submit(client, sub)
        if answer == "queued" and sub.affinity:
            self.guards.setdefault(sub.lane, (0, ""))
        return answer

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

    def settle(self, worker: str, rid: str, token: str, fingerprint: str, warm: bool) -> bool:
        item = self.flying.get(rid)
        if item and item.token == token and warm:
            for name in item.sub.affinity[:1]:
                seen = self.warm[f"{item.sub.lane}:{name}"]
                seen[worker] = self.now
                if len(seen) > MOST_WARM:
                    del seen[min(seen, key=lambda worker: (seen[worker], worker))]
        return super().settle(worker, rid, token, fingerprint, warm)

    def claim(
        self, worker: str, lanes: Sequence[str], want: int, busy: int
    ) -> tuple[list[str], bool, bool]:
        self.again_ms = 0
        self.redeemed.clear()
        pinned = [lane for lane in lanes if lane in self.guards]
        if pinned:
            late = sorted((till, name) for name, till in self.tills.items() if till <= self.now)
            for _, other in reversed(late):
                if other != worker:
                    self.counts["steals"] += self._recall(other)
        rids, alone, hold = super().claim(worker, lanes, want, busy)
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

    def _fill(self, worker: str, lanes: Sequence[str], want: int) -> list[str]:
        rids: list[str] = []
        if any(lane in self.guards for lane in lanes):
            line = self.promises.get(worker, [])
            while line and len(rids) < want:
                rid = line.pop(0)
                if self.to.pop(rid, None) == worker and self._take(rid):
                    rids.append(rid)
        self.redeemed.update(rids)
        return rids + super()._fill(worker, lanes, want - len(rids))

    def _serve(self, worker: str, lane: str, line: list[str], most: int) -> list[str]:
        if lane not in self.guards:
            return super()._serve(worker, lane, line, most)
        rids: list[str] = []
        while len(rids) < most and (rid := self._choose(worker, lane, line)):
            if self._take(rid):
                rids.append(rid)
        return rids

    def _choose(self, worker: str, lane: str, line: list[str]) -> str | None:
        best, best_rank = None, COLD + 1
        for place in range(WINDOW):
            while place < len(line) and not self._waits(line[place]):
                del line[place]
            if place == len(line):
                break
            rank = self._rank(worker, self.flying[line[place]].sub)
            if rank < best_rank:
                best, best_rank = place, rank
            if best_rank == 1 or self.now - self.bypassed.get(line[place], self.now) >= PASS_MS:
                break
        if best is None:
            return None
        for rid in line[:best]:
            self.bypassed.setdefault(rid, self.now)
        rid = line.pop(best)
        self.bypassed.pop(rid, None)
        return rid

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

    def _end(self, rid: str, verdict: str) -> None:
        self.to.pop(rid, None)
        super()._end(rid, verdict)

    def route(self, item: Flying) -> dict[str, str]:
        rid = item.sub.rid
        fields = {
            "a": " ".join(item.sub.affinity),
            "to": self.to.get(rid, ""),
            "by": str(self.bypassed.get(rid, "")),
        }
        return {name: text for name, text in fields.items() if text}
