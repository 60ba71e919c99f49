"""A trial of all scripts on a server, each run once in a queue of its own.

It tells whether a server takes this release before a worker's first call fails there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from leanq.errors import NotPermittedError, QueueFullError, RefusedError, UnavailableError
from leanq.queue.keys import Keys
from leanq.queue.requests import Reply
from leanq.queue.settings import Settings
from leanq.queue.shard import Shard, new_token
from leanq.queue.wire import pack_reply

_DAY_S = 86_400
_IDS = ("0-first", "0-second", "0-third")


@dataclass
class Trial:
    """How each script of the trial ended.

    Attributes:
        passed: the scripts that ran to their ends.
        failed: what the server says, by script.
        forbidden: the scripts that this user may not run, or not to their ends.
        full: the server's memory is full, so nothing can be said of the others.
    """

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    forbidden: list[str] = field(default_factory=list)
    full: bool = False


async def try_scripts(settings: Settings) -> Trial:
    """Runs every script once on the server, and removes what they wrote.

    The queue's keys begin as those of ``settings`` do, so that the same rules hold for them.
    """
    trial = Trial()
    async with Shard.every(replace(settings, shards=1)) as (shard,):
        shard.keys = Keys(f"{settings.prefix}:trial-{new_token()}")
        days = {int(await shard.clock_s()) // _DAY_S}
        for script, arguments in _calls():
            try:
                await shard.run(script, **arguments)
            except RefusedError as error:
                trial.failed[script] = str(error)
            except NotPermittedError:
                trial.forbidden.append(script)
            except QueueFullError:
                trial.full = True
            except UnavailableError:
                # Either this user waits for a worker to load the scripts, or the server has gone.
                await shard.clock_s()
                trial.forbidden.append(script)
            else:
                trial.passed.append(script)
        days.add(int(await shard.clock_s()) // _DAY_S)
        for key in _keys(days):
            with contextlib.suppress(NotPermittedError):
                await shard.ask(("UNLINK", shard.keys.of(*key.split(":"))))
    return trial


def _calls() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each script with its arguments: a request's way, then the rest."""
    first, second, _ = _IDS
    kind = {"environment": "e", "priority": 1, "deadline_ms": 0, "run_ms": 60_000}
    kind |= {"affinity": ["a"], "detached": False}
    end = {"outcome": "accepted", "reason": "", "warm": True, "way": "", "fingerprint": "f"}
    snapshot, memory = {"key": "s", "chunks": ["h"]}, {"name": "m"}
    yield "register", {"worker": "w", "info": b"", "environments": [("e", "f", b"")]}
    yield (
        "submit",
        {
            "client": "c",
            "remember_ms": 0,
            "upload": "",
            "kinds": [kind],
            "requests": [(request_id, 1, "t", "", b"") for request_id in _IDS],
        },
    )
    claim = {"worker": "w", "token": "1", "want": 1, "busy": 0, "environments": ["e"]}
    yield "claim", {**claim, "ends": [], "settlements": []}
    yield (
        "exchange",
        {
            "worker": "w",
            "token": "2",
            "environment": "e",
            "request_id": first,
            "settled_token": "1",
            "reply": pack_reply("1", Reply("accepted")),
            "cpu_ms": 1,
            **end,
            "uploaded": False,
        },
    )
    yield "reconcile", {"worker": "w", "request_ids": []}
    yield (
        "renew",
        {
            "worker": "w",
            "idle_lease_ms": 1000,
            "environments": ["e"],
            "tallies": [("run_ms:e", 1)],
            "used": [("e", "t", "", "attempts", 1)],
            "headers": [("f", "t", "import Init\n", 1)],
        },
    )
    yield "lookup", {"client": "c", "request_ids": [first, second]}
    yield "status", {}
    yield "others", {}
    yield "hot_headers", {"fingerprint": "f", "most": 1, "least": 1}
    yield "release", {"worker": "w", "how": "requeue", "leave": False, "leases": [(second, "2")]}
    yield "cancel", {"request_ids": list(_IDS)}
    yield "pause", {"kind": "e", "name": "e", "set": True}
    yield "notify", {"environment": "e"}
    yield "notify_worker", {"worker": "w"}
    yield "reap", {}
    yield "state_keep", {"records": [("000", b"field", b"record")]}
    yield "state_recall", {"id": bytes(32), "shards": 1, "max_records": 1}
    yield "state_collect", {"unused_hours": 1, "buckets": 4096, "max_records": 1}
    room = {"bytes": 1, "budget": 1 << 20, "max_snapshots": 1, "coming_ms": 1000}
    yield "snapshot_room", {**snapshot, **room}
    yield "snapshot_keep", {**snapshot, "manifest": b"m", "ttl_ms": 1000}
    yield "snapshot_find", {"key": "s", "ttl_ms": 1000}
    yield "replay_open", {**memory, "entries": 1, "max_bytes": 9, "reservoir": 0, "weighted": 1}
    yield (
        "replay_write",
        {
            **memory,
            "writer": "w",
            "serial": "1",
            "writer_ms": 1000,
            "randoms": bytes(60),
            "items": [(1.0, b"entry"), (2.0, b"other")],
        },
    )
    yield (
        "replay_sample",
        {
            **memory,
            "count": 1,
            "max_bytes": 9,
            "by_weight": True,
            "randoms": bytes(60),
        },
    )
    yield "replay_publish", {**memory, "expected": "", "value": b"v"}
    yield "replay_refuse", {**memory, "refused": 1, "evict": 1}
    yield "replay_drop", memory


def _keys(days: set[int]) -> Iterator[str]:
    """Yields the keys that the scripts write, after the tag."""
    yield from ("phase", "stats", "minutes", "accounts", "workers", "info", "environments")
    yield from ("fingerprints", "paused", "withdrawn", "collect", "states:000")
    yield from ("hot:f", "texts:f")
    yield from (f"account:{day}" for day in days)
    yield from (f"req:{request_id}" for request_id in _IDS)
    yield from ("wait:e:1:t", "ring:e:1", "wakeup:e", "inbox:c", "warm:e:a")
    yield from ("processing:w", "stop:w", "snaps", "snap:s", "chunk:h")
    yield from ("replay:names", "replay:m:writer:w")
    yield from (f"replay:m:{kind}" for kind in ("about", "log", "classes", "index", "places"))
    yield "replay:m:value"
