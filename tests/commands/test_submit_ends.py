"""How ``leanq submit`` ends, and what it shares: pipes, signals, servers, other terminals."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import redis
from support.fleets import look, until
from support.required import missing
from support.terminals import (
    LEANQ,
    SAMPLES,
    Process,
    Terminal,
    ended,
    samples,
    wait_for_line,
)

from leanq.commands import submit as submit_module
from leanq.commands.replies import Ended
from leanq.errors import WorkerError
from leanq.local import EmbeddedServer
from leanq.queue.keys import Keys
from leanq.queue.settings import Settings

FIELDS = [
    *("file", "request_id", "verdict", "reason", "messages", "sorries", "theorems", "axioms"),
    *("kernel", "attempts", "worker", "queued_s", "cpu_s", "wall_s"),
]
SHELL_PIPE = ("/bin/bash", "-c", '"${@:2}" | eval "$1"; exit "${PIPESTATUS[0]}"', "bash")


# Where the output and the input end


def through(terminal: Terminal, reader: str, *arguments: str) -> Process:
    """``leanq … | reader`` with the exit code of leanq."""
    return terminal.start(*arguments, program=(*SHELL_PIPE, reader, *LEANQ))


@pytest.mark.parametrize("reader", ["head -1", pytest.param("true", marks=pytest.mark.slow)])
def test_a_reader_that_leaves(client: Terminal, reader: str) -> None:
    files = samples("and_swap", "or_swap", "standalone")
    done = ended(through(client, reader, "submit", "--json", *files))
    assert (done.code, done.err) == (141, "")


@pytest.mark.slow
def test_an_output_that_takes_nothing(client: Terminal) -> None:
    with open("/dev/full", "wb") as full:
        done = ended(client.start("submit", *samples("and_swap"), stdout=full))
    assert (done.code, done.err) == (
        3,
        "leanq: No space left on device; free some room, or name folders on another disk: TMPDIR "
        "for what passes, LEANQ_CACHE for what is kept\n",
    )
    closed = ("/bin/sh", "-c", 'exec "$@" >&-', "sh", *LEANQ)
    done = ended(client.start("submit", *samples("and_swap", "wrong"), program=closed))
    assert done.code == 1
    assert done.err.startswith("1 accepted, 1 rejected in ")


@pytest.mark.parametrize("variable", ["HOME", "LEANQ_CACHE"])
def test_a_home_that_takes_nothing(terminal: Terminal, variable: str) -> None:
    terminal.environ.pop("LEANQ_CACHE", None)
    done = terminal.run("submit", *samples("and_swap"), environ={variable: "/sys/kernel"})
    assert done.code == 3
    assert re.fullmatch(
        r"leanq: cannot write /sys/kernel/\S+ \(.+\); name a writable cache folder with "
        r"LEANQ_CACHE\n",
        done.err,
    )


# Python's own search for a folder finds none.
NO_TEMPORARY_FOLDER = """
import tempfile
from leanq.cli import main
tempfile._candidate_tempdir_list = lambda: ["/sys/kernel"]
main()
"""


def test_without_a_folder_for_temporary_files(terminal: Terminal) -> None:
    program = (sys.executable, "-c", NO_TEMPORARY_FOLDER)
    done = terminal.run("submit", *samples("and_swap"), program=program)
    assert (done.code, done.err) == (
        3,
        "leanq: No usable temporary directory found in ['/sys/kernel']; free some room there, or "
        "name a folder to write in: TMPDIR for what passes, LEANQ_CACHE for what is kept\n",
    )


@pytest.mark.slow
def test_a_full_disk_of_the_cache_folder(terminal: Terminal, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        missing("a user namespace for a disk")
    fill = 'mount -t tmpfs -o size=64k full "$DISK" && head -c 64k /dev/zero > "$DISK/zeros"'
    program = ("unshare", "-rm", "sh", "-c", f'{fill} && exec "$@"', "sh", *LEANQ)
    environ = {"DISK": str(tmp_path), "LEANQ_CACHE": f"{tmp_path}/cache"}
    file = Path(*samples("and_swap")).resolve()
    done = terminal.run("submit", str(file), environ=environ, program=program)
    assert done.code == 3
    assert done.err.startswith(f"leanq: the disk of the cache folder {tmp_path}/cache")
    assert done.err.endswith("free some, or name a folder on another disk with LEANQ_CACHE\n")


def test_an_input_that_is_closed(client: Terminal) -> None:
    closed = ("/bin/sh", "-c", 'exec "$@" <&-', "sh", *LEANQ)
    done = ended(client.start("submit", "-", *samples("and_swap"), program=closed))
    assert done.code == 2
    assert "leanq: -: standard input is closed" in done.err
    # What is wrong is said before anything is sent.
    assert done.out == ""


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


@pytest.mark.slow
def test_a_whole_queue_for_one_call(terminal: Terminal) -> None:
    done = terminal.run("submit", *samples("and_swap", "silent_sorry", "wrong"), "--json")
    assert (done.code, done.err) == (1, "")
    verdicts = {Path(line["file"]).stem: line["verdict"] for line in done.lines}
    assert verdicts == {"and_swap": "accepted", "silent_sorry": "incomplete", "wrong": "rejected"}
    assert terminal.is_clean()
    assert not terminal.up_file.exists()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_an_end_by_a_signal_leaves_nothing(terminal: Terminal, number: signal.Signals) -> None:
    process = terminal.start("submit", *samples("stack_overflow", "stack_overflow"))
    until(terminal.busy)
    process.send_signal(number)
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    assert ended(process).code == codes[number]
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
        async for _ in submit_module.ends(checks, {asyncio.create_task(fail())}):
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
    ends = [ended.file async for ended in submit_module.ends(checks, set())]
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


@pytest.mark.slow
def test_a_file_waits_for_its_worker(terminal: Terminal, server: EmbeddedServer) -> None:
    settings = Settings(url=server.url, prefix=f"t{os.urandom(6).hex()}")
    terminal.use(settings)
    process = terminal.start("submit", *samples("standalone"))
    hint = wait_for_line(process.stderr, "no worker")
    assert hint.startswith("leanq: no worker for the environment 'default' is alive")
    assert "leanq worker" in hint
    terminal.start("worker", "--slots", "1", stderr=subprocess.DEVNULL)
    done = ended(process)
    assert done.code == 0
    assert done.err.startswith("1 accepted in ")
    assert "standalone.lean: accepted" in done.out


@pytest.mark.parametrize("wait", ["0", "0.4"])
def test_a_script_waits_so_long_for_a_worker(
    terminal: Terminal, server: EmbeddedServer, wait: str
) -> None:
    settings = Settings(url=server.url, prefix=f"t{os.urandom(6).hex()}")
    terminal.use(settings)
    files = samples("standalone", "and_swap", "wrong")
    done = terminal.run("submit", "--wait", wait, *files)
    assert done.code == 3
    said = [line for line in done.err.splitlines() if "requests wait for one" not in line]
    assert said[0].startswith(f"leanq: {files[0]} and 2 other files: no worker for the environment")
    assert f"within {wait} s (--wait); start one with 'leanq worker', or check --env" in said[0]
    assert said[1].startswith("3 not checked in ")
    assert len(said) == 2
    done = terminal.run("verify", "--theorem", "t", "--wait", wait, "--json", *files)
    assert (done.code, {line["file"] for line in done.lines}) == (3, {*files})
    assert all("(--wait)" in line["error"] for line in done.lines)
    # What was sent is withdrawn.
    assert not any(row.waiting for row in look(settings).priorities)


def test_scripts_have_a_limit_and_people_have_none(terminal: Terminal) -> None:
    help_ = terminal.run("submit", "--help").out
    assert "without end on a terminal, else 600" in " ".join(help_.split())


@pytest.mark.slow
def test_a_queue_that_is_lost_is_one_line_soon(terminal: Terminal) -> None:
    impatient = (
        *LEANQ[:2],
        "import leanq.commands.submit as s\n"
        "Real = s.AsyncLeanQClient\n"
        "s.AsyncLeanQClient = lambda settings, **_: Real(settings, unavailable_timeout_s=8)\n"
        "from leanq.cli import main; main()",
    )
    (terminal.folder / "many").mkdir()
    for number in range(258):
        terminal.file(f"many/f{number}.lean", "theorem t : True := trivial")
    with EmbeddedServer() as server:
        terminal.use(Settings(url=server.url))
        process = terminal.start("submit", str(terminal.folder / "many"), program=impatient)
        with redis.Redis.from_url(server.url) as connection:
            until(lambda: connection.hget(Keys("leanq").of("stats"), "submitted") == b"258")
    soon = wait_for_line(process.stderr, "no answer")
    assert soon.endswith("; the requests wait for it\n")
    assert process.poll() is None
    done = ended(process)
    lines = done.err.splitlines()
    assert done.code == 3
    assert len(lines) == 2, lines
    assert ".lean and 257 other files: no answer from" in lines[0]
    assert lines[1].startswith("258 not checked in ")


@pytest.mark.slow
def test_a_server_that_goes_away_ends_the_call(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = "unavailable_timeout_s=30.0"
    assert patient in Path(submit_module.__file__).read_text()
    impatient = (
        *LEANQ[:2],
        "import functools, leanq.commands.submit as s\n"
        "Real = s.AsyncLeanQClient\n"
        "s.AsyncLeanQClient = lambda settings, **_: Real(settings, unavailable_timeout_s=0.2)\n"
        "from leanq.cli import main; main()",
    )
    with EmbeddedServer() as server:
        terminal.use(Settings(url=server.url))
        files = samples("standalone", "and_swap")
        process = terminal.start("submit", *files, "--json", program=impatient)
        with redis.Redis.from_url(server.url) as connection:
            until(lambda: connection.hexists(Keys("leanq").of("stats"), "submitted"))
    done = ended(process)
    assert done.code == 3
    assert {line["file"] for line in done.lines} == set(files)
    assert all("no answer" in line["error"] for line in done.lines)
