"""Requests as bytes in Redis: their records, whose layout ``lua/parts/record.lua`` has too.

Releases with records of several versions may share a queue, so a reader here says which version it
cannot read.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

from msgspec import Struct

from leanq.errors import WireError
from leanq.queue.results import VERSION, Claimed, Job, Submission, is_record

# Version, kind, attempts, priority; submitted, deadline, longest run (ms); then seven texts and the
# body.
_RECORD = struct.Struct(">BBBBddd")
_RECORD_TEXTS = 7
_WHOLE, _DETACHED = 1, 2
# The texts of early records begin here.
_EARLY = struct.Struct(">BBBddd")


def read_jobs(answer: Mapping[str, Any], tokens: Iterable[str]) -> tuple[Job, ...]:
    """Returns the requests that the scripts ``claim`` and ``reconcile`` give out.

    Their leases have these tokens. Detached requests come without their bodies.
    """
    now_ms, alone = answer["now_ms"], set(answer["isolated"])
    rows = zip(answer["request_ids"], answer["records"], tokens, strict=False)
    return tuple(_read_job(now_ms, n in alone, *row) for n, row in enumerate(rows, 1))


def _read_job(now_ms: float, isolated: bool, request_id: bytes, record: bytes, token: str) -> Job:
    _, kind, attempts, _, submitted_ms, _, _ = _RECORD.unpack_from(record)
    (environment, *_, lost, tenant, digest), body = _texts_and_body(record)
    return Job(
        request_id.decode(errors="replace"),
        environment,
        token,
        attempts + 1,
        (now_ms - submitted_ms) / 1000,
        body if kind == _WHOLE else None,
        isolated,
        0 if kind == _WHOLE else int(body),
        tenant,
        digest,
        lost,
        int(submitted_ms),
        int(now_ms),
        time.monotonic(),
    )


def read_claimed(answer: Mapping[str, Any], token: str, settled: int) -> Claimed:
    accepted = [True] * settled
    for number in answer["fenced"]:
        accepted[number - 1] = False
    return Claimed(
        accepted=tuple(accepted),
        jobs=read_jobs(answer, repeat(token)),
        held=answer["held"],
        must_empty=answer["must_empty"] == 1,
    )


def read_exchanged(answer: Mapping[str, Any], token: str) -> Claimed:
    request_id, record = answer["request_id"], answer["record"]
    jobs = (_read_job(answer["now_ms"], False, request_id, record, token),) if request_id else ()
    return Claimed(accepted=(True,), jobs=jobs, held=answer["held"], must_empty=False)


def _texts_and_body(record: bytes) -> tuple[list[str], bytes]:
    *texts, body = record[_RECORD.size :].split(b"\0", _RECORD_TEXTS)
    return [text.decode(errors="replace") for text in texts], body


def version_of(record: bytes) -> int:
    """Returns the version of a record's layout.

    The tags of versions 1 and 2 are those of early releases, whose records do not say it. The fifth
    text is the tenant in version 1, and the lost attempts in version 2.
    """
    if record[0] not in (1, 2):
        return record[0]
    texts = record[_EARLY.size :].split(b"\0", 5)
    return 1 if len(texts) > 4 and texts[4] and not texts[4].endswith(b";") else 2


def _check_version(request_id: str, record: bytes) -> None:
    if record[0] != VERSION:
        raise WireError(
            f"another release of leanq wrote {request_id}: its record has version "
            f"{version_of(record)}, this release reads {VERSION}; use that release"
        )


def read_record(request_id: str, data: bytes) -> tuple[Submission, str]:
    """Returns a request and its client from its record in Redis.

    ``lua/parts/record.lua`` has the layout. A detached request has an empty body. The deadline is
    left out, since it counted from the submit.

    Raises:
        WireError: another release wrote it.
    """
    _check_version(request_id, data)
    _, kind, _, priority, _, _, run_ms = _RECORD.unpack_from(data)
    (environment, client, first, second, _, tenant, digest), body = _texts_and_body(data)
    body = b"" if kind == _DETACHED else body
    affinity = tuple(name for name in (first, second) if name)
    return Submission(
        request_id, environment, tenant, priority, 0, int(run_ms), body, digest, affinity
    ), client


class InFlight(Struct, frozen=True):
    """A request that has not ended, for people to look at.

    Attributes:
        attempts: how many attempts have ended.
        submitted_s: when, in seconds since 1970 by the server's clock.
        worker: the worker that has held it for ``running_s``; ``""`` if none does.
        lost: earlier attempts, as ``lua/parts/requeue.lua`` writes them.
    """

    request_id: str
    environment: str
    tenant: str
    priority: int
    attempts: int
    submitted_s: float
    worker: str = ""
    running_s: float = 0.0
    lost: str = ""


def read_in_flight(request_id: str, data: bytes) -> tuple[InFlight, float]:
    """Reads a request's record, and for how many seconds a worker may hold it.

    The record's first kilobyte is enough.

    Raises:
        ValueError: it is no record.
        WireError: another release wrote it.
    """
    if not is_record(data):
        raise ValueError(f"{request_id} has no record")
    _check_version(request_id, data)
    if len(data) < _RECORD.size:
        raise ValueError(f"the record of {request_id} is cut short")
    _, _, attempts, priority, submitted_ms, _, run_ms = _RECORD.unpack_from(data)
    texts, _ = _texts_and_body(data)
    if len(texts) < _RECORD_TEXTS:
        raise ValueError(f"the record of {request_id} is cut short")
    environment, lost, tenant = texts[0], texts[4], texts[5]
    where = environment, tenant, priority, attempts, submitted_ms / 1000
    return InFlight(request_id, *where, lost=lost), run_ms / 1000
