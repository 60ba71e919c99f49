"""``leanq submit`` as people use it: files in, verdicts out, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import click
import pytest
from support.fleets import look, until
from support.terminals import (
    LEANQ,
    SAMPLES,
    Terminal,
    ended,
    read_terminal,
    samples,
    screen,
    wait_for_line,
)

from leanq.commands.replies import Ended, Summary
from leanq.commands.submit import lean_files
from leanq.errors import QueueFullError, RequestError, UnavailableError, UsageError
from leanq.queue.requests import Reason, Reply
from leanq.queue.settings import Settings

FIELDS = [
    *("file", "request_id", "verdict", "reason", "messages", "sorries", "theorems", "axioms"),
    *("kernel", "attempts", "worker", "queued_s", "cpu_s", "wall_s"),
]
SHELL_PIPE = ("/bin/bash", "-c", '"${@:2}" | eval "$1"; exit "${PIPESTATUS[0]}"', "bash")


# Output


def test_json_lines(client: Terminal) -> None:
    files = samples("and_swap", "silent_sorry", "wrong", "incomplete")
    done = client.run(
        "submit", "--json", *files, "-", stdin=(SAMPLES / "or_swap.lean").read_bytes()
    )
    assert (done.code, done.err) == (1, "")
    lines = {Path(line["file"]).stem: line for line in done.lines}
    assert list(lines["-"]) == FIELDS
    assert {name: line["verdict"] for name, line in lines.items()} == {
        "and_swap": "accepted",
        "silent_sorry": "incomplete",
        "wrong": "rejected",
        "incomplete": "incomplete",
        "-": "accepted",
    }
    assert lines["and_swap"]["theorems"] == [
        {"name": "and_swap", "statement": "∀ (p q : Prop), p ∧ q → q ∧ p"}
    ]
    assert {name: line["axioms"] for name, line in lines.items()} == {
        "and_swap": [],
        "silent_sorry": ["sorryAx"],
        "wrong": None,
        "incomplete": None,
        "-": [],
    }
    # The wheel's Lean has the kernel; Lean's own errors come before it is asked.
    judged = {"and_swap", "silent_sorry", "-"}
    assert {name for name, line in lines.items() if line["kernel"] == "4.35.0"} == judged
    assert {name for name, line in lines.items() if line["kernel"] is None} == {*lines} - judged
    assert {line["file"] for line in done.lines} == {*files, "-"}
    assert lines["wrong"]["messages"] == [
        {
            "severity": "error",
            "line": 7,
            "column": 2,
            "text": "Type mismatch\n  h.left\nhas type\n  p\nbut is expected to have type\n  q",
            "end_line": 7,
            "end_column": 14,
        }
    ]
    for line in done.lines:
        assert line["attempts"] == 1
        has_sorry = Path(line["file"]).stem in ("incomplete", "silent_sorry")
        assert bool(line["sorries"]) == has_sorry
        assert line["request_id"].startswith("0-")
        assert line["worker"]
        assert 0 <= line["queued_s"] < 60
        assert 0 < line["cpu_s"] < 60
        assert 0 < line["wall_s"] < 60


def test_plain_lines(client: Terminal) -> None:
    wrong, silent = samples("wrong", "silent_sorry")
    done = client.run("submit", wrong, silent)
    assert done.code == 1
    assert re.fullmatch(r"1 incomplete, 1 rejected in \d+\.\d s\n", done.err)
    shown = re.sub(r"\d+\.\d\d s", "N s", done.out)
    assert (
        f"""{wrong}: rejected (lean_error; N s)
  {wrong}:7:2: error: Type mismatch
      h.left
    has type
      p
    but is expected to have type
      q
"""
        in shown
    )
    assert (
        f"""{silent}: incomplete (sorry; N s; axioms: sorryAx)
  {silent}:1:0: warning: leanq: it rests on sorryAx
