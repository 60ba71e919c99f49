"""What Lean printed, read as messages, and the verdict that it amounts to."""

from __future__ import annotations

import json
import signal
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leanq.lean.outcome import Printed, classify, message_of
from leanq.lean.sandbox.process import Exit, Finished, Limits
from leanq.queue.requests import Message, Reply
from leanq.queue.wire import pack_reply, unpack_reply

ENDED = Exit(code=0, signal=None, stopped=None, cpu_s=0.1, wall_s=0.1, peak_bytes=1 << 20)
FAILED = replace(ENDED, code=1)
LIMITS = Limits(cpu_s=10.0, wall_s=60.0, memory_bytes=512 << 20)

HEARTBEATS = (
    "(deterministic) timeout at `whnf`, maximum number of heartbeats (2000) has been reached\n\n"
    "Note: Use `set_option maxHeartbeats <num>` to set the limit."
)
RECURSION = (
    "maximum recursion depth has been reached\n"
    "use `set_option maxRecDepth <num>` to increase limit\n"
    "use `set_option diagnostics true` to get diagnostic information"
)


def line(text: str, severity: str = "error", **more: Any) -> bytes:
    """One line as Lean 4.35 prints it."""
    fields = {
        "caption": "",
        "data": text,
        "endPos": {"column": 9, "line": 4},
        "fileName": "LeanqSubmission.lean",
        "isSilent": False,
        "keepFullRange": False,
        "kind": "[anonymous]",
        "pos": {"column": 2, "line": 3},
        "severity": severity,
    }
    return json.dumps(fields | more, ensure_ascii=False).encode() + b"\n"


def outcome(stdout: bytes, end: Exit = ENDED, stderr: bytes = b"", compiled: bool = True) -> Reply:
    return classify(Printed(stdout), Finished(end, stdout, stderr), LIMITS, compiled=compiled)


def verdict(stdout: bytes, end: Exit = ENDED, stderr: bytes = b"", compiled: bool = True) -> str:
    return str(outcome(stdout, end, stderr, compiled).verdict)


def last_words(end: Exit, stderr: bytes = b"") -> str:
    """What leanq adds to what Lean has printed."""
    message = outcome(b"", end, stderr, compiled=False).messages[-1]
    assert (message.severity, message.line, message.column) == ("error", 1, 0)
    return message.text


def test_a_message_as_lean_prints_it() -> None:
    printed = Printed(line("Type mismatch\n  «∀ x, p» has type"))
    text = "Type mismatch\n  «∀ x, p» has type"
    assert printed.messages == (Message("error", 3, 2, text, end_line=4, end_column=9),)
    assert not printed.sorry


def test_messages_keep_their_order() -> None:
    severities = ["information", "warning", "error", "information"]
    printed = Printed(b"".join(line(str(n), each) for n, each in enumerate(severities)))
    assert [(m.text, m.severity) for m in printed.messages] == [
        (str(n), each) for n, each in enumerate(severities)
    ]


def test_a_message_without_an_end_or_a_place() -> None:
    (message,) = Printed(line("x", endPos=None)).messages
    assert (message.line, message.column, message.end_line, message.end_column) == (
        3,
        2,
        None,
        None,
    )
    (message,) = Printed(line("x", endPos=None, pos=None)).messages
    assert (message.line, message.column) == (1, 0)


# sorry


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("declaration uses 'sorry'", "[anonymous]"),
        ("declaration uses `sorry`", "[anonymous]"),
        ("declaration uses `sorry`", "hasSorry"),
        ("this declaration rests on an unproved claim", "hasSorry"),
    ],
)
def test_a_sorry_warning_in_every_spelling(text: str, kind: str) -> None:
    stdout = line(text, "warning", kind=kind)
    assert Printed(stdout).sorry
    assert verdict(stdout) == "incomplete"


def test_the_sorry_warning_of_versions_without_kinds() -> None:
    fields = json.loads(line("declaration uses 'sorry'", "warning"))
    del fields["kind"]
    assert Printed(json.dumps(fields).encode()).sorry


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("declaration uses 'sorry'", "information"),
        ("-- declaration uses 'sorry'", "warning"),
        ("unused variable `sorry`", "warning"),
        ('"declaration uses `sorry`"', "warning"),
        ("declaration uses `sorry` says the user", "warning"),
        ("declaration uses sorry", "warning"),
        ("declaration uses 'sorry`", "warning"),
        ("sorry", "warning"),
    ],
)
def test_the_word_alone_is_no_sorry(text: str, severity: str) -> None:
    stdout = line(text, severity)
    assert not Printed(stdout).sorry
    assert verdict(stdout) == "accepted"


