"""That claims are fair to tenants, read off the queue's model."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from support.queue.queue_model import Model


class Fairness:
    """Watches claims: of two tenants waiting in a priority, neither gets two more."""

    def __init__(self, model: Model) -> None:
        self.model = model
        # Per pair of tenants how far the one is ahead, the least and the most that it ever was.
        self.leads: dict[tuple[object, ...], tuple[int, int, int]] = {}

    def stale_lists(self) -> set[tuple[str, int, str]]:
        """Wait lists in which some request id waits no more."""
        model = self.model
        return {
            (*place, tenant)
            for place, ring in model.rings.items()
            for tenant, request_ids in ring.items()
            for request_id in request_ids
            if request_id not in model.flying or model.flying[request_id].deadline < model.now
        }

    def check(self, request_ids: list[str], stale: set[tuple[str, int, str]]) -> None:
        """Takes a claim's request ids in; ``stale`` are the stale lists before it."""
        stale = stale | self.model.passed
        subs = [self.model.flying[request_id].sub for request_id in request_ids]
        served = Counter((sub.environment, sub.priority, sub.tenant) for sub in subs)
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
