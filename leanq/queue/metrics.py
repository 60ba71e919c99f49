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

import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal, cast

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


# A metric's kind, name, labels and text; further lines of a text are indented.
_ROW = re.compile(r"(\w+) (\w+)(?:{(.+)})?: (.+)")


def _metrics(table: str) -> tuple[Metric, ...]:
    found = []
    for row in re.split(r"\n(?! )", table.strip()):
        match = _ROW.fullmatch(" ".join(row.split()))
        assert match, f"expected KIND NAME{{LABELS}}: TEXT, got {row}"
        kind, name, labels, text = match.groups()
        labelled = tuple(labels.split(", ")) if labels else ()
        found.append(Metric(name, cast("Kind", kind), text, labelled))
    return tuple(found)


FLEET = _metrics("""
gauge leanq_up: 1 while the exporter reaches every shard of the queue.
gauge leanq_requests{environment, state}: Requests by state: waiting, held, running, quarantined.
gauge leanq_other_release_requests{environment, version}: Requests that another release wrote, by
    the version of their records, and that wait while none of its workers is known to be alive.
gauge leanq_unaccounted_requests: Requests that neither wait nor run nor have ended.
gauge leanq_oldest_waiting_seconds{environment}: Age of the oldest request that waits.
gauge leanq_tenant_waiting{environment, tenant}: Requests that wait of the tenant with the most, one
    tenant of each priority.
gauge leanq_dead_letters: Requests that took down too many workers and are kept.
gauge leanq_workers{state}: Workers by state: alive, lapsed.
gauge leanq_workers_degraded{environment}: Living workers that are slower than they should be; leanq
    status says why.
gauge leanq_slots{environment, state}: Slots of living workers by state: busy, idle.
gauge leanq_environment_fingerprints{environment}: Different environments that living workers offer
    under one name; 1 where they agree.
gauge leanq_environment_info{environment, lean, kernel}: 1 for each environment, with its Lean and
    the kernel that judges there.
counter leanq_requests_submitted_total{environment}: Requests submitted.
counter leanq_requests_finished_total{environment, verdict}: Requests with a result.
counter leanq_requests_reason_total{environment, reason}: Results by their reason.
counter leanq_slot_busy_seconds_total{environment}: Time that slots have run requests.
counter leanq_cpu_seconds_total{environment}: CPU time that results took.
counter leanq_tenant_cpu_seconds_total{environment, tenant}: CPU time that results took, by tenant;
    without a name: of those that are not named.
gauge leanq_tenant_weight{tenant}: Shares of CPU time that operators gave to tenants.
histogram leanq_request_wait_seconds{environment}: From submit to the last claim.
histogram leanq_request_run_seconds{environment}: From the last claim to the end.
histogram leanq_request_total_seconds{environment}: From submit to the end.
counter leanq_requests_reaped_total: Attempts whose worker's lease expired.
counter leanq_requests_released_total: Requests requeued by workers that stopped.
counter leanq_results_fenced_total: Late results rejected by a fencing token.
counter leanq_requests_coalesced_total: Requests that joined the run of an identical one.
counter leanq_requests_remembered_total: Requests answered by a remembered verdict.
counter leanq_warm_hits_total: Requests that went to a worker known to be warm.
counter leanq_warm_misses_total: Requests for which no such worker was idle.
gauge leanq_snapshot_bytes: Snapshots of states in Redis, as accounted.
counter leanq_snapshot_evictions_total: Snapshots dropped to make room.
gauge leanq_replay_entries{memory}: Entries that a replay memory holds.
gauge leanq_replay_bytes{memory}: Their packed size, with the reservoir's.
counter leanq_replay_written_total{memory}: Entries written into a replay memory.
counter leanq_replay_evicted_total{memory}: Entries that left it, the oldest first.
counter leanq_replay_dropped_total{memory}: Entries not written, or taken out, since memory was
    short; also counted are those that writers could not send.
gauge leanq_redis_memory_bytes{shard}: Memory in use by a shard's server.
gauge leanq_redis_memory_limit_bytes{shard}: Its maxmemory; 0 where there is none.
counter leanq_redis_cpu_seconds_total{shard}: CPU time of its main thread.
gauge leanq_redis_connections{shard}: Connections that it has.
gauge leanq_redis_connections_limit{shard}: Its maxclients; 0 if it does not say.
gauge leanq_redis_replicas{shard}: Its replicas that are in step.
gauge leanq_redis_replica_lag_seconds{shard}: The longest that a replica has been silent.
gauge leanq_redis_persistence_failing{shard}: 1 if its last snapshot, write or rewrite of the AOF
    failed.
counter leanq_redis_fsync_delays_total{shard}: Writes that waited for the AOF's disk.
""")

