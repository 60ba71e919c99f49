"""``leanq worker`` and ``leanq up``: checks and steps for a queue until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from leanq.commands import options
from leanq.commands.common import beside, queue_settings
from leanq.commands.environments import environments, openers
from leanq.consumer.consumer import WorkerTimings
from leanq.errors import UsageError
from leanq.fleet.logging import log_to_stderr
from leanq.fleet.prometheus import Sample, counted_samples, page_at
from leanq.lean.driver import EchoDriver, LeanDriver, worker_cache
from leanq.lean.run.documents import DocumentRules
from leanq.lean.run.fork_server import ForkRules
from leanq.lean.run.headers_memory import HeadersMemory, default_bytes
from leanq.lean.sandbox.sandbox import probe
from leanq.lean.sandbox.walls import require_walls as demand
from leanq.queue.settings import Settings
from leanq.queue.up_file import UpFile
from leanq.worker import Worker

# How long a worker without its server may take to end its requests.
_WITHOUT_SERVER_S = 5.0

worker_options = options.combined(
    click.option(
        "--slots",
        type=options.WholeRange(1, 4096),
        help="Lean processes at a time [default: the CPUs, or the share of them].",
    ),
    click.option(
        "--driver",
        type=click.Choice(["lean", "server", "echo"]),
        default="lean",
        help="What reads texts: Lean, in forks where it can; Lean's language server in place of "
        "forks; or an echo for tests of the queue.",
    ),
    environments,
    click.option(
        "--require-walls",
        is_flag=True,
        help="End at once, and name what is missing, if the sandbox lacks namespaces, Landlock or "
        "the filter of system calls.",
    ),
    click.option(
        "--judge-alone",
        is_flag=True,
        help="Judge each file in a process of its own; else up to eight files of one tenant follow "
        "one another in one.",
    ),
    click.option(
        "--lean-alone",
        is_flag=True,
        help="Give each text a fork of its own; else up to eight texts of one tenant, which run no "
        "programs, follow one another in one.",
    ),
    click.option(
        "--headers-memory",
        "headers_memory_mb",
        type=options.WholeRange(256, 1 << 30, "MB"),
        help="Memory in MiB of all processes that stand ready behind headers: zygotes, steps' and "
        "judges' [default: what the machine or cgroup has beside 256 for the worker, and 4096 of "
        "memory with 256 of scratch disk for each slot; at least 512].",
    ),
    click.option(
        "--no-fork-server",
        is_flag=True,
        help="Fork no process that has imported a header: Lean's language server reads texts, and "
        "Lean starts anew to compile one.",
    ),
    click.option(
        "--trust-steps",
        is_flag=True,
        help="Take Lean's word for a step that leaves no goal, without the judge: such a step is "
        "unjudged (trusted_step).",
    ),
    click.option(
        "--metrics-port",
        type=options.PORT,
        help="Serve /metrics and /healthz on this port; 0 takes any free one, and logs it.",
    ),
    options.metrics_host,
    click.option(
        "--grace",
        "grace_s",
        type=options.FiniteRange(0, 3600, "seconds"),
        default=10.0,
        help="Seconds from SIGTERM to the end; unfinished requests go back to the queue.",
    ),
    click.option(
        "--exit-when-idle",
        "exit_when_idle_s",
        type=options.FiniteRange(0, 1e9, "seconds", min_open=True),
        help="Seconds without a request after which the worker ends [default: never].",
    ),
    click.option(
        "--exit-when-away",
        "exit_when_away_s",
        type=options.FiniteRange(0, 1e9, "seconds", min_open=True),
        help="Seconds without an answer of the Redis after which the worker ends, with code 3 "
        "[default: never].",
    ),
    click.option(
        "--nice",
        type=options.WholeRange(0, 19),
        default=0,
        help="Niceness of the Lean processes; at 19 they get only what nobody else wants. With the "
        "sysctl kernel.sched_autogroup_enabled=1 it counts only among those of a session, and Lean "
        "has its own.",
    ),
    click.option(
        "--cpu-share",
        type=options.FiniteRange(0, 1, min_open=True),
        default=1.0,
        help="Keep the worker and its Lean processes to this share of the CPUs.",
    ),
)
"""The options of a worker: the arguments of :func:`make_worker`, and those of its metrics."""


@click.command()
@options.queue
@worker_options
def worker(
    url: str | None, as_json: bool, metrics_port: int | None, metrics_host: str, **how: Any
) -> None:
    """Run requests of the queue until SIGTERM, then drain.

    With --json it logs JSON lines. If Lean does not work on this machine, it ends with code 3. Its
    claimed requests then go back to the queue, and the attempt does not count against them.
    """
    settings = queue_settings(url)
    log_to_stderr(as_json)
    made = make_worker(settings, **how)
    with metrics_page(made, metrics_port, metrics_host):
        asyncio.run(run_until_stopped(made))


@click.command()
@worker_options
def up(metrics_port: int | None, metrics_host: str, **how: Any) -> None:
    """Run a server and a worker that later commands find."""
    # A worker of a fleet needs none of it.
    from leanq.local import EmbeddedServer

    log_to_stderr(False)
    place = UpFile(os.environ)
    with EmbeddedServer() as server:
        settings = server.settings()
        worker = make_worker(settings, **how)

        async def run() -> None:
            async with (
                beside(announce()),
                beside(run_until_stopped(worker)) as serving,
                beside(server.watch()) as watching,
            ):
                await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    # Later commands would find a socket that nobody listens at.
                    place.remove()
                    worker.stop(grace_s=0.0)
                    await asyncio.wait({serving}, timeout=_WITHOUT_SERVER_S)
                    await watching
                await serving

        async def announce() -> None:
            # Only once a worker is there whose Lean works.
            await worker.joined.wait()
            click.echo(f"leanq is up; LEANQ_URL={server.url} (Ctrl-C ends it)", err=True)

        place.write(settings)
        try:
            with metrics_page(worker, metrics_port, metrics_host):
                asyncio.run(run())
        finally:
            place.remove()


def cpus() -> int:
    """Returns how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def keep_to(share: float) -> None:
    """Limits this process, and all that it starts from now on, to a share of its CPUs.

    It sets an affinity, which needs no cgroup; other processes may use these CPUs too. It takes
    those with the highest numbers, since most programs that are bound by hand begin at 0.
    """
    usable = sorted(os.sched_getaffinity(0))
    # Rounding must not make eight of 0.7 times ten.
    count = max(1, math.ceil(share * len(usable) - 1e-9))
    os.sched_setaffinity(0, usable[-count:])


