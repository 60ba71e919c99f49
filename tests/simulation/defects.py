"""Defects put in on purpose: each takes one thing away from a script or from Python, and the
simulation has to notice.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from simulation import network


@dataclass(frozen=True)
class Defect:
    """A text that is replaced by another: in the scripts, or in a function ``where``, named as
    ``MODULE:CLASS.METHOD``. ``mended_by`` is a text of the scripts that would mend it, and what
    stands in its place meanwhile."""

    name: str
    old: str
    new: str
    where: str = ""
    mended_by: tuple[str, str] | None = None

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Has the defect meanwhile; raises AssertionError where its text is not there."""
        with self._in_python() if self.where else self._in_scripts():
            yield

    @contextlib.contextmanager
    def _in_scripts(self) -> Iterator[None]:
        shimmed = network.shimmed
        changes = [(self.old, self.new), *([self.mended_by] if self.mended_by else [])]
        found: set[str] = set()

        def damaged(text: bytes) -> bytes:
            for old, new in changes:
                if old.encode() in text:
                    found.add(old)
                    text = text.replace(old.encode(), new.encode())
            return shimmed(text)

        with mock.patch.object(network, "shimmed", damaged):
            yield
        gone = [old for old, _ in changes if old not in found]
        assert not gone, f"no script has the text of {self.name!r}: {gone}"

    @contextlib.contextmanager
    def _in_python(self) -> Iterator[None]:
        module_name, _, path = self.where.partition(":")
        module = importlib.import_module(module_name)
        class_name, _, name = path.partition(".")
        owner: Any = getattr(module, class_name)
        source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
        assert self.old in source, f"{self.where} has no longer the text of {self.name!r}"
        made: dict[str, Any] = {}
        future = "from __future__ import annotations\n"
        exec(future + source.replace(self.old, self.new), vars(module), made)
        with mock.patch.object(owner, name, made[name]):
            yield


DEFECTS = (
    Defect(
        "a result counts with any token",
        "elseif lease and lease.token == tokens[k] then",
        "elseif lease then",
    ),
    Defect(
        "the reaper takes requests away and puts them nowhere",
        "local became = requeue.run(request_id, 'retry', 'reaped')",
        "local became = 'lost'",
    ),
    Defect(
        "a request that is submitted again is queued again",
        "if any > 0 and redis.call('EXISTS', names[k]) == 1 then",
        "if false then",
    ),
    Defect(
        "what is requeued is not counted as waiting",
        "counters.add('waiting:' .. r.environment, 1)\n  local push",
        "local push",
    ),
    Defect(
        "claims whose answer was lost are not handed out again",
        "local lease = not held[request_id] and single_flight.lease_of(request_id)",
        "local lease = false",
    ),
    Defect(
        "a request that is withdrawn stays with its worker",
        "redis.call('ZREM', tag .. ':processing:' .. lease.worker, request_id)\n"
        "  redis.call('RPUSH', tag .. ':stop:'",
        "redis.call('RPUSH', tag .. ':stop:'",
    ),
    Defect(
        "requests that joined a run do not end with it",
        "if #runs > 0 then settle.end_joined(runs) end",
        "",
        # Their clients ask for them, and they would run for themselves.
        mended_by=(
            "elseif run_id and not (single_flight.lease_of(run_id)",
            "elseif false and not (single_flight.lease_of(run_id)",
        ),
    ),
    Defect(
        "no attempt is isolated",
        "return attempts > 0 and attempts >= max_attempts / 2",
        "return false",
    ),
    Defect(
        "attempts are not counted",
        "with_lost(request_id, r, lease, worker, why), attempts\n",
        "with_lost(request_id, r, lease, worker, why), r.attempts\n",
    ),
    Defect(
        "a tenant whose list was empty does not get into its ring",
        "wait_list.open(push, ring_name, r.tenant)",
        "",
    ),
    Defect(
        "a batch whose submission failed is not sent again",
        "self._outbox.extendleft(entry for entry, _ in reversed(batch))",
        "pass",
        "leanq.producer.shard_client:Submitter._submit",
    ),
    Defect(
        "a client takes for sent what the server has forgotten",
        "self._submitter.send(entry)",
        "entry.ask_at_s = now_s + 1.0",
        "leanq.producer.shard_client:ShardClient._ask_for",
    ),
    Defect(
        "an exchange takes a tenant with work out of its ring",
        "if not more then call('LREM', ring, -1, r.tenant) end",
        "call('LREM', ring, -1, r.tenant)",
    ),
    Defect(
        "an exchange does not note which worker holds the next request",
        "held = held + call('ZADD', processing, now + r.run_ms, next_id)",
        "held = held + 1",
    ),
    Defect(
        "an exchange forgets the requests that joined its run",
        "call('EXISTS', joined, own_left, paused, paused",
        "call('EXISTS', own_left, paused, paused",
        mended_by=(
            "elseif run_id and not (single_flight.lease_of(run_id)",
            "elseif false and not (single_flight.lease_of(run_id)",
        ),
    ),
)
