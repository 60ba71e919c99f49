"""The script ``exchange`` beside ``claim``: in any state the same, or nothing.

Operations drawn at random bring a queue into some state. Then its keys are copied twice; one copy
is given to ``exchange``, the other to ``claim``, with equal arguments, and everything is compared:
the answers, and what stands in every key. ``LEANQ_SOAK=2000`` runs so many examples, new ones each
time.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import pytest
import redis
from support.queue.shards import lasting_of, set_clock, with_test_clock

from leanq.local import EmbeddedServer
from leanq.queue.keys import Keys
from leanq.queue.requests import Reply
from leanq.queue.results import is_record
from leanq.queue.scripts import SCRIPTS
from leanq.queue.wire import pack_reply

SOAK = int(os.environ.get("LEANQ_SOAK", "0"))
SEEDS = [random.randrange(10**9) for _ in range(SOAK)] or [*range(60)]
each_set_of_seeds = pytest.mark.parametrize(
    "seeds", [SEEDS[:5], pytest.param(SEEDS[5:], marks=pytest.mark.slow)], ids=["few", "the rest"]
)
LEASE_MS, TTL_MS, MAX_ATTEMPTS = 10_000, 3_600_000, 2
REPLY_BYTES = (0, 16_000, 16_384 - 40, 20_000)
_prefixes = itertools.count()

Contents = dict[str, tuple[Any, int]]


class Twin:
    """A queue, the copies of it, and the names that operations choose from by number."""

    def __init__(self, server: redis.Redis) -> None:
        self.server = server
        number = next(_prefixes)
        self.tag, *self.copies = (Keys(f"twin{number}{which}").tag for which in ("", "x", "y"))
        self.now_ms = 1_000_000_000
        self.tokens = itertools.count()
        self.sent: list[str] = []
        self.harmed = False
        # How many were not left to claim.
        self.exchanged = 0
        # Worker, request id, token, and environment of every lease that was ever given.
        self.leases: list[tuple[str, str, str, str]] = []
        self.advance(0)

    def advance(self, ms: int) -> None:
        self.now_ms += ms
        set_clock(self.server, self.tag, self.now_ms)

    def run(self, name: str, tag: str = "", /, **arguments: Any) -> Any:
        script = SCRIPTS[name]
        call = self.server.register_script(with_test_clock(name))
        return script.named(call(keys=[tag or self.tag], args=script.values(arguments)))

    def submit(self, client: str, kind: Mapping[str, Any], rows: Sequence[Sequence[Any]]) -> None:
        """Each row: whose turn it is (a number from 1, of those sent, or 0 for a new one), tenant,
        digest, body."""
        requests = []
        for back, tenant, digest, body in rows:
            known = self.sent[-back] if 0 < back <= len(self.sent) else f"r{len(self.sent)}"
            if known not in self.sent:
                self.sent.append(known)
            if kind["detached"]:
                self.server.set(f"{self.tag}:upload:call:{known}", body or b"-", px=TTL_MS)
                body = b"%d" % len(body or b"-")
            requests.append((known, 1, tenant, digest, body))
        self.run(
            "submit",
            client=client,
            max_waiting=8,
            remember_ms=TTL_MS,
            upload="call" if kind["detached"] else "",
            kinds=[dict(kind)],
            requests=requests,
        )

    def claim(self, worker: str, environments: Sequence[str], want: int, busy: int) -> None:
        token = f"t{next(self.tokens)}"
        answer = self.run("claim", **self.claim_arguments(worker, environments, want, busy, token))
        for request_id, record in zip(answer["request_ids"], answer["records"], strict=True):
            environment = record[28:].partition(b"\0")[0].decode()
            self.leases.append((worker, request_id.decode(), token, environment))

    def claim_arguments(
        self, worker: str, environments: Sequence[str], want: int, busy: int, token: str
    ) -> dict[str, Any]:
        return {
            "worker": worker,
            "lease_ms": LEASE_MS,
            "reply_ttl_ms": TTL_MS,
            "token": token,
            "want": want,
            "busy": busy,
            "max_attempts": MAX_ATTEMPTS,
            "remember_ms": TTL_MS,
            "ends": [],
            "settlements": [],
            "environments": environments,
        }

    def release(self, number: int, how: str) -> None:
        if leases := self.current():
            worker, request_id, token, _ = leases[-1 - number % len(leases)]
            self.run(
                "release",
                worker=worker,
                max_attempts=MAX_ATTEMPTS,
                reply_ttl_ms=TTL_MS,
                how=how,
                leave=False,
                leases=[(request_id, token)],
            )

    def picked(self, numbers: Sequence[int]) -> list[str]:
        return list(dict.fromkeys(self.sent[-n] for n in numbers if n <= len(self.sent)))

    def cancel(self, numbers: Sequence[int], forget: bool) -> None:
        """Their ids stay in their lists; what is forgotten may come again, and elsewhere."""
        self.run("cancel", reply_ttl_ms=TTL_MS, request_ids=self.picked(numbers))
        if forget:
            self.forget_replies()

    def lookup(self, client: str, numbers: Sequence[int]) -> None:
        self.run(
            "lookup",
            client=client,
            reply_ttl_ms=TTL_MS,
            max_attempts=MAX_ATTEMPTS,
            request_ids=self.picked(numbers),
        )

    def forget_replies(self) -> None:
        """Their time-to-live is over, or the server made room."""
        for key in self.server.scan_iter(f"{self.tag}:req:*", count=1000):
            if not is_record(cast("bytes", self.server.get(key))):
                self.server.delete(key)

    def reap(self) -> None:
        arguments = {"max_attempts": MAX_ATTEMPTS, "reply_ttl_ms": TTL_MS, "lease_ms": LEASE_MS}
        for ms in (0, LEASE_MS, LEASE_MS):
            self.advance(ms)
            self.run("reap", **arguments)

    def copy(self) -> None:
        """Makes both copies what the queue is."""
        self.drop_copies()
        pipe = self.server.pipeline(transaction=False)
        for key in self.server.keys(f"{lasting_of(self.tag)}*"):
            for tag in self.copies:
                pipe.copy(key, lasting_of(tag).encode() + key[len(lasting_of(self.tag)) :])
        pipe.execute()

    def contents(self, tag: str) -> Contents:
        """What stands in every key, and its time-to-live. Entries of streams are without their
        numbers, which are the server's own time."""
        keys = sorted(self.server.keys(f"{lasting_of(tag)}*"))
        pipe = self.server.pipeline(transaction=False)
        for key in keys:
            pipe.type(key)
        kinds = pipe.execute()
        for key, kind in zip(keys, kinds, strict=True):
            match kind:
                case b"hash":
                    pipe.hgetall(key)
                case b"list":
                    pipe.lrange(key, 0, -1)
                case b"set":
                    pipe.smembers(key)
                case b"zset":
                    pipe.zrange(key, 0, -1, withscores=True)
                case b"stream":
                    pipe.xrange(key)
                case _:
                    pipe.get(key)
            pipe.pttl(key)
        found = iter(pipe.execute())
        return {
            key[key.rindex(b"}") + 2 :].decode(errors="replace"): (
                [flat for _, flat in value] if kind == b"stream" else value,
                ttl_ms,
            )
            for key, kind, value, ttl_ms in zip(keys, kinds, found, found, strict=True)
        }

    def drop_copies(self) -> None:
        for tag in self.copies:
            if keys := self.server.keys(f"{lasting_of(tag)}*"):
                self.server.delete(*keys)

    def drop(self) -> None:
        self.drop_copies()
        self.server.delete(*self.server.keys(f"{lasting_of(self.tag)}*"))


