"""Arguments of wrong types are refused before anything is sent, in one line; without a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq import AsyncLeanQClient, Check, InvalidRequestError, LeanQClient, LeanQFuture, UsageError
from leanq.local import Pool
from leanq.producer.request_builder import RequestBuilder
from leanq.queue.settings import Settings
from leanq.queue.wire import unpack_request

SETTINGS = Settings(url="unix:///-")
BUILDER = RequestBuilder(SETTINGS, "t")
STATE = 64 * "0"

VALUES = [None, 1, 0.5, "5", b"5", True, [], {}, object(), ["a"], [1], 3 + 4j, 10**400, "\ud800"]
OPTIONS: dict[str, tuple[type, ...]] = {
    "tenant": (str,),
    "priority": (int,),
    "deadline_s": (int, float, type(None)),
    "request_id": (str, type(None)),
    "traceparent": (str, type(None)),
    "campaign": (str,),
    "env": (str,),
    "timeout_s": (int, float),
    "memory_mb": (int,),
    "scratch_mb": (int,),
    "allow_axioms": (list, dict),
    "audit": (bool,),
    "trust_programs": (bool,),
    "statements": (bool,),
    "profile": (bool,),
}

CALLS: dict[str, Callable[[Any], object]] = {
    "the Lean code": lambda value: BUILDER.check(value, {}),
    "the candidate": lambda value: BUILDER.verify("x", value, (), (), {}),
    "the target": lambda value: BUILDER.verify(value, "x", (), (), {}),
    "theorems": lambda value: BUILDER.verify(None, "x", value, (), {}),
    "holes": lambda value: BUILDER.verify("x", "x", (), value, {}),
    "the state": lambda value: BUILDER.step(value, "rfl", {}),
    "the tactic": lambda value: BUILDER.step(STATE, value, {}),
    "the exported state": lambda value: BUILDER.import_(value, {}),
    "the payload": lambda value: BUILDER.echo(value, 0.0, {}),
    "delay_s": lambda value: BUILDER.echo(b"", value, {}),
    "a request id": lambda value: BUILDER.request_id(value),
}


def refusal(call: Callable[[], object]) -> UsageError | None:
    """What refuses the call, in one short line; None where nothing does."""
    try:
        call()
    except UsageError as error:
        text, found = str(error), error
    else:
        return None
    assert "\n" not in text
    assert len(text) < 400
    return found


def is_of(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_an_option_is_of_its_type_or_refused(name: str) -> None:
    for value in VALUES:
        options: Check = {name: value}  # type: ignore[misc]
        error = refusal(partial(BUILDER.check, "example : True := trivial", options))
        if not is_of(value, OPTIONS[name]):
            assert isinstance(error, InvalidRequestError)
            assert f"{name} must be" in str(error)
            assert type(value).__name__ in str(error)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_an_argument_is_of_its_type_or_refused(name: str) -> None:
    for value in VALUES:
        if refusal(partial(CALLS[name], value)) is None:
            assert isinstance(value, str | bytes | int | float | list | dict | type(None))


@pytest.mark.parametrize("value", [5, "5", None, object()])
def test_a_budget_of_a_wrong_type_says_what_was_expected_and_what_came(value: object) -> None:
    if value == 5:
        assert BUILDER.check("x", {"timeout_s": 5}).submission.longest_run_ms
        return
    with pytest.raises(InvalidRequestError) as refused:
        BUILDER.check("x", {"timeout_s": value})  # type: ignore[typeddict-item]
    assert str(refused.value).startswith(f"timeout_s must be a number, got {value!r}")


class Text(str):
    """As NumPy has one, and enumerations."""

    def __str__(self) -> str:
        return "something else"


class Data(bytes): ...


class Number(float): ...


class Whole(int): ...


def test_subclasses_of_the_types_are_taken() -> None:
    ours = Check(
        timeout_s=Number(7.0), memory_mb=Whole(99), allow_axioms=[Text("a")], priority=Whole(0)
    )
    plain = Check(timeout_s=7.0, memory_mb=99, allow_axioms=["a"], priority=0)
    found = BUILDER.check(Text("code"), ours).submission
    expected = BUILDER.check("code", plain).submission
    assert (found.body, found.digest) == (expected.body, expected.digest)
    assert unpack_request(BUILDER.echo(Data(b"x"), 0.0, {}).submission.body).payload == b"x"
    assert BUILDER.step(Text(STATE), Text("rfl"), {}).submission.body


@given(st.one_of(st.floats(), st.integers()))
def test_any_number_is_taken_or_refused_in_a_line(number: float) -> None:
    for name in ("timeout_s", "deadline_s", "memory_mb", "scratch_mb", "priority"):
        options: Check = {name: number}  # type: ignore[misc]
        refusal(lambda options=options: BUILDER.check("x", options))  # type: ignore[misc]


WRONG: list[dict[str, Any]] = [
    {"url": 5},
    {"url": b"redis://localhost"},
    {"url": [5]},
    {"url": {"redis://localhost": 1}},
    {"url": []},
    {"weights": "1"},
    {"weights": 1.0},
    {"weights": ["1"]},
    {"weights": [True]},
    {"tenant": 5},
    {"tenant": None},
    {"when_full": "block"},
    {"when_full": None},
    {"when_full": ["wait"]},
    {"unavailable_timeout_s": "120"},
    {"unavailable_timeout_s": -1},
    {"unavailable_timeout_s": float("nan")},
    {"no_worker": True},
    {"no_worker": "error"},
]


@pytest.mark.parametrize("kind", [LeanQClient, AsyncLeanQClient])
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_client_refuses_arguments_of_wrong_types(kind: Any, wrong: dict[str, Any]) -> None:
    given = {"url": "redis://nowhere.invalid", **wrong}
    with pytest.raises(UsageError) as refused:
        kind(given.pop("url"), **given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"slots": "2"}, {"slots": 0}, {"nice": 1.5}, {"lean": 5}, {"environments": ["x"]}),
        *({"environments": {"default": 5}}, {"environments": {"a b": "/"}}),
    ],
    ids=repr,
)
def test_a_pool_refuses_arguments_of_wrong_types(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Pool(**wrong)


def test_a_verification_needs_a_target_or_theorems() -> None:
    for target, theorems in ((None, ()), ("", ()), ("theorem t : True := sorry", ("Nat.succ",))):
        with pytest.raises(InvalidRequestError, match="a target text or names of theorems"):
            BUILDER.verify(target, "x", theorems, (), {})


def test_a_future_that_was_never_sent_does_not_run() -> None:
    future: LeanQFuture[bytes] = LeanQFuture("0-x")
    assert not future.running()
    assert future.cancel()
    assert not future.running()


def test_a_client_shows_its_clusters_and_no_password() -> None:
    lean = AsyncLeanQClient("redis://:secret@one/2*3 redis://two?password=secret")
    assert repr(lean) == "<AsyncLeanQClient of redis://:***@one/2, redis://two?password=***>"
