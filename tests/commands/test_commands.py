"""The other commands: ``status``, ``doctor``, ``reap``, ``worker``, ``up``, and all their help."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace

import click
import pytest
from msgspec import structs
from support.fleets import counter, echo_body, look, submission, until
from support.metrics import port_in, scrape
from support.queue.queues import Queue
from support.servers import own_server
from support.terminals import Terminal, ended, own_server_of, samples, wait_for_line

from leanq import __version__
from leanq.cli import cli
from leanq.lean.environment import Environment
from leanq.lean.run.toolchain import ask
from leanq.queue import wire
from leanq.queue.requests import Reply
from leanq.queue.results import Settlement
from leanq.queue.settings import Settings

SIMPLE = [
    "campaign",
    "dead",
    "doctor",
    "env",
    "export-traces",
    "extract",
    "mcp",
    "metrics",
    "pause",
    "profile",
    "reap",
    "report",
    "resume",
    "scale",
    "serve",
    "state",
    "status",
    "step",
    "submit",
    "tenant",
    "trace",
    "try",
    "up",
    "verify",
    "worker",
]


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with the words that call it."""

    def walk(words: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield words, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner
                yield from walk(f"{words} {name}".strip(), inner)

    yield from walk("", cli)


COMMANDS = dict(commands())


# Help


@pytest.mark.slow
def test_the_commands_that_there_are(terminal: Terminal) -> None:
    assert sorted(words for words in COMMANDS if words and " " not in words) == SIMPLE
    done = terminal.run("--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Usage: leanq [OPTIONS] COMMAND")
    groups = done.out.split("\n\n")[3:]
    assert [group.partition(":")[0] for group in groups] == ["Check", "Fleet", "Data", "Operate"]
    listed = [line for group in groups for line in group.splitlines()[1:]]
    assert sorted(line.split()[0] for line in listed) == SIMPLE
    assert not any(line.endswith("...") for line in listed)


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_and_option_is_explained(words: str) -> None:
    command = COMMANDS[words]
    assert command.help
    context = click.Context(command, info_name=f"leanq {words}")
    shown = " ".join(command.get_help(context).split())
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{words}: {parameter.opts}"
            assert " ".join(parameter.help.split()) in shown
            assert parameter.help[0].isupper()
            assert parameter.help.endswith((".", "]"))


# Those that start a server of their own, or read files.
WITHOUT_A_QUEUE = {
    *("up", "campaign report", "env prepare", "env show", "export-traces", "extract", "try")
}


@pytest.mark.parametrize(
    "words",
    [
        w
        for w, each in COMMANDS.items()
        if not isinstance(each, click.Group) and w not in WITHOUT_A_QUEUE
    ],
)
def test_commands_that_talk_to_the_queue_take_its_url_and_speak_json(words: str) -> None:
    options = {name for parameter in COMMANDS[words].params for name in parameter.opts}
    assert {"--url", "--json"} <= options


def test_the_options_of_the_contract() -> None:
    contract = {
        "submit": "--env --tenant --priority --timeout --memory --allow-axiom --no-audit "
        "--trust-programs --scratch --embedded",
        "verify": "--target --theorem --hole --env --timeout --scratch --trust-programs --embedded",
        "worker": "--slots --driver --env --lean --grace --nice --cpu-share",
        "reap": "--watch",
    }
    for words, names in contract.items():
        parameters = COMMANDS[words].params
        options = {name for p in parameters for name in (*p.opts, *p.secondary_opts)}
        assert set(names.split()) <= options


@pytest.mark.slow
def test_as_a_module(terminal: Terminal) -> None:
    done = ended(terminal.start(program=(sys.executable, "-m", "leanq", "--version")))
    assert (done.code, done.out) == (0, f"leanq, version {__version__}\n")


@pytest.mark.slow
def test_each_command_is_imported_when_it_is_called(terminal: Terminal) -> None:
    """So none waits for, or fails for, what another one needs."""
    code = (
        "import sys; from leanq.cli import main; sys.argv = ['leanq', 'pause', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith('leanq.commands.')], file=sys.stderr)"
    )
    done = ended(terminal.start(program=(sys.executable, "-c", code)))
    assert "leanq.commands.pause" in done.err
    assert not any(
        f"leanq.commands.{name}" in done.err for name in ("campaign", "status", "submit")
    )


@pytest.mark.slow
def test_version_and_wrong_usage(terminal: Terminal) -> None:
    assert terminal.run("--version").out == f"leanq, version {__version__}\n"
    for arguments in ([], ["nonsense"], ["status", "--nonsense"], ["worker", "--slots", "0"]):
        done = terminal.run(*arguments)
        assert (done.code, done.out) == (2, "")
        assert "leanq" in done.err


# Without a queue


@pytest.mark.slow
@pytest.mark.parametrize("command", ["status", "reap", "worker"])
def test_a_command_without_a_queue_says_how_to_name_one(terminal: Terminal, command: str) -> None:
    done = terminal.run(command)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert all(word in done.err for word in ("--url", "LEANQ_URL", "leanq up"))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["status", "reap"])