def differences(ours: Contents, theirs: Contents) -> dict[str, Any]:
    """The keys that differ; times-to-live do so by a few seconds on a busy machine."""
    return {
        name: (one, other)
        for name in ours.keys() | theirs.keys()
        if (one := ours.get(name)) != (other := theirs.get(name))
        and not (one and other and one[0] == other[0] and alike(one[1], other[1]))
    }


def alike(ttl_ms: int, other_ms: int) -> bool:
    return ttl_ms == other_ms or (min(ttl_ms, other_ms) > 0 and abs(ttl_ms - other_ms) < 20_000)


ENVIRONMENTS, TENANTS, CLIENTS = ("a", "b"), ("s", "t"), ("c", "c", "d", "+g")
Step = tuple[Any, ...]


class Draw:
    """Operations of a seed. What lasts, such as a pause, is rare, and some seeds have none."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._pinned = self._rng.random() < 0.3
        self._priorities = self._rng.choice(((1,), (0, 1, 2)))
        self._lasts = self._rng.random() < 0.4

    def steps(self, turns: int) -> Iterator[Step]:
        yield from (self._submit(), self._submit(), self._claim())
        for _ in range(turns):
            yield from self._rng.choice((self._arrivals, self._trouble))()
            yield "turn", self._rng.choice((0, 3, 15, 23))
            yield from (self.exchange(), self.exchange())

    def exchange(self) -> Step:
        pick, end = self._rng.choice, self._end()
        environment = pick(("", "", "", "", *ENVIRONMENTS))
        used, size, remember = pick((0, 0, 0, 700)), pick(REPLY_BYTES), pick((0, TTL_MS))
        goes_on = self._rng.random() < 0.7
        return (
            "exchange",
            self._rng.randrange(10),
            environment,
            used,
            size,
            remember,
            end,
            goes_on,
        )

    def harm(self) -> Step:
        how = self._rng.choice(("another kind", "another kind", "none", "a value", "a value"))
        values = (b"", b"nonsense", b"-1", b"1e999", b"nan", b"\x01", b"l", b"l\0w\0", b"r0")
        return "harm", how, self._rng.randrange(200), self._rng.choice(values)

    def _arrivals(self) -> Iterator[Step]:
        yield self._submit()
        yield self._claim()

    def _trouble(self) -> Iterator[Step]:
        pick, some = self._rng.choice, [self._rng.randint(1, 12) for _ in range(4)]
        moved: list[Step] = [("cancel", some, True), self._submit(some)]
        yield from pick(
            [
                [("release", self._rng.randrange(6), pick(("requeue", "defer")))],
                [("cancel", some, False)],
                [("lookup", pick(CLIENTS), some)],
                [("forget_replies",)],
                [("advance", pick((1, 900, 6_000, -3_000)))],
                [("crowd", pick((0, 99, 100)))],
                [("listen",)],
                moved,
                moved,
                *(self._lasting() if self._lasts else ()),
            ]
        )

    def _lasting(self) -> Iterator[list[Step]]:
        pick = self._rng.choice
        yield [("reap",)]
        yield [("release", self._rng.randrange(6), "retry")]
        yield [("pause", pick("et"), pick("at"), pick((True, False)))]
        yield [("weigh", pick(TENANTS), "2")]
        # What was charged in the meantime is so still.
        yield [("weigh", "t", "2"), self._claim(), ("weigh", "t", "")]

    def _submit(self, again: Sequence[int] = ()) -> Step:
        """New requests, and some that were sent before, counted from the last."""
        pick = self._rng.choice
        kind = {
            "environment": pick("aaab"),
            "priority": pick(self._priorities),
            "deadline_ms": pick((0, 0, 0, 5_000)),
            "run_ms": pick((8_000, 100_000)),
            "affinity": pick(((), ("x",), ("y", "x"))) if self._pinned else (),
            "detached": pick((False, False, False, True)),
        }
        rows = [
            (
                back,
                pick(TENANTS),
                pick(("", "", "p", "q")),
                pick((b"", b"body", b"large" * 400)),
            )
            for back in (*again, *(pick((0, 0, 0, *range(8))) for _ in range(pick((4, 6, 8)))))
        ]
        return "submit", pick(CLIENTS), kind, rows

    def _claim(self) -> Step:
        environments = self._rng.choice((("a", "b"), ("b", "a"), ("a",)))
        busy = self._rng.randrange(2)
        return "claim", self._rng.choice("wv"), environments, self._rng.randint(1, 2), busy

    def _end(self) -> dict[str, Any]:
        pick = self._rng.choice
        return {
            "outcome": pick(("accepted", "rejected")),
            "reason": pick(("", "type_error")),
            "warm": pick((False, True)),
            "way": pick(("", "forked")),
            "fingerprint": pick(("", "f")),
            "uploaded": pick((False, False, False, True)),
        }


class Rivals(Twin):
    """The queue, on which ``exchange`` is set beside ``claim``."""

    def pause(self, kind: str, name: str, hold: bool) -> None:
        self.run("pause", kind=kind, name=name, set=hold)

    def weigh(self, tenant: str, weight: str) -> None:
        key = f"{lasting_of(self.tag)}:weights"
        if weight:
            self.server.hset(key, tenant, weight)
        else:
            self.server.delete(key)

    def turn(self, picks: int) -> None:
        """So many requests have been picked."""
        self.server.hset(f"{self.tag}:stats", "turn:a", picks)

    def listen(self) -> None:
        """Idle workers have taken all tokens."""
        self.server.delete(f"{self.tag}:wakeup:a")

    def crowd(self, tenants: int) -> None:
        """So many tenants have used CPU time."""
        self.server.hset(f"{self.tag}:stats", "tenants", tenants)

    def exchange(
        self,
        number: int,
        environment: str,
        cpu_ms: int,
        size: int,
        remember_ms: int,
        end: Mapping[str, Any],
        goes_on: bool,
    ) -> None:
        """Compares, and does it here as well where it ``goes_on``."""
        # Now and then one that has ended.
        leases = (number < 9 and not self.harmed and self.current()) or self.leases
        if not leases:
            return
        worker, request_id, token, leased = leases[-1 - number % len(leases)]
        environment = environment or leased
        reply = pack_reply(token, Reply("accepted", payload=b"x" * size))
        if end["uploaded"]:
            self.server.set(f"{self.tag}:upload:{token}:{request_id}", reply, px=TTL_MS)
            reply = b""
        new = f"t{next(self.tokens)}"
        whole = self.claim_arguments(worker, [environment], 1, 1, new) | {
            "remember_ms": remember_ms,
            "ends": [end],
            "settlements": [(request_id, token, 1, cpu_ms, reply)],
        }
        straight = dict(end) | {
            "worker": worker,
            "lease_ms": LEASE_MS,
            "reply_ttl_ms": TTL_MS,
            "token": new,
            "remember_ms": remember_ms,
            "environment": environment,
            "request_id": request_id,
            "settled_token": token,
            "reply": reply,
            "cpu_ms": cpu_ms,
        }
        self.compare(straight, whole)
        if goes_on:
            answer = self.run("claim", **whole)
            for given_id, record in zip(answer["request_ids"], answer["records"], strict=True):
                place = record[28:].partition(b"\0")[0].decode()
                self.leases.append((worker, given_id.decode(), new, place))

    def current(self) -> list[tuple[str, str, str, str]]:
        """The leases that have not ended."""
        phases = self.server.hgetall(f"{self.tag}:phase")
        return [
            lease
            for lease in self.leases
            if phases.get(lease[1].encode(), b"").startswith(b"l%s\0" % lease[2].encode())
        ]

    def compare(self, straight: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        self.copy()
        before = self.contents(self.copies[0])
        answer = self.tried("exchange", self.copies[0], straight)
        after = self.contents(self.copies[0])
        if not answer:
            assert not differences(before, after)
            return
        self.exchanged += 1
        expected = self.tried("claim", self.copies[1], whole)
        if FAILED not in (answer, expected):
            assert as_claims(answer) == expected
            assert not differences(after, self.contents(self.copies[1]))
            return
        # Where a key is not what it should be, claim may fail as well, or at something that is not
        # exchange's; but nothing is lost.
        assert expected == FAILED
        assert stranded(after) <= stranded(before) | stranded(self.contents(self.copies[1]))

    def tried(self, name: str, tag: str, arguments: Mapping[str, Any]) -> Any:
        try:
            return self.run(name, tag, **arguments)
        except redis.ResponseError:
            if not self.harmed:
                raise
            return FAILED

    def harm(self, how: str, number: int, value: bytes) -> None:
        """Puts something into a key that none of leanq's processes would."""
        self.leases, self.harmed = self.current() or self.leases, True
        name = self.names()[number % len(self.names())]
        key, kind = f"{self.tag}:{name}", self.server.type(f"{self.tag}:{name}")
        if how == "another kind":
            self.server.delete(key)
            if kind == b"string":
                self.server.rpush(key, value)
            else:
                self.server.set(key, value)
        elif how == "none":
            self.server.delete(key)
        elif kind == b"hash":
            fields = sorted(cast("list[bytes]", self.server.hkeys(key)))
            self.server.hset(key, fields[number % len(fields)], value)
        elif kind == b"list":
            # Also one that stands there already.
            items = cast("list[bytes]", self.server.lrange(key, 0, -1))
            self.server.lpush(key, value if number % 2 else items[number % len(items)])
        elif kind == b"zset":
            self.server.zadd(key, {value: 0})
        elif kind == b"string":
            self.server.set(key, value)

    def names(self) -> list[str]:
        """The keys without the tag, those first that an exchange looks at; not the test's clock."""
        found = sorted(
            key[len(self.tag) + 1 :].decode() for key in self.server.keys(f"{self.tag}:*")
        )
        return [name for name in found if name != "clock"]


