"""The script ``exchange`` beside ``claim``: in any state the same, or nothing.

Operations drawn at random bring a queue into some state. Then its keys are copied twice; one copy
is given to ``exchange``, the other to ``claim``, with equal arguments, and everything is compared:
the answers, and what stands in every key. ``LEANQ_SOAK=2000`` runs so many examples, new ones each
time.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import pytest
import redis
from hypothesis import HealthCheck, event, given
from hypothesis import settings as profile
from hypothesis import strategies as st
from support.shards import set_clock, with_test_clock

from leanq.local import EmbeddedServer
from leanq.queue.keys import Keys
from leanq.queue.requests import Reply
from leanq.queue.results import is_record
from leanq.queue.scripts import SCRIPTS
from leanq.queue.wire import pack_reply

SOAK = int(os.environ.get("LEANQ_SOAK", "0"))
PROFILE = profile(
    max_examples=SOAK or profile.default.max_examples,
    deadline=None,
    derandomize=not SOAK,
    database=None,
    suppress_health_check=list(HealthCheck),
)
LEASE_MS, TTL_MS, MAX_ATTEMPTS = 10_000, 3_600_000, 4
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
            requests.append((known, 1, tenant, digest, body))
        self.run(
            "submit",
            client=client,
            max_waiting=8,
            remember_ms=TTL_MS,
            kinds=[dict(kind)],
            requests=requests,
        )

    def claim(self, worker: str, environments: Sequence[str], want: int, busy: int) -> None:
        token = f"t{next(self.tokens)}"
        answer = self.run("claim", **self.claim_arguments(worker, environments, want, busy, token))
        for request_id, _, record in answer["jobs"]:
            environment = record[27:].partition(b"\0")[0].decode()
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
        if self.leases:
            worker, request_id, token, _ = self.leases[-1 - number % len(self.leases)]
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
        for key in self.server.keys(f"{self.tag}:*"):
            for tag in self.copies:
                pipe.copy(key, tag.encode() + key[len(self.tag) :])
        pipe.execute()

    def contents(self, tag: str) -> Contents:
        """What stands in every key, and its time-to-live. Entries of streams are without their
        numbers, which are the server's own time."""
        keys = sorted(self.server.keys(f"{tag}:*"))
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
            key[len(tag) + 1 :].decode(errors="replace"): (
                [flat for _, flat in value] if kind == b"stream" else value,
                ttl_ms,
            )
            for key, kind, value, ttl_ms in zip(keys, kinds, found, found, strict=True)
        }

    def drop_copies(self) -> None:
        for tag in self.copies:
            if keys := self.server.keys(f"{tag}:*"):
                self.server.delete(*keys)

    def drop(self) -> None:
        self.drop_copies()
        self.server.delete(*self.server.keys(f"{self.tag}:*"))


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


ENVIRONMENTS, TENANTS, CLIENTS = ("a", "b"), ("s", "t"), ("c", "d", "+g", "+h")
some = st.lists(st.integers(1, 12), max_size=4)
kinds = st.fixed_dictionaries(
    {
        "environment": st.sampled_from(("a", "a", "a", "b")),
        "priority": st.integers(0, 2),
        "deadline_ms": st.sampled_from((0, 0, 0, 5_000)),
        "run_ms": st.sampled_from((8_000, 100_000)),
        "affinity": st.sampled_from(((), (), (), ("x",), ("y", "x"))),
    }
)
digests = st.sampled_from(("", "", "p", "q"))
bodies = st.sampled_from((b"", b"body", b"large" * 1000))
rows = st.tuples(
    st.sampled_from((0, 0, 0, 1, 2, 3, 4, 5)), st.sampled_from(TENANTS), digests, bodies
)
ends = st.fixed_dictionaries(
    {
        "outcome": st.sampled_from(("accepted", "rejected")),
        "reason": st.sampled_from(("", "type_error")),
        "warm": st.booleans(),
        "way": st.sampled_from(("", "forked")),
        "fingerprint": st.sampled_from(("", "f")),
    }
)
exchanges = st.tuples(
    st.just("exchange"),
    st.integers(0, 3),
    st.sampled_from((0, 0, 0, 700)),
    st.sampled_from(REPLY_BYTES),
    st.sampled_from((0, TTL_MS)),
    ends,
    st.booleans(),
)
submits = st.tuples(
    st.just("submit"), st.sampled_from(CLIENTS), kinds, st.lists(rows, min_size=2, max_size=5)
)
claims = st.tuples(
    st.just("claim"),
    st.sampled_from(("w", "v")),
    st.sampled_from((("a",), ("b",), ("a", "b"))),
    st.integers(1, 4),
    st.integers(0, 1),
)
releases = st.tuples(
    st.just("release"), st.integers(0, 5), st.sampled_from(("requeue", "retry", "defer"))
)
cancels = st.tuples(st.just("cancel"), some, st.booleans())
lookups = st.tuples(st.just("lookup"), st.sampled_from(CLIENTS), some)
others = st.one_of(
    releases,
    cancels,
    cancels,
    lookups,
    st.tuples(st.just("forget_replies")),
    st.tuples(st.just("advance"), st.sampled_from((1, 900, 6_000, -3_000))),
    st.tuples(st.just("reap")),
    st.tuples(st.just("crowd"), st.sampled_from((0, 99, 100))),
    st.tuples(st.just("pause"), st.sampled_from(("e", "t")), st.sampled_from("at"), st.booleans()),
    st.tuples(st.just("weigh"), st.sampled_from(TENANTS), st.sampled_from(("", "", "2"))),
)
# Most of the time requests come and are worked on.
turns = st.tuples(st.one_of(submits, claims, others), exchanges, exchanges)