def test_a_command_without_its_server_says_so(terminal: Terminal, command: str) -> None:
    done = terminal.run(command, "--url", "redis://:secret@127.0.0.1:1", "--json")
    assert (done.code, done.out) == (3, "")
    warning, line = done.err.splitlines()
    assert "--url has a password" in warning
    assert "LEANQ_PASSWORD" in warning
    assert "127.0.0.1:1" in line
    assert "secret" not in done.err


@pytest.mark.slow
def test_a_worker_without_its_server_waits_until_it_is_told_to_end(terminal: Terminal) -> None:
    url = "redis://:secret@127.0.0.1:1"
    worker = terminal.start("worker", "--url", url, "--driver", "echo", "--metrics-port", "0")
    port = port_in(wait_for_line(worker.stderr, "metrics of this worker on port"))
    line = wait_for_line(worker.stderr, "not ready: no answer from redis://:***@127.0.0.1:1")
    assert "trying again in" in line
    assert scrape(port, "/healthz")[0] == 503
    worker.send_signal(signal.SIGTERM)
    done = ended(worker)
    assert done.code == 0
    assert "secret" not in done.err


# A queue with something in it


@pytest.fixture
def place(terminal: Terminal, settings: Settings) -> Terminal:
    """A terminal that uses a queue of its own."""
    terminal.use(settings)
    return terminal


@pytest.mark.slow
def test_status_of_an_empty_queue(place: Terminal) -> None:
    (record,) = place.run("status", "--json").lines
    for name in ("waiting", "workers"):
        assert record[name] == []
    for name in ("running", "dead", "submitted", "settled", "reaped", "released", "fenced"):
        assert record[name] == 0
    for name in ("warm_hits", "warm_misses"):
        assert record[name] == 0
    for name in ("quarantined", "verdicts", "reasons", "environments"):
        assert record[name] == {}
    shown = place.run("status").out
    assert "waiting     0\n" in shown
    assert "no worker is alive; start one with 'leanq worker'" in shown
    password = place.environ["LEANQ_URL"].partition("@")[0].rpartition(":")[2]
    assert password not in shown + json.dumps(record)


