"""``make ray-test``: a fleet on a real Ray cluster of this machine.

    python -m engines.ray

Ray comes from the package index. Its head and two nodes of two CPUs run on this machine, started by
Ray's own means for tests. A burst takes the fleet from nothing to four workers and back. Meanwhile
an actor is killed, the scaler starts anew beside a second one, a node is drained and another one is
removed. Every request has its verdict, and no more workers run than were allowed. A reward function
in a task of Ray's finds the queue without configuration. The end says what CPU Ray took.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import ray
from ray._private.state import actors as ray_actors
from ray.cluster_utils import Cluster

from engines.machine import run, until
from leanq import LeanQClient, LeanQFuture
from leanq.local import find_server
from leanq.queue.settings import Settings

MOST, WAITING, QUIET, CHECKS, SLOTS = 4, 300, 100, 20, 8
CPUS, STORE_BYTES = 2, 100 << 20
PASSWORD = "not-for-the-dashboard"
_MARK = "RAY_TEST_OF_LEANQ"
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Runs the course; no process of it is left."""
    os.environ |= {_MARK: str(os.getpid()), "RAY_USAGE_STATS_ENABLED": "0"}
    with contextlib.ExitStack() as at_end:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="ray-")))
        os.environ["RAY_TMPDIR"] = str(folder)
        at_end.callback(_end_all)
        settings = at_end.enter_context(_redis(folder))
        cluster = at_end.enter_context(_cluster())
        fleet = Fleet(folder, settings, cluster)
        at_end.callback(fleet.close)
        _course(fleet)
    return 0


class Fleet:
    """A queue, a cluster and its scalers."""

    def __init__(self, folder: Path, settings: Settings, cluster: Cluster) -> None:
        self.settings, self.cluster = settings, cluster
        self._folder = folder
        self._scalers: list[subprocess.Popen[bytes]] = []

    def scaler(self, *options: str) -> subprocess.Popen[bytes]:
        """Starts a scaler of four workers at most."""
        command = [sys.executable, "-m", "leanq", "scale", "--target", "ray"]
        command += ["--max-workers", str(MOST), "--every", "2s", "--deadline", "20s"]
        command += ["--scale-down-delay", "8s", *options]
        environ = os.environ | {"LEANQ_URL": self.settings.url}
        environ["RAY_ADDRESS"] = self.cluster.address
        with (self._folder / "scalers.log").open("ab") as log:
            scaler = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        self._scalers.append(scaler)
        return scaler

    def close(self) -> None:
        """Ends the scalers, and shows what they said if the course has failed."""
        for scaler in self._scalers:
            scaler.terminate()
            scaler.wait(60)
        if sys.exc_info()[0] is not None:
            print((self._folder / "scalers.log").read_text(errors="replace")[-6000:], flush=True)

    def serving(self) -> dict[str, int]:
        """The actor of each worker that is alive, and its process."""
        environ = os.environ | {"LEANQ_URL": self.settings.url}
        command = (sys.executable, "-m", "leanq", "status", "--json")
        status = json.loads(run(*command, environ=environ))
        living = (w["worker"] for w in status["workers"] if w["lease_s"] > 0)
        # A worker's name has its host, its process and what makes it unique.
        pids = [int(worker.split("-")[-2]) for worker in living]
        return {_job(pid): pid for pid in pids if _lives(pid)}


