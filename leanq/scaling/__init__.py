"""How many workers an environment should have: a pure function, and the terms to explain it.

``decide(stats, settings, memory)`` reads no clock, draws no lots and keeps nothing: what it has to
remember comes back in the decision and is given to the next one. A memory that was lost costs
little. Rates are learned again within minutes, and until then nothing is taken away.

The law ``deadline`` counts in seconds of work, not in requests::

    work      = slot seconds per finished request, the larger of 10 minutes' average and, less its
                own uncertainty, that of 2
    load      = median arrival rate × work                                        (slots)
    base      = load + spread × √load                                             (slots)
    backlog   = requests that wait × work, less its uncertainty                   (slot seconds)
    remaining = margin × deadline − age of the oldest, but after a slow start at least
                a third of the deadline                                           (seconds)
    capacity  = what slots that are ready or start will do by then beside the load
    order     = what is ordered + (backlog − capacity) / (remaining − slow start),
                and base once the load is more than is ordered                    (slots)

Workers that start have their part in the capacity, so an order is not given twice. Nothing is
ordered for a backlog that is gone before a worker would be there, and never more slots for it than
there are requests. Workers go when an excess has lasted, at most half of them at a time, and only
idle ones, or such whose requests end well within the time that they are given to drain.

The law ``reference`` gives the minimum for an autoscaler by CPU beside it. With Lq queued, Rmin
requests completed in the past minute by Bmin workers on average, and Cm minutes to clear::

    Lq ≥ Rmin:  (Rmin + Lq / Cm) / (Rmin / Bmin)        otherwise:  1

It has no answer where requests wait and nothing was completed or nobody worked: what was ordered
is then held, and one worker at least.
"""

from __future__ import annotations

from dataclasses import replace

from .deadline import by_deadline
from .memory import learned
from .reference import by_reference
from .values import Decision, Law, Memory, Reason, Sample, ScaleSettings, Stats

__all__ = [
    "Decision", "Law", "Memory", "Reason", "Sample", "ScaleSettings", "Stats", "decide",
]  # fmt: skip


def decide(stats: Stats, settings: ScaleSettings, memory: Memory | None = None) -> Decision:
    """The number of workers that the environment should have.

    Statistics that are too old change nothing, the memory included. Otherwise the target lies
    within the settings' bounds, whatever the order was.
    """
    memory = memory or Memory()
    if stats.age_s > settings.stale_s:
        text = f"the statistics are {stats.age_s:.0f} s old, so the order is held"
        return Decision(stats.order, "stale", text, {"age_s": stats.age_s}, memory)
    memory = learned(stats, memory)
    decision = (by_reference if settings.law == "reference" else by_deadline)(
        stats, settings, memory
    )
    target = min(max(decision.target, settings.least), settings.most)
    if target == decision.target:
        return decision
    reason: Reason = "floor" if target > decision.target else "ceiling"
    text = f"{decision.text}; the {reason} is {target}"
    return replace(decision, target=target, reason=reason, text=text)
