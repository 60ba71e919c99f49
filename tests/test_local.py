"""The pool: the same operations without a queue."""

from __future__ import annotations

from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from support.fleets import until
from support.pools import new_pool
from support.terminals import SAMPLES

from leanq.errors import (
    ClosedError,
    InvalidRequestError,
    RecipeError,
    RequestError,
    ToolchainError,
    UnknownEnvironmentError,
    UnknownStateError,
)
from leanq.lean.environment import Environment
from leanq.local import Pool
from leanq.queue.requests import Theorem

THEOREM = "prelude\nimport Core\ntheorem t (p q : Prop) (hp : p) (hq : q) : And p q := sorry\n"
DEADLINE_S = 60.0


@pytest.mark.slow
def test_checks(pool: Pool) -> None:
    names = ["and_swap", "wrong", "or_swap", "incomplete"]
    futures = [pool.check((SAMPLES / f"{name}.lean").read_text()) for name in names]
    replies = [future.result(DEADLINE_S) for future in futures]
    verdicts = ["accepted", "rejected", "accepted", "incomplete"]
    assert [reply.verdict for reply in replies] == verdicts
    assert [reply.request_id for reply in replies] == [future.request_id for future in futures]
    assert {reply.attempts for reply in replies} == {1}
    statement = "∀ (p q : Prop), p ∧ q → q ∧ p"
    assert replies[0].theorems == (Theorem("and_swap", statement),)


@pytest.mark.slow
def test_streams(pool: Pool) -> None:
    codes = [(SAMPLES / f"{name}.lean").read_text() for name in ("and_swap", "wrong")] * 3
    results = list(pool.map(iter(codes), window=4))
    assert [result.code for result in results] == codes
    assert [result.verdict for result in results] == ["accepted", "rejected"] * 3


def test_a_proof(pool: Pool) -> None:
    (sorry,) = pool.check(THEOREM).result(DEADLINE_S).sorries
    assert sorry.state
    step = pool.step(sorry.state, "constructor").result(DEADLINE_S)
    assert (step.verdict, len(step.goals)) == ("incomplete", 2)
    assert step.state
    exported = pool.export(step.state).result(DEADLINE_S)
    assert pool.import_(exported).result(DEADLINE_S) == step.state
    last = pool.step(step.state, "exact hp\nexact hq").result(DEADLINE_S)
    assert (last.verdict, last.state, last.axioms) == ("accepted", None, ())


@pytest.mark.slow
def test_a_state_from_elsewhere(pool: Pool, core: Environment, cache: Path) -> None:
    (sorry,) = pool.check(THEOREM).result(DEADLINE_S).sorries
    assert sorry.state
    exported = pool.export(sorry.state).result(DEADLINE_S)
    with new_pool(cache, slots=1) as other:
        with pytest.raises(UnknownStateError):
            other.step(sorry.state, "constructor").result(DEADLINE_S)
        assert other.import_(exported).result(DEADLINE_S) == sorry.state
        step = other.step(sorry.state, "constructor").result(DEADLINE_S)
        assert step == pool.step(sorry.state, "constructor").result(DEADLINE_S)


def test_echo_and_the_order_in_which_it_works(core: Environment, cache: Path) -> None:
    ended: list[str] = []
    with new_pool(cache, slots=1) as pool:
        held = pool.echo(b"held", 60.0)
        futures = {
            name: pool.echo(name.encode(), priority=priority)
            for name, priority in (("later", 2), ("first", 0), ("second", 0), ("third", 1))
        }
        for name, future in futures.items():
            future.add_done_callback(lambda _, name=name: ended.append(name))
        late = pool.echo(b"late", deadline_s=0.05)
        with pytest.raises(RequestError, match="expired"):
            late.result(DEADLINE_S)
        assert held.cancel()
        assert {name: future.result(DEADLINE_S) for name, future in futures.items()} == {
            name: name.encode() for name in futures
        }
        until(lambda: len(ended) == 4)
        assert ended == ["first", "second", "third", "later"]
        with pytest.raises(CancelledError):
            held.result()


def test_cancelling_stops_lean(core: Environment, cache: Path) -> None:
    with new_pool(cache, slots=1) as pool:
        slow = pool.check((SAMPLES / "stack_overflow.lean").read_text())
        until(slow.running)
        assert slow.cancel()
        code = (SAMPLES / "and_swap.lean").read_text()
        assert pool.check(code).result(DEADLINE_S).verdict == "accepted"


def test_a_pool_closes_after_what_was_withdrawn(core: Environment, cache: Path) -> None:
    slow = (SAMPLES / "stack_overflow.lean").read_text()
    with new_pool(cache) as pool:
        futures = [pool.check(slow) for _ in range(3)]
        assert all(future.cancel() for future in futures[:2])
    assert all(future.done() for future in futures)
    assert isinstance(futures[2].exception(), ClosedError)


@pytest.mark.slow
def test_an_error_of_the_caller_is_not_hidden_by_the_end_of_a_pool(
    core: Environment, cache: Path
) -> None:
    def fails_amid_a_stream() -> None:
        with new_pool(cache) as pool:
            for _ in pool.map(f"theorem t{n} (p : Prop) (h : p) : p := h" for n in range(20)):
                raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        fails_amid_a_stream()


def test_what_makes_no_sense(pool: Pool) -> None:
    with pytest.raises(InvalidRequestError):
        pool.check(" ")
    with pytest.raises(InvalidRequestError):
        pool.step("nonsense", "exact h")
    with pytest.raises(RecipeError):
        pool.import_(b"nonsense")
    with pytest.raises(UnknownEnvironmentError, match="known: default, echo"):
        pool.check("x", env="other").result(DEADLINE_S)


def test_a_closed_pool(core: Environment, cache: Path) -> None:
    with new_pool(cache, slots=1) as pool:
        outstanding = [pool.echo(b"x", 60.0) for _ in range(3)]
    for future in outstanding:
        with pytest.raises(ClosedError):
            future.result(DEADLINE_S)
    with pytest.raises(ClosedError):
        pool.echo(b"x")
    pool.close()


def test_a_machine_without_lean(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="nowhere"):
        Pool(lean=str(tmp_path / "nowhere"))
