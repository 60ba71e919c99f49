"""``leanq tenant``, and what a fleet of real Lean does by the weights."""

from __future__ import annotations

from collections import Counter

import pytest
from support.fleets import look, sweep, until
from support.paths import SAMPLES
from support.terminals import Terminal, ended, wait_for_line

from leanq.client import LeanQClient
from leanq.lean.environment import Environment
from leanq.queue.settings import Settings

CHECKS = 3000


@pytest.fixture
def place(terminal: Terminal, settings: Settings) -> Terminal:
    """A terminal that uses a queue of its own."""
    terminal.use(settings)
    return terminal


def used_s(settings: Settings) -> Counter[str]:
    tallies = look(settings).tallies
    prefix = "u:default:"
    return Counter(
        {name.removeprefix(prefix): n for name, n in tallies.items() if name.startswith(prefix)}
    )


@pytest.mark.slow
def test_a_weight_is_given_shown_and_taken_away(place: Terminal, settings: Settings) -> None:
    shown = place.run("tenant", "weight", "a", "2.5").out
    assert shown == "tenant a weighs 2.5 from its next request on\n"
    assert place.run("tenant", "weight", "b", "1", "--json").lines == [
        {"tenant": "b", "weight": 1.0}
    ]
    assert look(settings).weights == {"a": 2.5, "b": 1.0}
    assert "weights     of CPU time: a 2.5, b 1; other tenants 1" in place.run("status").out
    assert place.run("status", "--json").lines[0]["weights"] == {"a": 2.5, "b": 1.0}
    rows = place.run("tenant", "list").out.splitlines()
    assert [row.split() for row in rows] == [
        ["TENANT", "CPU", "OF", "ALL", "WEIGHT"],
        ["a", "0.0", "s", "0.0", "%", "2.5"],
        ["b", "0.0", "s", "0.0", "%", "1"],
    ]
    for name in ("a", "b"):
        assert place.run("tenant", "weight", name, "--remove").code == 0
    assert not look(settings).weights
    assert place.run("tenant", "list").out == "no tenant has a weight or used CPU time\n"


@pytest.mark.parametrize(
    "words", [(), ("0",), ("-1",), ("x",), ("nan",), ("1001",), ("1", "--remove")]
)
def test_a_weight_that_is_none(place: Terminal, words: tuple[str, ...]) -> None:
    done = place.run("tenant", "weight", "a", *words)
    assert done.code == 2
    assert "Traceback" not in done.err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fleet_of_real_lean_gives_cpu_time_by_weights(
    place: Terminal, settings: Settings, core: Environment
) -> None:
    """Long checks take many times as long as short ones; by turns they would have most."""
    long = (SAMPLES / "heartbeats.lean").read_text().replace("Heartbeats 2000", "Heartbeats 6000")
    short = (SAMPLES / "and_swap.lean").read_text()
    for name in ("long", "short"):
        assert place.run("tenant", "weight", name, "1").code == 0
    worker = place.start("worker", "--slots", "2")
    wait_for_line(worker.stderr, "serves")
    with LeanQClient(settings) as lean:
        futures = [
            lean.check(f"{text}\n-- {number}", tenant=tenant)
            for number in range(CHECKS)
            for tenant, text in (("long", long), ("short", short))
        ]
        until(lambda: min(used_s(settings)[name] for name in ("long", "short")) > 2000, 120)
        before = used_s(settings)
        until(lambda: (used_s(settings) - before).total() > 12_000, 240)
        used = used_s(settings) - before
        shown, since = place.run("status").out, place.run("status", "--since", "1h").out
        for future in futures:
            future.cancel()
    worker.terminate()
    assert ended(worker).code == 0
    sweep(settings)
    for name in ("long", "short"):
        assert place.run("tenant", "weight", name, "--remove").code == 0
    assert 0.35 < used["short"] / used.total() < 0.65
    assert "CPU time    default: " in shown
    assert "CPU time by tenant" in since
