"""The soak of a cluster: three shards on three nodes, whose slots move while workers are killed.

Clients ask for echoes whose right answers are known. Beside the SIGKILL of workers, one thing after
another befalls the nodes: a shard's slot moves to another node, key by key; a node dies and comes
back with its data; a node answers nobody for longer than a lease, so that the others call the
cluster down; all connections are cut. Then the history is checked as in :mod:`soak.soak`.
``make soak-cluster`` takes five minutes, the tests' part less.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import redis
from soak.soak import look_up, markdown
from support.cluster import SHARDS, Cluster, Node, new_cluster, slot_of
from support.fleets import look, until, until_stalled
from support.producer.history import Findings, Journal, check, read
from support.producer.nemeses import rounds
from support.producer.victims import Clients, Fleet, close, process_group

from leanq.queue.keys import Keys
from leanq.queue.settings import Settings

_CLIENTS, _WORKERS, _SLOTS = 2, 6, 4
_DELAY_S = 0.06
_KILL_EVERY_S = 3.0
# A shard lies on both nodes for a while, as it does where it is large.
_KEYS_AT_ONCE = 20


@dataclass
class Outcome:
    """What a run came to; ``faults`` must be empty, or ``journals`` is where all told theirs."""

    seed: int
    findings: Findings = field(default_factory=Findings)
    happened: Counter[str] = field(default_factory=Counter)
    keys_moved: int = 0
    faults: list[str] = field(default_factory=list)
    journals: Path | None = None

    def table(self) -> str:
        happened = ", ".join(f"{n:,} {name}" for name, n in sorted(self.happened.items()))
        return markdown(
            f"seed {self.seed}",
            [
                ("what happened", happened),
                ("keys that moved", f"{self.keys_moved:,}"),
                *self.findings.rows(),
                ("**other faults**", "; ".join(self.faults) or "0"),
                *([("journals and logs, kept", str(self.journals))] if self.journals else []),
            ],
        )


class ClusterFleet(Fleet):
    """Workers of a cluster's shards."""

    def __init__(self, cluster: Cluster, settings: Settings, folder: Path, group: int) -> None:
        super().__init__(settings, folder, group, _SLOTS)
        self._cluster = cluster

    def _names(self) -> list[str]:
        """Of the shards that answer: those of a node that is away are known from before."""
        found: set[str] = set()
        for shard in range(SHARDS):
            key = f"{Keys(self.settings.prefix, shard, SHARDS).tag}:workers"
            for node in self._cluster.nodes:
                with contextlib.suppress(redis.RedisError):
                    with redis.Redis(port=node.port, socket_timeout=0.5) as connection:
                        found |= {name.decode() for name in connection.zrange(key, 0, -1)}
                    break
        if not found:
            raise redis.ConnectionError("no node answers")
        return sorted(found)


