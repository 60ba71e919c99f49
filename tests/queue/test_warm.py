"""Loose pinning on a real server: reservations, reassignments, and preferences among what waits."""

from __future__ import annotations

from collections import Counter

import pytest
from support.shards import LEASE_MS, Shard

from leanq.queue.results import Claimed, Reserved

STATE = ("state", "header")


def request_ids(claimed: Claimed) -> list[str]:
    return [job.request_id for job in claimed.jobs]


# Reservations


async def test_an_idle_warm_worker_is_reserved_what_it_is_warm_for(shard: Shard) -> None:
    await shard.warm("w", *STATE, available=2)
    await shard.submit("r1", "r2", "r3", affinity=("state",))
    found = shard.dump()
    assert found.lists["reservation"] == {"w": ["r1", "r2"]}
    assert found.lists["wait"] == {"a:1:t": ["r3"]}
    # One word to it is enough, and one token for the worker that takes the third.
    assert await shard.queue.wait_wakeup("w", [], 1.0) == Reserved()
    assert await shard.queue.wait_wakeup("w", [], 0.05) is None
    assert shard.wakeup() == 1
    assert request_ids(await shard.claim("other")) == ["r3"]
    claimed = await shard.claim("w", 2)
    assert (request_ids(claimed), [job.attempts for job in claimed.jobs]) == (["r1", "r2"], [1, 1])
    found = shard.dump()
    assert not found.lists["reservation"]
    counters = (await shard.queue.status()).counters
    assert (counters["warm_hits"], counters["warm_misses"]) == (2, 1 + len(STATE))
    assert counters["waiting:a"] == 0
    assert await shard.settle(*claimed.jobs) == (True, True)


async def test_the_strongest_affinity_and_the_last_to_settle_come_first(shard: Shard) -> None:
    await shard.warm("header", "header")
    shard.advance(1)
    await shard.warm("old", "state")
    shard.advance(1)
    await shard.warm("new", "state")
    shard.advance(1)
    await shard.warm("header2", "header")
    for expected in ("new", "old", "header2", "header"):
        await shard.submit(expected, affinity=STATE)
        assert shard.dump().lists["reservation"][expected] == [expected]
    await shard.submit("late", affinity=STATE)
    assert shard.dump().lists["wait"] == {"a:1:t": ["late"]}
    for worker in ("header", "old", "new", "header2"):
        assert request_ids(await shard.claim(worker, 1)) == [worker]


@pytest.mark.parametrize(
    "why", ["busy", "another environment", "lapsed", "left", "cold", "none asked"]
)
async def test_no_reservation_without_a_warm_and_idle_worker(shard: Shard, why: str) -> None:
    await shard.queue.register("w", b"", {"a": b"", "b": b""})
    await shard.warm("w", "state", available=0 if why == "busy" else 3)
    if why == "lapsed":
        shard.advance(LEASE_MS)
    elif why == "left":
        await shard.queue.release("w", [], leave=True)
    names = {"cold": ("other",), "none asked": ()}.get(why, ("state",))
    await shard.submit(
        "r", environment="b" if why == "another environment" else "a", affinity=names
    )
    found = shard.dump()
    assert not found.lists["reservation"]
    assert "to" not in found.req["r"]
    # Any worker may take it, at once.
    assert sum(len(wakeup) for wakeup in found.lists["wakeup"].values()) > 0
    assert request_ids(await shard.claim("other", environments=["a", "b"])) == ["r"]


