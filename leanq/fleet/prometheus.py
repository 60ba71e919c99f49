"""Metrics in Prometheus' format, and the page that serves them."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import sys
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from typing import Any, Self

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from leanq import __version__
from leanq.errors import UsageError
from leanq.fleet.stats import FleetStats, Times, degraded_of
from leanq.queue.metrics import (
    BUCKETS_S,
    CAMPAIGNS,
    COUNTS,
    EXEMPLARS,
    FLEET,
    GATEWAY,
    PROCESS,
    SCALER,
    WORKER,
    Kind,
)
from leanq.queue.wire import info_of

log = logging.getLogger("leanq.metrics")

Sample = tuple[str, tuple[str, ...], float | Times]
"""A metric's name, the values of its labels, and its value."""

_KNOWN = {
    metric.name: metric for metric in (*FLEET, *SCALER, *WORKER, *CAMPAIGNS, *GATEWAY, *PROCESS)
}
_EDGES = [f"{edge:g}" for edge in BUCKETS_S] + ["+Inf"]


def fleet_samples(seen: FleetStats) -> Iterator[Sample]:
    counters, tallies = seen.status.counters, seen.status.tallies
    yield "leanq_up", (), 1
    for name, environment in seen.environments.items():
        for state, count in (
            ("waiting", environment.waiting - environment.held),
            ("held", environment.held),
            ("quarantined", environment.quarantined),
            ("running", environment.running),
        ):
            yield "leanq_requests", (name, state), count
        yield "leanq_oldest_waiting_seconds", (name,), environment.oldest_s
        for tenant, count in environment.fullest.items():
            yield "leanq_tenant_waiting", (name, tenant), count
        yield "leanq_slots", (name, "busy"), environment.busy
        yield "leanq_slots", (name, "idle"), environment.slots - environment.busy
        yield "leanq_environment_fingerprints", (name,), len(environment.fingerprints)
        about = info_of(seen.status.environments.get(name, b""))
        versions = (str(about.get(which) or "") for which in ("lean", "kernel"))
        yield "leanq_environment_info", (name, *versions), 1
        yield "leanq_requests_submitted_total", (name,), environment.submitted
        for verdict, count in environment.finished.items():
            yield "leanq_requests_finished_total", (name, verdict), count
        for reason, count in environment.reasons.items():
            yield "leanq_requests_reason_total", (name, reason), count
        yield "leanq_slot_busy_seconds_total", (name,), environment.ran.sum_s
        yield "leanq_cpu_seconds_total", (name,), environment.cpu_s
        for tenant, used_s in environment.tenants_cpu_s.items():
            yield "leanq_tenant_cpu_seconds_total", (name, tenant), used_s
        yield "leanq_request_wait_seconds", (name,), environment.waited
        yield "leanq_request_run_seconds", (name,), environment.ran
        yield "leanq_request_total_seconds", (name,), environment.took
    yield "leanq_workers", ("alive",), len(seen.living)
    yield "leanq_workers", ("lapsed",), len(seen.status.workers) - len(seen.living)
    degraded = Counter(name for row in seen.living for name in degraded_of(info_of(row.info)))
    for name in seen.environments:
        yield "leanq_workers_degraded", (name,), degraded[name]
    for tenant, weight in seen.status.weights.items():
        yield "leanq_tenant_weight", (tenant,), weight
    yield "leanq_dead_letters", (), seen.status.dead
    for other in seen.status.others:
        waiting = 0 if other.workers else other.waiting
        yield "leanq_other_release_requests", (other.environment, str(other.version)), waiting
    yield "leanq_unaccounted_requests", (), seen.status.unaccounted
    for name in ("reaped", "released", "coalesced", "remembered"):
        yield f"leanq_requests_{name}_total", (), counters.get(name, 0)
    yield "leanq_results_fenced_total", (), counters.get("fenced", 0)
    for name in ("warm_hits", "warm_misses"):
        yield f"leanq_{name}_total", (), counters.get(name, 0)
    yield "leanq_snapshot_bytes", (), tallies.get("snapshot_bytes", 0)
    yield "leanq_snapshot_evictions_total", (), tallies.get("snapshots_evicted", 0)
    for memory, row in seen.status.memories.items():
        yield "leanq_replay_entries", (memory,), row.entries
        yield "leanq_replay_bytes", (memory,), row.size_bytes
        for name in ("written", "evicted", "dropped"):
            yield f"leanq_replay_{name}_total", (memory,), getattr(row, name)
    for shard, info in enumerate(seen.servers):
        for name, value in _server_values(info):
            yield name, (str(shard),), value


_SAVED = ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")


