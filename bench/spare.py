"""What a busy program loses to a worker of deploy/spare-cpus.sh beside it.

    python bench/spare.py [--pairs 30] [--seconds 4]

A stand-in for a trainer hashes on every CPU. Lean has more to do than it can. In each pair of
intervals the worker runs in one and is stopped (SIGSTOP) in the other, in turns of which comes
first. Printed are the medians over the pairs: the stand-in's work, its work for each second of CPU
that it got, and the CPU that the worker's processes took, as a share of the stand-in's.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import mmap
import os
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import Process
from pathlib import Path

from leanq import LeanQClient, UsageError
from leanq.local import EmbeddedServer

ROOT = Path(__file__).resolve().parents[1]
_TICKS = os.sysconf("SC_CLK_TCK")
_COUNTER = struct.Struct("q")
_BLOCK = bytes(1 << 16)
_START_S = 120.0


@dataclass
class Interval:
    """What happened in one: hashes, and CPU seconds of the stand-in and of the worker."""

    hashes: int
    passed_s: float
    own_s: float
    worker_s: float

    @property
    def hashes_per_s(self) -> float:
        return self.hashes / self.passed_s

    @property
    def hashes_per_cpu_s(self) -> float:
        return self.hashes / self.own_s


def main() -> int:
    """Prints what the stand-in loses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=4.0, help="of an interval")
    parser.add_argument("--share", type=float, default=0.5, help="of the CPUs, for the worker")
    options = parser.parse_args()
    with _stand_in() as hashes, _worker(options.share) as worker:
        with_it, without = [], []
        for n in range(2 * options.pairs):
            runs = n % 4 in (0, 3)
            # The script looks about once a second, which is part of the cost.
            tree = [worker, *_tree(worker)]
            for pid in tree:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT if runs else signal.SIGSTOP)
            (with_it if runs else without).append(_interval(hashes, tree, options.seconds))
        for pid in (worker, *_tree(worker)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    _tell(with_it, without)
    return 0


def _tell(with_it: list[Interval], without: list[Interval]) -> None:
    both = list(zip(with_it, without, strict=True))
    for what, ratios in (
        ("work", [a.hashes_per_s / b.hashes_per_s for a, b in both]),
        (
            "work for a second of its CPU",
            [a.hashes_per_cpu_s / b.hashes_per_cpu_s for a, b in both],
        ),
    ):
        low, middle, high = statistics.quantiles(ratios, n=4)
        error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
        print(
            f"{what}, with / without: {middle:.3f} ± {error:.3f} (quartiles {low:.3f}, {high:.3f})"
        )
    took = statistics.median(i.worker_s / i.own_s for i in with_it)
    total_s = statistics.median(i.own_s for i in with_it)
    print(f"the worker's CPU / the stand-in's: {took:.4f}; {total_s:.1f} s in an interval")
    print(f"{len(both)} pairs, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.0f}")


def _interval(hashes: list[mmap.mmap], tree: Iterable[int], seconds: float) -> Interval:
    tree = list(tree)
    own = [process.pid for process in _STAND_INS]
    began, at_first = time.monotonic(), _count(hashes)
    own_s, worker_s = _cpu_s(own), _cpu_s(tree)
    time.sleep(seconds)
    passed_s, made = time.monotonic() - began, _count(hashes) - at_first
    return Interval(made, passed_s, _cpu_s(own) - own_s, max(0.0, _cpu_s(tree) - worker_s))


_STAND_INS: list[Process] = []


@contextlib.contextmanager
def _stand_in() -> Iterator[list[mmap.mmap]]:
    hashes = [mmap.mmap(-1, _COUNTER.size) for _ in range(os.cpu_count() or 1)]
    _STAND_INS[:] = [Process(target=_hash, args=(each,), daemon=True) for each in hashes]
    for process in _STAND_INS:
        process.start()
    try:
        yield hashes
    finally:
        for process in _STAND_INS:
            process.terminate()


def _hash(counter: mmap.mmap) -> None:
    for n in itertools.count(1):
        hashlib.sha256(_BLOCK).digest()
        _COUNTER.pack_into(counter, 0, n)


def _count(hashes: list[mmap.mmap]) -> int:
    return sum(_COUNTER.unpack_from(each)[0] for each in hashes)


@contextlib.contextmanager
def _worker(share: float) -> Iterator[int]:
    """The script with a worker that has always more to do; yields the script's pid."""
    text = (ROOT / "tests/samples/stack_overflow.lean").read_text()
    with contextlib.ExitStack() as at_end:
        url = at_end.enter_context(EmbeddedServer()).url
        environ = os.environ | {"LEANQ_URL": url, "SPARE_SHARE": str(share), "SPARE_FREE_GB": "1"}
        environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ["SPARE_STOP"] = "/nonexistent"
        script = subprocess.Popen(["bash", str(ROOT / "deploy/spare-cpus.sh")], env=environ)
        at_end.callback(script.wait, 30)
        at_end.callback(script.terminate)
        lean = at_end.enter_context(LeanQClient(url, no_worker="wait"))
        _until_joined(lean)
        for n in range(1000):
            lean.check(f"{text}\n-- {n}", timeout_s=600)
        yield script.pid


def _until_joined(lean: LeanQClient) -> None:
    end = time.monotonic() + _START_S
    while True:
        try:
            lean.check("theorem t (p : Prop) (h : p) : p := h").result(_START_S)
            return
        except UsageError:  # no worker has joined yet
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _tree(root: int) -> Iterator[int]:
    """Yields the processes below ``root``, by what /proc says now."""
    parents = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            parents[pid] = int(fields[1])
    for pid in parents:
        above = parents[pid]
        while above in parents and above != root:
            above = parents[above]
        if above == root:
            yield pid


def _cpu_s(pids: Iterable[int | None]) -> float:
    """Returns their CPU seconds, those of children that have ended included."""
    took = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            took += sum(map(int, fields[11:15]))
    return took / _TICKS


if __name__ == "__main__":
    sys.exit(main())