def make_worker(
    settings: Settings,
    *,
    driver: str = "lean",
    environments: Sequence[str] = (),
    lean: str | None = None,
    env_options: Sequence[str] = (),
    env_options_of_project: bool = False,
    trust_steps: bool = False,
    require_walls: bool = False,
    no_fork_server: bool = False,
    judge_alone: bool = False,
    lean_alone: bool = False,
    headers_memory_mb: int | None = None,
    slots: int | None = None,
    grace_s: float = 10.0,
    nice: int = 0,
    cpu_share: float = 1.0,
    exit_when_idle_s: float | None = None,
    exit_when_away_s: float | None = None,
) -> Worker:
    """Returns a worker for the environments given as ``NAME=PATH``; without any, for ``default``.

    With a ``cpu_share`` below 1, the whole process is limited to that share of its CPUs.

    Raises:
        UsageError: an environment or an option of one is not as :func:`openers` takes it.
        ToolchainError: there is no usable Lean, or an environment cannot be read.
        SandboxError: a required wall is missing.
    """
    if driver == "echo" and (environments or lean or env_options or env_options_of_project):
        raise UsageError(
            "--env…, --env-option… and --lean are for drivers with Lean; echo offers 'echo' alone"
        )
    if cpu_share < 1:
        keep_to(cpu_share)
    timings = WorkerTimings(
        exit_when_idle_s=exit_when_idle_s or math.inf, exit_when_away_s=exit_when_away_s or math.inf
    )
    made = partial(Worker, settings, slots=slots or cpus(), grace_s=grace_s, timings=timings)
    if driver == "echo":
        return made([EchoDriver()])
    if require_walls:
        demand(probe())
    made_of: Any = {
        "slots": slots or cpus(),
        "cache": worker_cache(settings),
        "hidden": _server_folder(settings),
        "nice": nice,
        "judge_alone": judge_alone,
        "trust_steps": trust_steps,
        "forks": None
        if no_fork_server or driver == "server"
        else ForkRules(compare_every=settings.compare_every, shares=not lean_alone),
        "documents": DocumentRules(compare_every=settings.compare_every),
        "memory": HeadersMemory(
            default_bytes(slots or cpus()) if headers_memory_mb is None else headers_memory_mb << 20
        ),
    }
    found = openers(environments, lean, env_options, env_options_of_project)
    return made([LeanDriver(each, **made_of) for each in found.values()])


def _server_folder(settings: Settings) -> list[Path]:
    """Returns the folder of the server's socket, and of its target if it is a link."""
    if not settings.url.startswith("unix:"):
        return []
    socket = Path(urlsplit(settings.url).path)
    return list(dict.fromkeys([socket.parent, socket.resolve().parent]))


def metrics_page(
    worker: Worker, port: int | None, host: str
) -> contextlib.AbstractContextManager[object]:
    """Returns the worker's metrics page, if a port was named for it."""

    def read() -> Iterator[Sample]:
        pool = worker.slot_pool
        yield "leanq_worker_slots", ("busy",), pool.slots.taken
        yield "leanq_worker_slots", ("idle",), pool.slots.free
        yield "leanq_worker_quarantined", (), float(pool.breaker.quarantined)
        yield "leanq_worker_longest_run_seconds", (), worker.longest_run_s
        yield from counted_samples()

    return page_at(port, "worker", read, worker.joined.is_set, host)


async def run_until_stopped(worker: Worker) -> None:
    """Runs the worker; SIGTERM and SIGINT drain it, and a second one does not wait."""
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        worker.stop(None if signals == 1 else 0.0)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    # All imports stay. To walk through them takes 6 ms, in which nothing is answered.
    gc.collect()
    gc.freeze()
    await worker.run()