@pytest.mark.slow
async def test_status_of_a_busy_queue(place: Terminal, settings: Settings, queue: Queue) -> None:
    await queue.register(
        "w1", wire.pack_info({"slots": 4, "started": 1.0, "environments": ["echo"]}), {}
    )
    await queue.register("w2", b"\xc1 is no msgpack", {"echo": wire.pack_info({"driver": "echo"})})
    odd = {"slots": b"x", "started": "x", "environments": [1, b"y"], "more": 2}
    await queue.register("w3", wire.pack_info(odd), {"other": wire.pack_info({"lean": b"4"})})
    batch = [submission(f"0-{n}", echo_body(b"x")) for n in range(5)]
    await queue.submit("client", [structs.replace(batch[0], affinity=("state",)), *batch[1:]])
    claimed = await queue.claim("w1", ["echo"], 2, busy=0, token="n:")
    await queue.submit("client", [submission("0-withdrawn", echo_body(b"x"))])
    assert await queue.cancel(["0-withdrawn"]) == [True]

    (record,) = (await asyncio.to_thread(place.run, "status", "--json")).lines
    (priority,) = record["waiting"]
    assert (
        priority["environment"],
        priority["priority"],
        priority["tenants"],
        priority["waiting"],
    ) == (
        "echo",
        1,
        1,
        3,
    )
    assert priority["oldest_s"] >= 0
    assert (record["running"], record["submitted"]) == (2, 6)
    assert record["reasons"] == {"withdrawn": 1}
    workers = {row["worker"]: row for row in record["workers"]}
    assert workers["w1"]["running"] == 2
    assert (workers["w1"]["slots"], workers["w1"]["environments"]) == (4, ["echo"])
    assert 0 < workers["w1"]["lease_s"] <= settings.lease_s
    # With those that a worker names though no request can.
    assert set(record["environments"]) == {"echo", "other", "1", "b'y'"}

    done = await asyncio.to_thread(place.run, "status")
    assert done.code == 0
    assert "waiting     3\n" in done.out
    assert "reasons     1 withdrawn\n" in done.out
    # Where nothing was warm, nothing is wrong.
    assert "warm  " not in done.out
    words = [line.split() for line in done.out.splitlines()]
    assert ["echo", "1", "3", "0"] in [line[:4] for line in words]
    assert ["w1", "2", "4"] in [line[:3] for line in words]
    assert ["w2", "0", "?"] in [line[:3] for line in words]
    assert all(len(line) <= 80 for line in done.out.splitlines()[1:])

    for worker in ("w1", "w2", "w3"):
        leases = [(job.request_id, job.token) for job in claimed.jobs] if worker == "w1" else []
        await queue.release(worker, leases, leave=True)
    await queue.cancel([f"0-{n}" for n in range(5)])
    await queue.claim("w1", ["echo"], 5, busy=0, token="m:")
    await queue.release("w1", [], leave=True)


@pytest.mark.slow
async def test_status_says_what_was_shared_and_remembered(place: Terminal, queue: Queue) -> None:
    queue.settings = replace(queue.settings, remember_s=60.0)
    await queue.register("w", wire.pack_info({}), {"echo": wire.pack_info({})}, {"echo": "print"})
    batch = [
        structs.replace(submission(f"0-{n}", echo_body(b"x")), digest="same") for n in range(6)
    ]
    await queue.submit("client", batch[:4])
    (job,) = (await queue.claim("w", ["echo"], 4, busy=0, token="n:")).jobs
    done = Settlement(
        job.request_id, job.token, "echo", wire.pack_reply(job.token, Reply()), "print"
    )
    await queue.claim("w", [], 0, busy=0, token="m:", settlements=[done])
    await queue.submit("client", batch[4:])
    await queue.release("w", [], leave=True)
    (record,) = (await asyncio.to_thread(place.run, "status", "--json")).lines
    assert (record["coalesced"], record["remembered"]) == (3, 2)
    shown = (await asyncio.to_thread(place.run, "status")).out
    assert "shared      3 joined an identical run, 2 answered from remembered" in shown


@pytest.mark.slow
def test_reap_gives_back_what_a_dead_worker_held(place: Terminal, settings: Settings) -> None:
    quick = replace(settings, lease_s=0.5)
    place.environ["LEANQ_LEASE_S"] = "0.5"

    async def die_with_two() -> None:
        queue = Queue(quick)
        await queue.register("doomed", wire.pack_info({}), {"echo": b""})
        await queue.submit("client", [submission(f"0-{n}", echo_body(b"x")) for n in range(2)])
        await queue.claim("doomed", ["echo"], 2, busy=0, token="n:")
        await queue.close()

    async def clean_up() -> None:
        queue = Queue(quick)
        assert await counter(queue, "reaped") == 2
        await queue.cancel(["0-0", "0-1"])
        await queue.claim("sweeper", ["echo"], 2, busy=0, token="n:")
        await queue.release("sweeper", [], leave=True)
        await queue.close()

    assert place.run("reap", "--json").lines == [{"requeued": 0, "poisoned": 0}]
    asyncio.run(die_with_two())
    watcher = place.start("reap", "--watch")
    assert wait_for_line(watcher.stdout, "") == "2 put back, 0 poisoned\n"
    watcher.send_signal(signal.SIGINT)
    assert ended(watcher).code == 130
    assert place.run("reap").out == "0 put back, 0 poisoned\n"
    asyncio.run(clean_up())