"""
        in shown
    )
    assert "\x1b" not in done.out


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_lines_come_as_files_finish_and_a_signal_withdraws_the_rest(
    client: Terminal, fleet: Settings, number: signal.Signals, word: str
) -> None:
    process = client.start("submit", *samples("stack_overflow", "and_swap"))
    assert "and_swap.lean: accepted" in wait_for_line(process.stdout, "")
    assert process.poll() is None
    process.send_signal(number)
    done = ended(process)
    code = 130 if number == signal.SIGINT else 143
    assert (done.code, done.err.strip()) == (
        code,
        f"leanq: {word}: 1 of 2 files ended, 1 request withdrawn",
    )
    until(lambda: sum(row.held for row in look(fleet).workers) == 0)


@pytest.mark.slow
def test_a_terminal_shows_progress_and_a_pipe_does_not(client: Terminal) -> None:
    """A progress bar, where it takes longer than two seconds, colours, and whole lines."""
    files = samples("and_swap", "wrong", "or_swap", "incomplete")
    assert client.run("pause", "--env", "default").code == 0
    try:
        with screen() as (ours, theirs):
            environ = {"TERM": "xterm", "COLUMNS": "40"}
            errors = client.folder / "errors"
            piped = client.start("submit", *files)
            with errors.open("wb") as stderr:
                process = client.start(
                    "submit", *files, stdout=theirs, stderr=stderr, environ=environ
                )
            os.close(theirs)
            shown = ""
            while "checking" not in shown:
                shown += os.read(ours, 1 << 16).decode()
            assert client.run("resume", "--env", "default").code == 0
            shown += read_terminal(ours)
            assert process.wait() == 1
    finally:
        client.run("resume", "--env", "default")
    assert "/4" in shown
    assert re.search(r"\x1b\[[^ ]*maccepted", shown)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r\n", "\n")
    # However narrow it is: what is copied from it must be whole.
    assert f"{files[1]}:7:2: error: Type mismatch\n" in text
    assert f"{files[0]}: accepted" in text
    (summary,) = errors.read_text().splitlines()
    assert summary.startswith("2 accepted, 1 incomplete, 1 rejected in ")
    # It has waited for as long.
    done = ended(piped)
    assert "checking" not in done.out
    assert "\x1b" not in done.out + done.err


def test_no_progress_and_no_colour_where_they_are_not_wanted(client: Terminal) -> None:
    with screen() as (ours, theirs):
        environ = {"TERM": "xterm", "NO_COLOR": "1"}
        process = client.start("submit", *samples("and_swap"), stdout=theirs, environ=environ)
        os.close(theirs)
        shown = read_terminal(ours)
        assert process.wait() == 0
    assert "\x1b" not in shown
    assert "accepted" in shown


@pytest.mark.slow
def test_a_verdict_by_a_limit_names_the_limit(client: Terminal) -> None:
    (slow,) = samples("stack_overflow")
    done = client.run("submit", "--timeout", "0.5", slow)
    assert ": timeout (cpu_time; " in done.out
    assert re.search(r"stopped after \d.* s of CPU time; the request allows 0\.5 s\n", done.out)
    done = client.run("submit", "--memory", "48", slow)
    assert ": memory (memory; " in done.out
    assert re.search(r" held \d+ MB of memory; the request allows 48 MB\n", done.out)


@pytest.mark.slow
def test_a_folder_is_all_its_lean_files(client: Terminal) -> None:
    folder = client.folder / "proofs"
    for name in ("b/z.lean", "b/a.lean", "a.lean", ".lake/x.lean", "b/.hidden.lean", "note.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((SAMPLES / "standalone.lean").read_bytes())
    assert list(lean_files(["x.lean", str(folder), "-"])) == [
        *("x.lean", f"{folder}/a.lean", f"{folder}/b/a.lean", f"{folder}/b/z.lean", "-")
    ]
    done = client.run("submit", str(folder))
    assert (done.code, len(done.out.splitlines())) == (0, 3)
    assert done.err.startswith("3 accepted in ")
    (client.folder / "empty").mkdir()
    done = client.run("submit", "empty")
    assert (done.code, done.out) == (2, "")
    assert done.err == "leanq: there are no .lean files in empty\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "locale",
    [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {}],
    ids=["C", "the user's"],
)
def test_text_in_any_locale(client: Terminal, locale: dict[str, str]) -> None:
    name = os.fsdecode(b"\xff\xfe.lean")
    client.file(name, "prelude\ntheorem «𝔸» (p : Prop) : p := «∀»\n")
    done = client.run("submit", name, environ=locale, program=LEANQ)
    assert done.code == 1
    assert f"{name}:2:30: error: Unknown identifier `«∀»`" in done.out
    done = client.run("submit", "--json", name, environ=locale, program=LEANQ)
    assert done.lines[0]["file"] == name
    assert "«∀»" in done.lines[0]["messages"][0]["text"]


# Exit codes


def test_exit_codes(client: Terminal) -> None:
    accepted, wrong, slow = samples("and_swap", "wrong", "stack_overflow")
    quick = ("--timeout", "0.5")
    assert client.run("submit", accepted).code == 0
    done = client.run("submit", *quick, accepted, wrong, slow, "--json")
    assert sorted(line["verdict"] for line in done.lines) == ["accepted", "rejected", "timeout"]
    assert done.code == 3
    assert client.run("submit", *quick, accepted, wrong, slow, "missing.lean").code == 2


VERDICTS = {
    "accepted": 0,
    "incomplete": 1,
    "rejected": 1,
    "exhausted": 1,
    "unverified": 1,
    "unjudged": 3,
    "timeout": 3,
    "memory": 3,
    "crashed": 3,
    "cancelled": 3,
    "poisoned": 3,
    "expired": 3,
}
ERRORS = {
    UsageError("malformed"): 2,
    RequestError("cannot"): 2,
    UnavailableError("gone"): 3,
    QueueFullError("full", 1.0): 3,
}


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        *((Ended("f", reply=Reply(verdict=verdict)), code) for verdict, code in VERDICTS.items()),  # type: ignore[arg-type]
        *((Ended("f", error=error), code) for error, code in ERRORS.items()),
    ],
    ids=[*VERDICTS, *(type(error).__name__ for error in ERRORS)],
)
def test_the_exit_code_of_each_end(ended: Ended, code: int) -> None:
    assert ended.exit_code == code


def test_of_several_exit_codes_the_highest_counts() -> None:
    said = {
        verdict: Ended("f", reply=Reply(verdict)) for verdict in ("accepted", "rejected", "crashed")
    }
    ends = {**said, "unread": Ended("f", error=UsageError("no text"))}
    for names, code in (
        ("", 0),
        ("accepted", 0),
        ("accepted rejected", 1),
        ("unread rejected", 2),
        ("crashed unread rejected accepted", 3),
    ):
        summary = Summary()
        for name in names.split():
            summary.add(ends[name])
        assert summary.exit_code == code


def test_a_batch_in_the_wrong_environment_is_told_of() -> None:
    summary = Summary()
    for n in range(3):
        reason: Reason = "unknown_import" if n else "lean_error"
        summary.add(Ended(f"{n}", reply=Reply("rejected", reason=reason)))
    assert summary.warning("mathlib") == (
        "2 of 3 texts import what the environment 'mathlib' does not have; is it the right --env?"
    )
    summary.add(Ended("accepted", reply=Reply("accepted")))
    assert summary.warning("mathlib") is None
    assert summary.line(1.14) == "".join(
        (
            click.style("1 accepted", fg="green"),
            ", ",
            click.style("3 rejected", fg="red"),
            " in 1.1 s",
        )
    )


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("judge_unavailable", "texts of the environment 'mathlib' could not be judged"),
        ("library_unreadable", "texts import a library of the environment 'mathlib' that its Lean"),
    ],
)
def test_a_batch_that_the_environment_fails_is_told_of(reason: Reason, told: str) -> None:
    summary = Summary()
    for _ in range(4):
        summary.add(Ended("a", reply=Reply("unjudged", reason=reason)))
    assert (summary.warning("mathlib") or "").startswith(f"4 of 4 {told}")


@pytest.mark.slow
def test_what_the_environment_lacks_is_explained_a_few_times_and_no_more(client: Terminal) -> None:
    files = [client.file(f"{n}.lean", f"import Mathlib\n-- {n}") for n in range(20)]
    done = client.run("submit", *files)
    assert done.out.count(": rejected (unknown_import; ") == 20
    assert done.out.count("'default' lacks Init, Mathlib") == 3
    assert done.err.endswith(
        "20 of 20 texts import what the environment 'default' does not have; "
        "is it the right --env?\n"
    )


@pytest.mark.slow
def test_options_reach_the_worker(client: Terminal) -> None:
    cheat = client.file("cheat.lean", "prelude\nimport Core\naxiom cheat : False\n")
    done = client.run("submit", "--allow-axiom", "cheat", cheat, "--json")
    assert (done.code, done.lines[0]["axioms"]) == (0, ["cheat"])
    done = client.run("submit", "--no-audit", *samples("silent_sorry"), "--json")
    assert (done.code, done.lines[0]["verdict"]) == (3, "unjudged")
    done = client.run("submit", "--memory", "48", *samples("stack_overflow"), "--json")
    assert (done.code, done.lines[0]["verdict"]) == (3, "memory")


# Bad input


def test_a_pipe_is_read_if_somebody_writes_to_it(client: Terminal) -> None:
    pipe = client.folder / "pipe.lean"
    os.mkfifo(pipe)
    done = client.run("submit", str(pipe))
    assert (done.code, done.err) == (2, f"leanq: {pipe}: is a pipe to which nobody writes\n")
    running = client.start("submit", str(pipe))
    pipe.write_bytes((SAMPLES / "standalone.lean").read_bytes())
    assert ended(running, b"").code == 0


def test_blank_files_of_a_folder_are_named_skipped_and_counted(client: Terminal) -> None:
    (client.folder / "some").mkdir()
    (client.folder / "none").mkdir()
    client.file("some/good.lean", (SAMPLES / "standalone.lean").read_bytes())
    for name in ("some/a.lean", "some/b.lean", "none/c.lean"):
        client.file(name, " \n")
    done = client.run("submit", "some")
    assert (done.code, len(done.out.splitlines())) == (0, 1)
    skipped, summary = done.err.splitlines()
    assert skipped == "leanq: 2 blank files skipped: some/a.lean, some/b.lean"
    assert summary.startswith("1 accepted in ")
    done = client.run("submit", "none")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        "leanq: 1 blank file skipped: none/c.lean",
        "leanq: there is no text in the .lean files in none",
    ]
    assert client.run("submit", "some", "some/a.lean").code == 2


def test_bad_files_say_what_is_wrong_before_anything_is_sent(
    client: Terminal, fleet: Settings
) -> None:
    before = look(fleet).counters.get("submitted", 0)
    good = client.file("good.lean", (SAMPLES / "standalone.lean").read_bytes())
    bad = {
        client.file("empty.lean", ""): "empty",
        client.file("blank.lean", " \n\t\n"): "empty",
        client.file("binary.lean", bytes(range(256))): "byte 128 is 0x80",
        client.file("latin.lean", "-- é".encode("latin-1")): "byte 3 is 0xe9",
        client.file("nul.lean", "prelude\0"): "NUL",
        client.file("large.lean", b"-" * 20_000_000): "16 MB",
        "/dev/zero": "16 MB",
        str(client.folder / "missing.lean"): "No such file",
        str(client.folder / ("x" * 300)): "too long",
        "-": "empty",
    }
    done = client.run("submit", *bad, good)
    assert done.code == 2
    *errors, summary = done.err.splitlines()
    assert len(errors) == len(bad)
    assert summary == (
        f"leanq: nothing was sent: {len(bad)} of {len(bad) + 1} files cannot be checked"
    )
    for file, text in bad.items():
        (line,) = [line for line in errors if line.startswith(f"leanq: {file}: ")]
        assert text in line
    assert done.out == ""

    done = client.run("submit", "--json", *bad, good)
    assert (done.code, done.err) == (2, "")
    lines = {line["file"]: line for line in done.lines}
    assert {file: line["verdict"] for file, line in lines.items()} == dict.fromkeys(bad)
    assert all(text in lines[file]["error"] for file, text in bad.items())
    assert look(fleet).counters.get("submitted", 0) == before


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--timeout", "-1", "expected a number between 0.01 and 86400 CPU seconds, got '-1'"),
        ("--timeout", "nan", "CPU seconds, got 'nan'"),
        ("--timeout", "5m", "expected a number between 0.01 and 86400 CPU seconds, got '5m'"),
        ("--memory", "4g", "expected a whole number between 16 and 16777216 MB, got '4g'"),
        ("--priority", "7", "expected a whole number between 0 and 2, got '7'"),
        (
            "--env",
            "Mathlib",
            "no worker has ever offered the environment 'Mathlib'; known: default",
        ),
        ("--env", "a b", "is not a valid name"),
        ("--env", "a=/tmp", "only a worker is told the folder behind a name"),
        ("--tenant", "", "is not a valid name"),
        ("--url", "ftp://localhost", "not a Redis URL"),
        ("--url", "redis://:secret@localhost:port", "not a Redis URL"),
        ("--url", "redis://localhost?foo=1", "redis-py knows no option 'foo' for it"),
        (
            "--url",
            "rediss://:secret@localhost?ssl_ca_certs=/none",
            "ssl_ca_certs=/none of 'rediss://:***@localhost?ssl_ca_certs=/none' cannot be read: "
            "No such file or directory",
        ),
        ("--nonsense", "x", "No such option"),
    ],
)
def test_wrong_options(client: Terminal, option: str, value: str, text: str) -> None:
    done = client.run("submit", *samples("and_swap"), option, value)
    assert (done.code, done.out) == (2, "")
    assert text in done.err
    assert done.err.replace("leanq: WARNING: ", "").count("leanq: ") <= 1
    assert "secret" not in done.err


def test_no_file_at_all(client: Terminal) -> None:
    done = client.run("submit")
    assert (done.code, done.out) == (2, "")
    assert "Missing argument" in done.err


def test_no_server_at_the_url(terminal: Terminal) -> None:
    for url in ("redis://:secret@127.0.0.1:1", f"unix://{terminal.folder}/nothing.sock"):
        done = terminal.run("submit", *samples("and_swap"), environ={"LEANQ_URL": url})
        assert (done.code, done.out) == (3, "")
        assert len(done.err.splitlines()) == 1
        assert "no answer" in done.err
        assert "secret" not in done.err


def test_a_variable_that_is_no_number(terminal: Terminal) -> None:
    done = terminal.run("submit", *samples("and_swap"), environ={"LEANQ_LEASE_S": "long"})
    assert (done.code, done.out) == (2, "")
    assert done.err == "leanq: LEANQ_LEASE_S must be a number, got 'long'\n"


def test_no_lean_at_all(terminal: Terminal) -> None:
    environ = {"PATH": "", "LEANQ_LEAN": "/no/such/lean"}
    done = terminal.run("submit", *samples("and_swap"), environ=environ)
    assert (done.code, done.out) == (3, "")
    assert len(done.err.splitlines()) == 1
    assert "/no/such/lean" in done.err
    assert "LEANQ_LEAN" in done.err