def test_a_sorry_in_text_that_is_no_message() -> None:
    assert verdict(b"declaration uses 'sorry'\nwarning: declaration uses `sorry`\n") == "accepted"


# The words of each version

_FIRST_FIELDS = ("fileName", "pos", "endPos", "severity", "caption", "data", "keepFullRange")


def said_by(minor: int, text: str, severity: str = "error", kind: str = "[anonymous]") -> bytes:
    """One line as Lean 4.``minor`` prints it."""
    fields = json.loads(line(text, severity, kind=kind))
    since = dict.fromkeys(_FIRST_FIELDS, 9) | {"kind": 15, "isSilent": 19}
    known = {name: fields[name] for name, first in since.items() if minor >= first}
    return json.dumps(known).encode() + b"\n"


def sorry_of(minor: int) -> bytes:
    text = "declaration uses `sorry`" if minor >= 28 else "declaration uses 'sorry'"
    return said_by(minor, text, "warning", "hasSorry")


def heartbeats_of(minor: int) -> bytes:
    advice = "use" if minor <= 10 else "Use" if minor <= 21 else "Note: Use"
    gap = "\n" if minor <= 21 else "\n\n"
    return said_by(
        minor,
        "(deterministic) timeout at `whnf`, maximum number of heartbeats (2000) has been reached"
        f"{gap}{advice} `set_option maxHeartbeats <num>` to set the limit.",
    )


def recursion_of(minor: int) -> bytes:
    return said_by(minor, RECURSION, kind="runtime.maxRecDepth")


def kernel_recursion_of(minor: int) -> bytes:
    more = ", use `set_option maxRecDepth <num>` to increase it" if minor >= 33 else ""
    return said_by(minor, f"(kernel) deep recursion detected{more}")


@pytest.mark.parametrize("minor", [9, 11, 14, 15, 19, 20, 22, 25, 27, 28, 33, 35])
def test_the_words_of_each_version_are_understood(minor: int) -> None:
    assert verdict(sorry_of(minor)) == "incomplete"
    assert verdict(heartbeats_of(minor), FAILED) == "exhausted"
    assert verdict(recursion_of(minor), FAILED) == "exhausted"
    assert verdict(kernel_recursion_of(minor), FAILED) == "exhausted"
    assert verdict(said_by(minor, "(kernel) deterministic timeout"), FAILED) == "exhausted"
    assert verdict(said_by(minor, "unsolved goals\n⊢ p") + sorry_of(minor), FAILED) == "rejected"
    assert verdict(said_by(minor, "unused variable `x`", "warning")) == "accepted"


# Budgets


@pytest.mark.parametrize(
    "text",
    [
        HEARTBEATS,
        RECURSION,
        "(deterministic) timeout",
        "maximum recursion depth reached in the code generator",
        "(kernel) deterministic timeout",
        "(kernel) deep recursion detected, use `set_option maxRecDepth <num>` to increase it",
        f"tactic 'simp' failed, nested error:\n{HEARTBEATS}",
        f"failed to synthesize\n  Decidable p\n  {RECURSION}",
    ],
)
def test_a_budget_that_ran_out(text: str) -> None:
    assert verdict(line(text), FAILED) == "exhausted"
    assert verdict(line(text) + line(RECURSION), FAILED) == "exhausted"
    assert verdict(line(text) + line("unused", "warning"), FAILED) == "exhausted"


@pytest.mark.parametrize("first", [True, False])
def test_a_real_error_wins_over_a_budget(first: bool) -> None:
    lines = [line("unsolved goals\n⊢ p"), line(HEARTBEATS)]
    assert verdict(b"".join(lines if first else reversed(lines)), FAILED) == "rejected"


@pytest.mark.parametrize(
    "text",
    [
        "unknown identifier 'timeout'",
        "Type mismatch: «(deterministic) timeout» is no proposition",
        "the maximum recursion depth has been reached",
        "unsolved goals\nh : maximum recursion depth has been reached\n⊢ p",
    ],
)
def test_an_error_that_only_mentions_a_budget(text: str) -> None:
    assert verdict(line(text), FAILED) == "rejected"


