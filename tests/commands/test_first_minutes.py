"""What a newcomer types in the first minutes, with the mistakes that belong to it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click import unstyle
from support.cluster import free_ports
from support.fleets import Recorder, serving, until
from support.servers import own_server
from support.terminals import Terminal, ended, samples, wait_for_line

import leanq.__main__
from leanq.client import LeanQClient
from leanq.commands.replies import lines_of
from leanq.commands.state import lines_of_step
from leanq.lean.environment import Environment
from leanq.queue.requests import CHECKED, Failure, Message, Reply, Sorry, reply_to_json
from leanq.queue.settings import Settings

_MAIN = "from leanq.__main__ import main; main()"
# A Redis that is not there.
_NOWHERE = {"LEANQ_URL": "redis://127.0.0.1:1"}


@pytest.fixture
def place(terminal: Terminal, settings: Settings) -> Terminal:
    """A terminal that uses a queue of its own."""
    terminal.use(settings)
    return terminal


@pytest.mark.slow
@pytest.mark.parametrize("module", ["click", "asyncio", "redis", "leanq.commands.replies"])
def test_ctrl_c_while_the_program_is_imported_shows_no_traceback(
    terminal: Terminal, module: str
) -> None:
    # Python tells of each module that it has imported.
    program = (sys.executable, "-X", "importtime", "-c", _MAIN)
    process = terminal.start("submit", *samples("and_swap"), program=program)
    wait_for_line(process.stderr, f" {module}\n")
    process.send_signal(signal.SIGINT)
    assert ended(process).code == 130


def test_ctrl_c_is_itself_where_python_wraps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr("leanq.cli.main", interrupted)
    with pytest.raises(SystemExit) as exited:
        leanq.__main__.main()
    assert exited.value.code == 130


@pytest.mark.parametrize("command", ["worker", "up", "doctor"])
def test_a_folder_that_is_not_there_is_wrong_usage(place: Terminal, command: str) -> None:
    done = place.run(command, "--env", "mathlib=nowhere")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "leanq: --env mathlib: there is no nowhere; name the folder of a Lake project or of .olean "
        "files\n"
    )


@pytest.mark.slow
def test_doctor_looks_at_the_environments_that_are_named(
    terminal: Terminal, core: Environment
) -> None:
    (folder,) = core.search_path
    done = terminal.run("doctor", "--json", "--env", f"one={folder}", "--env", f"two={folder}")
    assert (done.code, done.err) == (0, "")
    assert [line["what"] for line in done.lines][5:] == 2 * [
        "lean",
        "judge",
        "first texts",
        "fork server",
        "check",
    ]
    texts = [line["text"] for line in done.lines if line["what"] == "lean"]
    assert [text.split()[0] for text in texts] == ["one", "two"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["worker", "up"])
def test_the_start_says_which_lean_and_whether_the_judge_works(
    place: Terminal, core: Environment, command: str
) -> None:
    process = place.start(command)
    line = wait_for_line(process.stderr, "environment default: ")
    toolchain = core.toolchain
    assert f"Lean {toolchain.version}" in line
    assert f"from wheel: {toolchain.program}; the judge works" in line
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("submit", *samples("and_swap")),
        ("verify", "--target", *samples("and_swap", "and_swap")),
        ("campaign", "run", "set", "--out", "out.jsonl"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_embedded_uses_nothing_that_others_have_started(
    terminal: Terminal, arguments: tuple[str, ...]
) -> None:
    folder = terminal.folder / "set"
    folder.mkdir()
    folder.joinpath("one.lean").write_bytes(Path(samples("and_swap")[0]).read_bytes())
    terminal.up_file.parent.mkdir(parents=True)
    terminal.up_file.write_text(json.dumps({"url": _NOWHERE["LEANQ_URL"], "pid": os.getpid()}))
    done = terminal.run(*arguments, "--embedded", environ=_NOWHERE)
    assert done.code == 0, done.err
    assert "1 accepted" in done.out + done.err


def test_a_campaign_without_a_file_for_its_results_says_what_to_name(terminal: Terminal) -> None:
    done = terminal.run("campaign", "run", "data.jsonl")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("leanq: name the file for the results, such as --out results.jsonl")


def test_a_difference_is_shown_once() -> None:
    failure = Failure("t", "statement_differs", "type: expected 1 = 1, got 1 = 2")
    texts = (
        f"leanq: it is not what the target states: t: {failure.rule}: {failure.text}",
        "something else",
    )
    messages = tuple(Message("error", 1, 0, text) for text in texts)
    reply = Reply("rejected", messages, reason="statement_differs", failed=(failure,))
    shown = "\n".join(lines_of("a.lean", reply))
    assert shown.count("expected 1 = 1") == 1
    assert "something else" in shown


def test_what_lean_quotes_of_a_text_steers_no_terminal() -> None:
    steering = "\x1b[1A\x1b[2Ka.lean: accepted\r\x9b\u202e"
    reply = Reply(
        "rejected",
        (Message("error", 1, 0, f"Unknown identifier `«{steering}»`\n\tnot ∀ ⊢"),),
        axioms=(f"«{steering}»",),
        failed=(Failure(f"«{steering}»", "missing", steering),),
        sorries=(Sorry(1, 0, f"h : {steering}\n⊢ p"),),
        goals=(f"h : {steering}\n⊢ p",),
    )
    shown = [*lines_of("a.lean", reply), *lines_of_step(reply)]
    for line in shown:
        plain = unstyle(line).replace("\n", "")
        assert plain.isprintable()
        assert not plain.startswith("a.lean: accepted")
    assert any("not ∀ ⊢" in line for line in shown)


def test_times_have_four_digits_in_json() -> None:
    record = reply_to_json(
        Reply("accepted", cpu_s=0.1 + 0.2, wall_s=1 / 3, queued_s=2 / 3), CHECKED
    )
    times = [record[name] for name in ("cpu_s", "wall_s", "queued_s")]
    assert times == [0.3, 0.3333, 0.6667]


@pytest.mark.slow
def test_requests_that_are_paused_are_counted_apart(place: Terminal, settings: Settings) -> None:
    with serving(settings, Recorder(), slots=1), LeanQClient(settings) as lean:
        held = lean.echo(b"held")
        assert place.run("pause", "--tenant", "slow").code == 0
        outstanding = [lean.echo(b"held", tenant="slow") for _ in range(3)]
        until(lambda: all(future.running() for future in (held, *outstanding)))
        shown = place.run("status").out.splitlines()
        (record,) = place.run("status", "--json").lines
        watching = place.start("status", "--watch")
        watched = wait_for_line(watching.stdout, "ENVIRONMENT")
        watching.send_signal(signal.SIGINT)
        ended(watching)
        assert place.run("pause", "--env", "echo").code == 0
        (whole,) = place.run("status", "--json").lines
        for option in (("--tenant", "slow"), ("--env", "echo")):
            assert place.run("resume", *option).code == 0
        for future in outstanding:
            assert future.cancel()
        assert held.cancel()
    assert "waiting     3, of which 3 are paused" in shown
    assert max(map(len, shown)) <= 80
    (table,) = (number for number, line in enumerate(shown) if "PRIORITY" in line)
    assert shown[table].split()[:4] == ["ENVIRONMENT", "PRIORITY", "WAITING", "PAUSED"]
    assert shown[table + 1].split()[:4] == ["echo", "1", "3", "3"]
    assert watched.split("ENVIRONMENT")[1].split()[:2] == ["WAITING", "PAUSED"]
    assert record["environments"]["echo"]["paused"] == 3
    assert [row["held"] for row in (*record["waiting"], *whole["waiting"])] == [3, 3]


# A server that asks for a password


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The host and the port of a server with a password."""
    (port,) = free_ports(1)
    with own_server("--requirepass", "right", "--port", str(port), "--bind", "127.0.0.1"):
        yield f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    "words", [("status",), ("submit", "t.lean"), ("worker", "--driver", "echo")]
)
def test_a_missing_or_wrong_password_is_said_and_ends_the_command(
    terminal: Terminal, guarded: str, words: tuple[str, ...]
) -> None:
    terminal.file("t.lean", "theorem t : True := trivial")
    url = {"LEANQ_URL": f"redis://{guarded}"}
    done = terminal.run(*words, environ=url)
    assert done.code == 3
    assert "asks for a password: no password was given; set it in LEANQ_PASSWORD" in done.err
    done = terminal.run(*words, environ={**url, "LEANQ_PASSWORD": "wrong"})
    assert done.code == 3
    assert "the password of the user 'default' is refused, or there is no such user" in done.err
    assert "wrong" not in done.err
    assert "no answer" not in done.err