def actors(environment: str) -> list[str]:
    """The actors of an environment's workers, those that wait or start too."""
    names = ray.util.list_named_actors()
    return sorted(name for name in names if name.startswith(f"worker-{environment}-"))


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[Settings]:
    """A server with a password, which nobody else on this machine reads in a list of processes."""
    options = f"port 0\nunixsocket {folder}/redis\nrequirepass {PASSWORD}\nsave ''\ndir {folder}\n"
    server = subprocess.Popen(
        [str(find_server()), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        assert server.stdin
        server.stdin.write(options.encode())
        server.stdin.close()
        until((folder / "redis").exists)
        yield Settings(url=f"unix://:{PASSWORD}@{folder}/redis")
    finally:
        server.terminate()
        server.wait(30)


@contextlib.contextmanager
def _cluster() -> Iterator[Cluster]:
    small = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=CPUS, object_store_memory=STORE_BYTES)
        ray.init(cluster.address, namespace="leanq", log_to_driver=False, logging_level="error")
        print(f"Ray {ray.__version__} with 2 nodes of {CPUS} CPUs", flush=True)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def _course(fleet: Fleet) -> None:
    echo = ("--env", "echo", "--worker", f"--driver echo --slots {SLOTS}")
    scaler = fleet.scaler(*echo)
    with LeanQClient(fleet.settings) as lean, _Most() as watch:
        with _Load(lean) as load:
            _burst(fleet, load, scaler, echo)
        futures = load.futures
        assert [future.result(300) for future in futures] == [
            b"%d" % n for n in range(len(futures))
        ]
        print(f"{len(futures)} of {len(futures)} answered", flush=True)
        began = time.monotonic()
        until(lambda: actors("echo") == [], 120.0)
        print(f"no worker {time.monotonic() - began:.0f} s after its end", flush=True)
    assert max(watch.seen) == MOST, watch.seen
    _rewards(fleet)


class _Load(threading.Thread):
    """Keeps as many requests outstanding until the end of the block, however long that takes."""

    def __init__(self, lean: LeanQClient) -> None:
        super().__init__(daemon=True)
        self._lean = lean
        self._over = threading.Event()
        self.futures: list[LeanQFuture[bytes]] = []

    def run(self) -> None:
        """Until the end of the block."""
        while not self._over.wait(0.5):
            for _ in range(WAITING - len(self.futures) + self.done()):
                self.futures.append(self._lean.echo(b"%d" % len(self.futures), delay_s=6.0))

    def done(self) -> int:
        """How many have ended."""
        return sum(future.done() for future in tuple(self.futures))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


class _Most(threading.Thread):
    """Looks twice a second how many actors there are."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self.seen: Counter[int] = Counter()

    def run(self) -> None:
        """Until the end of the block."""
        while not self._over.wait(0.5):
            self.seen[len(actors("echo"))] += 1

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        # Ray would connect once more for a late look.
        self.join()


def _burst(
    fleet: Fleet, load: _Load, scaler: subprocess.Popen[bytes], echo: tuple[str, ...]
) -> None:
    began = time.monotonic()

    def serve(workers: int) -> Callable[[], bool]:
        return lambda: len(actors("echo")) == len(fleet.serving()) == workers

    def said(what: str) -> None:
        print(f"{what} {time.monotonic() - began:.0f} s after the start", flush=True)

    until(serve(MOST), 300.0)
    said(f"{MOST} workers")
    _quiet(load)
    killed, child = next(iter(fleet.serving().items()))
    os.kill(_parent(child), signal.SIGKILL)
    until(lambda: not _lives(child))
    # By its name: Ray has started the same actor again.
    until(lambda: fleet.serving().get(killed, child) != child, 120.0)
    said("an actor killed: Ray has started it again")
    second = fleet.scaler(*echo)
    scaler.kill()
    scaler.wait(20)
    adopted = set(actors("echo"))
    child = next(iter(fleet.serving().values()))
    os.kill(child, signal.SIGKILL)
    until(lambda: bool(set(actors("echo")) - adopted), 120.0)
    until(serve(MOST), 120.0)
    assert len(adopted & set(actors("echo"))) == MOST - 1
    assert second.poll() is None
    said("the scaler killed: a second one knows its workers, and replaces one that died")
    drained, removed = [node for node in fleet.cluster.list_all_nodes() if not node.head]
    there = _on(drained.node_id)
    _drain(fleet.cluster, drained.node_id)
    until(lambda: not there & set(actors("echo")), 120.0)
    fleet.cluster.remove_node(drained)
    fleet.cluster.add_node(num_cpus=CPUS, object_store_memory=STORE_BYTES)
    until(serve(MOST), 180.0)
    said("a node drained: its workers gave back what they held, and others came")
    gone = _on(removed.node_id)
    fleet.cluster.remove_node(removed, allow_graceful=False)
    fleet.cluster.add_node(num_cpus=CPUS, object_store_memory=STORE_BYTES)
    until(lambda: gone <= fleet.serving().keys() and len(fleet.serving()) == MOST, 180.0)
    said("a node removed: Ray has started its actors on another one")


def _quiet(load: _Load) -> None:
    """What CPU is taken while nothing but requests happens. None of them passes through Ray."""
    before, at_first, began = _cpu_s(), load.done(), time.monotonic()
    until(lambda: load.done() >= at_first + QUIET, 120.0)
    passed_s = time.monotonic() - began
    took = {what: (s - before[what]) * 1000 for what, s in _cpu_s().items() if what in before}
    shown = ", ".join(f"{what} {ms / passed_s:.1f}" for what, ms in sorted(took.items()))
    print(
        f"milliseconds of CPU a second, with {MOST} workers: {shown}; {QUIET} requests in "
        f"{passed_s:.0f} s at a load of {os.getloadavg()[0]:.0f}",
        flush=True,
    )


def _rewards(fleet: Fleet) -> None:
    """A function within Ray, which no one has told where the queue is."""
    fleet.scaler("--env", "default", "--min-workers", "1")
    # The queue refuses texts for an environment that no worker has ever offered.
    until(lambda: len(fleet.serving()) == 1, 180.0)

    @ray.remote(num_cpus=1)
    def score(texts: list[str]) -> list[str]:
        from leanq import LeanQClient

        with LeanQClient() as lean:
            return [reply.result(240).verdict for reply in map(lean.check, texts)]

    texts = [f"theorem t{n} (p : Prop) (h : p) : p := h" for n in range(CHECKS)]
    texts.append("theorem t (p : Prop) : p := sorry")
    assert "LEANQ_URL" not in os.environ
    found = ray.get(score.remote(texts), timeout=300)
    assert found == ["accepted"] * CHECKS + ["incomplete"]
    print(f"real Lean: {CHECKS} of {CHECKS} accepted for a function within Ray", flush=True)


def _drain(cluster: Cluster, node: str) -> None:
    command = [str(Path(sys.executable).parent / "ray"), "drain-node", "--address", cluster.address]
    command += ["--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    run(*command, "--reason-message", "a test", "--deadline-remaining-seconds", "60")


def _on(node: str) -> set[str]:
    """The workers' actors that run on a node."""
    known = ray_actors(actor_state_name="ALIVE").values()
    there = {actor["Name"] for actor in known if actor["Address"]["NodeID"] == node}
    return there & set(actors("echo"))


def _environ(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _job(pid: int) -> str:
    return _environ(pid).get("LEANQ_JOB", "")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _ours() -> Iterator[int]:
    """The processes that the course has started, at any distance."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if pid != os.getpid() and _environ(pid).get(_MARK) == str(os.getpid()):
                yield pid


def _cpu_s() -> dict[str, float]:
    """CPU seconds of those that live: Ray's own, its actors, and leanq's workers."""
    took: Counter[str] = Counter()
    for pid in _ours():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            what = "actors" if words.startswith(b"ray::WorkerActor") else "Ray"
            what = "workers" if b"runpy" in words else what
            what = "scaler" if b"leanq scale" in words else what
            took[what] += (int(fields[11]) + int(fields[12])) / _TICKS
    return dict(took)


def _end_all() -> None:
    """Ends what Ray's shutdown has left, and fails if it has left a worker."""
    until(lambda: not any(_job(pid) for pid in _ours()), 60.0)
    for pid in list(_ours()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(_lives, _ours())))


if __name__ == "__main__":
    sys.exit(main())