def test_a_budget_in_a_warning_is_no_end() -> None:
    assert verdict(line(HEARTBEATS, "warning")) == "accepted"


# Ends


def test_accepted_needs_the_compiled_result() -> None:
    assert verdict(b"") == "accepted"
    assert verdict(b"", compiled=False) == "crashed"
    assert verdict(line("declaration uses `sorry`", "warning"), compiled=False) == "crashed"


def test_an_error_is_a_no_whatever_the_exit_code_says() -> None:
    assert verdict(line("unsolved goals"), ENDED) == "rejected"


@pytest.mark.parametrize("code", [1, 2, 134, 255])
def test_an_exit_code_without_an_error_is_a_crash(code: int) -> None:
    assert verdict(b"", replace(ENDED, code=code), compiled=False) == "crashed"
    assert verdict(line("x", "information"), replace(ENDED, code=code)) == "crashed"


def test_out_of_memory_as_lean_says_it() -> None:
    stderr = b"INTERNAL PANIC: out of memory\n"
    assert verdict(b"", FAILED, stderr, compiled=False) == "memory"
    assert verdict(line("unsolved goals"), FAILED, stderr, compiled=False) == "rejected"
    assert verdict(b"", ENDED, stderr) == "accepted"


@pytest.mark.parametrize(
    ("stopped", "expected"),
    [
        ("cpu", "timeout"),
        ("wall", "timeout"),
        ("memory", "memory"),
        ("output", "crashed"),
        ("killed", "crashed"),
    ],
)
@pytest.mark.parametrize("stdout", [b"", line("unsolved goals"), line(HEARTBEATS)])
def test_what_leanq_stopped(stopped: Any, expected: str, stdout: bytes) -> None:
    end = Exit(None, signal.SIGKILL, stopped, 1.0, 1.0, 1)
    assert verdict(stdout, end) == expected
    # It can have ended by itself in the same moment.
    assert verdict(stdout, replace(ENDED, stopped=stopped)) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGXCPU, "timeout"),
        (signal.SIGABRT, "crashed"),
        (signal.SIGSEGV, "crashed"),
        (signal.SIGKILL, "crashed"),
    ],
)
def test_signals(number: int, expected: str) -> None:
    end = replace(ENDED, code=None, signal=number)
    assert verdict(b"", end) == expected
    assert verdict(line("unsolved goals"), end) == expected


@pytest.mark.parametrize("number", range(1, signal.NSIG))
def test_every_signal_has_last_words(number: int) -> None:
    text = last_words(replace(ENDED, code=None, signal=number))
    assert str(number) in text or "SIG" in text or number == signal.SIGXCPU


def test_last_words_name_the_cause_and_quote_the_end() -> None:
    text = last_words(replace(ENDED, code=None, signal=6), b"Stack overflow detected.\n")
    assert text == "leanq: Lean died of SIGABRT\nStack overflow detected."
    assert "exit code 7" in last_words(replace(ENDED, code=7))
    long = last_words(FAILED, b"a" * 5000 + "ende\u0301".encode() + b"\xff")
    assert len(long) < 2200
    assert long.endswith("ende\u0301\ufffd")


# Reasons


@pytest.mark.parametrize(
    ("end", "verdict", "reason", "said"),
    [
        ({"stopped": "cpu"}, "timeout", "cpu_time", "after 12.5 s of CPU time; the request allows"),
        ({"signal": signal.SIGXCPU}, "timeout", "cpu_time", "the request allows 10 s"),
        ({"stopped": "wall"}, "timeout", "wall_time", "after 61 s, of which 12.5 s of CPU time"),
        ({"stopped": "wall"}, "timeout", "wall_time", "the request allows 60 s in all"),
        ({"stopped": "memory"}, "memory", "memory", "held 700 MB of memory; the request allows"),
        ({"stopped": "memory"}, "memory", "memory", "allows 512 MB"),
        ({"stopped": "output"}, "crashed", "process_died", "too much; at most 64 MB are read"),
        ({"stopped": "killed"}, "crashed", "process_died", "SIGKILL"),
        ({"signal": signal.SIGSEGV}, "crashed", "process_died", "Lean died of SIGSEGV"),
        ({"code": 134, "signal": None}, "crashed", "process_died", "exit code 134"),
    ],
)
def test_an_end_has_a_reason_and_names_the_limit_and_what_was_used(
    end: dict[str, Any], verdict: str, reason: str, said: str
) -> None:
    killed = Exit(None, signal.SIGKILL, None, 12.5, 61.0, 700 << 20)
    found = outcome(b"", replace(killed, **end), compiled=False)
    assert (found.verdict, found.reason) == (verdict, reason)
    assert said in found.messages[-1].text


