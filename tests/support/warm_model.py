"""Loose pinning as plain Python, on top of the queue's model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from leanq.queue.results import Submission
from support.queue_model import Flying, Model

REASSIGN_MS, PASS_MS, WINDOW, MOST_WARM, COLD = 100, 2000, 16, 16, 3


class WarmModel(Model):
    """Reservations are request ids by worker; the watchdog's note is a time and a worker, or ''."""

    def __init__(self, lease_ms: int, max_attempts: int, max_waiting: int) -> None:
        super().__init__(lease_ms, max_attempts, max_waiting)
        self.warm: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.available: dict[str, int] = {}
        self.reservations: dict[str, list[str]] = {}
        self.tills: dict[str, int] = {}
        self.watchdog: tuple[int, str] | None = None
        self.affine: set[str] = set()
        # By request id, when a warmer one first went before it.
        self.bypassed: dict[str, int] = {}
        self.counts = Counter[str]()
        self.again_ms = 0
        self._reserved_workers: set[str] = set()

    def submit(self, client: str, sub: Submission) -> str:
        answer = super().submit(client, sub)
        if answer == "queued" and sub.affinity:
            self.affine.add(sub.environment)
        return answer

    def _enter(self, sub: Submission) -> None:
        worker = self._warm_worker(sub)
        if worker is None:
            super()._enter(sub)
            return
        self.to[sub.request_id] = worker
        self.available[worker] -= 1
        self.reservations.setdefault(worker, []).append(sub.request_id)
        self.tills.setdefault(worker, self.now + REASSIGN_MS)
        self._reserved_workers.add(worker)

    def _warm_worker(self, sub: Submission) -> str | None:
        if self.quarantined[sub.environment] or any(
            self.rings[sub.environment, priority] for priority in range(3)
        ):
            return None
        for name in sub.affinity:
            seen = self.warm[f"{sub.environment}:{name}"]
            for worker in sorted(seen, key=lambda worker: (seen[worker], worker), reverse=True):
                if self.available.get(worker, 0) > 0 and self.leases[worker] > self.now:
                    return worker
        return None

    def submitted(self) -> None:
        note = self._note()
        if self._reserved_workers and (not note or note[1] in self._reserved_workers):
            self.watchdog = (self.now + REASSIGN_MS, "")
        self._reserved_workers.clear()

    def _note(self) -> tuple[int, str] | None:
        if self.watchdog and self.watchdog[0] <= self.now:
            self.watchdog = None
        return self.watchdog

    def settle(
        self, worker: str, request_id: str, token: str, fingerprint: str, warm: bool, cpu_ms: int
    ) -> bool:
        item = self.flying.get(request_id)
        if item and item.token == token and warm:
            for name in item.sub.affinity[:1]:
                seen = self.warm[f"{item.sub.environment}:{name}"]
                seen[worker] = self.now
                if len(seen) > MOST_WARM:
                    del seen[min(seen, key=lambda worker: (seen[worker], worker))]
        return super().settle(worker, request_id, token, fingerprint, warm, cpu_ms)

    def claim(
        self, worker: str, environments: Sequence[str], want: int, busy: int
    ) -> tuple[list[str], bool, bool]:
        self.again_ms = 0
        self.redeemed.clear()
        affine = not self.affine.isdisjoint(
            environment
            for environment in environments
            if ("environment", environment) not in self.paused
        )
        if affine:
            late = sorted((till, name) for name, till in self.tills.items() if till <= self.now)
            for _, other in reversed(late):
                if other != worker:
                    self.counts["reassignments"] += self._recall(other)
        request_ids, alone, hold = super().claim(worker, environments, want, busy)
        for request_id in request_ids:
            sub = self.flying[request_id].sub
            if sub.affinity:
                rank = self._rank(worker, sub)
                self.counts["warm_misses" if rank == COLD else "warm_hits"] += 1
        if affine:
            self._recall(worker)
            left = 0 if alone or hold else want - len(request_ids)
            if left:
                self.available[worker] = left
            if want:
                self.again_ms = self._watch(worker)
        return request_ids, alone, hold

    def leave(self, worker: str) -> None:
        if not self.work[worker]:
            self._recall(worker)
        super().leave(worker)

    def _fill(self, worker: str, environments: Sequence[str], want: int) -> list[str]:
        request_ids: list[str] = []
        if any(environment in self.affine for environment in environments):
            line = self.reservations.get(worker, [])
            while line and len(request_ids) < want:
                request_id = line.pop(0)
                if self.to.pop(request_id, None) == worker and self._take(request_id):
                    request_ids.append(request_id)
        self.redeemed.update(request_ids)
        return request_ids + super()._fill(worker, environments, want - len(request_ids))

    def _serve(self, worker: str, environment: str, line: list[str], most: int) -> list[str]:
        if environment not in self.affine:
            return super()._serve(worker, environment, line, most)
        request_ids: list[str] = []
        while len(request_ids) < most and (request_id := self._choose(worker, environment, line)):
            if self._take(request_id):
                request_ids.append(request_id)
        return request_ids

    def _choose(self, worker: str, environment: str, line: list[str]) -> str | None:
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
        for request_id in line[:best]:
            self.bypassed.setdefault(request_id, self.now)
        request_id = line.pop(best)
        self.bypassed.pop(request_id, None)
        return request_id

    def _rank(self, worker: str, sub: Submission) -> int:
        names = enumerate(sub.affinity, 1)
        warm = (rank for rank, name in names if worker in self.warm[f"{sub.environment}:{name}"])
        return next(warm, COLD)

    def _recall(self, worker: str) -> int:
        request_ids = [
            request_id
            for request_id in self.reservations.pop(worker, [])
            if self.to.get(request_id) == worker
        ]
        for request_id in reversed(request_ids):
            del self.to[request_id]
            self._go_back(self.flying[request_id].sub)
        self.tills.pop(worker, None)
        self.available.pop(worker, None)
        return len(request_ids)

    def _watch(self, worker: str) -> int:
        soonest, note = min(self.tills.values(), default=0), self._note()
        if self.redeemed or not (soonest or note) or (note and note[1] not in {worker, ""}):
            return 0
        wait_ms = max(soonest - self.now, 1) if soonest else REASSIGN_MS
        self.watchdog = (self.now + wait_ms, worker)
        return wait_ms

    def _end(self, request_id: str, verdict: str) -> None:
        self.to.pop(request_id, None)
        super()._end(request_id, verdict)

    def route(self, item: Flying) -> dict[str, str]:
        request_id = item.sub.request_id
        fields = {
            "a": " ".join(item.sub.affinity),
            "to": self.to.get(request_id, ""),
            "by": str(self.bypassed.get(request_id, "")),
        }
        return {name: text for name, text in fields.items() if text}
