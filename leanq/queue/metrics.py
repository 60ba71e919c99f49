"""Every metric of leanq, named once: by Prometheus' conventions, with bounded labels.

Redis keeps the figures of the fleet, and one exporter shows them: ``leanq metrics``, or ``leanq
scale``, which decides by them. Each worker shows the figures that it alone knows
(``--metrics-port``), and so do gateways. A campaign worker shows the campaigns of RQ's Redis.

No label's values grow with requests or pods. ``environment`` is one that workers offer, with the
versions ``lean`` and ``kernel``, and ``route`` one of the gateway's. ``tenant`` is one of a hundred
that used CPU time in the last day or so, or the one for which most requests wait. All other labels
have fixed sets of values in the code.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""The upper edges of all histograms of times, in seconds."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A counter's name ends in ``_total``, and a name with a unit says the unit."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", text, labels)


def _histogram(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "histogram", text, labels)


FLEET = (
    _gauge("leanq_up", "1 while the exporter reaches every shard of the queue."),
    _gauge(
        "leanq_requests",
        "Requests by state: waiting, held, running, quarantined.",
        "environment",
        "state",
    ),
    _gauge("leanq_oldest_waiting_seconds", "Age of the oldest request that waits.", "environment"),
    _gauge(
        "leanq_tenant_waiting",
        "Requests that wait of the tenant with the most, one tenant of each priority.",
        "environment",
        "tenant",
    ),
    _gauge("leanq_dead_letters", "Requests that took down too many workers and are kept."),
    _gauge("leanq_workers", "Workers by state: alive, lapsed.", "state"),
    _gauge(
        "leanq_workers_degraded",
        "Living workers that are slower than they should be; leanq status says why.",
        "environment",
    ),
    _gauge("leanq_slots", "Slots of living workers by state: busy, idle.", "environment", "state"),
    _gauge(
        "leanq_environment_fingerprints",
        "Different environments that living workers offer under one name; 1 where they agree.",
        "environment",
    ),
    _gauge(
        "leanq_environment_info",
        "1 for each environment, with its Lean and the kernel that judges there.",
        "environment",
        "lean",
        "kernel",
    ),
    _counter("leanq_requests_submitted_total", "Requests submitted.", "environment"),
    _counter("leanq_requests_finished_total", "Requests with a result.", "environment", "verdict"),
    _counter("leanq_requests_reason_total", "Results by their reason.", "environment", "reason"),
    _counter("leanq_slot_busy_seconds_total", "Time that slots have run requests.", "environment"),
    _counter("leanq_cpu_seconds_total", "CPU time that results took.", "environment"),
    _counter(
        "leanq_tenant_cpu_seconds_total",
        "CPU time that results took, by tenant; without a name: of those that are not named.",
        "environment",
        "tenant",
    ),
    _gauge("leanq_tenant_weight", "Shares of CPU time that operators gave to tenants.", "tenant"),
    _histogram("leanq_request_wait_seconds", "From submit to the last claim.", "environment"),
    _histogram("leanq_request_run_seconds", "From the last claim to the end.", "environment"),
    _histogram("leanq_request_total_seconds", "From submit to the end.", "environment"),
    _counter("leanq_requests_reaped_total", "Attempts whose worker's lease expired."),
    _counter("leanq_requests_released_total", "Requests requeued by workers that stopped."),
    _counter("leanq_results_fenced_total", "Late results rejected by a fencing token."),
    _counter("leanq_requests_coalesced_total", "Requests that joined the run of an identical one."),
    _counter("leanq_requests_remembered_total", "Requests answered by a remembered verdict."),
    _counter("leanq_warm_hits_total", "Requests that went to a worker known to be warm."),
    _counter("leanq_warm_misses_total", "Requests for which no such worker was idle."),
    _gauge("leanq_snapshot_bytes", "Snapshots of states in Redis, as accounted."),
    _counter("leanq_snapshot_evictions_total", "Snapshots dropped to make room."),
    _gauge("leanq_replay_entries", "Entries that a replay memory holds.", "memory"),
    _gauge("leanq_replay_bytes", "Their packed size, with the reservoir's.", "memory"),
    _counter("leanq_replay_written_total", "Entries written into a replay memory.", "memory"),
    _counter("leanq_replay_evicted_total", "Entries that left it, the oldest first.", "memory"),
    _counter(
        "leanq_replay_dropped_total",
        "Entries not written, or taken out, since memory was short; also counted are those that "
        "writers could not send.",
        "memory",
    ),
    _gauge("leanq_redis_memory_bytes", "Memory in use by a shard's server.", "shard"),
    _gauge("leanq_redis_memory_limit_bytes", "Its maxmemory; 0 where there is none.", "shard"),
    _counter("leanq_redis_cpu_seconds_total", "CPU time of its main thread.", "shard"),
    _gauge("leanq_redis_connections", "Connections that it has.", "shard"),
    _gauge("leanq_redis_connections_limit", "Its maxclients; 0 if it does not say.", "shard"),
    _gauge("leanq_redis_replicas", "Its replicas that are in step.", "shard"),
    _gauge(
        "leanq_redis_replica_lag_seconds", "The longest that a replica has been silent.", "shard"
    ),
    _gauge(
        "leanq_redis_persistence_failing",
        "1 if its last snapshot, write or rewrite of the AOF failed.",
        "shard",
    ),
    _counter("leanq_redis_fsync_delays_total", "Writes that waited for the AOF's disk.", "shard"),
)

SCALER = (
    _gauge("leanq_scaler_leader", "1 for the one scaler that acts."),
    _gauge("leanq_scaler_stale", "1 while statistics are too old to act on.", "environment"),
    _gauge("leanq_scaler_input", "What the decision was made from.", "environment", "input"),
    _gauge("leanq_scaler_term", "The terms of the decision.", "environment", "term"),
    _gauge("leanq_scaler_target_workers", "Workers wanted.", "environment"),
    _gauge(
        "leanq_scaler_unsized_requests",
        "Requests that wait in an environment that no scaler sizes.",
        "environment",
    ),
    _counter("leanq_scaler_decisions_total", "Decisions by reason.", "environment", "reason"),
    _counter("leanq_scaler_errors_total", "Calls to the target that failed.", "environment"),
)

WORKER = (
    _gauge("leanq_worker_slots", "Slots of this worker by state: busy, idle.", "state"),
    _gauge("leanq_worker_quarantined", "1 while Lean does not work here, and nothing is claimed."),
    _gauge("leanq_worker_longest_run_seconds", "Of the requests that run here, the oldest one's."),
    _counter("leanq_worker_requests_total", "Requests that this worker has run.", "verdict"),
    _counter("leanq_lean_starts_total", "Programs started in sandboxes.", "program"),
    _counter("leanq_lean_deaths_total", "Programs that died or met a limit.", "reason"),
    _counter("leanq_fork_server_total", "Preloaded headers and forks, by event.", "event"),
    _counter(
        "leanq_kernels_disagree_total",
        "Texts that the environment's Lean takes, and the judge's kernel does not.",
    ),
    _counter("leanq_worker_snapshots_total", "What became of snapshots here.", "event"),
    _counter("leanq_redis_errors_total", "Calls to Redis that failed.", "kind"),
)

CAMPAIGNS = (
    _gauge(
        "leanq_campaigns",
        "Submitted campaigns by state: waiting, scheduled, queued, running, pausing, paused, "
        "cancelling, finished, failed, cancelled.",
        "state",
    ),
    _gauge("leanq_campaign_rows", "Rows that all these campaigns have done."),
)

PROCESS = (
    _gauge("leanq_build_info", "1, with the version of leanq.", "version"),
    _counter("leanq_spans_dropped_total", "Spans of sampled traces that were not sent.", "reason"),
)
"""What every exporter tells of itself, besides ``process_*``."""

GATEWAY = (
    _counter("leanq_http_requests_total", "HTTP requests that were answered.", "route", "status"),
    _histogram("leanq_http_request_seconds", "From an HTTP request to its answer's end.", "route"),
    _gauge("leanq_http_streams", "Answers that are sent line by line, and have not ended."),
    _gauge("leanq_http_outstanding", "Requests to the queue whose end this gateway waits for."),
    _counter("leanq_http_refusals_total", "Requests that keys and limits refused.", "reason"),
    _gauge("leanq_http_connections", "Connections that callers hold."),
    _gauge("leanq_http_connections_limit", "The most connections that this gateway takes."),
    _counter(
        "leanq_http_late_seconds_total",
        "How late the gateway's loop woke, which it is to do once a second.",
    ),
)


COUNTS: Counter[tuple[str, ...]] = Counter()
"""The counts of this process, by a metric's name and its labels' values."""


EXEMPLARS: dict[tuple[str, ...], tuple[str, float, float]] = {}
"""The latest sampled trace of a metric, by its name and its labels' values: the trace's id, the
value, and when that was, in seconds since 1970."""


def note_exemplar(name_and_labels: tuple[str, ...], trace_id: str, value: float) -> None:
    """Keeps a trace as the example of a metric in :data:`WORKER` or :data:`GATEWAY`."""
    EXEMPLARS[name_and_labels] = trace_id, value, time.time()


def count(name: str, *labels: str) -> None:
    """Adds one to a metric in :data:`WORKER` or :data:`GATEWAY`."""
    COUNTS[name, *labels] += 1