def _server_values(info: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields a server's metrics and their values, from its INFO."""
    named = (each for name, each in info.items() if re.fullmatch(r"slave\d+", name))
    replicas = [each for each in named if isinstance(each, dict)]
    yield "leanq_redis_memory_bytes", info.get("used_memory", 0)
    yield "leanq_redis_memory_limit_bytes", info.get("maxmemory", 0)
    # Scripts run in the main thread, so its CPU is the limit.
    kinds = ("used_cpu_sys_main_thread", "used_cpu_user_main_thread")
    yield "leanq_redis_cpu_seconds_total", sum(info.get(kind, 0.0) for kind in kinds)
    yield "leanq_redis_connections", info.get("connected_clients", 0)
    yield "leanq_redis_connections_limit", info.get("maxclients", 0)
    yield "leanq_redis_replicas", sum(each.get("state") == "online" for each in replicas)
    lags_s = (each.get("lag", 0) for each in replicas)
    yield "leanq_redis_replica_lag_seconds", max(lags_s, default=0)
    failing = any(info.get(name, "ok") != "ok" for name in _SAVED)
    yield "leanq_redis_persistence_failing", float(failing)
    yield "leanq_redis_fsync_delays_total", info.get("aof_delayed_fsync", 0)


def counted_samples() -> Iterator[Sample]:
    for (name, *labels), count in list(COUNTS.items()):
        yield name, tuple(labels), count


def exposition(samples: Iterable[Sample]) -> str:
    """Returns the samples in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(lambda: samples))
    return generate_latest(registry).decode()


class Page:
    """``/metrics`` and ``/healthz`` on a port of this machine, in a thread; a context manager.

    Args:
        port: 0 takes any free one.
        read: returns the current samples; called in another thread, once for each scrape. The
            page adds ``process_*`` and the version.
        healthy: whether ``/healthz`` answers 200 rather than 503.

    Raises:
        UsageError: the port cannot be used.
    """

    def __init__(
        self,
        port: int,
        read: Callable[[], Iterable[Sample]],
        healthy: Callable[[], bool] = lambda: True,
        host: str = "127.0.0.1",
    ) -> None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        build = ("leanq_build_info", (__version__,), 1)
        registry.register(_Collector(lambda: [build, *read()]))

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/healthz":
                    well = healthy()
                    self._answer(200 if well else 503, b"ok\n" if well else b"not ready\n")
                elif self.path.partition("?")[0] == "/metrics":
                    encode, content = choose_encoder(self.headers.get("Accept", ""))
                    self._answer(200, encode(registry), content)
                else:
                    self._answer(404, b"there are /metrics and /healthz\n")

            def _answer(self, code: int, body: bytes, content: str = "text/plain") -> None:
                self.send_response(code)
                self.send_header("Content-Type", content)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Does nothing: scrapes are not logged."""

        try:
            self._server = (_Server6 if ":" in host else _Server)((host, port), Handler)
        except OSError as error:
            raise UsageError(
                f"cannot serve metrics on port {port} of {host!r}: {error.strerror}"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def page_at(
    port: int | None,
    whose: str,
    read: Callable[[], Iterable[Sample]],
    healthy: Callable[[], bool] = lambda: True,
    host: str = "127.0.0.1",
) -> contextlib.AbstractContextManager[object]:
    """Returns a ``Page``, and logs its port; nothing if no port was named for it."""
    if port is None:
        return contextlib.nullcontext()
    page = Page(port, read, healthy, host)
    log.info("metrics of this %s on port %d", whose, page.port)
    return page


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Logs why there was no answer, unless the scraper has gone."""
        if not isinstance(sys.exception(), ConnectionError):
            log.exception("a scrape had no answer")


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Collector(Collector):
    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def describe(self) -> list[Family]:
        # Nothing is read before the first scrape.
        return []

    def collect(self) -> Iterable[Family]:
        families: dict[str, Family] = {}
        for name, labels, value in self._read():
            if name not in families:
                metric = _KNOWN[name]
                made = _FAMILIES[metric.kind](metric.name, metric.text, labels=metric.labels)
                families[name] = made
            _add(families[name], labels, value, EXEMPLARS.get((name, *labels)))
        return families.values()


_FAMILIES: Mapping[Kind, Callable[..., Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _add(
    family: Family,
    labels: Sequence[str],
    value: float | Times,
    seen: tuple[str, float, float] | None,
) -> None:
    """Adds a sample; ``seen`` is its exemplar, which OpenMetrics alone shows."""
    exemplar = Exemplar({"trace_id": seen[0]}, *seen[1:]) if seen else None
    if isinstance(value, Times):
        assert isinstance(family, HistogramMetricFamily)
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]]
        buckets = [*zip(_EDGES, map(float, accumulate(value.counts)), strict=True)]
        if exemplar:
            at = bisect_left(BUCKETS_S, exemplar.value)
            buckets[at] = (*buckets[at][:2], exemplar)
        family.add_metric(labels, buckets, value.sum_s)
    elif isinstance(family, CounterMetricFamily):
        family.add_metric(labels, value, exemplar=exemplar)
    else:
        assert isinstance(family, GaugeMetricFamily)
        family.add_metric(labels, value)
