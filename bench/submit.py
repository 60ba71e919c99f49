"""What leanq costs: the same Lean files through ``leanq submit`` and through plain ``xargs``.

All that is compared is run in turn, round by round, on the same files with the same number of
Lean processes; each figure is the median of the rounds' ratios, so whatever else the machine
does weighs on both sides alike. Nothing of the user's is used or changed but the installed wheels.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import leanq
from leanq.client import AsyncLeanQClient
from leanq.commands.build import cpus
from leanq.config import Settings
from leanq.drivers.environment import Environment, open_environment
from leanq.local import EmbeddedServer
from leanq.queue import Queue

_LEANQ = (sys.executable, "-c", "from leanq.cli import main; main()")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ECHOES, _ECHOES_EACH, _OUTSTANDING, _ECHO_SLOTS = 500, 5, 1000, 256

# Name, what it is, how its number is written, target.
_FIGURES = (
    ("xargs_ms", "xargs: time of the call per file", "{:.1f} ms", "–"),
    ("cold", "`submit --no-audit` / xargs, server and worker started for it", "{:.3f}", "≤ 1.10"),
    ("warm", "`submit --no-audit` / xargs, with a fleet that runs", "{:.3f}", "–"),
    ("audit", "audit adds, of the call: theorems only", "{:.1%}", "≤ 40 %"),
    ("audit_field", "audit adds, of the replies' `audit_s`: theorems only", "{:.1%}", "≤ 40 %"),
    ("audit_examples", "audit adds, of the call: an `example` in each file", "{:.1%}", "–"),
    ("idle_worker", "idle worker with its wardens, of one CPU", "{:.2f} %", "< 1 %"),
    ("idle_server", "idle server, of one CPU", "{:.2f} %", "–"),
    ("echo_p50", "echo round trip, one outstanding: p50", "{:.2f} ms", "–"),
    ("echo_p99", "echo round trip, one outstanding: p99", "{:.2f} ms", "–"),
    ("echo_rate", f"echo, {_OUTSTANDING} outstanding", "{:.0f} / s", "–"),
)


@dataclass(frozen=True)
class Bench:
    """A user with folders of his own. Files are named without their ``.lean``."""

    folder: Path
    environment: Environment
    theorems: list[str]
    examples: list[str]
    environ: dict[str, str]
    figures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def main() -> None:
    """Prints the table. Ctrl-C and SIGTERM leave nothing behind either."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", type=int, default=200, help="Lean files in a call")
    parser.add_argument("--rounds", type=int, default=5, help="times that everything is run")
    parser.add_argument(
        "--idle-s", type=float, default=20.0, help="how long to watch an idle fleet"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="leanq-bench-") as folder:
            bench = prepare(Path(folder), options.files)
            with EmbeddedServer() as server:
                about = measure(bench, server.url, options.rounds, options.idle_s)
            print(f"{options.files} files, {options.rounds} rounds; {about}\n")
            print("\n".join(table(bench.figures)))
    except KeyboardInterrupt:
        sys.exit(130)


