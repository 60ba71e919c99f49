"""Retries dead letters: requests that took down too many workers."""

from __future__ import annotations

from msgspec import structs

from leanq.errors import QueueFullError, UnknownEnvironmentError
from leanq.queue.client_queue import ClientQueue
from leanq.queue.connection import RETRY_AFTER_S
from leanq.queue.keys import retry_request_id
from leanq.queue.operator_queue import OperatorQueue
from leanq.queue.results import Became, DeadLetter


async def send_again(queue: OperatorQueue, letter: DeadLetter) -> str:
    """Sends a dead letter of this shard as a new request, drops the letter, and returns the new id.

    Raises:
        UnknownEnvironmentError: no worker ever offered its environment.
        QueueFullError: the tenant's queue is full.
        UnavailableError: the shard cannot be reached.
    """
    old = letter.submission
    new = retry_request_id(old.request_id)
    submission = structs.replace(old, request_id=new)
    (answer,) = await ClientQueue(queue.shard).submit(letter.client, [submission])
    if answer is Became.UNKNOWN_ENVIRONMENT:
        raise UnknownEnvironmentError(
            f"no worker offers the environment {old.environment!r} of {old.request_id}"
        )
    if answer is Became.FULL:
        raise QueueFullError(f"the queue of {old.tenant!r} is full", RETRY_AFTER_S)
    # Last: a letter sent twice is still one request, a letter dropped first could be lost.
    await queue.drop_dead(old.request_id)
    return new
