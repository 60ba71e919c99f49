"""Steps of the repl driver, in the tiny language of the stand-in: what they make of each answer,
and how a state comes into a process. With real Lean: ``test_steps``."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from support.lean.sites import SELDOM, Site, check

from leanq.lean.repl.driver import ReplDriver
from leanq.queue.requests import Reply, Request
from leanq.states import MemoryStates

OPEN = "import Library\ntheorem two := by\n  sorry\n"


async def opened(driver: ReplDriver, code: str = OPEN) -> str:
    """The state of the only hole of a text."""
    reply = await driver.run(check(code, audit=False))
    (sorry,) = reply.sorries
    assert (reply.verdict, sorry.goal) == ("incomplete", "⊢ goal 0")
    assert sorry.state is not None
    return sorry.state


async def step(driver: ReplDriver, state: str | None, tactic: str, **options: Any) -> Reply:
    assert state is not None
    return await driver.run(Request("step", state=state, tactic=tactic, audit=False, **options))


async def walk(driver: ReplDriver, state: str | None, *tactics: str) -> Reply:
    """Several steps, all but the last of which leave something to prove."""
    *before, last = tactics
    for tactic in before:
        reply = await step(driver, state, tactic)
        assert reply.verdict == "incomplete", reply
        state = reply.state
    return await step(driver, state, last)


async def test_a_proof_step_by_step(site: Site) -> None:
    driver = await site.standin()
    state = await opened(driver)
    first = await step(driver, state, "split 2")
    assert (first.verdict, first.goals) == ("incomplete", ("⊢ goal 0.0", "⊢ goal 0.1"))
    assert (first.way, first.warm) == ("warm", True)
    second = await step(driver, first.state, "close")
    assert (second.verdict, second.goals) == ("incomplete", ("⊢ goal 0.1",))
    done = await step(driver, second.state, "close")
    assert (done.verdict, done.state, done.goals) == ("unjudged", None, ())
    # Any order, and again.
    assert (await step(driver, first.state, "(close; close)")).verdict == "unjudged"
    assert await step(driver, first.state, "close") == second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tactic", "verdict", "text", "place"),
    [
        ("fail no way", "rejected", "no way", (1, 0)),
        ("parse error", "rejected", "unknown tactic", (1, 6)),
        ("budget", "exhausted", "(deterministic) timeout", (1, 0)),
        # No goals, and yet no proof: with an error message, or by the REPL's own word.
        ("soft not so", "rejected", "not so", (1, 0)),
        ("meta", "rejected", "(kernel) declaration has metavariables", (1, 0)),
        ("kernel", "rejected", "(kernel) declaration has free variables", (1, 0)),
        # The tactic mode takes it for complete, and as a text it is wrong.
        ("wrong", "rejected", "type mismatch", (1, 0)),
        ("close\nfail late", "rejected", "late", (1, 0)),
    ],
)
async def test_steps_that_fail(
    site: Site, tactic: str, verdict: str, text: str, place: tuple[int, int]
) -> None:
    driver = await site.standin()
    state = await opened(driver)
    reply = await step(driver, state, tactic)
    assert (reply.verdict, reply.state, reply.goals) == (verdict, None, ())
    message = reply.messages[0]
    assert (message.severity, message.line, message.column) == ("error", *place)
    assert text in message.text
    assert (await step(driver, state, "close")).verdict == "unjudged"


async def test_the_repls_word_where_it_is_trusted(site: Site) -> None:
    driver = await site.standin(trust_steps=True)
    state = await opened(driver)
    for tactic in ("wrong", "close"):
        reply = await step(driver, state, tactic)
        assert (reply.verdict, reply.reason) == ("unjudged", "trusted_step")
    # These it does not take for complete itself.
    for tactic in ("meta", "kernel", "soft not so"):
        assert (await step(driver, state, tactic)).verdict == "rejected"


@pytest.mark.slow
async def test_what_a_proof_state_lacks_the_text_has(site: Site) -> None:
    """A refusal that may be the REPL's alone is no verdict."""
    driver = await site.standin()
    assert (await step(driver, await opened(driver), "shy")).verdict == "unjudged"
    # With what stands in front of a command alone, any refusal may be.
    state = await opened(driver, OPEN.replace("theorem", "open Nat in theorem"))
    reply = await step(driver, state, "fail no way")
    assert (reply.verdict, reply.messages[0].text) == ("rejected", "no way")
    # Said of the text, so with its place.
    assert reply.messages[0].line == 1


