"""What a model is told of its candidate."""

from __future__ import annotations

from leanq.queue.requests import Failure, Message, Reply, Sorry
from leanq.trainers.feedback import feedback


def test_it_has_the_verdict_errors_failures_and_goals() -> None:
    reply = Reply(
        "rejected",
        messages=(Message("warning", 1, 0, "unused"), Message("error", 2, 4, "Type mismatch")),
        failed=(Failure("t", "statement_differs", "it is stated otherwise"),),
        sorries=(Sorry(3, 2, "⊢ p"), Sorry(4, 2, None)),
        reason="statement_differs",
    )
    assert feedback(reply).splitlines() == [
        "Lean says: rejected (statement_differs).",
        "t: it is stated otherwise",
        "Line 2, column 4: Type mismatch",
        "Goal at line 3, column 2:",
        "⊢ p",
    ]


def test_it_is_cut() -> None:
    reply = Reply("rejected", messages=tuple(Message("error", n, 0, "x" * 99) for n in range(50)))
    assert "… and 42 more errors." in feedback(reply)
    short = feedback(reply, max_characters=100)
    assert len(short) < 150
    assert short.endswith("more characters)")