@pytest.mark.slow
def test_a_reaper_that_watches_outlasts_its_server(terminal: Terminal) -> None:
    environ = {"LEANQ_LEASE_S": "0.5"}
    with own_server() as server:
        terminal.use(server.settings)
        watcher = terminal.start("reap", "--watch", "--json", environ=environ)
        wait_for_line(watcher.stdout, '"requeued": 0')
        server.stop()
        wait_for_line(watcher.stderr, "; trying again")
        assert terminal.run("reap", environ=environ).code == 3
        assert terminal.run("reap", "--watch", environ=environ).code == 3
        server.start()

        async def die_with_one() -> None:
            queue = Queue(replace(server.settings, lease_s=0.5))
            await queue.submit("client", [submission("0-1", echo_body(b"x"))])
            await queue.claim("doomed", ["echo"], 1, busy=0, token="n:")
            await queue.close()

        asyncio.run(die_with_one())
        wait_for_line(watcher.stdout, '"requeued": 1')
        watcher.send_signal(signal.SIGINT)
        assert ended(watcher).code == 130


# Workers


@pytest.mark.slow
def test_worker_logs_json_and_drains(place: Terminal, settings: Settings) -> None:
    worker = place.start("worker", "--driver", "echo", "--slots", "3", "--json")
    first = json.loads(wait_for_line(worker.stderr, "serves"))
    assert set(first) == {"time", "level", "message"}
    assert first["level"] == "INFO"
    assert "serves echo with 3 slots" in first["message"]
    (row,) = look(settings).workers
    assert wire.unpack_info(row.info)["slots"] == 3
    worker.send_signal(signal.SIGTERM)
    done = ended(worker)
    assert (done.code, done.out) == (0, "")
    assert all(json.loads(line)["message"] for line in done.err.splitlines())
    assert look(settings).workers == ()


@pytest.mark.slow
def test_worker_offers_environments_by_name(
    place: Terminal, core: Environment, settings: Settings
) -> None:
    library = place.folder / "library"
    library.mkdir()
    (library / "Given.lean").write_text("prelude\ntheorem given (p : Prop) (h : p) : p := h\n")
    command = (*core.toolchain.command, "-o", "Given.olean", "Given.lean")
    assert ask(command, {}, library).returncode == 0
    worker = place.start("worker", "--slots", "1", "--env", f"mine={library}")
    assert "serves mine with 1 slots" in wait_for_line(worker.stderr, "serves")
    file = place.file("x.lean", "prelude\nimport Given\ntheorem t (p : Prop) : p → p := given p\n")
    assert place.run("submit", "--env", "mine", file).code == 0
    done = place.run("submit", file)
    assert (done.code, "known: mine" in done.err) == (2, True)
    (record,) = place.run("status", "--json").lines
    about = record["environments"]["mine"]
    assert (about["driver"], about["lean"]) == ("lean", core.toolchain.version)
    shown = place.run("status").out
    assert [core.toolchain.version, about["fingerprint"][:12]] in (
        line.split()[-2:] for line in shown.splitlines()
    )
    worker.send_signal(signal.SIGTERM)
    assert ended(worker).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "code", "text"),
    [
        ("mine", 2, "is not NAME=PATH"),
        ("mine=", 2, "is not NAME=PATH"),
        ("=/tmp", 2, "is not a valid name"),
        ("a b=/tmp", 2, "is not a valid name"),
        ("mine=/no/such/folder", 2, "/no/such/folder"),
    ],
)
def test_bad_environments(place: Terminal, value: str, code: int, text: str) -> None:
    done = place.run("worker", "--env", value)
    assert (done.code, done.out) == (code, "")
    assert len(done.err.splitlines()) == 1
    assert text in done.err


@pytest.mark.parametrize(
    ("name", "says"),
    [("sumbit", " Did you mean 'submit'?"), ("zzzz", "")],
)
def test_a_command_that_there_is_not(place: Terminal, name: str, says: str) -> None:
    done = place.run(name)
    assert done.code == 2
    assert done.err.endswith(f"Error: No such command {name!r}.{says}\n")


def test_an_environment_named_twice(place: Terminal) -> None:
    done = place.run("worker", "--env", f"a={place.folder}", "--env", f"a={place.folder}")
    assert (done.code, done.err) == (2, "leanq: --env names 'a' twice\n")


