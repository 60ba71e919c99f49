"""The queue as plain Python: what the scripts must do, one request at a time.

A ring is a dict from tenant to its waiting request ids, whose order is the tenants' turn. As on the
server, a request that was withdrawn or expired stays in its list until a claim passes over it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from leanq.queue.results import Returning, Submission


@dataclass
class Flying:
    """A request in flight; ``token`` and ``worker`` say which worker has it while it is leased, and
    ``run`` what it joined. ``client`` is empty once it has its verdict and runs on for what joined
    it."""

    sub: Submission
    client: str
    submitted: int
    deadline: float
    attempts: int = 0
    token: str | None = None
    worker: str = ""
    run: str = ""
    solo: bool = False
    charge: float | None = None

    @property
    def status(self) -> str:
        return "joined" if self.run else "queued" if self.token is None else "leased"


@dataclass
class Account:
    """A tenant's share of a ring: virtual time, and the mean CPU time of its requests, in ms."""

    time: float
    mean: float | None = None


@dataclass
class Shares:
    """A ring's virtual time and its tenants' accounts. A call changes copies of these (``open``),
    and keeps those that it ``charged``."""

    time: float = 0.0
    accounts: dict[str, Account] = field(default_factory=dict)
    open: dict[str, Account] = field(default_factory=dict)
    charged: set[str] = field(default_factory=set)


