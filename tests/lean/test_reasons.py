"""Why a reply is not accepted, in one word for machines and in a sentence for people."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

import pytest
from support.lean.sites import Site, check, sample
from support.paths import TESTS

from leanq.lean.sandbox.sandbox import PACKAGE
from leanq.queue.requests import Reason, Request, Rule, Verdict

HEAD = "prelude\nimport Core\n"
BOTH = f"{HEAD}theorem t (p q : Prop) (h : p) (k : q) : And p q := sorry\n"


def expected_words() -> Iterator[str]:
    """The words of short texts in tests, and of the tables that say what becomes of texts."""
    for path in TESTS.rglob("test_*.py"):
        for text in re.findall(r'"([\w ]+)"', path.read_text()):
            yield from text.split()
    for path in TESTS.rglob("*.toml"):
        yield from path.read_text().replace('"', " ").split()


def test_some_test_expects_each_reason_and_each_rule() -> None:
    promised = {*get_args(Reason), *get_args(Rule)}
    assert promised <= {*expected_words()}, promised - {*expected_words()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict", "reason"),
    [
        ("and_swap", "accepted", None),
        ("incomplete", "incomplete", "sorry"),
        ("silent_sorry", "incomplete", "sorry"),
        ("wrong", "rejected", "lean_error"),
        ("syntax_error", "rejected", "lean_error"),
        ("heartbeats", "exhausted", "heartbeats"),
    ],
)
async def test_a_check_of(either: Site, name: str, verdict: Verdict, reason: Reason | None) -> None:
    reply = await either.check(sample(name))
    assert (reply.verdict, reply.reason) == (verdict, reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "verdict", "reason", "said"),
    [
        ({"timeout_s": 0.5}, "timeout", "cpu_time", "s of CPU time; the request allows 0.5 s"),
        ({"wall_s": 0.3}, "timeout", "wall_time", "the request allows 0.3 s in all"),
        ({"memory_mb": 48}, "memory", "memory", "MB of memory; the request allows 48 MB"),
    ],
)
async def test_a_limit_that_was_met(
    either: Site, limit: dict[str, float], verdict: Verdict, reason: Reason, said: str
) -> None:
    reply = await either.check(sample("stack_overflow"), **limit)
    assert (reply.verdict, reply.reason) == (verdict, reason)
    assert said in reply.messages[-1].text


@pytest.mark.slow
async def test_a_judge_that_does_not_start_says_nothing_of_the_text(site: Site) -> None:
    driver = await site.driver(hidden=[PACKAGE / "lean" / "judge"])
    reply = await driver.run(check("theorem t (p : Prop) (h : p) : p := h"))
    assert (reply.verdict, reply.reason) == ("unjudged", "judge_unavailable")
    assert "the judge does not start here" in reply.messages[-1].text


@pytest.mark.slow
async def test_a_judge_that_meets_a_limit_says_so(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await site.one()
    assert (await driver.run(check(sample("and_swap")))).verdict == "accepted"
    monkeypatch.setattr("leanq.lean.judge.judge_client._MOST_ANSWERED_BYTES", 10)
    reply = await driver.run(check(sample("or_swap")))
    assert (reply.verdict, reply.reason) == ("unjudged", "judge_limit")
    assert "the judge was stopped by a limit" in reply.messages[-1].text


@pytest.mark.slow
async def test_steps(either: Site) -> None:
    driver = await either.one()
    (sorry,) = (await driver.run(check(BOTH))).sorries
    assert sorry.state is not None

    async def step(tactic: str) -> tuple[Verdict | None, Reason | None]:
        reply = await driver.run(Request("step", state=str(sorry.state), tactic=tactic))
        return reply.verdict, reply.reason

    assert await step("constructor") == ("incomplete", "goals_remain")
    assert await step("exact And.intro h sorry") == ("incomplete", "goals_remain")
    assert await step("exact And.intro h k") == ("accepted", None)
    assert await step("exact h") == ("rejected", "lean_error")
    assert await step("}") == ("rejected", "lean_error")


@pytest.mark.slow
async def test_a_step_that_meets_a_limit_says_so_behind_what_lean_said(site: Site) -> None:
    driver = await site.one()
    endless = sample("heartbeats").replace("maxHeartbeats 2000", "maxHeartbeats 0")
    (sorry,) = (await driver.run(check(endless.replace("exact rfl", "exact sorry")))).sorries
    request = Request("step", state=str(sorry.state), tactic="exact rfl", wall_s=0.3)
    reply = await driver.run(request)
    assert (reply.verdict, reply.reason) == ("timeout", "wall_time")
    assert "the request allows 0.3 s" in reply.messages[-1].text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("import Mathlib\ntheorem t : 1 + 1 = 2 := rfl", "Init, Mathlib"),
        ("prelude\nimport Core.Elsewhere", "Core.Elsewhere"),
    ],
)
async def test_a_text_for_another_environment_is_rejected_and_told_what_there_is(
    either: Site, code: str, missing: str
) -> None:
    reply = await either.check(code)
    assert (reply.verdict, reply.reason) == ("rejected", "unknown_import")
    text = reply.messages[-1].text
    assert f"the environment 'default' lacks {missing}; it has Core" in text
    assert f"(Lean {either.core.toolchain.version}). Choose" in text
    assert "--env NAME=FOLDER" in text


@pytest.mark.slow
async def test_a_wrong_proof_in_an_environment_with_a_header_of_its_own(either: Site) -> None:
    for proof in ("h", "nowhere", "by\n  constructor", "by\n  simpa using h", "h)"):
        reply = await either.check(f"theorem t (p q : Prop) (h : p) : q := {proof}")
        assert (reply.verdict, reply.reason) == ("rejected", "lean_error")


@pytest.mark.slow
async def test_a_hole_has_an_end(either: Site) -> None:
    driver = await either.one()
    reply = await driver.run(
        check(f"{HEAD}theorem t (p : Prop) : And p p :=\n  And.intro sorry sorry")
    )
    places = [(s.line, s.column, s.end_line, s.end_column) for s in reply.sorries]
    assert places == [(4, 12, 4, 17), (4, 18, 4, 23)]
    reply = await driver.run(check("theorem t (p : Prop) : p :=\n  sorry"))
    (sorry,) = reply.sorries
    assert (sorry.line, sorry.column, sorry.end_line, sorry.end_column) == (2, 2, 2, 7)
    step = Request("step", state=str(sorry.state), tactic="\n  exact id sorry")
    (sorry,) = (await driver.run(step)).sorries
    assert (sorry.line, sorry.column, sorry.end_line, sorry.end_column) == (2, 11, 2, 16)