FAILED = "failed"


def as_claims(exchanged: Mapping[str, Any]) -> dict[str, Any]:
    """What claim would answer where an exchange was answered so."""
    claimed = exchanged["request_id"] is not None
    return {
        "fenced": [],
        "missing": [],
        "request_ids": [exchanged["request_id"]] if claimed else [],
        "records": [exchanged["record"]] if claimed else [],
        "isolated": [],
        "held": exchanged["held"],
        "must_empty": 0,
        "now_ms": exchanged["now_ms"],
    }


def stranded(contents: Contents) -> set[bytes]:
    """Requests in flight that stand in no list, that no worker holds, and that joined no run."""
    placed: set[bytes] = set()
    for name, (value, _) in contents.items():
        if name.startswith(("wait:", "quarantined:")) and isinstance(value, list):
            placed.update(value)
        elif name.startswith(("processing:", "joined:")) and isinstance(value, list):
            placed.update(member for member, _ in value)
    live = {
        name[4:].encode()
        for name, (value, _) in contents.items()
        if name.startswith("req:") and isinstance(value, bytes) and is_record(value)
    }
    return live - placed


@pytest.fixture(scope="module")
def connection(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as made:
        yield made


@each_set_of_seeds
def test_an_exchange_is_what_claim_would_have_done(
    connection: redis.Redis, seeds: Sequence[int]
) -> None:
    exchanged = 0
    for seed in seeds:
        exchanged += played(connection, seed, Draw(seed).steps(15))
    # Most of the time there is something to be seen.
    assert exchanged > 5 * len(seeds)


@each_set_of_seeds
def test_hostile_values_make_no_exchange_lose_a_request(
    connection: redis.Redis, seeds: Sequence[int]
) -> None:
    for seed in seeds:
        draw = Draw(seed)
        before = [(*step[:-1], True) if step[0] == "exchange" else step for step in draw.steps(2)]
        harmed = [draw.harm(), *((*draw.exchange()[:-1], False) for _ in range(4))]
        played(connection, seed, (*before, *harmed))


def played(connection: redis.Redis, seed: int, steps: Iterable[Step]) -> int:
    """Returns how many exchanges were not left to claim."""
    rivals, done = Rivals(connection), list[Step]()
    try:
        for step in steps:
            done.append(step)
            getattr(rivals, step[0])(*step[1:])
    except BaseException as error:
        error.add_note("\n".join((f"seed {seed}, after:", *(str(step)[:500] for step in done))))
        raise
    finally:
        rivals.drop()
    return rivals.exchanged
