"""A client's route, which is internal to it, for tests that look at what it has outstanding."""

from __future__ import annotations

from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.producer.cluster_router import ClusterRouter
from leanq.producer.future_client import LoopThread
from leanq.producer.request_builder import PreparedRequest
from leanq.producer.route import Route
from leanq.producer.shard_client import ShardClient
from leanq.producer.shard_router import ShardRouter
from leanq.queue.requests import Reply, Request
from leanq.queue.results import Submission


def route_of(lean: LeanQClient | AsyncLeanQClient) -> Route:
    """The client's route; it has to be open, or the client of threads."""
    if isinstance(lean, AsyncLeanQClient):
        route = lean._route  # noqa: SLF001 - no user has a use for it
        assert route
        return route
    return lean._running()[1]  # noqa: SLF001 - no user has a use for it


def thread_of(lean: LeanQClient) -> LoopThread:
    """The thread that runs the client's event loop."""
    return lean._running()[0]  # noqa: SLF001 - no user has a use for it


def clusters_of(lean: LeanQClient | AsyncLeanQClient) -> ClusterRouter:
    """The route of a client with several clusters."""
    route = route_of(lean)
    assert isinstance(route, ClusterRouter)
    return route


def first_shard(lean: LeanQClient | AsyncLeanQClient) -> ShardClient:
    """What speaks to the first shard of a client with one cluster."""
    route = route_of(lean)
    assert isinstance(route, ShardRouter)
    return route.shards[0]


async def reply_to(lean: AsyncLeanQClient, submission: Submission) -> Reply:
    """The whole reply to any submission, also to such as no operation of the client makes."""
    prepared = PreparedRequest(Request("echo"), submission, lambda reply: reply)
    return await lean._reply(prepared)  # noqa: SLF001 - users have its operations
