"""The changes that callers of the page make: dead letters, pauses and weights."""

from __future__ import annotations

from typing import Literal

from fastapi import HTTPException

from leanq.errors import InvalidRequestError, UsageError
from leanq.gateway.client import GatewayClient
from leanq.gateway.page.viewers import Viewer
from leanq.queue.keys import shard_of
from leanq.queue.operator_queue import LEAST_WEIGHT, MOST_WEIGHT, OperatorQueue, send_again
from leanq.queue.results import DeadLetter
from leanq.queue.settings import check_name


async def retry(lean: GatewayClient, viewer: Viewer, request_id: str) -> str:
    """Sends a dead letter again; returns its new id.

    Raises:
        HTTPException: 403, the viewer may not submit.
        UsageError: the viewer has no such dead letter.
        LeanQError: it cannot be sent.
    """
    queue, letter = await _letter(lean, viewer, request_id)
    return await send_again(queue, letter)


async def drop(lean: GatewayClient, viewer: Viewer, request_id: str) -> None:
    """Removes a dead letter for good; raises as :func:`retry`."""
    queue, _ = await _letter(lean, viewer, request_id)
    await queue.drop_dead(request_id)


async def pause(
    lean: GatewayClient,
    viewer: Viewer,
    kind: Literal["environment", "tenant"],
    name: str,
    *,
    paused: bool,
) -> None:
    """Pauses an environment's or a tenant's requests, or resumes them.

    Raises:
        HTTPException: 403, the viewer does not operate the fleet.
        UsageError: a malformed name.
        UnknownEnvironmentError: no worker ever offered the environment.
    """
    _check_operates(viewer)
    check_name(kind, name)
    if kind == "environment" and not viewer.sees_environment(name):
        raise HTTPException(403, f"the key may not use the environment {name!r}")
    if kind == "environment" and paused:
        known = {name for queue in lean.queues for name in await queue.shard.environments()}
        if name not in known:
            raise await lean.queues[0].shard.unknown(name)
    for queue in lean.queues:
        await queue.set_paused(kind, name, paused=paused)


async def set_weight(
    lean: GatewayClient, viewer: Viewer, tenant: str, weight: float | None
) -> None:
    """Gives a tenant a share of CPU time, or takes it away (None).

    Raises:
        HTTPException: 403, the viewer does not operate the fleet.
        UsageError: a malformed name or weight.
    """
    _check_operates(viewer)
    check_name("tenant", tenant)
    if weight is not None and not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise InvalidRequestError(
            f"a weight must lie between {LEAST_WEIGHT:g} and {MOST_WEIGHT:g}, got {weight:g}"
        )
    for queue in lean.queues:
        await queue.set_weight(tenant, weight)


def check_submits(viewer: Viewer) -> None:
    if not viewer.submits:
        raise HTTPException(403, "the key has not the right 'submit'")


def _check_operates(viewer: Viewer) -> None:
    if not viewer.operates:
        raise HTTPException(
            403,
            "only a key with the right 'operate' changes what is of all tenants; "
            "'leanq pause' and 'leanq tenant' do so without the gateway",
        )


async def _letter(
    lean: GatewayClient, viewer: Viewer, request_id: str
) -> tuple[OperatorQueue, DeadLetter]:
    if not viewer.operates:
        check_submits(viewer)
    shard = shard_of(request_id)
    for queue in lean.queues:
        letter = await queue.dead_letter(request_id) if queue.shard.keys.shard == shard else None
        # The answer does not reveal that another tenant has one.
        if letter and viewer.owns(letter.submission.tenant, letter.submission.environment):
            return queue, letter
    raise UsageError(f"there is no dead letter {request_id!r:.80}")