def test_lean_that_finds_no_memory_has_the_reason_memory() -> None:
    found = outcome(b"", FAILED, b"INTERNAL PANIC: out of memory\n", compiled=False)
    assert (found.verdict, found.reason) == ("memory", "memory")
    assert "the request allows 512 MB" in found.messages[-1].text


@pytest.mark.parametrize(
    ("stdout", "verdict", "reason"),
    [
        (b"", "accepted", None),
        (line("declaration uses `sorry`", "warning"), "incomplete", "sorry"),
        (line("Type mismatch"), "rejected", "lean_error"),
        (line("Type mismatch") + line(HEARTBEATS), "rejected", "lean_error"),
        (line(HEARTBEATS) + line(RECURSION), "exhausted", "heartbeats"),
        (line(RECURSION) + line(HEARTBEATS), "exhausted", "recursion_depth"),
        (line("(kernel) deterministic timeout"), "exhausted", "heartbeats"),
        (line("(kernel) deep recursion detected"), "exhausted", "recursion_depth"),
        (line("unknown module prefix 'Mathlib'\n\nNo directory"), "rejected", "unknown_import"),
        (line("unknown package 'Mathlib'"), "rejected", "unknown_import"),
        (
            line("object file '/lib/A/B.olean' of module A.B does not exist"),
            "rejected",
            "unknown_import",
        ),
        (line("I know of an unknown module prefix 'A'"), "rejected", "lean_error"),
    ],
)
def test_what_lean_says_has_a_reason(stdout: bytes, verdict: str, reason: str | None) -> None:
    found = outcome(stdout)
    assert (found.verdict, found.reason) == (verdict, reason)


# Floods


@pytest.mark.slow
def test_only_so_many_messages_are_kept_and_all_are_judged() -> None:
    flood = line("x", "information") * 10_005
    printed = Printed(flood + line("declaration uses `sorry`", "warning") + line("no"))
    assert len(printed.messages) == 10_001
    assert printed.messages[-1].text == "leanq: 7 further messages are left out"
    assert printed.sorry
    assert verdict(flood + line("no")) == "rejected"
    assert verdict(flood + line(RECURSION)) == "exhausted"


@pytest.mark.slow
@pytest.mark.parametrize("text", ["\n", " ", "\t\n", "{", '{"', '"severity"', "(", "maximum "])
def test_no_text_takes_longer_than_it_is_long(text: str) -> None:
    # What is quadratic takes hours here.
    assert verdict(line(text * 500_000)) == "rejected"
    assert Printed(text.encode() * 500_000).messages == ()


# What stands around the messages


@pytest.mark.parametrize(
    "before",
    [
        b"text without a newline ",
        b"{",
        b'{"',
        b'{"severity":',
        b'{"severity":"information","data":"',
        b'{"a": 1}',
        b'{"' * 100,
        b"\xff\x00",
        b'[{"nested": {"deep": [',
    ],
)
def test_text_before_a_message_hides_nothing(before: bytes) -> None:
    printed = Printed(b"first\n" + before + line("unsolved goals") + b"last")
    assert [m.text for m in printed.messages] == ["unsolved goals"]
    assert verdict(before + line("declaration uses `sorry`", "warning")) == "incomplete"


def test_a_message_inside_a_message_is_text() -> None:
    inner = line("declaration uses `sorry`", "warning").decode()
    printed = Printed(line(inner, "information"))
    assert [(m.severity, m.text) for m in printed.messages] == [("information", inner)]
    assert not printed.sorry