class Rivals(Twin):
    """The queue, on which ``exchange`` is set beside ``claim``."""

    def pause(self, kind: str, name: str, hold: bool) -> None:
        self.run("pause", kind=kind, name=name, set=hold)

    def weigh(self, tenant: str, weight: str) -> None:
        key = f"{self.tag}:weights"
        if weight:
            self.server.hset(key, tenant, weight)
        else:
            self.server.delete(key)

    def crowd(self, tenants: int) -> None:
        """So many tenants have used CPU time."""
        self.server.hset(f"{self.tag}:stats", "tenants", tenants)

    def exchange(
        self,
        number: int,
        cpu_ms: int,
        size: int,
        remember_ms: int,
        end: Mapping[str, Any],
        goes_on: bool,
    ) -> None:
        """Compares, and does it here as well where it ``goes_on``."""
        if not self.leases:
            return
        worker, request_id, token, environment = self.leases[-1 - number % len(self.leases)]
        reply = pack_reply(token, Reply("accepted", payload=b"x" * size))
        new, given = f"t{next(self.tokens)}", dict(end) | {"warm": int(end["warm"])}
        whole = self.claim_arguments(worker, [environment], 1, 1, new) | {
            "remember_ms": remember_ms,
            "ends": [tuple(given[name] for name in SCRIPTS_END)],
            "settlements": [(request_id, token, reply, 1, cpu_ms)],
        }
        straight = given | {
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
            for given_id, _, record in answer["jobs"]:
                place = record[27:].partition(b"\0")[0].decode()
                self.leases.append((worker, given_id.decode(), new, place))

    def compare(self, straight: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        self.copy()
        before = self.contents(self.copies[0])
        answer = self.tried("exchange", self.copies[0], straight)
        after = self.contents(self.copies[0])
        if not answer:
            event(f"left to claim: {answer}")
            assert not differences(before, after)
            return
        event("failed" if answer == FAILED else "exchanged")
        expected = self.tried("claim", self.copies[1], whole)
        if FAILED not in (answer, expected):
            assert answer == expected
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
        self.harmed = True
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


SCRIPTS_END = SCRIPTS["claim"].rows["ends"].replace(":flag", "").split()  # type: ignore[index]


@pytest.fixture(scope="module")
def connection(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as made:
        yield made


@PROFILE
@given(begin=st.tuples(submits, submits, claims), rest=st.lists(turns, min_size=3, max_size=12))
def test_an_exchange_is_what_claim_would_have_done(
    connection: redis.Redis,
    begin: Sequence[tuple[Any, ...]],
    rest: Sequence[Sequence[tuple[Any, ...]]],
) -> None:
    rivals = Rivals(connection)
    try:
        for name, *arguments in itertools.chain(begin, *rest):
            getattr(rivals, name)(*arguments)
    finally:
        rivals.drop()


harms = st.tuples(
    st.sampled_from(("another kind", "another kind", "none", "a value", "a value")),
    st.integers(0, 200),
    st.sampled_from(
        (b"", b"nonsense", b"-1", b"1e999", b"nan", b"\x01", b"l", b"l\x00w\x00", b"r0")
    ),
)


@PROFILE
@given(
    begin=st.tuples(submits, submits, claims),
    rest=st.lists(turns, max_size=3),
    harm=harms,
    last=st.lists(exchanges, min_size=1, max_size=2),
)
def test_hostile_values_make_no_exchange_lose_a_request(
    connection: redis.Redis,
    begin: Sequence[tuple[Any, ...]],
    rest: Sequence[Sequence[tuple[Any, ...]]],
    harm: tuple[Any, ...],
    last: Sequence[tuple[Any, ...]],
) -> None:
    rivals = Rivals(connection)
    try:
        for name, *arguments in itertools.chain(begin, *rest):
            getattr(rivals, name)(*arguments)
        rivals.harm(*harm)
        for _, *arguments, _ in last:
            rivals.exchange(*arguments, goes_on=False)
    finally:
        rivals.drop()
