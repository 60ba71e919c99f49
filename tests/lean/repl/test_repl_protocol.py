"""How an answer is found in what a REPL printed, whatever else was printed."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq.errors import ReplError
from leanq.lean.repl.protocol import (
    Elaborated,
    Exchange,
    OpenGoal,
    Refused,
    Stepped,
    elaborate,
    find_answers,
    read_answer,
    run_tactic,
)
from leanq.queue.requests import Message

POS = {"line": 1, "column": 4}

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLACES = st.fixed_dictionaries({"line": st.integers(0, 99), "column": st.integers(0, 99)})
MESSAGES = st.fixed_dictionaries(
    {
        "severity": st.sampled_from(["info", "warning", "error", "trace"]),
        "data": TEXTS | st.sampled_from(['{"env": 7}', '{"message": "x"}', '"\n\n{"env": 1}']),
    },
    optional={"pos": PLACES, "endPos": st.none() | PLACES},
)
SORRIES = st.fixed_dictionaries(
    {"goal": TEXTS}, optional={"proofState": st.integers(0, 99) | st.none(), "pos": PLACES}
)
LISTS: dict[str, Any] = {"messages": st.lists(MESSAGES), "sorries": st.lists(SORRIES)}
ANSWERS = (
    st.fixed_dictionaries({"env": st.integers(0, 99)}, optional=LISTS)
    | st.fixed_dictionaries(
        {"proofState": st.integers(0, 99), "goals": st.lists(TEXTS)},
        optional={**LISTS, "proofStatus": TEXTS, "traces": st.lists(TEXTS)},
    )
    | st.fixed_dictionaries({"message": TEXTS})
)
# What Lean code may have printed, short of an answer.
NOISE = st.lists(
    TEXTS
    | st.sampled_from(["{", '{"', '{"env"', '{"env": ', '{"x": 1}', "[", "\n\n", '"', "\\", "\x00"])
    | st.sampled_from(['{"goals": "⊢ p"}', '{"message": 3}', '{"env": null}', '{"messages": [']),
    max_size=4,
).map("".join)


def printed(answer: object, indent: int = 1) -> str:
    return json.dumps(answer, indent=indent, ensure_ascii=False) + "\n\n"


def probe_of(exchange: Exchange) -> str:
    """What a REPL says to the probe of an exchange."""
    command = json.loads(exchange.sent.decode().rstrip("\n").rpartition("\n\n")[2])
    return printed({"message": f"no such file or directory\n  file: {command['path']}"})


def feed(exchange: Exchange, data: bytes, cuts: list[int]) -> bool:
    """Whether the probe is seen at the end, and not before."""
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    seen = [exchange.take(data[a:b]) for a, b in itertools.pairwise(edges)]
    assert seen == sorted(seen)
    return seen[-1]


@pytest.mark.slow
@given(answer=ANSWERS, before=NOISE, between=NOISE, cuts=st.lists(st.integers(0, 10_000)))
def test_one_answer_is_found_in_any_noise(
    answer: dict[str, Any], before: str, between: str, cuts: list[int]
) -> None:
    exchange = Exchange(elaborate("x"))
    data = f"{before}{printed(answer)}{between}{probe_of(exchange)}".encode()
    assert feed(exchange, data, cuts)
    try:
        found = exchange.answer()
    except ReplError:
        # Noise can run into what follows it, so that nothing is left to read. It is never misread.
        assert "{" in before + between
    else:
        assert found == answer


@pytest.mark.slow
@given(answers=st.lists(ANSWERS, max_size=3), noise=NOISE)
def test_none_and_several_answers_are_refused(answers: list[dict[str, Any]], noise: str) -> None:
    exchange = Exchange(elaborate("x"))
    data = noise.join([*map(printed, answers), probe_of(exchange)]).encode()
    exchange.take(data)
    if len(answers) == 1 and not noise:
        assert exchange.answer() == answers[0]
        return
    try:
        found = exchange.answer()
    except ReplError:
        return
    # Where noise has swallowed some, the one that is left is a real one.
    assert found in answers


@pytest.mark.slow
@given(answer=ANSWERS, cut=st.integers(1, 10_000))
def test_an_answer_that_is_cut_short_is_none(answer: dict[str, Any], cut: int) -> None:
    exchange = Exchange(elaborate("x"))
    whole = printed(answer).rstrip()
    exchange.take(f"{whole[: -1 - cut % len(whole)]}\n\n{probe_of(exchange)}".encode())
    with pytest.raises(ReplError):
        exchange.answer()


@given(st.data())
def test_the_answer_to_another_probe_is_no_end(data: st.DataObject) -> None:
    first, second = Exchange(elaborate("x")), Exchange(elaborate("y"))
    assert not feed(second, probe_of(first).encode(), data.draw(st.lists(st.integers(0, 999))))


@given(ANSWERS)
def test_every_answer_can_be_read(answer: dict[str, Any]) -> None:
    read = read_answer(answer)
    if isinstance(read, Refused):
        assert read.text == answer["message"]
        return
    assert len(read.messages) == len(answer.get("messages", []))
    assert [each.goal for each in read.sorries] == [s["goal"] for s in answer.get("sorries", [])]
    if isinstance(read, Stepped):
        assert (read.proof_state, list(read.goals)) == (answer["proofState"], answer["goals"])
    else:
        assert read.env == answer["env"]


def test_answers_as_values() -> None:
    assert read_answer(
        {
            "sorries": [{"proofState": 0, "pos": POS, "goal": "⊢ p", "endPos": POS}],
            "messages": [
                {"severity": "error", "pos": POS, "endPos": None, "data": "no"},
                {"severity": "trace", "pos": POS, "endPos": POS, "data": "t"},
            ],
            "tactics": [{"usedConstants": [], "proofState": 1, "goals": "⊢ p"}],
            "infotree": [],
            "env": 3,
        }
    ) == Elaborated(
        3,
        (
            (Message("error", 1, 4, "no"), ""),
            (Message("information", 1, 4, "t", 1, 4), ""),
        ),
        (OpenGoal(0, "⊢ p", (1, 4)),),
        b"[]",
    )
    assert read_answer(
        {
            "traces": ["37"],
            "sorries": [{"proofState": 4, "goal": "⊢ q"}],
            "proofStatus": "Completed",
            "proofState": 5,
            "goals": [],
        }
    ) == Stepped(5, (), "Completed", (), (OpenGoal(4, "⊢ q", None),), ("37",))
    refused = read_answer({"message": "Lean error:\nno"})
    assert isinstance(refused, Refused)
    assert (refused.by_lean, refused.reason) == (True, "no")
    assert not Refused("Unknown environment.").by_lean


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"env": "0"},
        {"env": 0, "messages": {}},
        {"env": 0, "messages": [{"severity": "fatal", "data": ""}]},
        {"env": 0, "sorries": [{"pos": POS}]},
        {"proofState": 0, "goals": [1]},
        {"proofState": 0, "goals": [], "traces": "x"},
        {"proofState": 0, "goals": [], "proofStatus": None},
    ],
)
def test_what_no_repl_answers(answer: dict[str, Any]) -> None:
    with pytest.raises(ReplError, match="answer"):
        read_answer(answer)


def test_half_a_surrogate_pair_can_be_sent_on() -> None:
    answer = read_answer(
        json.loads(r'{"proofState": 0, "goals": ["\ud800"], "traces": ["\udc00"]}')
    )
    assert isinstance(answer, Stepped)
    assert (answer.goals, answer.traces) == (("?",), ("?",))


@pytest.mark.parametrize(
    "flood", ['{"env": ' * 5000, '{"env": {' * 500, '{"env": "' * 400, '{"env": [' + "[" * 200_000]
)
def test_a_flood_of_beginnings_comes_to_an_end(flood: str) -> None:
    with pytest.raises(ReplError, match="too often"):
        list(find_answers(flood * 3 if len(flood) < 9000 else flood * 300))


def test_letters_are_sent_as_they_are() -> None:
    """Older versions of Lean read a pair of escaped surrogates as no letter at all."""
    sent = Exchange(elaborate("theorem t (𝓟 : Prop)")).sent
    assert "(𝓟 : Prop)".encode() in sent
    assert b"\\u" not in sent


def test_a_command_is_one_line() -> None:
    sent = Exchange(run_tactic("intro x\n\n\n-- a comment\r\u2028end", 3)).sent.decode()
    first, second, rest = sent.split("\n\n")
    assert json.loads(first)["tactic"].startswith("intro x\n\n\n--")
    assert "\n" not in first
    assert list(json.loads(second)) == ["path"]
    assert rest == ""