def test_line_ends_of_either_kind() -> None:
    both = line("one").rstrip() + b"\r\n" + line("two").rstrip()
    assert [m.text for m in Printed(both).messages] == ["one", "two"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\n\n\n",
        b"{}",
        b'{"severity": "error"}',
        b'{"data": "x"}',
        b'{"severity": "error", "data": 7}',
        b'{"severity": "fatal", "data": "x"}',
        b'{"severity": ["error"], "data": "x"}',
        b'{"severity": {"a": 1}, "data": "x"}',
        b'["severity", "error"]',
        b"null",
        b'{"severity": "error", "data": "x"',
        b'{"n": ' + b"9" * 10_000 + b"}",
        b'{"deep": ' + b"[" * 100_000,
        b'{"deep": ' * 100_000,
    ],
)
def test_garbage_is_no_message(garbage: bytes) -> None:
    assert Printed(garbage).messages == ()
    assert [m.text for m in Printed(garbage + b"\n" + line("after")).messages] == ["after"]


@pytest.mark.parametrize(
    "place",
    [
        None,
        [],
        {"line": 1},
        {"line": "1", "column": 0},
        {"line": 1.5, "column": 0},
        {"line": True, "column": False},
        {"line": -1, "column": 0},
        {"line": 10**30, "column": 0},
        {"line": 1, "column": 2**64},
    ],
)
def test_an_impossible_place_keeps_the_message(place: Any) -> None:
    (message,) = Printed(line("x", pos=place, endPos=place)).messages
    assert (message.line, message.column, message.end_line) == (1, 0, None)
    assert_fit_for_the_queue(Printed(line("x", pos=place, endPos=place)))


def test_text_that_is_no_unicode_can_travel() -> None:
    broken = line("x").replace(b'"x"', b'"a\\ud800b \xff \\u0000"')
    assert_fit_for_the_queue(Printed(broken))


@pytest.mark.parametrize("part", ["[],", "1,", "1e5,", '"a",', "{},"])
def test_long_json_of_a_candidate_is_passed_over_and_not_built(part: str) -> None:
    hostile = f'{{"x":[{part * (4_000_000 // len(part))}0],"severity":"error","data":"d"}}'.encode()
    tracemalloc.start()
    try:
        (message,) = Printed(hostile).messages
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (message.severity, message.text) == ("error", "d")
    assert peak_bytes < 8 * len(hostile)


def assert_fit_for_the_queue(printed: Printed) -> None:
    data = pack_reply("token", Reply(verdict="rejected", messages=printed.messages))
    (message,) = unpack_reply("request_id", data).messages
    assert message == printed.messages[0]


LINES = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [line("x"), line("declaration uses `sorry`", "warning"), b'{"', b"}", b"\n"]
        ),
        st.dictionaries(
            st.sampled_from(["severity", "data", "pos", "endPos", "kind", "line", "column"]),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.floats(),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["line", "column"]), inner, max_size=2)
                ),
                max_leaves=5,
            ),
        ).map(lambda fields: json.dumps({"severity": "error", "data": ""} | fields).encode()),
    ),
    max_size=8,
)


OBJECTS = st.dictionaries(
    st.sampled_from(["severity", "data", "pos", "endPos", "kind", "other"]),
    st.sampled_from(["error", "warning", "é\ud800", {"line": 3, "column": 1}, {"line": -1}])
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.floats(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
)


@given(OBJECTS, st.booleans())
def test_a_line_is_read_as_pythons_own_reader_does(value: dict[str, Any], ascii_: bool) -> None:
    text = json.dumps({"severity": "error", "data": "d"} | value, ensure_ascii=ascii_)
    found = Printed(text.encode(errors="replace")).messages
    expected = message_of(json.loads(text.encode(errors="replace")))
    assert found == (() if expected is None else (expected[0],))


@pytest.mark.slow
@given(pieces=LINES, code=st.none() | st.integers(0, 255), stderr=st.binary(max_size=30))
@example(pieces=[b'{"a":' * 50_000], code=0, stderr=b"")
def test_nothing_that_is_printed_raises_or_makes_a_failure_a_success(
    pieces: list[bytes], code: int | None, stderr: bytes
) -> None:
    stdout = b"".join(pieces)
    end = replace(ENDED, code=code, signal=None if code is not None else signal.SIGABRT)
    found = verdict(stdout, end, stderr)
    if code != 0:
        assert found in ("rejected", "exhausted", "crashed", "memory")
    assert verdict(stdout, end, stderr, compiled=False) != "accepted"
    reply = outcome(stdout, end, stderr)
    assert (reply.reason is None) == (reply.verdict == "accepted")
    assert unpack_reply("", pack_reply("", reply)).messages == reply.messages
