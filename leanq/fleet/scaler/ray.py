"""Ray as a scaler's target: each worker is the child of a detached actor.

Ray starts actors again where their process or node dies. An actor whose child has ended is gone for
good: the scaler decides whether another takes its place. Actors stand in a namespace of Ray's that
is named by the queue's prefix. docs/internals/fleet.md says who sends which signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from leanq.errors import TargetError, UnavailableError, UsageError
from leanq.fleet.scaler.jobs import Job, JobTarget
from leanq.fleet.scaler.local import options_of
from leanq.fleet.scaler.targets import named
from leanq.queue.ray_cluster import publish, published
from leanq.queue.settings import JOB_VARIABLE, Settings

log = logging.getLogger("leanq.scaler")

# Ray's head answers within milliseconds, but the first actor on a node may take a while.
_CALL_S = 60.0
# An actor that does not take an order within this time waits for a node or for its process.
_TELL_S = 5.0
# How often an actor asks whether Ray drains its node. Clouds give notice of 30 s or more.
_DRAINED_EVERY_S = 2.0
# The kernel ends the child with the thread that started it. If that has ended before, do so here.
_CHILD = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the actor has ended")
runpy.run_module("leanq", run_name="__main__")
"""
_T = TypeVar("_T")


class WorkerActor:
    """Runs ``leanq worker`` as a child, and is gone once that has ended.

    ``name``: the actor's, which the worker tells. ``prefix``: of the queue whose settings are at
    Ray's head.
    """

    def __init__(self, name: str, prefix: str, options: Sequence[str]) -> None:
        environ = {**os.environ, **published({"LEANQ_PREFIX": prefix}), JOB_VARIABLE: name}
        self._told_to_go = False
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(os.getpid()), "worker", *options],
            env=environ,
            stdin=subprocess.DEVNULL,
        )
        threading.Thread(target=self._watch, daemon=True).start()

    def drain(self) -> None:
        """Has the worker claim nothing more; may be called again."""
        # A second signal would not wait for what runs.
        if not self._told_to_go:
            self._told_to_go = True
            self._child.terminate()

    def _watch(self) -> None:
        here = ray.get_runtime_context()
        node, me = here.get_node_id(), here.current_actor
        while self._child.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_DRAINED_EVERY_S)
            # While Ray's head is away, the worker goes on.
            with contextlib.suppress(RayError):
                if node in ray._private.state.state.get_draining_nodes():
                    self.drain()
        # Not by an exit, after which Ray would start it again.
        ray.kill(me, no_restart=True)


class Lease:
    """Lives as long as the scaler that made it."""

    def renew(self) -> None:
        """Returns if it still lives."""


class RayTarget(JobTarget):
    """Detached actors of one Ray cluster, one for each worker.

    Args:
        worker: the options of ``leanq worker``; ``{env}`` in them stands for the environment's
            name.
        slots: of each worker, and the CPUs that its actor takes.

    Raises:
        UsageError: no Ray cluster is found, or the options cannot be read.
    """

    def __init__(
        self, settings: Settings, environments: Collection[str], *, worker: str, slots: int
    ) -> None:
        super().__init__(environments)
        self._settings, self._options, self._slots = settings, options_of(worker), slots
        self._lease_name = f"scaler of {', '.join(sorted(environments))}"
        self._lease: Any = None
        # When each actor was ordered, or had a worker for the last time.
        self._since_s: dict[str, float] = {}
        try:
            ray.init(
                "auto", namespace=settings.prefix, log_to_driver=False, logging_level="warning"
            )
        except (ConnectionError, RayError) as error:
            raise UsageError(
                "--target ray: no Ray cluster is found; run the scaler on one of its nodes, or "
                f"name its head by RAY_ADDRESS=HOST:6379 ({error})"
            ) from None

    async def leads(self) -> bool:
        return await _ask(self._leads)

    async def jobs(self, environment: str) -> list[Job]:
        now = time.monotonic()
        names = [
            name
            for name in await _ask(ray.util.list_named_actors)
            if name.rpartition("-")[0] == f"worker-{environment}"
        ]
        ready = self._environments[environment].ready
        for name in names:
            self._since_s[name] = now if name in ready else self._since_s.get(name, now)
        return [Job(name, name, False, now - self._since_s[name]) for name in names]

    async def start(self, environment: str, count: int) -> None:
        await _ask(self._start, environment, count)

    async def end(self, ids: Collection[str], ready: Collection[str]) -> None:
        await _ask(self._end, ids, ready)

    def _leads(self) -> bool:
        if self._lease is not None:
            try:
                ray.get(self._lease.renew.remote(), timeout=_CALL_S)
            except RayError as error:
                log.warning("this scaler leads no longer: %s", error)
                self._lease = None
            else:
                return True
        # It must not outlive this process, and so not stand on another node.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        made = ray.remote(Lease).options(
            name=self._lease_name, num_cpus=0, scheduling_strategy=here
        )
        try:
            lease = made.remote()
        except ValueError:
            return False  # another scaler has that name
        ray.get(lease.renew.remote(), timeout=_CALL_S)
        publish(self._settings.variables())
        self._lease = lease
        return True

    def _start(self, environment: str, count: int) -> None:
        options = [named(option, environment) for option in self._options]
        options = ["--slots", str(self._slots), *options]
        for _ in range(count):
            name = f"worker-{environment}-{secrets.token_hex(6)}"
            ray.remote(WorkerActor).options(
                name=name,
                lifetime="detached",
                num_cpus=self._slots,
                max_restarts=-1,
                scheduling_strategy="SPREAD",
            ).remote(name, self._settings.prefix, options)

    def _end(self, ids: Collection[str], ready: Collection[str]) -> None:
        told, unready = [], {}
        for name in ids:
            # It may have ended since.
            with contextlib.suppress(ValueError):
                actor = ray.get_actor(name)
                told.append(order := actor.drain.remote())
                if name not in ready:
                    unready[order] = actor
        if unready:
            _, deaf = ray.wait(list(unready), num_returns=len(unready), timeout=_TELL_S)
            for order in deaf:
                ray.kill(unready[order], no_restart=True)


async def _ask(function: Callable[..., _T], *arguments: object) -> _T:
    """Returns what a blocking call of Ray's returns; raises TargetError."""
    try:
        return await asyncio.to_thread(function, *arguments)
    except (RayError, UnavailableError) as error:
        raise TargetError(f"Ray: {' '.join(str(error).split())}") from None
