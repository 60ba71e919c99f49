"""The queue as plain Python: what the scripts must do, one request at a time.

A ring is a dict from tenant to its waiting rids, whose order is the tenants' turn. As on the
server, a request that was withdrawn or expired stays in its list until a claim passes over it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from leanq.queue.results import Returning, Submission


@dataclass
class Flying:
    """A request in flight; ``token`` and ``worker`` say who has it while it is leased, and
    ``leader`` whom it follows while it is attached. ``client`` is empty once it has its verdict
    and runs on for its followers."""

    sub: Submission
    client: str
    submitted: int
    deadline: float
    attempts: int = 0
    token: str | None = None
    worker: str = ""
    leader: str = ""
    solo: bool = False

    @property
    def status(self) -> str:
        return "attached" if self.leader else "queued" if self.token is None else "leased"


class Model:
    def __init__(self, lease_ms: int, max_attempts: int, max_waiting: int) -> None:
        self.lease_ms, self.max_attempts, self.max_waiting = lease_ms, max_attempts, max_waiting
        self.now = 1_000_000
        self.flying: dict[str, Flying] = {}
        self.verdicts: dict[str, str] = {}
        self.winners: dict[str, str] = {}
        self.remembered: set[str] = set()
        self.coalesced = 0
        # Who leads each lane's runs of a digest, who follows whom, what each lane's environment
        # is, and the tokens of the verdicts that are remembered of each.
        self.runs: dict[tuple[str, str], str] = {}
        self.followers: defaultdict[str, list[str]] = defaultdict(list)
        self.prints: dict[str, str] = {}
        self.memory: dict[tuple[str, str], str] = {}
        # Lists in which the last claim met a request that needed no run of its own.
        self.passed: set[tuple[str, int, str]] = set()
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
        # Lanes and tenants that are held back, and the lines of such tenants.
        self.paused: set[tuple[Literal["lane", "tenant"], str]] = set()
        self.parked: defaultdict[tuple[str, int], dict[str, list[str]]] = defaultdict(dict)
        # Whom a request is promised to that stands in no line, and which such the last claim took.
        self.to: dict[str, str] = {}
        self.redeemed: set[str] = set()

    def join(self, worker: str, lanes: Iterable[str], fingerprint: str) -> None:
        self.leases[worker] = self.now + self.lease_ms
        self.fleet.add(worker)
        self.lanes |= set(lanes)
        self.prints |= dict.fromkeys(lanes, fingerprint) if fingerprint else {}

    def submit(self, client: str, sub: Submission) -> str:
        ring = self._ring(sub)
        if sub.rid in self.verdicts:
            return "reply"
        if sub.rid in self.flying:
            self.flying[sub.rid].client = client
            return "attached"
        if self.lanes and sub.lane not in self.lanes:
            return "unknown"
        known = (self.prints.get(sub.lane, ""), sub.digest)
        if sub.digest and known in self.memory:
            self.verdicts[sub.rid], self.winners[sub.rid] = "accepted", self.memory[known]
            self.remembered.add(sub.rid)
            return "reply"
        full = len(ring.get(sub.tenant, ())) >= self.max_waiting
        if full and (sub.lane, sub.digest) not in self.runs:
            return "full"
        deadline = self.now + sub.deadline_ms if sub.deadline_ms else float("inf")
        self.flying[sub.rid] = Flying(sub, client, self.now, deadline)
        if not self._follows(sub.rid):
            self._enter(sub)
        return "queued"

    def submitted(self) -> None:
        """The batch is over."""

    def settle(self, worker: str, rid: str, token: str, fingerprint: str, warm: bool) -> bool:
        item = self.flying.get(rid)
        if not item or item.token != token:
            return self.winners.get(rid) == token
        followers = self._disband(rid)
        if item.sub.digest and fingerprint:
            self.memory[fingerprint, item.sub.digest] = token
        for end in (rid, *followers):
            if end != rid and self.flying[end].deadline < self.now:
                self._end(end, "expired")
                continue
            self.coalesced += end != rid
            if self.flying[end].client:
                self.winners[end] = token
                self._end(end, "accepted")
            else:
                del self.flying[end]
        return True

    def claim(
        self, worker: str, lanes: Sequence[str], want: int, busy: int
    ) -> tuple[list[str], bool, bool]:
        """The rids, whether the one runs alone, and whether the worker is to empty itself."""
        self.leases[worker] = self.now + self.lease_ms
        self.passed.clear()
        lanes = [lane for lane in lanes if ("lane", lane) not in self.paused]
        for lane in lanes if want else ():
            suspect = self._first_suspect(lane)
            if suspect and busy == 0:
                if self.isolating.get(lane) == worker:
                    del self.isolating[lane]
                self.suspects[lane].pop(0)
                self._take(suspect, solo=True)
                self._first_suspect(lane)
                return [suspect], True, False
            if suspect and self.isolating.setdefault(lane, worker) == worker:
                return [], False, True
        return self._fill(worker, lanes, want), False, False

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
        if not item or not item.client:
            return False
        if item.status == "leased" and self.followers.get(rid):
            self._tell(rid, "cancelled")
            item.client = ""
            return True
        if item.leader:
            self._detach(rid)
        elif item.status == "leased":
            self._disband(rid)
        self._end(rid, "cancelled")
        return True

    def lookup(self, client: str, rid: str) -> str:
        item = self.flying.get(rid)
        if item and item.client:
            item.client = client
            if item.leader and item.deadline < self.now:
                self._detach(rid)
                self._end(rid, "expired")
            elif item.status != "queued" or self._waits(rid):
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

    def pause(self, kind: Literal["lane", "tenant"], name: str, hold: bool) -> bool:
        """Whether it was otherwise before."""
        if hold == ((kind, name) in self.paused):
            return False
        self.paused ^= {(kind, name)}
        source, target = (self.rings, self.parked) if hold else (self.parked, self.rings)
        for place in list(source) if kind == "tenant" else ():
            if name in source[place]:
                target[place][name] = source[place].pop(name)
        return True

    def _ring(self, sub: Submission) -> dict[str, list[str]]:
        held = ("tenant", sub.tenant) in self.paused
        return (self.parked if held else self.rings)[sub.lane, sub.level]

    def _enter(self, sub: Submission) -> None:
        self._ring(sub).setdefault(sub.tenant, []).append(sub.rid)

    def _fill(self, worker: str, lanes: Sequence[str], want: int) -> list[str]:
        rids: list[str] = []
        for lane in lanes:
            alone = sum(bool(self.rings[lane, level]) for level in range(3)) == 1
            while len(rids) < want and (
                drawn := self._draw_turn(worker, lane, want - len(rids), alone)
            ):
                rids += drawn
        return rids

    def _draw_turn(self, worker: str, lane: str, want: int, alone: bool) -> list[str]:
        """Seven picks of eight to the most urgent level, the eighth goes round the levels; all of
        them at once where but one level has work."""
        turn, place = divmod(self.turns[lane], 8)
        first, most = (turn % 3, 1) if place == 7 else (0, min(want, 7 - place))
        most = want if alone else most
        rids: list[str] = []
        for level in sorted(range(3), key=lambda level: (level != first, level)):
            rids += self._draw(worker, lane, level, most - len(rids))
        self.turns[lane] += len(rids)
        return rids

    def _draw(self, worker: str, lane: str, level: int, want: int) -> list[str]:
        """Tenants give in turn, and several each where they are few."""
        ring = self.rings[lane, level]
        rids: list[str] = []
        while ring and len(rids) < want:
            tenants = list(ring)[: want - len(rids)]
            each = (want - len(rids)) // len(tenants)
            for tenant in tenants:
                line = ring.pop(tenant)
                rids += self._serve(worker, lane, line, each)
                if line:
                    ring[tenant] = line
        return rids

    def _serve(self, worker: str, lane: str, line: list[str], most: int) -> list[str]:
        """Takes the next ones out of a tenant's line; those that are to run."""
        rids = line[:most]
        del line[:most]
        return [rid for rid in rids if self._take(rid)]

    def _take(self, rid: str, solo: bool = False) -> bool:
        """Whether a request that waits is to run; it is leased, and has no token yet."""
        if not self._waits(rid) or self._follows(rid, suspect=solo):
            return False
        item = self.flying[rid]
        item.token, item.solo = "", solo and bool(item.sub.digest)
        if item.sub.digest:
            self.runs[item.sub.lane, item.sub.digest] = rid
        return True

    def _first_suspect(self, lane: str) -> str | None:
        suspects = self.suspects[lane]
        while suspects and (
            not self._waits(suspects[0]) or self._follows(suspects[0], suspect=True)
        ):
            suspects.pop(0)
        return suspects[0] if suspects else None

    def _follows(self, rid: str, suspect: bool = False) -> bool:
        """Attaches a request to one that runs; suspects only to one that runs alone."""
        item = self.flying[rid]
        leader = self.runs.get((item.sub.lane, item.sub.digest))
        if leader is None or (suspect and not self.flying[leader].solo):
            return False
        item.leader, item.attempts = leader, item.attempts + 1
        by_age = [(self.flying[each].submitted, each) for each in (*self.followers[leader], rid)]
        self.followers[leader] = [each for _, each in sorted(by_age)]
        self.passed.add((item.sub.lane, item.sub.level, item.sub.tenant))
        return True

    def _disband(self, rid: str) -> list[str]:
        """Takes a request from its worker; returns who followed it."""
        item = self.flying[rid]
        del self.work[item.worker][rid]
        if self.runs.get((item.sub.lane, item.sub.digest)) == rid:
            del self.runs[item.sub.lane, item.sub.digest]
        return self.followers.pop(rid, [])

    def _detach(self, rid: str) -> None:
        leader = self.flying[rid].leader
        self.followers[leader].remove(rid)
        if not self.followers[leader] and not self.flying[leader].client:
            self._disband(leader)
            del self.flying[leader]

    def _waits(self, rid: str) -> bool:
        if rid in self.flying and self.flying[rid].deadline < self.now:
            self._end(rid, "expired")
        return rid in self.flying

    def _requeue(self, rid: str, charge: bool, defer: bool = False) -> str:
        followers = self._disband(rid)
        how = self._put_back(rid, charge, defer)
        for follower in followers:
            self._put_back(follower, charge, defer)
        return how

    def _put_back(self, rid: str, charge: bool, defer: bool) -> str:
        item = self.flying[rid]
        if not item.client:
            del self.flying[rid]
            return "lost"
        item.attempts -= not charge
        if item.attempts >= self.max_attempts:
            self._end(rid, "poisoned")
            return "poisoned"
        item.token, item.leader, item.solo = None, "", False
        if 0 < item.attempts == self.max_attempts - 1:
            suspects = self.suspects[item.sub.lane]
            suspects.insert(len(suspects) if defer else 0, rid)
        else:
            self._go_back(item.sub, defer)
        return "queued"

    def _go_back(self, sub: Submission, defer: bool = False) -> None:
        ring = self._ring(sub)
        if waiting := ring.get(sub.tenant):
            waiting.insert(len(waiting) if defer else 0, sub.rid)
            return
        held = dict(ring)
        ring.clear()
        new = {sub.tenant: [sub.rid]}
        ring |= {**held, **new} if defer else {**new, **held}

    def _end(self, rid: str, verdict: str) -> None:
        self._tell(rid, verdict)
        del self.flying[rid]

    def _tell(self, rid: str, verdict: str) -> None:
        self.told[self.flying[rid].client].add(rid)
        assert rid not in self.verdicts
        self.verdicts[rid] = verdict