async def test_several_tactics_at_once(site: Site) -> None:
    driver = await site.standin()
    state = await opened(driver)
    for tactic in (
        "split 2\nclose",
        "split 2; close",
        "(split 2\nclose)",
        "\n  split 2\n  close\n",
    ):
        reply = await step(driver, state, tactic)
        assert (reply.verdict, reply.goals) == ("incomplete", ("⊢ goal 0.1",)), tactic
    (message,) = (await step(driver, state, "split 2\nparse error")).messages
    assert (message.line, message.column, message.text) == (1, 6, "unknown tactic")


async def test_traces_are_messages(site: Site) -> None:
    driver = await site.standin()
    reply = await step(driver, await opened(driver), "trace seen")
    assert [(m.severity, m.line, m.text) for m in reply.messages] == [("information", 1, "seen")]


async def test_a_tactic_with_a_hole_of_its_own(site: Site) -> None:
    driver = await site.standin()
    state = await opened(driver)
    reply = await step(driver, state, "\n  have x := sorry")
    assert (reply.verdict, reply.goals) == ("incomplete", ("⊢ goal 0",))
    (sorry,) = reply.sorries
    assert (sorry.line, sorry.column, sorry.goal) == (2, 12, "⊢ goal 0.have")
    inner = await step(driver, sorry.state, "split 2")
    assert inner.goals == ("⊢ goal 0.have.0", "⊢ goal 0.have.1")
    assert (await step(driver, reply.state, "split 2")).goals == ("⊢ goal 0.0", "⊢ goal 0.1")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["crash", "fake", "cut", "exit", "die-after", "noise", "slow=5"])
async def test_mischief_changes_no_step(site: Site, what: str) -> None:
    driver = await site.standin()
    state = await opened(driver)
    for tactic, verdict in (
        ("split 2", "incomplete"),
        ("fail no", "rejected"),
        ("close", "unjudged"),
    ):
        reply = await step(driver, state, f"{tactic} standin:{what}")
        assert reply.verdict == verdict, reply.error
        assert (await step(driver, state, "split 3")).goals[2:] == ("⊢ goal 0.2",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "options"), [("hang", {"wall_s": 0.4}), ("spin", {"timeout_s": 0.3})]
)
async def test_budgets_of_time(site: Site, what: str, options: dict[str, float]) -> None:
    driver = await site.standin()
    state = await opened(driver)
    assert (await step(driver, state, f"skip standin:{what}", **options)).verdict == "timeout"
    assert (await step(driver, state, "close")).verdict == "unjudged"


# How a state comes into a process


@pytest.mark.slow
async def test_a_new_process_for_each_request(site: Site) -> None:
    driver = await site.standin(rules=replace(SELDOM, requests=1))
    state = await opened(driver)
    reply = await walk(driver, state, "split 3", "close", "rename x", "split 2", "close", "close")
    assert (reply.verdict, reply.goals) == ("incomplete", ("⊢ goal 0.2",))
    assert reply.way == "replayed"
    assert (await step(driver, reply.state, "close")).verdict == "unjudged"


@pytest.mark.slow
async def test_states_are_those_of_the_lean_driver(site: Site) -> None:
    """Either continues what the other began."""
    states = MemoryStates()
    repl, lean = await site.standin(), await site.driver(site.tiny())
    await repl.open(states)
    await lean.open(states)
    ours, theirs = await opened(repl), (await lean.run(check(OPEN, audit=False))).sorries[0]
    assert (ours, "⊢ goal 0") == (theirs.state, theirs.goal)
    first = await step(repl, ours, "split 2")
    same = await lean.run(Request("step", state=ours, tactic="split 2", audit=False))
    assert (first.state, first.goals) == (same.state, same.goals)
    blob = (await lean.run(Request("export", state=str(first.state)))).payload
    assert blob is not None
    assert (await repl.run(Request("import", payload=blob))).state == first.state
    assert (await walk(repl, first.state, "close", "close")).verdict == "unjudged"


@pytest.mark.slow
async def test_two_slots_hold_one_state(site: Site) -> None:
    driver = await site.standin(slots=2)
    state = await opened(driver)
    replies = await asyncio.gather(
        *(step(driver, state, f"split {n} standin:slow=20") for n in (2, 3))
    )
    assert [len(reply.goals) for reply in replies] == [2, 3]
    for reply in replies:
        assert (await step(driver, reply.state, "close")).verdict == "incomplete"


@pytest.mark.slow
async def test_a_recipe_that_leads_there_no_more(site: Site) -> None:
    """What the REPL cannot replay, Lean does."""
    driver = await site.standin()
    state = await opened(driver)
    first = await step(driver, state, "split 2 standin:die-after")
    again = await step(driver, first.state, "close")
    assert (again.verdict, again.goals) == ("incomplete", ("⊢ goal 0.1",))
