"""Loose pinning as plain Python, on top of the queue's model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from leanq.queue.results import Submission
from support.queue.queue_model import Flying, Model

PASS_MS, WINDOW, MOST_WARM, COLD = 2000, 16, 1000, 3
NOTED_AGAIN_MS = 10_000


class WarmModel(Model):
    """When a worker was last warm, by environment and affinity."""

    def __init__(self, lease_ms: int, max_attempts: int, max_waiting: int) -> None:
        super().__init__(lease_ms, max_attempts, max_waiting)
        self.warm: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.affine: set[str] = set()
        # By request id, when a warmer one first went before it.
        self.bypassed: dict[str, int] = {}
        self.counts = Counter[str]()

    def submit(self, client: str, sub: Submission) -> str:
        answer = super().submit(client, sub)
        if answer == "queued" and sub.affinity:
            self.affine.add(sub.environment)
        return answer

    def settle(
        self, worker: str, request_id: str, token: str, fingerprint: str, warm: bool, cpu_ms: int
    ) -> bool:
        item = self.flying.get(request_id)
        if item and item.token == token and warm:
            self._note(worker, item.sub)
        return super().settle(worker, request_id, token, fingerprint, warm, cpu_ms)

    def _note(self, worker: str, sub: Submission) -> None:
        for name in sub.affinity[:1]:
            seen = self.warm[f"{sub.environment}:{name}"]
            if self.now - seen.get(worker, -NOTED_AGAIN_MS) >= NOTED_AGAIN_MS:
                seen[worker] = self.now
            if len(seen) > MOST_WARM:
                del seen[min(seen, key=lambda worker: (seen[worker], worker))]

    def claim(
        self, worker: str, environments: Sequence[str], want: int, busy: int
    ) -> tuple[list[str], bool, bool]:
        request_ids, alone, hold = super().claim(worker, environments, want, busy)
        for request_id in request_ids:
            sub = self.flying[request_id].sub
            if sub.affinity:
                rank = self._rank(worker, sub)
                self.counts["warm_misses" if rank == COLD else "warm_hits"] += 1
        return request_ids, alone, hold

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

    def route(self, item: Flying) -> dict[str, str]:
        request_id = item.sub.request_id
        fields = {
            "a": " ".join(item.sub.affinity),
            "by": str(self.bypassed.get(request_id, "")),
        }
        return {name: text for name, text in fields.items() if text}