async def test_what_waits_already_goes_before_any_reservation(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("plain")
    await shard.submit("r", affinity=("state",))
    assert shard.dump().lists["wait"] == {"a:1:t": ["plain", "r"]}


async def test_a_worker_settles_ends_and_is_remembered_among_sixteen(shard: Shard) -> None:
    for number in range(20):
        await shard.warm(f"w{number:02}", "state", available=0)
        shard.advance(1)
    assert set(shard.dump().warm["a:state"]) == {f"w{number:02}" for number in range(4, 20)}
    assert shard.server.pttl(f"{shard.tag}:warm:a:state") > 0


async def test_one_that_is_not_warm_is_not_noted(shard: Shard) -> None:
    await shard.submit("r", affinity=("state",))
    await shard.settle(await shard.job())
    assert not shard.dump().warm


async def test_others_behind_a_reservation_are_not_held_up(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("reserved", affinity=("state",))
    await shard.submit("plain")
    claimed = await shard.claim("other", 2)
    assert request_ids(claimed) == ["plain"]
    assert request_ids(await shard.claim("w", 2)) == ["reserved"]


async def test_a_claim_without_room_gives_reservations_up_at_once(shard: Shard) -> None:
    await shard.warm("w", "state", available=3)
    await shard.submit("r1", "r2", "r3", affinity=("state",))
    assert request_ids(await shard.claim("w", 1)) == ["r1"]
    assert shard.wakeup() == 1
    assert shard.dump().lists["wait"] == {"a:1:t": ["r2", "r3"]}
    assert request_ids(await shard.claim("other")) == ["r2", "r3"]
    assert "reassignments" not in (await shard.queue.status()).counters


async def test_a_quarantined_worker_keeps_no_reservation(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("r", affinity=("state",))
    await shard.quarantined("quarantined", environment="b")
    assert (await shard.claim("w", environments=["a", "b"], busy=1)).must_empty
    assert request_ids(await shard.claim("other")) == ["r"]
    await shard.claim("w", environments=["b"])


# Reassignments and watchdogs


async def test_a_reservation_that_is_not_kept_is_stolen(shard: Shard) -> None:
    await shard.warm("w", "state", available=2)
    await shard.queue.register("watchdog", b"", {"a": b""})
    await shard.submit("r1", "r2", affinity=("state",))
    # For the watchdog alone, since neither of the two is for any other.
    assert shard.wakeup() == 1
    shard.server.delete(shard.queue.keys.wakeup("a"))
    claimed = await shard.claim("watchdog", 1)
    assert (claimed.jobs, claimed.again_s) == ((), 0.1)
    # While one watches, others need not.
    shard.advance(60)
    claimed = await shard.claim("other", 1)
    assert (claimed.jobs, claimed.again_s, shard.wakeup()) == ((), 0, 0)
    shard.advance(40)
    assert request_ids(await shard.claim("watchdog", 1)) == ["r1"]
    assert shard.wakeup() == 1
    assert request_ids(await shard.claim("other", 1)) == ["r2"]
    assert (await shard.queue.status()).counters["reassignments"] == 2
    # Who did not come is reserved nothing more, until he does.
    await shard.submit("r3", affinity=("state",))
    assert shard.dump().lists["wait"] == {"a:1:t": ["r3"]}
    assert request_ids(await shard.claim("w", 3)) == ["r3"]
    await shard.submit("r4", affinity=("state",))
    assert shard.dump().lists["reservation"] == {"w": ["r4"]}


async def test_a_late_worker_still_takes_what_was_not_reassigned(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("r", affinity=("state",))
    shard.advance(5000)
    assert request_ids(await shard.claim("w", 1)) == ["r"]
    counters = (await shard.queue.status()).counters
    assert (counters["warm_hits"], counters.get("reassignments")) == (1, None)


async def test_what_is_stolen_goes_to_the_front_in_its_order(shard: Shard) -> None:
    await shard.warm("w", "state", available=2)
    await shard.submit("r1", "r2", affinity=("state",))
    await shard.submit("plain", tenant="u")
    await shard.submit("r3")
    shard.advance(100)
    # Its tenant has no other turn than before.
    assert request_ids(await shard.claim("other", 1)) == ["plain"]
    assert shard.dump().lists["wait"] == {"a:1:t": ["r1", "r2", "r3"]}
    assert request_ids(await shard.claim("other", 3)) == ["r1", "r2", "r3"]


async def test_a_watchdog_stays_while_there_are_reservations_and_no_longer(shard: Shard) -> None:
    await shard.warm("w", "state", available=9)
    await shard.queue.register("watchdog", b"", {"a": b""})
    await shard.submit("r1", affinity=("state",))
    await shard.claim("w", 9)
    # Its own was taken; it watches on, since another may come.
    assert (await shard.claim("watchdog", 1)).again_s == 0.1
    shard.server.delete(shard.queue.keys.wakeup("a"))
    shard.advance(30)
    await shard.submit("r2", affinity=("state",))
    assert shard.wakeup() == 0
    shard.advance(70)
    assert (await shard.claim("watchdog", 1)).again_s == pytest.approx(0.03)
    await shard.claim("w", 9)
    shard.advance(30)
    assert (await shard.claim("watchdog", 1)).again_s == 0
    await shard.submit("r3", affinity=("state",))
    assert shard.wakeup() == 1


async def test_no_worker_watches_over_its_own_reservations(shard: Shard) -> None:
    await shard.warm("w", "state", available=1)
    await shard.warm("v", "another", available=1)
    await shard.submit("r1", affinity=("another",))
    assert (await shard.claim("w", 1)).again_s == 0.1
    shard.server.delete(shard.queue.keys.wakeup("a"))
    await shard.submit("r2", affinity=("state",))
    assert shard.wakeup() == 1
    # A worker that takes its own reservation leaves the watch to others.
    assert (await shard.claim("w", 2)).again_s == 0
    assert (await shard.claim("third", 1)).again_s == 0.1


async def test_a_watchdog_that_finds_work_watches_on(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("r", affinity=("state",))
    await shard.submit("plain")
    shard.server.delete(shard.queue.keys.wakeup("a"))
    claimed = await shard.claim("watchdog", 1)
    assert (request_ids(claimed), claimed.again_s) == (["plain"], 0.1)
    assert (shard.dump().watchdog, shard.wakeup()) == ("watchdog", 0)


async def test_a_note_ends_with_the_first_reservation(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("r", affinity=("state",))
    assert (await shard.claim("watchdog", 1)).again_s == 0.1
    # It died, and any claim takes the watch up.
    shard.advance(100)
    assert shard.dump().watchdog is None
    assert request_ids(await shard.claim("other", 1)) == ["r"]


async def test_reservations_alone_wake_no_worker(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("r", affinity=("state",))
    assert (await shard.claim("watchdog", 1)).again_s == 0.1
    await shard.submit("plain")
    shard.server.delete(shard.queue.keys.wakeup("a"))
    assert request_ids(await shard.claim("other", 1)) == ["plain"]
    assert shard.wakeup() == 0


async def test_a_worker_that_is_alone_needs_no_watchdog(shard: Shard) -> None:
    await shard.warm("w", "state")
    shard.server.delete(shard.queue.keys.wakeup("a"))
    await shard.submit("r", affinity=("state",))
    assert shard.wakeup() == 0


# Ends of reserved requests


async def test_a_reserved_request_can_be_withdrawn(shard: Shard) -> None:
    await shard.warm("w", "state", available=2)
    await shard.submit("r", "q", affinity=("state",))
    assert await shard.queue.cancel(["r"]) == [True]
    assert request_ids(await shard.claim("w")) == ["q"]
    assert await shard.end("r") == ("cancelled", 0, 0)
    shard.dump().check()
    assert (await shard.queue.status()).counters["waiting:a"] == 0


async def test_a_reserved_request_expires(shard: Shard) -> None:
    await shard.warm("w", "state", available=2)
    await shard.submit("r", "q", affinity=("state",), deadline_ms=50)
    shard.advance(51)
    assert await shard.queue.lookup("c", ["r"]) == await shard.queue.replies(["r"])
    assert (await shard.claim("w")).jobs == ()
    for request_id in ("r", "q"):
        assert await shard.end(request_id) == ("expired", 0, 0.051)
    shard.dump().check()


@pytest.mark.parametrize("how", ["leaves", "is reaped"])
async def test_reservations_to_a_worker_that_is_gone_are_for_any(shard: Shard, how: str) -> None:
    await shard.warm("w", "state", available=2)
    await shard.submit("r", "q", affinity=("state",))
    if how == "leaves":
        await shard.queue.release("w", [], leave=True)
    else:
        await shard.lapse()
        await shard.queue.reap()
    found = shard.dump()
    found.check()
    assert found.lists["wait"] == {"a:1:t": ["r", "q"]}
    assert (shard.wakeup(), found.hashes.get("available")) == (1, None)
    assert request_ids(await shard.claim("other")) == ["r", "q"]


async def test_a_request_that_comes_back_is_reserved_to_no_worker(shard: Shard) -> None:
    await shard.warm("w", "state")
    await shard.submit("r", affinity=("state",))
    (job,) = (await shard.claim("w", 2)).jobs
    await shard.queue.release("w", [("r", job.token)])
    found = shard.dump()
    assert found.lists["wait"] == {"a:1:t": ["r"]}
    assert "to" not in found.req["r"]
    assert request_ids(await shard.claim("other")) == ["r"]


async def test_a_dead_letter_keeps_its_affinities(shard: Shard) -> None:
    await shard.quarantined("r", affinity=STATE)
    job = await shard.job()
    await shard.queue.release("w", [("r", job.token)], how="retry")
    letter = await shard.queue.dead_letter("r")
    assert letter
    assert letter.submission.affinity == STATE


# Preferences among what waits


async def test_the_warmest_of_the_next_ones_goes_first(shard: Shard) -> None:
    await shard.warm("w", "state", "header", available=0)
    await shard.submit("cold1", "cold2")
    await shard.submit("header", affinity=("new", "header"))
    await shard.submit("state", affinity=("state", "header"))
    claimed = [request_ids(await shard.claim("w", 1)) for _ in range(4)]
    assert claimed == [["state"], ["header"], ["cold1"], ["cold2"]]


async def test_several_are_chosen_at_once(shard: Shard) -> None:
    await shard.warm("w", "state", available=0)
    for number in range(4):
        await shard.submit(f"cold{number}")
        await shard.submit(f"warm{number}", affinity=("state",))
    assert request_ids(await shard.claim("w", 5)) == ["warm0", "warm1", "warm2", "warm3", "cold0"]
    assert request_ids(await shard.claim("other", 5)) == ["cold1", "cold2", "cold3"]


async def test_only_the_front_of_a_line_is_searched(shard: Shard) -> None:
    await shard.warm("w", "state", available=0)
    await shard.submit(*(f"cold{number}" for number in range(16)))
    await shard.submit("warm", affinity=("state",))
    claimed = [request_ids(await shard.claim("w", 1)) for _ in range(3)]
    assert claimed == [["cold0"], ["warm"], ["cold1"]]


async def test_nothing_is_passed_over_for_long(shard: Shard) -> None:
    await shard.warm("w", "state", available=0)
    await shard.submit("cold", *(f"w{number}" for number in range(8)), affinity=("other",))
    for number in range(3):
        await shard.submit(f"warm{number}", affinity=("state",))
    # Its long wait alone is no reason, or in a long line no worker would ever be preferred.
    shard.advance(60_000)
    assert request_ids(await shard.claim("w", 1)) == ["warm0"]
    shard.advance(1999)
    assert request_ids(await shard.claim("w", 1)) == ["warm1"]
    shard.advance(1)
    assert request_ids(await shard.claim("w", 1)) == ["cold"]


async def test_tenants_share_as_ever(shard: Shard) -> None:
    await shard.warm("w", "state", available=0)
    for number in range(6):
        await shard.submit(f"t{number}", tenant="t", affinity=("state",))
        await shard.submit(f"u{number}", tenant="u")
    served = [request_ids(await shard.claim("w", 1))[0] for _ in range(12)]
    assert Counter(request_id[0] for request_id in served[:6]) == {"t": 3, "u": 3}
    assert [request_id[0] for request_id in served[::2]] == [served[0][0]] * 6


async def test_what_was_withdrawn_and_sent_again_runs_once(shard: Shard) -> None:
    await shard.warm("w", "state", available=0)
    await shard.submit("q", "r")
    await shard.queue.cancel(["r"])
    shard.server.delete(shard.queue.keys.request("r"))  # as at the end of its time-to-live
    await shard.submit("r")
    assert shard.dump().lists["wait"] == {"a:1:t": ["q", "r", "r"]}
    assert sorted(request_ids(await shard.claim("w", 9))) == ["q", "r"]
    assert not shard.dump().lists["wait"]


async def test_environments_without_affinities_note_nothing(shard: Shard) -> None:
    await shard.warm("w", "state", environment="b")
    await shard.submit("r1", "r2", "r3")
    await shard.claim("other", 9)
    found = shard.dump()
    assert found.affine == {"b"}
    assert list(found.hashes["available"]) == ["w"]
