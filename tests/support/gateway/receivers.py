"""Receivers of traces: one of ours that stands in, and Arize Phoenix, which is a real one."""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import httpx2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.cluster import free_ports
from support.fleets import until

# The program ``phoenix`` of the package arize-phoenix.
PHOENIX = "LEANQ_PHOENIX"
# It imports for a minute on a busy machine.
_START_S = 300.0


@dataclass(frozen=True)
class Seen:
    """A span as a receiver has it; ``parent`` is "" for the first of a trace.

    ``links`` and ``service`` are what the stand-in alone tells.
    """

    name: str
    trace: str
    span: str
    parent: str
    attributes: dict[str, Any]
    failed: bool
    start_ns: int = 0
    end_ns: int = 0
    links: tuple[str, ...] = ()
    service: str = ""


class Receiver(Protocol):
    """Takes traces by OTLP over HTTP at ``url``."""

    url: str

    def spans(self) -> list[Seen]: ...


@dataclass
class StandIn:
    """A server that reads OTLP as its published messages say, and nothing else."""

    url: str = ""
    found: list[Seen] = field(default_factory=list)

    def spans(self) -> list[Seen]:
        return list(self.found)

    def take(self, body: bytes) -> None:
        asked = ExportTraceServiceRequest.FromString(body)
        for resource in asked.resource_spans:
            about = _plain(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.found += (
                    Seen(
                        each.name,
                        each.trace_id.hex(),
                        each.span_id.hex(),
                        each.parent_span_id.hex(),
                        _plain(each.attributes),
                        each.status.code == 2,
                        each.start_time_unix_nano,
                        each.end_time_unix_nano,
                        tuple(link.span_id.hex() for link in each.links),
                        about["service.name"],
                    )
                    for each in scope.spans
                )


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    made = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            made.take(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Phoenix:
    """A running Phoenix, asked by its own HTTP interface."""

    def __init__(self, url: str) -> None:
        self.url = url

    def spans(self) -> list[Seen]:
        answer = httpx2.get(f"{self.url}/v1/projects/default/spans?limit=1000", timeout=30.0)
        if answer.status_code == 404:
            return []
        return [
            Seen(
                each["name"],
                each["context"]["trace_id"],
                each["context"]["span_id"],
                each["parent_id"] or "",
                each["attributes"],
                each["status_code"] == "ERROR",
            )
            for each in answer.json()["data"]
        ]


@contextlib.contextmanager
def phoenix(folder: Path) -> Iterator[Phoenix]:
    port, grpc_port = free_ports(2)
    environ = {
        **os.environ,
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(grpc_port),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with (folder / "log").open("wb") as log:
        command = [os.environ[PHOENIX], "serve"]
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            made = Phoenix(f"http://127.0.0.1:{port}")
            until(lambda: _serves(made, process), _START_S)
            yield made
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _serves(made: Phoenix, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    with contextlib.suppress(httpx2.TransportError):
        return httpx2.get(made.url, timeout=5.0).status_code == 200
    return False
