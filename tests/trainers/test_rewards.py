"""Rewards: on real Lean, and by a prover that says what a test wants."""

from __future__ import annotations

import asyncio
import doctest
import logging
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.waiting import eventually

from leanq.errors import (
    RequestError,
    StalledError,
    TooLargeError,
    UnavailableError,
    UsageError,
)
from leanq.local import Pool
from leanq.queue.requests import Failure, Message, Reply, Sorry, Theorem
from leanq.trainers import rewards
from leanq.trainers.rewards import LeanReward, by_goals_left, by_place_of_error, proof_text

STATEMENT = "theorem and_swap (p q : Prop) (h : And p q) : And q p := sorry"
PROOF = STATEMENT.replace("sorry", "And.intro h.right h.left")


@dataclass
class Verifier:
    """Verifies by a table of replies; what is not in it never ends."""

    replies: dict[str, Reply | Exception]
    asked: list[tuple[str | None, str]] = field(default_factory=list)
    cancelled: int = 0

    async def verify(self, target: str | None, code: str, **_: object) -> Reply:
        self.asked.append((target, code))
        try:
            reply = self.replies.get(code.strip())
            if isinstance(reply, Exception):
                raise reply
            return reply or await asyncio.Future()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def check(self, code: str, **_: object) -> Reply:
        raise NotImplementedError

    async def step(self, state: str, tactic: str, **_: object) -> Reply:
        raise NotImplementedError


async def test_a_proof_of_the_statement_earns_and_no_other(pool: Pool) -> None:
    completions = [
        PROOF,
        f"Let me think.\n```lean4\n{PROOF}\n```\nThat is it.",
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROOF}],
        "theorem and_swap (p : Prop) (h : p) : p := h",
        STATEMENT,
        "axiom cheat : False\n" + STATEMENT.replace("sorry", "cheat.elim"),
        "no Lean at all",
        "",
        "\0",
    ]
    score = LeanReward(pool)
    assert await score(completions=completions, statement=[STATEMENT] * 9) == [1.0] * 3 + [0.0] * 6


async def test_an_odd_completion_costs_no_other_its_reward(pool: Pool) -> None:
    parts = [{"type": "text", "text": PROOF[:30]}, {"type": "text", "text": PROOF[30:]}]
    contents = [parts, parts[0], None, [], [None, {"type": "image_url"}], 7, {"text": None}]
    messages = [{"role": "assistant", "content": content} for content in contents]
    odd: list[Any] = [PROOF, *([each] for each in messages), [], [{"role": "assistant"}], None, [7]]
    found = await LeanReward(pool)(completions=odd, statement=[STATEMENT] * len(odd))
    assert found == [1.0, 1.0, *[0.0] * (len(odd) - 2)]


async def test_a_reward_asks_for_statements_only_if_its_caller_does(pool: Pool) -> None:
    for options, statement in (({}, None), ({"statements": True}, "∀ (p q : Prop), p ∧ q → q ∧ p")):
        [score] = await LeanReward(pool, **options).scores([STATEMENT], [PROOF])
        assert score.reply is not None
        assert score.reply.theorems == (Theorem("and_swap", statement),)


async def test_models_that_write_the_proof_alone(pool: Pool) -> None:
    score = LeanReward(pool, extract=proof_text)
    scores = await score.scores([STATEMENT] * 3, ["And.intro h.right h.left", "sorry", "h"])
    assert [each.reward for each in scores] == [1.0, 0.0, 0.0]
    assert scores[0].candidate == PROOF


async def test_a_statement_that_proves_nothing_has_no_reward(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "leanq.rewards"):
        score = LeanReward(pool)
        unended = "theorem t (p : Prop) (h : p) : p"
        statements = ["def a := 1", "theorem t : Nonsense := sorry", unended]
        found = await score(completions=[PROOF] * 3, statement=statements)
    assert found == [None, None, None]
    assert len(caplog.records) == 3
    (said,) = (line for line in caplog.messages if unended in line)
    assert "it is not complete; behind its end Lean expected ':=', 'where' or '|'" in said
    assert "namespace" not in said


async def test_what_says_nothing_about_the_proof_has_no_reward() -> None:
    replies = {
        "a": Reply("timeout", reason="cpu_time"),
        "b": Reply("crashed"),
        "c": Reply("accepted"),
        "d": Reply("exhausted"),
        "e": Reply("rejected", failed=(Failure("t", "target_unread", "the target has an error"),)),
    }
    score = LeanReward(Verifier(dict(replies)))
    found = await score(completions=list("abcde"), statement=["s"] * 5)
    assert found == [None, None, 1.0, 0.0, None]


async def test_one_candidate_that_is_accepted_is_enough_and_ends_the_search() -> None:
    replies = {
        "right": Reply("accepted"),
        "wrong": Reply("rejected", reason="lean_error"),
        "late": Reply("timeout", reason="cpu_time"),
        "broken": Reply("rejected", failed=(Failure("t", "target_unread", "it has an error"),)),
        "long": TooLargeError("too long"),
        "elsewhere": RequestError("the environment is broken"),
    }
    expected = {
        "right wrong": (1.0, "right", 1),
        "wrong right": (1.0, "right", 2),
        "wrong long right": (1.0, "right", 3),
        "late right": (1.0, "right", 2),
        "wrong late wrong": (None, "late", 3),
        "wrong wrong": (0.0, "wrong", 2),
        "long wrong": (0.0, "long", 2),
        "broken right": (None, "broken", 1),
        "elsewhere right": (None, "elsewhere", 1),
        "": (0.0, "", 0),
    }
    for completion, wanted in expected.items():
        verifier = Verifier(dict(replies))
        score = LeanReward(verifier, extract=lambda _, answer: answer.split())
        [found] = await score.scores(["s"], [completion])
        assert (found.reward, found.candidate, len(verifier.asked)) == wanted, completion