SCALER = _metrics("""
gauge leanq_scaler_leader: 1 for the one scaler that acts.
gauge leanq_scaler_stale{environment}: 1 while statistics are too old to act on.
gauge leanq_scaler_input{environment, input}: What the decision was made from.
gauge leanq_scaler_term{environment, term}: The terms of the decision.
gauge leanq_scaler_target_workers{environment}: Workers wanted.
gauge leanq_scaler_unsized_requests{environment}: Requests that wait in an environment that no
    scaler sizes.
counter leanq_scaler_decisions_total{environment, reason}: Decisions by reason.
counter leanq_scaler_errors_total{environment}: Calls to the target that failed.
""")

WORKER = _metrics("""
gauge leanq_worker_slots{state}: Slots of this worker by state: busy, idle.
gauge leanq_worker_quarantined: 1 while Lean does not work here, and nothing is claimed.
gauge leanq_worker_longest_run_seconds: Of the requests that run here, the oldest one's.
counter leanq_worker_requests_total{verdict}: Requests that this worker has run.
counter leanq_lean_starts_total{program}: Programs started in sandboxes.
counter leanq_lean_deaths_total{reason}: Programs that died or met a limit.
counter leanq_fork_server_total{event}: Preloaded headers and forks, by event.
counter leanq_language_server_total{event}: Lean's language server and texts that it read, by
    event.
counter leanq_kernels_disagree_total: Texts that the environment's Lean takes, and the judge's
    kernel does not.
counter leanq_worker_snapshots_total{event}: What became of snapshots here.
counter leanq_redis_errors_total{kind}: Calls to Redis that failed.
""")

CAMPAIGNS = _metrics("""
gauge leanq_campaigns{state}: Submitted campaigns by state: waiting, scheduled, queued, running,
    pausing, paused, cancelling, finished, failed, cancelled.
gauge leanq_campaign_rows: Rows that all these campaigns have done.
""")

PROCESS = _metrics("""
gauge leanq_build_info{version}: 1, with the version of leanq.
counter leanq_spans_dropped_total{reason}: Spans of sampled traces that were not sent.
""")
"""What every exporter tells of itself, besides ``process_*``."""

GATEWAY = _metrics("""
counter leanq_http_requests_total{route, status}: HTTP requests that were answered.
histogram leanq_http_request_seconds{route}: From an HTTP request to its answer's end.
gauge leanq_http_streams: Answers that are sent line by line, and have not ended.
gauge leanq_http_outstanding: Requests to the queue whose end this gateway waits for.
counter leanq_http_refusals_total{reason}: Requests that keys and limits refused.
gauge leanq_http_connections: Connections that callers hold.
gauge leanq_http_connections_limit: The most connections that this gateway takes.
counter leanq_http_late_seconds_total: How late the gateway's loop woke, which it is to do once a
    second.
""")


COUNTS: Counter[tuple[str, ...]] = Counter()
"""The counts of this process, by a metric's name and its labels' values."""


EXEMPLARS: dict[tuple[str, ...], tuple[str, float, float]] = {}
"""The latest sampled trace of a metric, by its name and its labels' values: the trace's id, the
value, and when that was, in seconds since 1970."""


def note_exemplar(name_and_labels: tuple[str, ...], trace_id: str, value: float) -> None:
    """Keeps a trace as the example of a metric in ``WORKER`` or ``GATEWAY``."""
    EXEMPLARS[name_and_labels] = trace_id, value, time.time()


def count(name: str, *labels: str) -> None:
    """Adds one to a metric in ``WORKER`` or ``GATEWAY``."""
    COUNTS[name, *labels] += 1