class Model:
    def __init__(self, lease_ms: int, max_attempts: int, max_waiting: int) -> None:
        self.lease_ms, self.max_attempts, self.max_waiting = lease_ms, max_attempts, max_waiting
        self.now = 1_000_000
        self.flying: dict[str, Flying] = {}
        self.verdicts: dict[str, str] = {}
        self.winners: dict[str, str] = {}
        self.remembered: set[str] = set()
        self.coalesced = 0
        # By environment and digest the request that runs, and by this what joined it; each
        # environment's fingerprint, and the tokens of the verdicts that are remembered of each.
        self.runs: dict[tuple[str, str], str] = {}
        self.joined: defaultdict[str, list[str]] = defaultdict(list)
        self.prints: dict[str, str] = {}
        self.memory: dict[tuple[str, str], str] = {}
        self.told: defaultdict[str, set[str]] = defaultdict(set)
        self.rings: defaultdict[tuple[str, int], dict[str, list[str]]] = defaultdict(dict)
        self.quarantined: defaultdict[str, list[str]] = defaultdict(list)
        self.work: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.leases: dict[str, int] = {}
        self.fleet: set[str] = set()
        self.environments: set[str] = set()
        self.isolating: dict[str, str] = {}
        self.turns: Counter[str] = Counter()
        self.heard = self.expiry_grace = 0
        # Environments and tenants that are held back, and the lines of such tenants.
        self.paused: set[tuple[Literal["environment", "tenant"], str]] = set()
        self.parked: defaultdict[tuple[str, int], dict[str, list[str]]] = defaultdict(dict)
        # Lists in which this call withdrew requests, by environment, priority (None: quarantined)
        # and tenant.
        self.withdrawn: set[tuple[str, int | None, str]] = set()
        self.weights: dict[str, float] = {}
        self.shares: defaultdict[tuple[str, int], Shares] = defaultdict(Shares)
        # CPU time (ms) by environment and tenant.
        self.cpu_ms: Counter[tuple[str, str]] = Counter()

    def register(self, worker: str, environments: Iterable[str], fingerprint: str) -> None:
        self.leases[worker] = self.now + self.lease_ms
        self.fleet.add(worker)
        self.environments |= set(environments)
        self.prints |= dict.fromkeys(environments, fingerprint) if fingerprint else {}

    def submit(self, client: str, sub: Submission) -> str:
        ring = self._ring(sub)
        if sub.request_id in self.verdicts:
            return "reply"
        if sub.request_id in self.flying:
            if _differ(self.flying[sub.request_id].sub, sub):
                return "conflict"
            self.flying[sub.request_id].client = client
            return "attached"
        if self.environments and sub.environment not in self.environments:
            return "unknown"
        known = (self.prints.get(sub.environment, ""), sub.digest)
        if sub.digest and known in self.memory:
            self.verdicts[sub.request_id], self.winners[sub.request_id] = (
                "accepted",
                self.memory[known],
            )
            self.remembered.add(sub.request_id)
            return "reply"
        full = self._waiting(ring.get(sub.tenant, ())) >= self.max_waiting
        if full and (sub.environment, sub.digest) not in self.runs:
            return "full"
        deadline = self.now + sub.deadline_ms if sub.deadline_ms else float("inf")
        self.flying[sub.request_id] = Flying(sub, client, self.now, deadline)
        if not self._joins(sub.request_id):
            ring.setdefault(sub.tenant, []).append(sub.request_id)
        return "queued"

    def settle(
        self, worker: str, request_id: str, token: str, fingerprint: str, warm: bool, cpu_ms: int
    ) -> bool:
        item = self.flying.get(request_id)
        if not item or item.token != token:
            return self.winners.get(request_id) == token
        self.cpu_ms[item.sub.environment, item.sub.tenant] += cpu_ms
        self._correct(item, cpu_ms)
        joined = self._disband(request_id)
        if item.sub.digest and fingerprint:
            self.memory[fingerprint, item.sub.digest] = token
        for end in (request_id, *joined):
            if end != request_id and self.flying[end].deadline < self.now:
                self._end(end, "expired")
                continue
            self.coalesced += end != request_id
            if self.flying[end].client:
                self.winners[end] = token
                self._end(end, "accepted")
            else:
                del self.flying[end]
        return True

    def claim(
        self, worker: str, environments: Sequence[str], want: int, busy: int
    ) -> tuple[list[str], bool, bool]:
        """The request ids, whether one runs alone, whether the worker is to empty itself."""
        environments = [
            environment
            for environment in environments
            if ("environment", environment) not in self.paused
        ]
        for environment in environments if want else ():
            quarantined = self._first_quarantined(environment)
            if quarantined and busy == 0:
                if self.isolating.get(environment) == worker:
                    del self.isolating[environment]
                self.quarantined[environment].pop(0)
                self._take(quarantined, solo=True)
                self._first_quarantined(environment)
                return [quarantined], True, False
            if quarantined and self.isolating.setdefault(environment, worker) == worker:
                return [], False, True
        return self._fill(worker, environments, want), False, False

    def called(self, worker: str) -> None:
        """A claim has ended, which extends the lease of a worker that holds something."""
        if self.work[worker]:
            self.leases[worker] = self.now + self.lease_ms

    def lease(self, worker: str, request_id: str, token: str) -> None:
        """What a claim does with each of its request ids."""
        item = self.flying[request_id]
        item.token, item.worker, item.attempts = token, worker, item.attempts + 1
        self.work[worker][request_id] = self.now + item.sub.longest_run_ms

    def release(self, worker: str, request_id: str, token: str, how: Returning) -> bool:
        held = request_id in self.flying and self.flying[request_id].token == token
        if held:
            if how != "retry":
                self._correct(self.flying[request_id], None)
            self._requeue(request_id, how == "retry", how == "defer")
        return held

    def leave(self, worker: str) -> None:
        if not self.work[worker]:
            self.leases.pop(worker, None)
            self.fleet.discard(worker)

    def cancel(self, request_id: str) -> bool:
        item = self.flying.get(request_id)
        if not item or not item.client:
            return False
        if item.status == "leased" and self.joined.get(request_id):
            self._tell(request_id, "cancelled")
            item.client = ""
            return True
        if item.run:
            self._detach(request_id)
        elif item.status == "leased":
            self._disband(request_id)
        else:
            self._note_withdrawn(request_id)
        self._end(request_id, "cancelled")
        return True

    def trim(self) -> None:
        """What was withdrawn leaves the front of its list, once a call's withdrawals are over."""
        for name in self.withdrawn:
            environment, priority, tenant = name
            if priority is None:
                self._trim(self.quarantined[environment])
                continue
            for rings in (self.rings, self.parked):
                ring = rings[environment, priority]
                if tenant in ring:
                    self._trim(ring[tenant])
                    if not ring[tenant]:
                        del ring[tenant]
        self.withdrawn.clear()

    def waiting(self, environment: str, priority: int) -> tuple[int, int]:
        """How many requests wait in such lines, and how many of them are held back."""
        place = environment, priority
        free, held = (
            sum(map(self._waiting, rings[place].values())) for rings in (self.rings, self.parked)
        )
        return free + held, held

    def lookup(self, client: str, request_id: str) -> str:
        item = self.flying.get(request_id)
        if item and item.client:
            item.client = client
            if item.run and item.deadline < self.now:
                self._detach(request_id)
                self._end(request_id, "expired")
            elif item.status == "queued" and item.deadline < self.now:
                self._note_withdrawn(request_id)
                self._end(request_id, "expired")
            else:
                return "in flight"
        return "reply" if request_id in self.verdicts else "unknown"

    def renew(self, worker: str) -> list[str]:
        """The request ids that overran."""
        self.leases[worker] = self.now + self.lease_ms
        timed_out: list[str] = []
        if self.judges():
            timed_out = [
                request_id
                for request_id in self._by_age(worker)
                if self.work[worker][request_id] <= self.now
            ]
        for request_id in timed_out:
            self._requeue(request_id, counts=True)
        return timed_out

    def judges(self) -> bool:
        """Whether leases are judged now. After a silence they are not, for half a lease."""
        silent_ms = self.now - self.heard if self.heard else 0
        if abs(silent_ms) > self.lease_ms / 2:
            self.expiry_grace = self.now + self.lease_ms // 2
            for worker, end in self.leases.items():
                if silent_ms < 0 and end > self.now + self.lease_ms:
                    self.leases[worker] = end + silent_ms
        self.heard = self.now
        return self.now >= self.expiry_grace

    def reap(self) -> Counter[str] | None:
        """What became of the requests of the worker that is overdue the longest, by name."""
        if not self.judges():
            return None
        worker = min((end, worker) for worker, end in self.leases.items())[1]
        ends = Counter(
            self._requeue(request_id, counts=True) for request_id in self._by_age(worker)
        )
        self.leave(worker)
        return ends

    def route(self, item: Flying) -> dict[str, str]:
        """The fields of the request's hash that are about warm workers."""
        return {}

    def attempts_told(self, item: Flying) -> int:
        """Which attempt a worker is told that a lease of it is, once more. A run that its client
        withdrew has no record, and is told by that of the first request that has joined it."""
        if item.client:
            return item.attempts
        return self.flying[self.joined[item.sub.request_id][0]].attempts

    def _by_age(self, worker: str) -> list[str]:
        return sorted(
            self.work[worker], key=lambda request_id: (self.work[worker][request_id], request_id)
        )

    def pause(self, kind: Literal["environment", "tenant"], name: str, hold: bool) -> bool:
        """Whether it was otherwise before."""
        if hold == ((kind, name) in self.paused):
            return False
        self.paused ^= {(kind, name)}
        source, target = (self.rings, self.parked) if hold else (self.parked, self.rings)
        for place in list(source) if kind == "tenant" else ():
            if name in source[place]:
                target[place][name] = source[place].pop(name)
        return True

    def first_submitted(self, line: Sequence[str]) -> int:
        """When the first of a line that waits was submitted."""
        waits = (self.flying[request_id] for request_id in line if request_id in self.flying)
        return next((item.submitted for item in waits), self.now)

    def _note_withdrawn(self, request_id: str) -> None:
        sub = self.flying[request_id].sub
        if request_id in self.quarantined[sub.environment]:
            self.withdrawn.add((sub.environment, None, ""))
        else:
            self.withdrawn.add((sub.environment, sub.priority, sub.tenant))

    def _trim(self, line: list[str]) -> None:
        while line and line[0] not in self.flying:
            del line[0]

    def _waiting(self, line: Sequence[str]) -> int:
        return sum(request_id in self.flying for request_id in line)

    def _ring(self, sub: Submission) -> dict[str, list[str]]:
        held = ("tenant", sub.tenant) in self.paused
        return (self.parked if held else self.rings)[sub.environment, sub.priority]

    def _fill(self, worker: str, environments: Sequence[str], want: int) -> list[str]:
        request_ids: list[str] = []
        for environment in environments:
            alone = sum(bool(self.rings[environment, priority]) for priority in range(3)) == 1
            while len(request_ids) < want and (
                drawn := self._draw_turn(worker, environment, want - len(request_ids), alone)
            ):
                request_ids += drawn
        return request_ids

    def _draw_turn(self, worker: str, environment: str, want: int, isolated: bool) -> list[str]:
        """Seven picks of eight to the most urgent priority, the eighth goes round the priorities;
        all of
        them at once where but one priority has work."""
        turn, place = divmod(self.turns[environment], 8)
        first, most = (turn % 3, 1) if place == 7 else (0, min(want, 7 - place))
        most = want if isolated else most
        request_ids: list[str] = []
        for priority in sorted(range(3), key=lambda priority: (priority != first, priority)):
            request_ids += self._draw(worker, environment, priority, most - len(request_ids))
        self.turns[environment] += len(request_ids)
        return request_ids

    def _draw(self, worker: str, environment: str, priority: int, want: int) -> list[str]:
        """Tenants give in turn, and several each where they are few; or by their weights."""
        ring = self.rings[environment, priority]
        request_ids: list[str] = []
        while ring and len(request_ids) < want:
            asked = want - len(request_ids)
            tenants = list(ring)[: 200 if self.weights else asked]
            counts = [asked // len(tenants)] * len(tenants)
            if self.weights:
                counts = self._plan((environment, priority), tenants, asked)
            for tenant, count in zip(tenants, counts, strict=True):
                line = ring.pop(tenant)
                request_ids += self._serve(worker, environment, line, count)
                if line:
                    ring[tenant] = line
        return request_ids

    def _serve(self, worker: str, environment: str, line: list[str], most: int) -> list[str]:
        """Takes the next ones out of a tenant's line; those that are to run."""
        request_ids = line[:most]
        del line[:most]
        return [request_id for request_id in request_ids if self._take(request_id)]

    def _take(self, request_id: str, solo: bool = False) -> bool:
        """Whether a request that waits is to run; it is leased, and has no token yet."""
        if not self._waits(request_id) or self._joins(request_id, quarantined=solo):
            return False
        item = self.flying[request_id]
        item.token, item.solo = "", solo and bool(item.sub.digest)
        if item.sub.digest:
            self.runs[item.sub.environment, item.sub.digest] = request_id
        self._charge(item)
        return True

    def call_over(self) -> None:
        """What a call charged is kept."""
        for shares in self.shares.values():
            for tenant in shares.charged:
                shares.accounts[tenant] = shares.open[tenant]
            shares.open.clear()
            shares.charged.clear()

    def _account(self, place: tuple[str, int], tenant: str) -> Account:
        shares = self.shares[place]
        if tenant not in shares.open:
            account = replace(shares.accounts.get(tenant, Account(shares.time)))
            behind = 4 * (account.mean or 0) / self.weights.get(tenant, 1)
            account.time = max(account.time, shares.time - behind)
            shares.open[tenant] = account
        return shares.open[tenant]

    def _plan(self, place: tuple[str, int], tenants: Sequence[str], n: int) -> list[int]:
        """Each request goes to the tenant whose virtual time is least by then."""
        shares = self.shares[place]
        accounts = [self._account(place, tenant) for tenant in tenants]
        times, counts = [account.time for account in accounts], [0] * len(tenants)
        for _ in range(n):
            may = [i for i, account in enumerate(accounts) if account.mean or not counts[i]]
            if may:
                chosen = min(may, key=lambda i: times[i])
                shares.time = max(shares.time, times[chosen])
                counts[chosen] += 1
                mean = accounts[chosen].mean or 0
                times[chosen] += mean / self.weights.get(tenants[chosen], 1)
        return counts

    def _charge(self, item: Flying) -> None:
        if not self.weights:
            return
        place, tenant = (item.sub.environment, item.sub.priority), item.sub.tenant
        account = self._account(place, tenant)
        item.charge = account.mean or item.sub.longest_run_ms
        account.time += item.charge / self.weights.get(tenant, 1)
        self.shares[place].charged.add(tenant)

    def _correct(self, item: Flying, cpu_ms: int | None) -> None:
        if not self.weights or item.charge is None:
            return
        place, tenant = (item.sub.environment, item.sub.priority), item.sub.tenant
        account = self._account(place, tenant)
        took = 0 if cpu_ms is None else max(cpu_ms, 1)
        account.time += (took - item.charge) / self.weights.get(tenant, 1)
        if cpu_ms is not None:
            mean = account.mean
            account.mean = took if mean is None else mean + (took - mean) / 8
        self.shares[place].charged.add(tenant)

    def _first_quarantined(self, environment: str) -> str | None:
        quarantined = self.quarantined[environment]
        while quarantined and (
            not self._waits(quarantined[0]) or self._joins(quarantined[0], quarantined=True)
        ):
            quarantined.pop(0)
        return quarantined[0] if quarantined else None

    def _joins(self, request_id: str, quarantined: bool = False) -> bool:
        """Attaches a request to one that runs; quarantined requests only to one that runs alone."""
        item = self.flying[request_id]
        run = self.runs.get((item.sub.environment, item.sub.digest))
        if run is None or (quarantined and not self.flying[run].solo):
            return False
        item.run, item.attempts = run, item.attempts + 1
        by_age = [(self.flying[each].submitted, each) for each in (*self.joined[run], request_id)]
        self.joined[run] = [each for _, each in sorted(by_age)]
        return True

    def _disband(self, request_id: str) -> list[str]:
        """Takes a request from its worker; returns what joined it."""
        item = self.flying[request_id]
        del self.work[item.worker][request_id]
        if self.runs.get((item.sub.environment, item.sub.digest)) == request_id:
            del self.runs[item.sub.environment, item.sub.digest]
        return self.joined.pop(request_id, [])

    def _detach(self, request_id: str) -> None:
        run = self.flying[request_id].run
        self.joined[run].remove(request_id)
        if not self.joined[run] and not self.flying[run].client:
            self._disband(run)
            del self.flying[run]

    def _waits(self, request_id: str) -> bool:
        if request_id in self.flying and self.flying[request_id].deadline < self.now:
            self._end(request_id, "expired")
        return request_id in self.flying

    def _requeue(self, request_id: str, counts: bool, defer: bool = False) -> str:
        joined = self._disband(request_id)
        how = self._put_back(request_id, counts, defer)
        for other in joined:
            self._put_back(other, counts, defer)
        return how

    def _put_back(self, request_id: str, counts: bool, defer: bool) -> str:
        item = self.flying[request_id]
        if not item.client:
            del self.flying[request_id]
            return "lost"
        item.attempts -= not counts
        if item.attempts >= self.max_attempts:
            self._end(request_id, "poisoned")
            return "poisoned"
        item.token, item.run, item.solo, item.charge = None, "", False, None
        if item.attempts > 0 and 2 * item.attempts >= self.max_attempts:
            quarantined = self.quarantined[item.sub.environment]
            quarantined.insert(len(quarantined) if defer else 0, request_id)
        else:
            self._go_back(item.sub, defer)
        return "queued"

    def _go_back(self, sub: Submission, defer: bool = False) -> None:
        ring = self._ring(sub)
        if waiting := ring.get(sub.tenant):
            waiting.insert(len(waiting) if defer else 0, sub.request_id)
            return
        held = dict(ring)
        ring.clear()
        new = {sub.tenant: [sub.request_id]}
        ring |= {**held, **new} if defer else {**new, **held}

    def _end(self, request_id: str, verdict: str) -> None:
        self._tell(request_id, verdict)
        del self.flying[request_id]

    def _tell(self, request_id: str, verdict: str) -> None:
        self.told[self.flying[request_id].client].add(request_id)
        assert request_id not in self.verdicts
        self.verdicts[request_id] = verdict


def _differ(one: Submission, other: Submission) -> bool:
    """Whether they ask for different things; of one without a digest nothing more is known."""
    digests = {one.digest, other.digest} - {""}
    return one.environment != other.environment or len(digests) > 1
