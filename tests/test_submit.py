"""``leanq submit`` as people use it: files in, verdicts out, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import redis
from fleets import look, until
from terminals import (
    LEANQ,
    SAMPLES,
    Terminal,
    ended,
    new_fleet,
    read_terminal,
    samples,
    screen,
    wait_for_line,
)

from leanq.commands import submit as submit_module
from leanq.commands.submit import Ended
from leanq.config import Settings
from leanq.drivers.environment import Environment
from leanq.errors import QueueFullError, RequestError, UnavailableError, UsageError, WorkerError
from leanq.local import EmbeddedServer
from leanq.wire import Reply

FIELDS = [
    *("file", "verdict", "messages", "sorries", "axioms", "fingerprint", "rid", "worker"),
    *("attempts", "queued_s", "cpu_s", "wall_s", "audit_s"),
]
SHELL_PIPE = ("/bin/bash", "-c", '"${@:2}" | eval "$1"; exit "${PIPESTATUS[0]}"', "bash")


@pytest.fixture(scope="module")
def fleet(server: EmbeddedServer, core: Environment, cache: Path) -> Iterator[Settings]:
    """A queue with one worker process, so that not every command has to start its own."""
    with new_fleet(cache, server.url, "--slots", "2") as settings:
        yield settings
        assert not look(settings).levels


@pytest.fixture
def client(terminal: Terminal, fleet: Settings) -> Terminal:
    """A terminal that uses the fleet."""
    terminal.use(fleet)
    return terminal


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
        assert (line["attempts"], line["sorries"]) == (1, [])
        assert line["rid"].startswith("0-")
        assert line["worker"]
        assert 0 <= line["queued_s"] < 60
        assert 0 < line["cpu_s"] < 60
        assert 0 <= line["audit_s"] < line["wall_s"] < 60


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
    assert (done.code, done.lines[0]["axioms"]) == (0, None)
    done = client.run("submit", "--memory", "48", *samples("stack_overflow"), "--json")
    assert (done.code, done.lines[0]["verdict"]) == (3, "memory")
    done = client.run("submit", "--replay", *samples("and_swap"))
    assert (done.code, done.out) == (2, "")
    assert "leanchecker" in done.err


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
        ("--timeout", "-1", "timeout is -1 CPU seconds"),
        ("--timeout", "nan", "timeout is nan"),
        ("--timeout", "soon", "not a valid"),
        ("--memory", "0", "memory is 0 MB"),
        ("--priority", "7", "0<=x<=2"),
        (
            "--env",
            "Mathlib",
            "no worker has ever offered the environment 'Mathlib'; known: default",
        ),
        ("--env", "a b", "is no name"),
        ("--tenant", "", "is no name"),
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
    assert done.err == "leanq: LEANQ_LEASE_S is 'long', which is no number\n"


def test_no_lean_at_all(terminal: Terminal) -> None:
    environ = {"PATH": "", "LEANQ_LEAN": "/no/such/lean"}
    done = terminal.run("submit", *samples("and_swap"), environ=environ)
    assert (done.code, done.out) == (3, "")
    assert len(done.err.splitlines()) == 1
    assert "/no/such/lean" in done.err
    assert "LEANQ_LEAN" in done.err


# Where the output and the input end


def through(terminal: Terminal, reader: str, *arguments: str) -> subprocess.Popen[bytes]:
    """``leanq … | reader`` with the exit code of leanq."""
    return terminal.start(*arguments, program=(*SHELL_PIPE, reader, *LEANQ))


def test_a_reader_that_leaves(client: Terminal) -> None:
    files = samples("and_swap", "or_swap", "standalone")
    for reader in ("head -1", "true"):
        done = ended(through(client, reader, "submit", "--json", *files))
        assert (done.code, done.err) == (141, "")


def test_an_output_that_takes_nothing(client: Terminal) -> None:
    with open("/dev/full", "wb") as full:
        done = ended(client.start("submit", *samples("and_swap"), stdout=full))
    assert (done.code, done.err) == (3, "leanq: [Errno 28] No space left on device\n")
    closed = ("/bin/sh", "-c", 'exec "$@" >&-', "sh", *LEANQ)
    done = ended(client.start("submit", *samples("and_swap", "wrong"), program=closed))
    assert (done.code, done.err) == (1, "")


def test_an_input_that_is_closed(client: Terminal) -> None:
    closed = ("/bin/sh", "-c", 'exec "$@" <&-', "sh", *LEANQ)
    done = ended(client.start("submit", "-", *samples("and_swap"), program=closed))
    assert done.code == 2
    assert "leanq: -: standard input is closed" in done.err
    assert "accepted" in done.out


@pytest.mark.parametrize("name", ["-", "pipe"])
def test_an_interrupt_while_the_input_waits(client: Terminal, name: str) -> None:
    pipe = client.folder / "pipe"
    os.mkfifo(pipe)
    process = client.start("submit", *samples("and_swap"), name, stdin=subprocess.PIPE)
    wchan = Path(f"/proc/{process.pid}/wchan")

    def interrupt() -> None:
        # A signal just before the read would only be seen after it.
        until(lambda: "pipe_read" in wchan.read_text())
        process.send_signal(signal.SIGINT)

    if name == "pipe":
        with pipe.open("wb"):
            interrupt()
            assert ended(process).code == 130
    else:
        interrupt()
        assert process.wait() == 130


def test_a_pipe_as_a_file(client: Terminal) -> None:
    pipe = client.folder / "pipe"
    os.mkfifo(pipe)
    process = client.start("submit", str(pipe))
    pipe.write_bytes((SAMPLES / "standalone.lean").read_bytes())
    assert ended(process).code == 0


# A server and a worker for the length of the call


def test_a_whole_queue_for_one_call(terminal: Terminal) -> None:
    done = terminal.run("submit", *samples("and_swap", "silent_sorry", "wrong"), "--json")
    assert (done.code, done.err) == (1, "")
    verdicts = {Path(line["file"]).stem: line["verdict"] for line in done.lines}
    assert verdicts == {"and_swap": "accepted", "silent_sorry": "incomplete", "wrong": "rejected"}
    assert terminal.is_clean()
    assert not terminal.up_file.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_by_a_signal_leaves_nothing(terminal: Terminal, number: signal.Signals) -> None:
    process = terminal.start("submit", *samples("stack_overflow", "stack_overflow"))
    until(terminal.busy)
    process.send_signal(number)
    assert ended(process).code == (130 if number == signal.SIGINT else -number)
    until(terminal.is_clean)
    assert not terminal.up_file.exists()


async def test_a_worker_that_ends_ends_the_call() -> None:
    async def fail() -> None:
        raise WorkerError("no room")

    async def never() -> Ended:
        await asyncio.Event().wait()
        raise AssertionError

    checks = (never() for _ in count())
    with pytest.raises(WorkerError, match="no room"):
        async for _ in submit_module._ends(checks, {asyncio.create_task(fail())}):
            pass


async def test_as_many_files_as_one_likes() -> None:
    running = most = 0

    async def check(number: int) -> Ended:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Ended(str(number))

    checks = (check(number) for number in range(5000))
    ends = [ended.file async for ended in submit_module._ends(checks, set())]
    assert sorted(ends) == sorted(map(str, range(5000)))
    assert most <= 512


# One queue for all


def test_two_terminals_share_a_queue(client: Terminal, fleet: Settings) -> None:
    both = [
        client.start("submit", "--json", "--tenant", name, *samples(name, "standalone"))
        for name in ("and_swap", "wrong")
    ]
    done = [ended(process) for process in both]
    assert [d.code for d in done] == [0, 1]
    assert [{Path(line["file"]).stem for line in d.lines} for d in done] == [
        {"and_swap", "standalone"},
        {"wrong", "standalone"},
    ]
    (worker,) = look(fleet).workers
    assert {line["worker"] for d in done for line in d.lines} == {worker.worker}


def test_a_file_waits_for_its_worker(terminal: Terminal, server: EmbeddedServer) -> None:
    settings = Settings(url=server.url, prefix=f"t{os.urandom(6).hex()}")
    terminal.use(settings)
    process = terminal.start("submit", *samples("standalone"))
    hint = wait_for_line(process.stderr, "no worker")
    assert hint.startswith("leanq: no worker for the environment 'default' is alive")
    assert "leanq worker" in hint
    terminal.start("worker", "--slots", "1", stderr=subprocess.DEVNULL)
    done = ended(process)
    assert (done.code, done.err) == (0, "")
    assert "standalone.lean: accepted" in done.out


def test_a_server_that_goes_away_ends_the_call(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = "patience_s=30.0"
    assert patient in Path(submit_module.__file__).read_text()
    impatient = (
        *LEANQ[:2],
        "import functools, leanq.commands.submit as s\n"
        "Real = s.AsyncLeanQClient\n"
        "s.AsyncLeanQClient = lambda settings, **_: Real(settings, patience_s=0.2)\n"
        "from leanq.cli import main; main()",
    )
    with EmbeddedServer() as server:
        terminal.use(Settings(url=server.url))
        files = samples("standalone", "and_swap")
        process = terminal.start("submit", *files, "--json", program=impatient)
        with redis.Redis.from_url(server.url) as connection:
            until(lambda: connection.hexists("{leanq:0}:stats", "submitted"))
    done = ended(process)
    assert done.code == 3
    assert {line["file"] for line in done.lines} == set(files)
    assert all("no answer" in line["error"] for line in done.lines)
