"""What statistics add to the memory."""

from __future__ import annotations

from dataclasses import replace

from .values import LEARNED_REQUESTS, LONG_S, Memory, Sample, Stats

_STARTS_KEPT = 100
_GAP_S = 60.0


def learned(stats: Stats, memory: Memory) -> Memory:
    """The memory with these statistics in it."""
    samples, enough = memory.samples, memory.enough
    last = samples[-1] if samples else None
    # A failover may have forgotten the last writes, and another server has another clock;
    # differences across that would mean nothing.
    if last and (
        stats.time_s <= last.time_s
        or stats.submitted < last.submitted
        or stats.finished < last.finished
        or stats.busy_s < last.busy_s
    ):
        last, samples, enough = None, (), ()
    worked_s = unfinished_s = 0.0
    if last:
        # What finished is known exactly, but late: a fleet that runs long requests would look idle
        # until the first of them ends. So slots that are busy now and were before count as well,
        # except where nobody looked for long: a server that was gone had its workers wait.
        span_s = stats.time_s - last.time_s
        seen_s = min(last.busy_slots, stats.busy_slots) * span_s if span_s <= _GAP_S else 0.0
        finished_s = stats.busy_s - last.busy_s
        step_s = max(seen_s, finished_s - last.unfinished_s)
        worked_s = last.worked_s + step_s
        # What vanished workers had begun never finishes, and is not to add up.
        most_s = stats.busy_slots * LONG_S
        unfinished_s = min(max(0.0, last.unfinished_s + step_s - finished_s), most_s)
    now = Sample(
        stats.time_s,
        stats.submitted,
        stats.finished,
        stats.busy_s,
        stats.busy_slots,
        stats.ready,
        worked_s,
        unfinished_s,
    )
    samples = (*(s for s in samples if s.time_s >= stats.time_s - LONG_S), now)
    finished = now.finished - samples[0].finished
    work_s = memory.work_s
    if finished >= LEARNED_REQUESTS:
        work_s = (now.worked_s - samples[0].worked_s) / finished
    starts = (*memory.starts_s, *stats.started_s)[-_STARTS_KEPT:]
    return replace(memory, samples=samples, starts_s=starts, work_s=work_s, enough=enough)
