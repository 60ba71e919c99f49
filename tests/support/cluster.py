"""A real cluster of three nodes, on free ports of this machine."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from leanq.queue.keys import Keys
from leanq.queue.settings import Settings
from support.fleets import until
from support.servers import find_server

SHARDS = 3


class Node:
    """One server of a cluster; ``client`` speaks to it alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.port, self.bus = free_ports(2)
        self.client = redis.Redis(port=self.port, decode_responses=True)
        self.start()
        self.id = str(self.client.execute_command("CLUSTER", "MYID"))

    def start(self) -> None:
        """Starts it, with what it knew if it ran before."""
        options = {
            "port": self.port,
            "cluster-port": self.bus,
            "bind": "127.0.0.1",
            "dir": self.folder,
            "cluster-enabled": "yes",
            "cluster-node-timeout": 2000,
            "cluster-allow-replica-migration": "no",
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
        }
        argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self.process = subprocess.Popen(
            [str(find_server()), *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(self.answers)

    def answers(self) -> bool:
        # Not there yet, or still loading what it knew.
        with contextlib.suppress(redis.ConnectionError):
            return bool(self.client.ping())
        return False

    def cluster(self, *words: str | int) -> object:
        return self.client.execute_command("CLUSTER", *words)

    def is_whole(self, nodes: int) -> bool:
        """Whether it knows so many nodes, and finds the cluster in order."""
        info = str(self.cluster("INFO"))
        return "cluster_state:ok" in info and f"cluster_known_nodes:{nodes}" in info

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def end(self) -> None:
        self.kill()
        self.client.close()


class Cluster:
    """Three masters, each with a third of the slots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []

    def start(self) -> None:
        self.nodes += (Node(self.folder / f"node{number}") for number in range(3))
        for number, node in enumerate(self.nodes):
            first, end = 16384 * number // 3, 16384 * (number + 1) // 3
            # Like the tags of shards, see leanq.queue.keys.
            node.cluster("ADDSLOTSRANGE", first, end - 1)
            node.cluster("SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            self.nodes[0].cluster("MEET", "127.0.0.1", node.port, node.bus)
        until(lambda: all(node.is_whole(3) for node in self.nodes))

    def settings(self, prefix: str) -> Settings:
        """A queue of three shards; the URL names the first two nodes."""
        url = f"redis://127.0.0.1:{self.nodes[0].port},127.0.0.1:{self.nodes[1].port}"
        return Settings(url=url, prefix=prefix, shards=SHARDS, lease_s=3.0)

    def owner(self, slot: int) -> Node:
        ranges: Any = self.alive.cluster("SLOTS")
        for first, last, (_, port, *_), *_ in ranges:
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"no node has slot {slot}")

    @property
    def alive(self) -> Node:
        return next(node for node in self.nodes if node.process.poll() is None)

    def add_replica(self, master: Node) -> Node:
        replica = Node(self.folder / f"node{len(self.nodes)}")
        self.nodes.append(replica)
        master.cluster("MEET", "127.0.0.1", replica.port, replica.bus)
        until(lambda: all(node.is_whole(len(self.nodes)) for node in self.nodes))
        replica.cluster("REPLICATE", master.id)
        until(lambda: replica.client.info("replication")["master_link_status"] == "up")
        return replica

    def close(self) -> None:
        for node in self.nodes:
            node.end()
        shutil.rmtree(self.folder)


def slot_of(settings: Settings, shard: int) -> int:
    return int(key_slot(Keys(settings.prefix, shard, settings.shards).tag.encode()))


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def new_cluster() -> Iterator[Cluster]:
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="leanq-c-", dir="/tmp")))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