class Storm:
    """One run on a cluster, from the first kill to the last look."""

    def __init__(self, cluster: Cluster, folder: Path, group: int, seed: int, rate: float) -> None:
        self.outcome = Outcome(seed)
        self._cluster, self._folder = cluster, folder
        self._rng = random.Random(f"plague {seed}")
        self._over = threading.Event()
        # Clients and workers find the default prefix without being told.
        self._settings = replace(cluster.settings(Settings.prefix), lease_s=2.0)
        self._fleet = ClusterFleet(cluster, self._settings, folder, group)
        for _ in range(_WORKERS):
            self._fleet.hire()
        until_stalled(lambda: len(self._fleet.joined()) == _WORKERS, self._fleet.progress)
        given = {
            "urls": [self._settings.url],
            "lean": False,
            "shards": SHARDS,
            "seed": seed,
            "rate": rate / _CLIENTS,
            "delay_s": _DELAY_S,
            "silence_s": 2.0,
        }
        self._clients = Clients(given, _CLIENTS, folder, group)
        # A client refuses to begin without a server.
        until_stalled(self._clients.all_began, self._fleet.progress)

    def rage(self, seconds: float) -> None:
        """So many seconds, and longer until each of the nemeses came."""
        ends_s = time.monotonic() + seconds
        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(self._kill), pool.submit(self._plague)]
            try:
                while not any(job.done() for job in jobs):
                    enough = all(self.outcome.happened[name] for name in self._nemeses())
                    if (time.monotonic() > ends_s and enough) or self._over.wait(0.2):
                        break
            finally:
                self._over.set()
            for job in jobs:
                job.result()

    def _nemeses(self) -> Mapping[str, Callable[[], None]]:
        return {
            "move": self._move,
            "restart": self._restart,
            "freeze": self._freeze,
            "cut": self._cut,
        }

    def _plague(self) -> None:
        nemeses = self._nemeses()
        for name in rounds(list(nemeses), self._rng):
            if self._over.wait(self._rng.uniform(0.5, 2.0) * self._settings.lease_s):
                return
            nemeses[name]()
            self.outcome.happened[name] += 1
            # What befalls one node after another has to find the cluster in order.
            until(lambda: all(node.is_whole(SHARDS) for node in self._cluster.nodes))

    def _kill(self) -> None:
        rng = random.Random(f"kill {self.outcome.seed}")
        while not self._over.wait(rng.expovariate(1 / _KILL_EVERY_S)):
            for code in self._fleet.replace_the_ended():
                self.outcome.happened[f"worker that ended by itself with {code}"] += 1
            if drawn := self._fleet.draw(rng):
                drawn[0].kill()
                close(drawn[0])
                self._fleet.hire()
                self.outcome.happened["kill"] += 1

    def _move(self) -> None:
        """A shard's slot moves to another node, some keys at a time."""
        slot = slot_of(self._settings, self._rng.randrange(SHARDS))
        source = self._cluster.owner(slot)
        target = self._rng.choice([node for node in self._cluster.nodes if node is not source])
        target.cluster("SETSLOT", slot, "IMPORTING", source.id)
        source.cluster("SETSLOT", slot, "MIGRATING", target.id)
        while keys := source.cluster("GETKEYSINSLOT", slot, _KEYS_AT_ONCE):
            assert isinstance(keys, list)
            options = ("127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            source.client.execute_command("MIGRATE", *options)
            self.outcome.keys_moved += len(keys)
        for node in (target, source, *self._cluster.nodes):
            node.cluster("SETSLOT", slot, "NODE", target.id)

    def _restart(self) -> None:
        """A node dies, and comes back with its data."""
        node = self._node()
        node.kill()
        node.start()

    def _freeze(self) -> None:
        """A node answers nobody for longer than a lease."""
        node = self._node()
        node.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(1.5 * self._settings.lease_s)
        finally:
            node.process.send_signal(signal.SIGCONT)

    def _cut(self) -> None:
        """All connections of clients and workers are cut."""
        for node in self._cluster.nodes:
            node.client.execute_command("CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES")

    def _node(self) -> Node:
        return self._rng.choice(self._cluster.nodes)

    def calm_down(self) -> None:
        """All workers finish and leave in order, and every reply is looked up once more."""
        faults = self.outcome.faults
        if any(codes := self._clients.stop()):
            faults.append(f"clients ended with {codes}")
        try:
            until_stalled(self._quiet, lambda: look(self._settings).counters.get("settled", 0))
        except AssertionError:
            faults.append("what was in flight did not end")
        if any(codes := self._fleet.stop(signal.SIGTERM)):
            faults.append(f"workers that were told to stop ended with {codes}")
        told = self._folder / "keys.history"
        journal = Journal(told, "keys")
        for shard in range(SHARDS):
            tag = Keys(self._settings.prefix, shard, SHARDS).tag
            node = self._cluster.owner(slot_of(self._settings, shard))
            with redis.Redis(port=node.port) as connection:
                keys = list(connection.scan_iter(f"{tag}:*", count=10_000))
                if left := look_up(connection, keys, journal):
                    faults.append(f"left of shard {shard}: {dict(left)}")
        journal.close()
        for log in self._folder.glob("*.log"):
            if (text := log.read_text()).count("Traceback"):
                faults.append(f"{log.name}: {text[text.index('Traceback') :][:2000]}")
        events = chain.from_iterable(map(read, [*self._clients.journals, told]))
        self.outcome.findings = found = check(events, looked_up=True)
        faults += [f"{len(request_ids)} {name}" for name, request_ids in found.faults.items()]

    def _quiet(self) -> bool:
        self._fleet.replace_the_ended()
        status = look(self._settings)
        held = any(row.held for row in status.workers)
        busy = status.priorities or status.quarantined or held
        hired = len(status.workers) == _WORKERS and self._fleet.complete()
        return hired and not busy

    def end(self) -> None:
        """Kills what is left of it."""
        self._clients.kill()
        self._fleet.stop(signal.SIGKILL)


def storm(seed: int, seconds: float, rate: float) -> Outcome:
    """A run on a cluster of its own.

    Args:
        seconds: for how long clients ask and workers are killed, at least.
        rate: requests per second.
    """
    folder = Path(tempfile.mkdtemp(prefix="leanq-soak-", dir="/tmp"))
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(process_group())
        cluster = stack.enter_context(new_cluster())
        run = Storm(cluster, folder, group, seed, rate)
        stack.callback(run.end)
        try:
            run.rage(seconds)
            run.calm_down()
        except BaseException as error:
            error.add_note(f"seed {seed}; {run.outcome.faults}; journals: {folder}")
            raise
    if run.outcome.faults:
        run.outcome.journals = folder
    else:
        shutil.rmtree(folder)
    return run.outcome


def main() -> int:
    """Prints the table; the exit code is 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcome = storm(given.seed, given.seconds, given.rate)
    print(outcome.table())
    return int(bool(outcome.faults))


if __name__ == "__main__":
    sys.exit(main())
