"""Messages: what is packed comes back, and what is nonsense becomes a WireError."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from msgspec.structs import asdict

from leanq.errors import (
    InvalidRequestError,
    NewerMessageError,
    NoRewardError,
    TooLargeError,
    WireError,
)
from leanq.queue import wire
from leanq.queue.requests import (
    CHECKED,
    LEAN_NO,
    LEAN_VERDICTS,
    STEPPED,
    VERIFIED,
    VERSION,
    Failure,
    Message,
    Reason,
    Reply,
    Request,
    Severity,
    Sorry,
    Theorem,
    Verdict,
    reply_to_json,
    reward,
)
from leanq.queue.settings import MAX_REQUEST_BYTES
from leanq.queue.wire import (
    pack_info,
    pack_reply,
    pack_request,
    unpack_info,
    unpack_reply,
    unpack_request,
)

quick = profile(max_examples=200)

texts = st.text(st.characters(codec="utf-8"), max_size=40)
codes = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200)
seconds = st.floats(0.01, 86_400, allow_nan=False)
positions = st.integers(0, 2**31)
maybe = st.none() | positions
programs = codes.filter(str.strip)
names = st.lists(texts, max_size=3).map(tuple)
limits: dict[str, st.SearchStrategy[Any]] = {
    "timeout_s": seconds,
    "wall_s": seconds,
    "memory_mb": st.integers(16, 1 << 24),
    "scratch_mb": st.integers(1, 1 << 24),
    "allow_axioms": names,
    "trust_programs": st.booleans(),
    "statements": st.booleans(),
}
requests = (
    st.builds(
        Request,
        op=st.just("check"),
        code=programs,
        audit=st.booleans(),
        **limits,
    )
    | st.builds(
        Request, op=st.just("verify"), code=programs, target=programs, holes=names, **limits
    )
    | st.builds(Request, op=st.just("verify"), code=programs, theorems=names.filter(bool), **limits)
    | st.builds(Request, op=st.just("echo"), payload=st.binary(max_size=200), delay_s=seconds)
)
messages = st.builds(
    Message, st.sampled_from(get_args(Severity)), positions, positions, texts, maybe, maybe
)
sorries = st.builds(Sorry, positions, positions, st.none() | texts, st.none() | texts, maybe, maybe)
replies = st.builds(
    Reply,
    verdict=st.none() | st.sampled_from(get_args(Verdict)),
    messages=st.lists(messages, max_size=3).map(tuple),
    sorries=st.lists(sorries, max_size=3).map(tuple),
    reason=st.none() | st.sampled_from(get_args(Reason)),
    theorems=st.lists(st.builds(Theorem, texts, texts), max_size=3).map(tuple),
    failed=st.lists(st.builds(Failure, texts, texts, texts), max_size=3).map(tuple),
    kernel=st.none() | texts,
    axioms=st.none() | st.lists(texts, max_size=3).map(tuple),
    more_theorems=st.integers(0, 3),
    fingerprint=st.none() | texts,
    payload=st.none() | st.binary(max_size=100),
    error=st.none() | texts,
    request_id=texts,
    worker=texts,
    attempts=st.integers(0, 100),
    queued_s=seconds,
    cpu_s=seconds,
    wall_s=seconds,
    audit_s=seconds,
)
# What a worker makes, and whatever another release did.
tokens = st.from_regex(r"[A-Za-z0-9_-]{12}:[0-9]{1,4}", fullmatch=True)
values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(max_size=20)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))
    | st.builds(msgpack.Timestamp, st.integers(0, 2**33), st.integers(0, 999_999_999)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


def everything(reply: Reply) -> dict[str, Any]:
    """All fields, those too that do not count in a comparison."""
    return asdict(reply)


@pytest.mark.slow
@quick
@given(requests)
def test_request_comes_back(request: Request) -> None:
    assert unpack_request(pack_request(request)) == request


@pytest.mark.slow
@quick
@given(tokens, replies)
def test_reply_comes_back(token: str, reply: Reply) -> None:
    assert everything(unpack_reply(reply.request_id, pack_reply(token, reply))) == everything(reply)


@pytest.mark.slow
@quick
@given(tokens, replies)
def test_reply_begins_as_the_settle_script_compares(token: str, reply: Reply) -> None:
    head = bytes([0x93, 0xA0 + len(token)]) + token.encode()
    assert pack_reply(token, reply).startswith(head)


@quick
@given(st.dictionaries(texts, st.none() | st.integers(0, 99) | texts | st.lists(texts, max_size=3)))
def test_info_comes_back(info: dict[str, Any]) -> None:
    assert unpack_info(pack_info(info)) == info


# Nonsense


def value_or_wire_error(data: bytes) -> None:
    """Whatever the bytes, each reader gives a value or a WireError of one short line."""
    readers: list[Callable[[bytes], object]] = [
        unpack_request,
        unpack_info,
        lambda data: unpack_reply("r", data),
    ]
    for read in readers:
        found: object
        try:
            found = read(data)
        except WireError as error:
            found = error
        assert isinstance(found, (Request, Reply, dict, WireError))
        if isinstance(found, WireError):
            assert len(str(found)) < 300
            assert "\n" not in str(found)


@quick
@given(st.binary(max_size=100))
def test_any_bytes(data: bytes) -> None:
    value_or_wire_error(data)


@pytest.mark.slow
@quick
@given(values)
def test_any_value(value: Any) -> None:
    value_or_wire_error(msgpack.packb(value))


@pytest.mark.slow
@quick
@given(st.data(), requests.map(pack_request) | replies.map(lambda reply: pack_reply("t", reply)))
def test_valid_messages_with_bytes_changed(draw: st.DataObject, data: bytes) -> None:
    changed = bytearray(data)
    for place in draw.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=4)):
        changed[place] = draw.draw(st.integers(0, 255))
    end = draw.draw(st.integers(0, len(changed)))
    value_or_wire_error(bytes(changed))
    value_or_wire_error(bytes(changed[:end]))


@pytest.mark.slow
@quick
@given(st.sampled_from(Request.__struct_fields__), values)
def test_requests_with_a_field_of_nonsense(name: str, value: Any) -> None:
    body = {"v": VERSION, "op": "check", "code": "x", name: value}
    value_or_wire_error(msgpack.packb(body))


@pytest.mark.slow
@quick
@given(st.sampled_from(Reply.__struct_fields__), values)
def test_replies_with_a_field_of_nonsense(name: str, value: Any) -> None:
    value_or_wire_error(msgpack.packb(["t", VERSION, {name: value}]))


@pytest.mark.parametrize("nesting", [b"\x91", b"\x81\xa1x"])
def test_deep_nesting(nesting: bytes) -> None:
    value_or_wire_error(nesting * 200_000 + b"\xc0")


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"])
def test_lengths_that_are_lies(head: bytes) -> None:
    value_or_wire_error(head + b"\xff\xff\xff\xff")


def test_extension_types_are_refused() -> None:
    for extension in (msgpack.ExtType(5, b"x"), msgpack.Timestamp(1)):
        with pytest.raises(WireError):
            unpack_request(msgpack.packb({"v": 1, "op": "check", "code": extension}))
        with pytest.raises(WireError):
            unpack_reply("r", msgpack.packb(["t", 1, {"worker": extension}]))
    with pytest.raises(WireError):
        unpack_info(msgpack.packb({"x": msgpack.ExtType(5, b"x")}))


@pytest.mark.parametrize("version", [0, 2, None, "1", "x" * 100_000])
def test_other_versions_are_refused_by_name(version: object) -> None:
    shown = repr(version)[:40]
    with pytest.raises(WireError) as refused:
        unpack_request(msgpack.packb({"v": version, "op": "check", "code": "x"}))
    assert shown in str(refused.value)
    with pytest.raises(WireError) as refused:
        unpack_reply("r", msgpack.packb(["t", version, {}]))
    assert shown in str(refused.value)
    value_or_wire_error(msgpack.packb({"v": version}))


def test_fields_of_a_later_release_are_ignored() -> None:
    body = {"v": 1, "op": "check", "code": "x", "later": [1]}
    assert unpack_request(msgpack.packb(body)) == Request("check", "x")
    longer = ["error", 1, 2, "text", None, None, "later"]
    data = msgpack.packb(["t", 1, {"verdict": "rejected", "later": 1, "messages": [longer]}])
    assert unpack_reply("r", data) == Reply("rejected", (Message("error", 1, 2, "text"),))


def test_a_sorry_of_an_earlier_release_has_no_end() -> None:
    data = msgpack.packb(["t", 1, {"sorries": [[1, 2, "⊢ p", None]]}])
    assert unpack_reply("r", data).sorries == (Sorry(1, 2, "⊢ p"),)


# What is told of a reply


@pytest.mark.slow
@quick
@given(replies)
def test_json_has_the_fields_of_the_contract(reply: Reply) -> None:
    check = reply_to_json(reply, CHECKED)
    assert check.pop("more_theorems", 0) == reply.more_theorems
    assert list(check) == [
        *("request_id", "verdict", "reason", "messages", "sorries", "theorems", "axioms"),
        *("kernel", "attempts", "worker", "queued_s", "cpu_s", "wall_s"),
    ]
    for message in check["messages"]:
        assert set(message) == {"severity", "line", "column", "end_line", "end_column", "text"}
    for sorry in check["sorries"]:
        assert set(sorry) == {"line", "column", "end_line", "end_column", "goal", "state"}
    assert all(set(theorem) == {"name", "statement"} for theorem in check["theorems"])
    verify = reply_to_json(reply, VERIFIED)
    verify.pop("more_theorems", 0)
    assert list(verify) == [*check, "failed"]
    assert all(set(failure) == {"name", "rule", "text"} for failure in verify["failed"])
    step = reply_to_json(reply, STEPPED)
    assert list(step) == [
        *("verdict", "reason", "state", "goals", "messages", "cpu_s", "wall_s"),
    ]
    assert json.loads(json.dumps([check, verify, step])) == [check, verify, step]


@pytest.mark.slow
@quick
@given(replies)
def test_replies_survive_pickle(reply: Reply) -> None:
    assert everything(pickle.loads(pickle.dumps(reply))) == everything(reply)


def test_only_verdicts_of_lean_and_the_judge_earn_a_reward() -> None:
    assert reward("accepted") == 1
    assert {reward(verdict) for verdict in get_args(Verdict) if verdict in LEAN_NO} == {0}
    assert {"accepted"} | LEAN_NO == LEAN_VERDICTS < set(get_args(Verdict))
    for verdict in (*sorted(set(get_args(Verdict)) - LEAN_VERDICTS), None):
        with pytest.raises(NoRewardError, match=verdict or "no verdict"):
            reward(verdict)  # type: ignore[arg-type]


# Limits


@pytest.mark.parametrize(
    "fields",
    [
        {"op": "check", "code": ""},
        {"op": "check", "code": " \n"},
        {"op": "check", "code": "x\0"},
        {"op": "check", "code": "x", "timeout_s": 0.0},
        {"op": "check", "code": "x", "timeout_s": float("nan")},
        {"op": "check", "code": "x", "timeout_s": 86_401.0},
        {"op": "check", "code": "x", "memory_mb": 15},
        {"op": "echo", "delay_s": -1.0},
        {"op": "check", "code": "x", "scratch_mb": 0},
        {"op": "verify", "code": "", "target": "x"},
        {"op": "verify", "code": "x"},
        {"op": "verify", "code": "x", "target": " \n"},
        {"op": "verify", "code": "x", "target": "x\0"},
        {"op": "verify", "code": "x", "target": "x", "theorems": ("t",)},
    ],
)
def test_impossible_requests(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        Request(**fields)
    with pytest.raises(WireError):
        unpack_request(msgpack.packb({"v": 1, **fields}))


def test_request_that_is_too_large_is_not_packed() -> None:
    with pytest.raises(TooLargeError):
        pack_request(Request("check", "x" * MAX_REQUEST_BYTES))


def test_text_that_is_no_unicode_is_refused_from_clients_and_mended_from_lean() -> None:
    with pytest.raises(InvalidRequestError):
        pack_request(Request("check", "def x := 1 -- \ud800"))
    reply = Reply("rejected", (Message("error", 1, 0, "no \udcff"),), (Sorry(1, 0, "\ud800"),))
    assert unpack_reply("r", pack_reply("t", reply)).messages[0].text == "no ?"
    assert unpack_info(pack_info({"host": "\udcff"})) == {"host": "?"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"messages": (Message("error", 1, 0, "∀" * 30_000_000),)},
        {"messages": (Message("error", 1, 0, "∀" * 10_000),) * 3000},
        {"sorries": (Sorry(1, 0, "∀" * 10_000, "state"),) * 3000},
        {"axioms": ("∀" * 10_000,) * 3000},
        {"theorems": (Theorem("t", "∀" * 10_000),) * 3000},
        {"failed": (Failure("t", "statement_differs", "∀" * 10_000),) * 3000},
        {"error": "∀" * 30_000_000},
    ],
)
def test_reply_that_is_too_large_is_cut_and_keeps_its_verdict(fields: dict[str, Any]) -> None:
    data = pack_reply("token", Reply("rejected", worker="w", **fields))
    assert len(data) <= wire.MAX_REPLY_BYTES
    reply = unpack_reply("r", data)
    assert (reply.verdict, reply.worker) == ("rejected", "w")
    assert "cut short" in reply.messages[0].text
    assert all(getattr(reply, name) for name in fields)


def test_defaults_cost_no_bytes() -> None:
    assert len(pack_request(Request("check", "x"))) < 25
    assert len(pack_reply("t", Reply("accepted"))) < 25


def test_a_drivers_word_to_its_worker_is_not_sent() -> None:
    told = Reply("accepted", warm=True, way="warm")
    assert pack_reply("t", told) == pack_reply("t", Reply("accepted"))


def test_equal_requests_have_equal_bytes() -> None:
    # Objects of their own, as a caller's are.
    same = Request(
        "check",
        "x",
        payload=bytes(bytearray()),
        delay_s=float("-0"),
        timeout_s=float("60"),
        wall_s=int("360"),
        memory_mb=int("4096"),
        scratch_mb=int("256"),
        allow_axioms=tuple(list[str]()),
        target="".join(list[str]()),
    )
    assert pack_request(same) == pack_request(Request("check", "x"))
    assert pack_request(unpack_request(pack_request(same))) == pack_request(same)


def test_replies_are_equal_where_leans_answers_are() -> None:
    here = Reply("accepted", request_id="a", worker="w", attempts=1, cpu_s=1.0, warm=True)
    there = Reply("accepted", request_id="b", worker="v", attempts=2, cpu_s=2.0, way="cold")
    assert here == there
    assert hash(here) == hash(there)
    assert here != Reply("rejected")
    assert here != Reply("accepted", axioms=("propext",))
    assert here != "accepted"


def test_what_is_wrong_with_a_message_is_said() -> None:
    with pytest.raises(WireError, match=r"Expected `int`, got `str` - at `\$.memory_mb`"):
        unpack_request(msgpack.packb({"v": 1, "op": "check", "code": "x", "memory_mb": "4"}))
    with pytest.raises(NewerMessageError, match="a request for the unknown operation 'prove'"):
        unpack_request(msgpack.packb({"op": "prove", "v": 1}))
    with pytest.raises(NewerMessageError, match="a reply of version 2; this release reads 1"):
        unpack_reply("r", msgpack.packb(["t", 2, {}]))
    with pytest.raises(WireError, match=r"Invalid enum value 'proved' - at `\$\[2\].verdict`"):
        unpack_reply("r", msgpack.packb(["t", 1, {"verdict": "proved"}]))
