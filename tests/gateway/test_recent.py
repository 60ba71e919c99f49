"""The latest requests of a gateway: bounded, and without their replies."""

from __future__ import annotations

import gc

from leanq.gateway.pending import Pending, RequestName
from leanq.gateway.recent import RecentRequests
from leanq.queue.requests import Message, Reply
from leanq.queue.results import Submission


def submission(name: str, body: bytes, tenant: str = "alice") -> Submission:
    return Submission(name, "default", tenant, 1, 0, 1000, body)


def pending(tenant: str, name: str) -> Pending:
    return Pending(RequestName(tenant, name), None, lambda _: None)


def test_memory_is_bounded_by_texts_and_by_number() -> None:
    recent = RecentRequests()
    for number in range(100):
        text = submission(f"0-{number}", b"x" * (1 << 20))
        recent.add(text, pending("alice", f"{number}"))
    kept = list(recent.all())
    assert 20 < len(kept) < 33
    assert kept[-1].submission.request_id == "0-99"
    for number in range(20_000):
        text = submission(f"1-{number}", b"", "bob")
        recent.add(text, pending("bob", f"{number}"))
    assert len(list(recent.all())) <= 8192
    assert not list(recent.all("alice"))
    # One that is larger than all that is kept is not kept, and harms no request.
    huge = submission("0-huge", b"x" * (40 << 20))
    recent.add(huge, pending("alice", "huge"))
    assert recent.find("0-huge") is None


def test_the_same_name_again_takes_the_place_of_the_one_before() -> None:
    recent = RecentRequests()
    for _ in range(100):
        recent.add(submission("0-a", b"x" * (1 << 20)), pending("alice", "a"))
    recent.add(submission("0-b", b"x"), pending("alice", "b"))
    assert [kept.submission.request_id for kept in recent.all()] == ["0-a", "0-b"]


def test_a_reply_is_not_kept() -> None:
    recent = RecentRequests()
    waited = pending("alice", "a")
    recent.add(submission("0-a", b"text"), waited)
    reply = Reply("accepted", messages=(Message("warning", 1, 0, "w"),), wall_s=2.0, attempts=1)
    waited.ended(reply)
    kept = recent.find("0-a")
    assert kept
    assert kept.pending is None
    assert kept.ended
    assert (kept.ended.verdict, kept.ended.wall_s) == ("accepted", 2.0)
    assert not [held for held in gc.get_referrers(reply) if held is kept]
