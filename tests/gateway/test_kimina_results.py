"""What replies become for clients of Kimina Lean Server."""

from __future__ import annotations

from typing import get_args

import pytest
from support.gateway.gateways import REASONS, STATE, reply_with
from support.gateway.kimina_reading import documented, reading

from leanq.errors import UnavailableError
from leanq.gateway.kimina_results import result_of
from leanq.queue.requests import Message, Reply, Sorry, Verdict

VERDICTS = get_args(Verdict)


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_client_reads_of_each_verdict_what_the_table_says(verdict: Verdict) -> None:
    assert documented().keys() == set(VERDICTS)
    assert reading(result_of(reply_with(verdict), 30)) == documented()[verdict]


@pytest.mark.parametrize("verdict", VERDICTS)
def test_what_is_not_accepted_never_reads_as_valid_whatever_stands_in_it(verdict: Verdict) -> None:
    bare = Reply(verdict, reason=REASONS[verdict])
    assert (reading(result_of(bare, 30)) == "valid") == (verdict == "accepted")
    assert reading(result_of(bare, 30)) == documented()[verdict]


def test_only_a_timeout_says_that_it_timed_out() -> None:
    said = {v: result_of(reply_with(v), 30).get("error", "") for v in VERDICTS}
    assert [v for v, text in said.items() if "timed out" in text] == ["timeout"]
    assert said["timeout"].startswith("Lean REPL command timed out in 30.0 seconds")
    assert "timed out" not in result_of(UnavailableError("the server timed out"), 30)["error"]


def test_an_error_names_the_verdict_the_reason_and_what_leanq_has_said() -> None:
    error = result_of(reply_with("crashed"), 30)["error"]
    assert error.startswith("leanq: crashed (process_died): it is crashed")
    assert result_of(Reply("poisoned", reason="too_many_deaths"), 1)["error"] == (
        "leanq: poisoned (too_many_deaths): the request took down too many workers"
    )


@pytest.mark.parametrize(
    "said",
    [
        "unknown module prefix 'Mathlib'",
        "unknown package 'Aesop'",
        "object file '/srv/lib/Mathlib.olean' of module Mathlib does not exist",
    ],
)
def test_a_missing_library_is_the_servers_error_and_says_what_is_missing(said: str) -> None:
    lean = Message("error", 1, 0, said)
    hint = Message("error", 1, 0, "leanq: the environment has no such module")
    result = result_of(Reply("rejected", (lean, hint), reason="unknown_import"), 30)
    assert reading(result) == "server_error"
    assert result["error"] == (
        "leanq: rejected (unknown_import): this server does not have what the text imports: "
        "the environment has no such module"
    )
    assert result["leanq"]["reason"] == "unknown_import"


@pytest.mark.parametrize(
    "said",
    [
        "unknown module prefix 'Mathlibb'\n\nNo directory 'Mathlibb'",
        "unknown package 'My'",
        "object file '/srv/Mathlib/No/Such.olean' of module Mathlib.No.Such does not exist",
        "unknown module prefix ''",
    ],
)
def test_any_other_unknown_import_is_the_texts_error(said: str) -> None:
    hint = Message("error", 1, 0, "leanq: the environment has no such module")
    messages = (Message("error", 1, 0, said), hint)
    result = result_of(Reply("rejected", messages, reason="unknown_import"), 30)
    assert reading(result) == "lean_error"
    assert [message["data"] for message in result["response"]["messages"]] == [said, hint.text]


def test_a_timeout_has_diagnostics_and_others_have_them_with_debug() -> None:
    timeout, accepted = Reply("timeout", worker="w"), Reply("accepted", worker="w")
    assert result_of(timeout, 30)["diagnostics"] == {"repl_uuid": "w"}
    assert "diagnostics" not in result_of(accepted, 30)
    assert result_of(accepted, 30, debug=True)["diagnostics"] == {"repl_uuid": "w"}


def test_clean_code_is_an_environment_alone() -> None:
    assert result_of(reply_with("accepted"), 30)["response"] == {"env": 0}


def test_sorries_have_what_the_client_needs_and_states_stand_beside_them() -> None:
    result = result_of(reply_with("incomplete"), 30)
    [sorry] = result["response"]["sorries"]
    assert sorry == {
        "pos": {"line": 1, "column": 36},
        "endPos": {"line": 1, "column": 41},
        "goal": "⊢ p",
        "proofState": 0,
    }
    assert result["leanq"]["states"] == [STATE]
    unknown = Reply("incomplete", sorries=(Sorry(2, 3),), reason="sorry")
    assert result_of(unknown, 30)["response"]["sorries"] == [
        {
            "pos": {"line": 2, "column": 3},
            "endPos": {"line": 2, "column": 3},
            "goal": "",
            "proofState": 0,
        }
    ]


def test_a_sorry_that_cannot_be_placed_stands_where_lean_warned_of_it() -> None:
    warned = Message("warning", 4, 8, "declaration uses `sorry`", 4, 9)
    hidden = Reply("incomplete", (warned,), reason="sorry")
    [sorry] = result_of(hidden, 30)["response"]["sorries"]
    assert (sorry["pos"], sorry["endPos"]) == ({"line": 4, "column": 8}, {"line": 4, "column": 9})


def test_messages_have_the_words_of_the_repl() -> None:
    messages = (Message("information", 1, 0, "Nat : Type", 1, 6), Message("warning", 2, 1, "w"))
    assert result_of(Reply("accepted", messages), 30)["response"]["messages"] == [
        {
            "severity": "info",
            "pos": {"line": 1, "column": 0},
            "endPos": {"line": 1, "column": 6},
            "data": "Nat : Type",
        },
        {"severity": "warning", "pos": {"line": 2, "column": 1}, "data": "w"},
    ]
