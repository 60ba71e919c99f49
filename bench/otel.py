"""CPU time that traces cost a request: off, 1 in 100 sampled, and all; see README.md.

A client and a worker of echoes run in one process, whose CPU time counts. It has all that a check
has but Lean and the judge. The receiver is a process of its own that reads and forgets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time

from servers import server

_RECEIVER = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(made.server_address[1], flush=True)
made.serve_forever()
"""
_OUTSTANDING = 100
# A small check's CPU on its worker; the table of README.md has it.
_CHECK_US = 30_000


async def _echoes(url: str, count: int) -> float:
    from leanq.client import AsyncLeanQClient
    from leanq.lean.driver import EchoDriver
    from leanq.queue.metrics import COUNTS
    from leanq.queue.settings import Settings
    from leanq.worker import Worker

    settings = Settings(url=url)
    worker = Worker(settings, [EchoDriver()], slots=8)
    running = asyncio.create_task(worker.run())
    await worker.joined.wait()
    async with AsyncLeanQClient(settings) as lean:

        async def some(number: int) -> None:
            for _ in range(number):
                await lean.echo(b"x")

        await some(200)
        began_s = time.process_time()
        await asyncio.gather(*(some(count // _OUTSTANDING) for _ in range(_OUTSTANDING)))
        # Spans that still wait are part of the cost.
        from leanq.fleet import tracing

        await asyncio.to_thread(tracing.flush)
        took_s = time.process_time() - began_s
    worker.stop()
    await running
    assert not any(name[0] == "leanq_spans_dropped_total" for name in COUNTS), COUNTS
    return took_s / count * 1e6


def _measured(url: str, count: int, ratio: float | None, port: str) -> float:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}
    if ratio is not None:
        environ |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": str(ratio),
            "OTEL_BSP_MAX_QUEUE_SIZE": "1000000",
        }
    command = [sys.executable, __file__, "--one", url, "--count", str(count)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(asyncio.run(_echoes(asked.one, asked.count)))
        return
    ways: dict[str, float | None] = {"off": None, "1 in 100": 0.01, "all": 1.0}
    found: dict[str, list[float]] = {way: [] for way in ways}
    with (
        server() as url,
        subprocess.Popen(
            [sys.executable, "-c", _RECEIVER], stdout=subprocess.PIPE, text=True
        ) as receiver,
    ):
        try:
            assert receiver.stdout
            port = receiver.stdout.readline().strip()
            for _ in range(asked.rounds):
                for way, ratio in ways.items():
                    found[way].append(_measured(url, asked.count, ratio, port))
        finally:
            receiver.kill()
    off = found["off"]
    said: dict[str, float] = {"off_us": round(statistics.median(off), 1)}
    for way in ("1 in 100", "all"):
        # Ways of one round met the same load.
        more_us = statistics.median(b - a for a, b in zip(off, found[way], strict=True))
        said[f"{way}: us more"] = round(more_us, 1)
        said[f"{way}: of a check"] = round(more_us / _CHECK_US, 5)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
