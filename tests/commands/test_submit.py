"""``leanq submit`` as people use it: files in, verdicts out, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from support.fleets import look, until
from support.terminals import (
    SAMPLES,
    Terminal,
    ended,
    read_terminal,
    samples,
    screen,
    wait_for_line,
)

from leanq.commands.submit import Ended
from leanq.errors import QueueFullError, RequestError, UnavailableError, UsageError
from leanq.queue.requests import Reply
from leanq.queue.settings import Settings

FIELDS = [
    *("file", "request_id", "verdict", "reason", "messages", "sorries", "theorems", "axioms"),
    *("attempts", "worker", "queued_s", "cpu_s", "wall_s"),
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
    assert {name: line["axioms"] for name, line in lines.items()} == {
        "and_swap": [],
        "silent_sorry": ["sorryAx"],
        "wrong": None,
        "incomplete": None,
        "-": [],
    }
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
    assert (done.code, done.err) == (1, "")
    shown = re.sub(r"\d+\.\d\d s", "N s", done.out)
    assert (
        f"""{wrong}: rejected (N s)
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
        f"""{silent}: incomplete (N s; axioms: sorryAx)
  {silent}:1:0: warning: leanq: it rests on sorryAx
"""
        in shown
    )
    assert "\x1b" not in done.out


def test_lines_come_as_files_finish_and_an_interrupt_withdraws_the_rest(
    client: Terminal, fleet: Settings
) -> None:
    process = client.start("submit", *samples("stack_overflow", "and_swap"))
    assert "and_swap.lean: accepted" in wait_for_line(process.stdout, "")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert (done.code, done.err.strip()) == (130, "")
    until(lambda: sum(row.held for row in look(fleet).workers) == 0)


def test_a_terminal_shows_progress_and_a_pipe_does_not(client: Terminal) -> None:
    files = samples("and_swap", "wrong", "or_swap")
    with screen() as (ours, theirs):
        environ = {"TERM": "xterm", "COLUMNS": "40"}
        errors = client.folder / "errors"
        with errors.open("wb") as stderr:
            process = client.start(
                "submit", *files, "missing.lean", stdout=theirs, stderr=stderr, environ=environ
            )
        os.close(theirs)
        shown = read_terminal(ours)
        assert process.wait() == 2
    assert "checking" in shown
    assert "/4" in shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r\n", "\n")
    # However narrow it is: what is copied from it must be whole.
    assert f"{files[1]}:7:2: error: Type mismatch\n" in text
    assert f"{files[0]}: accepted" in text
    assert "missing" not in text
    with open(errors) as file:
        assert file.read() == "leanq: missing.lean: No such file or directory\n"
    assert "checking" not in client.run("submit", *files).out


def test_text_in_any_locale(client: Terminal) -> None:
    name = os.fsdecode(b"\xff\xfe.lean")
    client.file(name, "prelude\ntheorem «𝔸» (p : Prop) : p := «∀»\n")
    for locale in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {}):
        done = client.run("submit", name, environ=locale)
        assert done.code == 1
        assert f"{name}:2:30: error: Unknown identifier `«∀»`" in done.out
        done = client.run("submit", "--json", name, environ=locale)
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


def test_options_reach_the_worker(client: Terminal) -> None:
    cheat = client.file("cheat.lean", "prelude\nimport Core\naxiom cheat : False\n")
    done = client.run("submit", "--allow-axiom", "cheat", cheat, "--json")
    assert (done.code, done.lines[0]["axioms"]) == (0, ["cheat"])
    done = client.run("submit", "--no-audit", *samples("silent_sorry"), "--json")
    assert (done.code, done.lines[0]["verdict"]) == (3, "unjudged")
    done = client.run("submit", "--memory", "48", *samples("stack_overflow"), "--json")
    assert (done.code, done.lines[0]["verdict"]) == (3, "memory")


# Bad input


def test_bad_files_say_what_is_wrong_and_keep_no_good_one_from_being_checked(
    client: Terminal,
) -> None:
    good = client.file("good.lean", (SAMPLES / "standalone.lean").read_bytes())
    (client.folder / "folder.lean").mkdir()
    bad = {
        client.file("empty.lean", ""): "empty",
        client.file("blank.lean", " \n\t\n"): "empty",
        client.file("binary.lean", bytes(range(256))): "byte 128 is 0x80",
        client.file("latin.lean", "-- é".encode("latin-1")): "byte 3 is 0xe9",
        client.file("nul.lean", "prelude\0"): "NUL",
        client.file("large.lean", b"-" * 20_000_000): "16 MB",
        "/dev/zero": "16 MB",
        str(client.folder / "folder.lean"): "directory",
        str(client.folder / "missing.lean"): "No such file",
        str(client.folder / ("x" * 300)): "too long",
        "-": "empty",
    }
    done = client.run("submit", *bad, good)
    assert done.code == 2
    errors = done.err.splitlines()
    assert len(errors) == len(bad)
    for file, text in bad.items():
        (line,) = [line for line in errors if line.startswith(f"leanq: {file}: ")]
        assert text in line
    assert f"{good}: accepted" in done.out

    done = client.run("submit", "--json", *bad, good)
    assert (done.code, done.err) == (2, "")
    lines = {line["file"]: line for line in done.lines}
    assert lines.pop(good)["verdict"] == "accepted"
    assert {file: line["verdict"] for file, line in lines.items()} == dict.fromkeys(bad)
    assert all(text in lines[file]["error"] for file, text in bad.items())


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--timeout", "-1", "timeout must lie between 0.01 and 86400 CPU seconds, got -1"),
        ("--timeout", "nan", "CPU seconds, got nan"),
        ("--timeout", "soon", "not a valid"),
        ("--memory", "0", "memory must lie between 16 and 16777216 MB, got 0"),
        ("--priority", "7", "0<=x<=2"),
        (
            "--env",
            "Mathlib",
            "no worker has ever offered the environment 'Mathlib'; known: default",
        ),
        ("--env", "a b", "is not a valid name"),
        ("--tenant", "", "is not a valid name"),
        ("--url", "http://localhost", "not a Redis URL"),
        ("--url", "redis://:secret@localhost:port", "not a Redis URL"),
        ("--nonsense", "x", "No such option"),
    ],
)
def test_wrong_options(client: Terminal, option: str, value: str, text: str) -> None:
    done = client.run("submit", *samples("and_swap"), option, value)
    assert (done.code, done.out) == (2, "")
    assert text in done.err.splitlines()[-1]
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