@pytest.mark.slow
def test_a_worker_without_lean(place: Terminal) -> None:
    done = place.run("worker", "--lean", "/no/such/lean")
    assert (done.code, done.out) == (3, "")
    assert "/no/such/lean (from option) does not exist" in done.err


# leanq up


@pytest.mark.slow
def test_up(terminal: Terminal) -> None:
    up = terminal.start("up", "--slots", "1")
    url = wait_for_line(up.stderr, "leanq is up").partition("LEANQ_URL=")[2].split()[0]
    assert stat.S_IMODE(terminal.up_file.stat().st_mode) == 0o600
    assert json.loads(terminal.up_file.read_text()) == {"pid": up.pid, "url": url}

    done = terminal.run("submit", *samples("standalone"), "--json")
    assert done.code == 0
    assert f"-{up.pid}-" in done.lines[0]["worker"]
    (record,) = terminal.run("status", "--json").lines
    assert [row["worker"] for row in record["workers"]] == [done.lines[0]["worker"]]
    # What a command is told goes before what it finds.
    assert terminal.run("status", environ={"LEANQ_URL": "redis://127.0.0.1:1"}).code == 3

    second = terminal.run("up", "--driver", "echo")
    assert (second.code, second.out) == (3, "")
    assert second.err == "leanq: leanq is up already; other commands find it by themselves\n"
    assert terminal.up_file.exists()

    up.send_signal(signal.SIGINT)
    assert ended(up).code == 0
    assert not terminal.up_file.exists()
    assert terminal.is_clean()
    assert terminal.run("status").code == 2


@pytest.mark.slow
def test_up_ends_with_its_server(terminal: Terminal) -> None:
    up = terminal.start("up", "--driver", "echo")
    wait_for_line(up.stderr, "leanq is up")
    os.kill(own_server_of(up), signal.SIGKILL)
    done = ended(up)
    assert done.code == 3
    assert "leanq: the server of this command has died, and what its queue held is lost" in done.err
    assert done.err.splitlines()[-1].endswith("; run the command again")
    assert not terminal.up_file.exists()
    assert terminal.run("status").code == 2
    assert terminal.is_clean()


@pytest.mark.slow
def test_what_a_killed_up_leaves_is_not_believed(terminal: Terminal) -> None:
    up = terminal.start("up", "--driver", "echo")
    wait_for_line(up.stderr, "serves")
    up.kill()
    up.wait()
    until(terminal.is_clean)
    assert terminal.up_file.exists()
    assert terminal.run("status").code == 2
    again = terminal.start("up", "--driver", "echo")
    wait_for_line(again.stderr, "serves")
    again.send_signal(signal.SIGTERM)
    assert ended(again).code == 0
    assert not terminal.up_file.exists()


@pytest.mark.slow
def test_up_without_lean_leaves_nothing(terminal: Terminal) -> None:
    done = terminal.run("up", "--lean", "/no/such/lean")
    assert (done.code, len(done.err.splitlines())) == (3, 1)
    assert terminal.is_clean()
    assert not terminal.up_file.exists()


def test_an_environment_of_this_machine_has_a_folder(terminal: Terminal) -> None:
    for command in ("show", "prepare"):
        done = terminal.run("env", command, "mathlib")
        assert done.code == 2
        assert "write --env mathlib=FOLDER" in done.err


def test_a_folder_that_was_removed_is_named(terminal: Terminal) -> None:
    """A shell may stand in a folder that is gone."""
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    program = ("/bin/sh", "-c", script, "sh", sys.executable, "-m", "leanq")
    done = ended(terminal.start("env", "show", program=program), b"")
    assert done.code == 3
    assert (
        done.err == "leanq: the folder in which this command runs was removed; go to another one\n"
    )


@pytest.mark.slow
def test_env_show_says_what_evaluates(terminal: Terminal) -> None:
    done = terminal.run("env", "show", "--json")
    assert done.code == 0, done.err
    [line] = done.lines
    assert line["environment"] == "default"
    assert line["words"] == line["unseen"] == {}
    done = terminal.run("env", "show")
    assert "no syntax beside Lean's own that evaluates" in done.out