async def test_a_stall_is_counted_from_the_last_reply_of_any_candidate() -> None:
    verifier = Verifier({"a": Reply("rejected", reason="lean_error")})
    score = LeanReward(verifier, extract=lambda *_: ["a"] * 3 + ["b"], stall_s=0.5)
    with pytest.raises(StalledError):
        await score(completions=["x"], statement=["s"])
    assert [code for _, code in verifier.asked] == ["a", "a", "a", "b"]


async def test_an_answer_is_read_outside_of_the_trainers_loop() -> None:
    ours, seen = threading.get_ident(), list[int]()

    def extract(_: str, answer: str) -> str:
        seen.append(threading.get_ident())
        return answer

    score = LeanReward(Verifier({"a": Reply("accepted")}), extract=extract)
    assert await score(completions=["a"] * 3, statement=["s"] * 3) == [1.0] * 3
    assert len(seen) == 3
    assert ours not in seen


async def test_partial_credit_is_given_where_asked_for() -> None:
    error = Message("error", 3, 0, "unknown")
    replies = {
        "1\n2\n3\n4": Reply("rejected", (error,), reason="lean_error"),
        "goal": Reply(
            "incomplete", sorries=(Sorry(1, 0, "⊢ p"), Sorry(2, 0, "⊢ q")), reason="sorry"
        ),
        "unknown": Reply("incomplete", sorries=(Sorry(1, 0, "⊢ p"), Sorry(2, 0)), reason="sorry"),
        "other": Reply("rejected", (error,), reason="statement_differs"),
        "late": Reply("timeout"),
        "fine": Reply("accepted"),
    }

    async def scored(partial: rewards.Partial | None) -> list[float | None]:
        score = LeanReward(Verifier(dict(replies)), partial=partial)
        return await score(completions=list(replies), statement=["s"] * len(replies))

    assert await scored(None) == [0.0, 0.0, 0.0, 0.0, None, 1.0]
    assert await scored(by_place_of_error(0.5)) == [0.25, 0.0, 0.0, 0.0, None, 1.0]
    assert await scored(by_goals_left(0.6)) == [0.0, pytest.approx(0.2), 0.0, 0.0, None, 1.0]
    assert await scored(lambda *_: 7.0) == [0.999, 0.999, 0.999, 0.999, None, 1.0]


async def test_credit_for_goals_counts_those_that_are_left(pool: Pool) -> None:
    head = STATEMENT.removesuffix("sorry")
    apart = f"{head}by\n  constructor\n  sorry\n  sorry"
    at_once = f"{head}by\n  constructor <;> sorry"
    unknown = f"{head}by\n  constructor <;> try sorry"
    texts = [STATEMENT, apart, at_once, PROOF, f"{head}h", unknown]
    score = LeanReward(pool, partial=by_goals_left(0.6))
    found = await score(completions=texts, statement=[STATEMENT] * 6)
    fifth = pytest.approx(0.2)
    assert found[:5] == [pytest.approx(0.3), fifth, fifth, 1.0, 0.0]
    assert found[5] in (0.0, fifth)  # Lean may tell no goals there.


async def test_a_fleet_that_does_not_answer_is_an_error_and_leaves_nothing_asked() -> None:
    verifier = Verifier({"a": Reply("accepted")})
    score = LeanReward(verifier, stall_s=0.5)
    with pytest.raises(StalledError, match=r"within 0\.5 seconds"):
        await score(completions=["a", "b", "c"], statement=["s"] * 3)
    assert verifier.cancelled == 2
    gone = Verifier({"a": UnavailableError("gone")})
    with pytest.raises(UnavailableError, match="gone"):
        await LeanReward(gone)(completions=["b", "a"], statement=["s"] * 2)
    assert gone.cancelled == 1


async def test_the_window_is_kept() -> None:
    verifier = Verifier({})
    score = LeanReward(verifier, outstanding=5)
    task = asyncio.create_task(score(completions=["x"] * 50, statement=["s"] * 50))
    await eventually(lambda: len(verifier.asked) == 5)
    # Whatever else was to be read is read before these.
    await asyncio.gather(*(asyncio.to_thread(int) for _ in range(50)))
    assert len(verifier.asked) == 5
    task.cancel()
    await asyncio.wait([task])


async def test_wrong_calls_are_told() -> None:
    score = LeanReward(Verifier({}))
    with pytest.raises(UsageError, match="no column 'statement' with the statements; got answer"):
        await score(completions=["a"], answer=["b"])
    with pytest.raises(UsageError, match="1 statements for 2 completions"):
        await score(completions=["a", "b"], statement=["s"])
    with pytest.raises(UsageError, match="a statement must be a text, got NoneType"):
        await score(completions=["a"], statement=[None])
    with pytest.raises(UsageError, match="rests on the judge"):
        LeanReward(audit=False)
    with pytest.raises(UsageError, match="one sorry, got 2"):
        proof_text("sorry sorry", "x")


def test_the_imports_of_the_statement_are_lent() -> None:
    statement = "import Mathlib\nopen Nat\ntheorem t : p := sorry"
    lent = rewards.lean_text(statement, "theorem t : p := h")
    assert lent == ("import Mathlib\nopen Nat\ntheorem t : p := h",)
    whole = "import Mathlib.Tactic\ntheorem t : p := h"
    assert rewards.lean_text(statement, whole) == (whole,)


def test_the_examples() -> None:
    found = doctest.DocTestFinder(exclude_empty=True).find(rewards)
    for test in found:
        if not test.name.endswith("LeanReward"):
            assert doctest.DocTestRunner().run(test).failed == 0