def prepare(folder: Path, count: int) -> Bench:
    """Writes the files, and finds the same Lean for both sides."""
    for name in ("cache", "files", "home", "tmp"):
        Path(folder, name).mkdir()
    environ = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(Path(leanq.__file__).parents[1]),
        "HOME": f"{folder}/home",
        "TMPDIR": f"{folder}/tmp",
        "LEANQ_CACHE": f"{folder}/cache",
    }
    theorems = [f"theorem_{number}" for number in range(count)]
    # Each is compiled twice when it is audited; a quarter of the files says as much.
    examples = [f"example_{number}" for number in range(max(1, count // 4))]
    for number, name in enumerate(theorems):
        write(folder, name, f"theorem bench_{number} {statement(number)}")
    for number, name in enumerate(examples):
        write(folder, name, f"example {statement(number)}")
    environment = open_environment("default", None, environ=environ)
    return Bench(folder, environment, theorems, examples, environ)


def write(folder: Path, name: str, command: str) -> None:
    Path(folder, "files", f"{name}.lean").write_text(f"prelude\nimport Core\n\n{command}\n")


def statement(number: int) -> str:
    """A small statement with its proof by tactics; the conjunction is each time another one."""
    names = [f"p{number}", f"q{number}", "r"]
    left, middle, right = names if number % 2 else reversed(names)
    return (
        f"({' '.join(names)} : Prop) :\n"
        f"    And {left} (And {middle} {right}) → And (And {right} {middle}) {left} := by\n"
        "  intro h\n  constructor\n  constructor\n"
        "  exact h.right.right\n  exact h.right.left\n  exact h.left"
    )


def measure(bench: Bench, url: str, rounds: int, idle_s: float) -> str:
    """Fills ``bench.figures``; what the machine is made of."""
    fleet = {**bench.environ, "LEANQ_URL": url}
    info = asyncio.run(server_info(url))
    with worker(bench, fleet) as lean_worker:
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            measure_round(bench, fleet, backwards=number % 2 == 1)
        print(f"watching an idle fleet for {idle_s:g} s", file=sys.stderr)
        trees = {"idle_worker": lean_worker, "idle_server": int(info["process_id"])}
        for name, share in idle_percent(trees, idle_s).items():
            bench.figures[name].append(share)
    with worker(bench, fleet, "--driver", "echo", "--slots", str(_ECHO_SLOTS)):
        for _ in range(rounds):
            asyncio.run(measure_echo(bench, url))
    server = info.get("valkey_version") or info["redis_version"]
    lean = bench.environment.toolchain.version
    return f"{cpus()} CPUs, Python {platform.python_version()}, Valkey {server}, Lean {lean}"


async def server_info(url: str) -> Mapping[str, Any]:
    queue = Queue(Settings(url=url))
    try:
        return await queue.ping()
    finally:
        await queue.close()


def measure_round(bench: Bench, fleet: Mapping[str, str], *, backwards: bool) -> None:
    """Runs each of the commands once; every other round in the opposite order."""
    alone, theorems, examples = bench.environ, bench.theorems, bench.examples
    calls = {
        "xargs": lambda: xargs(bench),
        "cold": lambda: submit(bench, theorems, alone, "--no-audit"),
        "cold_audited": lambda: submit(bench, theorems, alone),
        "warm": lambda: submit(bench, theorems, fleet, "--no-audit"),
        "examples": lambda: submit(bench, examples, fleet, "--no-audit"),
        "examples_audited": lambda: submit(bench, examples, fleet),
    }
    runs = {name: calls[name]() for name in (reversed(calls) if backwards else calls)}
    took = {name: seconds for name, (seconds, _) in runs.items()}
    replies = [json.loads(line) for line in runs["cold_audited"][1].splitlines()]
    audit_s = sum(reply["audit_s"] for reply in replies)
    check_s = sum(reply["wall_s"] for reply in replies) - audit_s
    for name, value in {
        "xargs_ms": 1000 * took["xargs"] / len(theorems),
        "cold": took["cold"] / took["xargs"],
        "warm": took["warm"] / took["xargs"],
        "audit": took["cold_audited"] / took["cold"] - 1,
        "audit_field": audit_s / check_s,
        "audit_examples": took["examples_audited"] / took["examples"] - 1,
    }.items():
        bench.figures[name].append(value)


def xargs(bench: Bench) -> tuple[float, bytes]:
    """Seconds for all theorems through the driver's own command of Lean, and what it printed."""
    environment = bench.environment
    scratch = Path(bench.environ["TMPDIR"])
    lean = [*environment.toolchain.command, *environment.options, "--json"]
    command = ["xargs", "-P", str(cpus()), "-I{}", *lean, "-o", f"{scratch}/{{}}.olean", "{}.lean"]
    environ = {**environment.process_env(), "HOME": str(scratch), "TMPDIR": str(scratch)}
    timed = run(bench, command, environ, stdin="\n".join(bench.theorems).encode())
    for name in bench.theorems:
        Path(scratch, f"{name}.olean").unlink()
    return timed


def submit(
    bench: Bench, names: Sequence[str], environ: Mapping[str, str], *options: str
) -> tuple[float, bytes]:
    """Seconds for one ``leanq submit``, from its start to its end, and its JSON lines."""
    files = [f"{name}.lean" for name in names]
    return run(bench, [*_LEANQ, "submit", "--json", *options, *files], environ)


def run(
    bench: Bench, command: Sequence[str], environ: Mapping[str, str], stdin: bytes = b""
) -> tuple[float, bytes]:
    """Seconds from start to end of a command that has to succeed, and what it printed."""
    with tempfile.TemporaryFile() as feed:
        feed.write(stdin)
        feed.seek(0)
        started = time.perf_counter()
        with process(bench, command, environ, stdin=feed, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            said = child.stdout.read()
            code = child.wait()
        seconds = time.perf_counter() - started
    if code != 0:
        sys.exit(f"{command[:4]} ended with {code}: {said[-2000:].decode()}")
    return seconds, said


@contextlib.contextmanager
def process(
    bench: Bench, command: Sequence[str], environ: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A command in ``files``; on leaving, it is interrupted if it still runs, and has ended.

    In a session of its own, so that Ctrl-C reaches this process alone, which ends the others.
    """
    with subprocess.Popen(
        command, env=environ, cwd=bench.folder / "files", start_new_session=True, **streams
    ) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGINT)
            for stream in (child.stdout, child.stderr):
                if stream:
                    stream.read()  # ends with the last process of the command


@contextlib.contextmanager
def worker(bench: Bench, environ: Mapping[str, str], *options: str) -> Iterator[int]:
    """The pid of a worker of the fleet's that is ready."""
    command = [*_LEANQ, "worker", *options]
    with process(bench, command, environ, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if b" serves " in line:
                break
        else:
            sys.exit("the worker does not start")
        yield child.pid


def idle_percent(roots: Mapping[str, int], seconds: float) -> dict[str, float]:
    """What each process with all its descendants uses of one CPU, in percent."""
    before = {name: cpu_s(pid) for name, pid in roots.items()}
    time.sleep(seconds)
    return {name: 100 * (cpu_s(pid) - before[name]) / seconds for name, pid in roots.items()}


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of all below it, the ended ones included."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    ticks = sum(map(int, stat[stat.rindex(")") + 2 :].split()[11:15]))
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return ticks / _TICKS_PER_S + sum(map(cpu_s, children))


async def measure_echo(bench: Bench, url: str) -> None:
    """Round trips one by one, then requests per second with many outstanding."""
    async with AsyncLeanQClient(Settings(url=url)) as client:

        async def echo_ms(times: int) -> list[float]:
            moments = [time.perf_counter()]
            for _ in range(times):
                await client.echo(b"payload")
                moments.append(time.perf_counter())
            return [1000 * (after - before) for before, after in pairwise(moments)]

        trips_ms = await echo_ms(_ECHOES)
        started = time.perf_counter()
        await asyncio.gather(*(echo_ms(_ECHOES_EACH) for _ in range(_OUTSTANDING)))
        took_s = time.perf_counter() - started
    bench.figures["echo_p50"].append(statistics.median(trips_ms))
    bench.figures["echo_p99"].append(statistics.quantiles(trips_ms, n=100)[98])
    bench.figures["echo_rate"].append(_OUTSTANDING * _ECHOES_EACH / took_s)


def table(figures: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """Markdown: a line for each figure of ``_FIGURES``."""
    yield "| figure | median | target | min – max |"
    yield "| --- | --- | --- | --- |"
    for name, what, form, target in _FIGURES:
        values = figures[name]
        shown = [
            form.format(each) for each in (statistics.median(values), min(values), max(values))
        ]
        spread = f"{shown[1]} – {shown[2]}" if len(values) > 1 else "one run"
        yield f"| {what} | {shown[0]} | {target} | {spread} |"


main()
