"""That what is counted in Redis is what is there, wherever no test has written by its own hand."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import redis

from leanq.errors import WireError
from support.queue.shards import dump

_WRITES = re.compile(r"(H|M|Z|X|R|L|S|P)?(SET|DEL|ADD|PUSH|POP|INCRBY|REM|SETRANGE|TRIM)$|UNLINK")
# Hash tags of queues to which the running test has written.
_written: set[str] = set()
# Prefixes of queues whose driver answers what the queue alone does, such as `expired`.
_left_out: set[str] = set()
_execute: Callable[..., Any] = redis.Redis.execute_command


def note_hands() -> None:
    """Notes what tests write: they use redis-py's plain client, and leanq the asynchronous one."""

    def noted(self: redis.Redis, *args: Any, **options: Any) -> Any:
        if _WRITES.match(str(args[0])):
            keys = [a.decode("latin-1") if isinstance(a, bytes) else str(a) for a in args[1:]]
            _written.update(key.partition("}")[0] for key in keys if not key.endswith("}:clock"))
        return _execute(self, *args, **options)

    redis.Redis.execute_command = noted  # type: ignore[method-assign]


def forget_hands() -> None:
    """Notes anew what the next test writes."""
    _written.clear()
    _left_out.clear()


def leave_out(prefix: str) -> None:
    """Counts nothing in a queue whose driver gives verdicts that are the queue's own."""
    _left_out.add(prefix)


def evict(server: redis.Redis, key: str) -> None:
    """Removes a key as the server does to make room, which no count may suffer from."""
    _execute(server, "UNLINK", key)


def check_counts(server: redis.Redis, prefix: str) -> None:
    """Looks at every shard of a queue."""
    if prefix in _left_out:
        return
    keys = [key.decode() for key in server.scan_iter(f"{{{prefix}:*", count=10_000)]
    for lasting in {key.partition("}")[0] for key in keys} - _written:
        if lasting.endswith(":queue"):
            continue
        try:
            found = dump(server, f"{lasting}}}{{3}}")
        except WireError:
            continue  # of another release, which alone can read it
        found.check_counts()
        memories = {key.partition("}:replay:")[2] for key in keys if key.startswith(lasting)}
        for name in {each.rpartition(":")[0] for each in memories if each.endswith(":about")}:
            check_memory(server, f"{lasting}}}:replay:{name}")


def check_memory(server: redis.Redis, key: str) -> None:
    """Each sample is where the accounts of its class say, and sizes are sums."""
    about = {k.decode(): float(v) for k, v in server.hgetall(f"{key}:about").items()}
    log = server.xrange(f"{key}:log")
    assert about["bytes"] == sum(len(entry) for _, fields in log for entry in fields.values())
    assert about["last"] - about["base"] - about["evicted"] == len(log) <= about["entries"]
    slots = server.hgetall(f"{key}:slots")
    assert sorted(map(int, slots)) == [*range(len(slots))]
    assert about["slot_bytes"] == sum(len(each.partition(b" ")[2]) for each in slots.values())
    assert len(slots) <= about["capacity"] <= about["entries"]
    assert max(about["bytes"], about["slot_bytes"]) <= about["max_bytes"]
    index = {k.decode(): v.split() for k, v in server.hgetall(f"{key}:index").items()}
    places = {k: v.decode() for k, v in server.hgetall(f"{key}:places").items()}
    assert {member: place for place, (member, _) in index.items()} == places
    assert places.keys() <= (slots.keys() or {number.partition(b"-")[0] for number, _ in log})
    counts = Counter(place.partition(":")[0] for place in index)
    classes = {k.decode(): int(n) for k, n in server.hgetall(f"{key}:classes").items()}
    assert classes == counts
    assert index.keys() == {
        f"{name}:{n + 1}" for name, count in counts.items() for n in range(count)
    }
    for place, (_, weight) in index.items():
        fraction, exponent = math.frexp(float(weight))
        assert place.partition(":")[0] == str(8 * exponent + math.floor(8 * fraction))
