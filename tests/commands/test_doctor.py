"""``leanq doctor``: what there is, what is missing, and the remedy."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from support.lean.other_lean import other_lean
from support.required import missing
from support.servers import own_server
from support.terminals import LEANQ, Terminal, ended, read_terminal, screen

from leanq import __version__
from leanq.cli import cli
from leanq.commands.doctor import server_findings
from leanq.lean.environment import Environment
from leanq.local import EmbeddedServer
from leanq.queue.settings import Settings


@pytest.fixture
def place(terminal: Terminal, settings: Settings) -> Terminal:
    """A terminal that uses a queue of its own."""
    terminal.use(settings)
    return terminal


# The doctor


def by_name(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert all(set(line) == {"what", "works", "text", "warns"} for line in lines)
    return {line["what"]: line for line in lines}


@pytest.mark.slow
def test_doctor_where_all_is_well(terminal: Terminal, core: Environment) -> None:
    done = terminal.run("doctor", "--json")
    assert (done.code, done.err) == (0, "")
    found = by_name(done.lines)
    assert list(found) == [
        "leanq",
        "python",
        "server",
        "sandbox",
        "memory",
        "lean",
        "judge",
        "first texts",
        "fork server",
        "check",
    ]
    assert all(finding["works"] for finding in found.values())
    assert found["leanq"]["text"] == __version__
    assert found["server"]["text"].startswith("embedded, version ")
    assert core.fingerprint[:12] in found["lean"]["text"]
    assert found["check"]["text"].startswith("accepted in ")
    assert terminal.is_clean()


@pytest.mark.slow
def test_what_is_slower_or_less_protected_is_a_warning(terminal: Terminal) -> None:
    """Without namespaces there are no forks, and fewer walls."""
    if subprocess.run(["unshare", "-r", "true"], check=False, capture_output=True).returncode:
        missing("a user namespace")
    deny = "for kind in user pid mnt; do echo 0 > /proc/sys/user/max_${kind}_namespaces; done"
    program = ("unshare", "-r", "sh", "-c", f'{deny}; exec "$@"', "sh", *LEANQ)
    done = terminal.run("doctor", program=program)
    assert done.code == 0
    marks = {line[9:22].strip(): line.split()[0] for line in done.out.splitlines()}
    assert (marks["sandbox"], marks["fork server"]) == ("warning", "warning")
    assert {mark for what, mark in marks.items() if what not in ("sandbox", "fork server")} == {
        "ok"
    }
    assert "; it needs x86-64, process and mount namespaces" in done.out


@pytest.mark.slow
def test_the_doctors_lines_fit_a_terminal(terminal: Terminal) -> None:
    with screen() as (ours, theirs):
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        process = terminal.start("doctor", stdout=theirs, environ={"NO_COLOR": "1"})
        os.close(theirs)
        text = read_terminal(ours)
        assert ended(process).code == 0
    assert "judge" in text
    # A path is not broken.
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in text.splitlines()), text


@pytest.mark.slow
def test_doctor_looks_at_the_named_server(place: Terminal, settings: Settings) -> None:
    done = place.run("doctor")
    assert done.code == 0
    (line,) = [line for line in done.out.splitlines() if "  server  " in line]
    assert line.startswith("ok ")
    assert "maxmemory-policy noeviction" in line
    assert settings.url not in done.out


@pytest.mark.slow
def test_doctor_without_lean(terminal: Terminal) -> None:
    done = terminal.run("doctor", environ={"LEANQ_LEAN": "/no/such/lean"})
    assert (done.code, done.err) == (3, "")
    missing = [line for line in done.out.splitlines() if line.startswith("FAILED")]
    assert len(missing) == 1
    assert "/no/such/lean" in missing[0]
    assert "set LEANQ_LEAN to" in missing[0]
    # The rest is looked at all the same.
    assert "\nok       sandbox" in done.out


@pytest.mark.slow
def test_doctor_without_a_server(terminal: Terminal) -> None:
    done = terminal.run("doctor", "--json", "--url", "redis://:secret@127.0.0.1:1")
    found = by_name(done.lines)
    assert (done.code, found["server"]["works"], found["check"]["works"]) == (3, False, True)
    assert "secret" not in done.out


@pytest.mark.slow
def test_doctor_warns_of_a_server_that_evicts_requests(terminal: Terminal) -> None:
    with EmbeddedServer() as server:
        with redis.Redis.from_url(server.url) as connection:
            connection.config_set("maxmemory-policy", "allkeys-lru")
        done = terminal.run("doctor", "--json", "--url", server.url)
    finding = by_name(done.lines)["server"]
    assert (done.code, finding["works"]) == (3, False)
    assert "set noeviction" in finding["text"]


async def test_doctor_and_status_say_that_a_server_is_full() -> None:
    with own_server("--maxmemory", "1") as server:
        (found,) = await server_findings(server.settings.url)
        assert not found.works
        assert "it is full (" in found.text
        done = await asyncio.to_thread(
            CliRunner().invoke, cli, ["status", "--url", server.settings.url]
        )
        assert "of the server's maxmemory; a full server takes no requests" in done.output


async def test_doctor_says_that_the_clocks_differ(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time() - 7300
    monkeypatch.setattr("leanq.commands.doctor.time.time", lambda: now_s)
    server, clock = await server_findings(settings.url)
    assert (server.works, clock.what, clock.works, clock.warns) == (True, "clock", True, True)
    assert "2 h ahead of this machine's" in clock.text


@pytest.mark.slow
def test_a_reader_that_leaves_ends_doctor(terminal: Terminal) -> None:
    process = terminal.start("doctor", stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()
    process.stdout = None
    assert ended(process).code == 141


@pytest.mark.slow
def test_the_working_folder_can_be_a_lake_project(place: Terminal) -> None:
    # It is taken for the default environment, wherever in it one stands.
    Path(place.folder, "lakefile.toml").write_text('name = "p"\n')
    inner = place.folder / "deep" / "er"
    inner.mkdir(parents=True)
    place.folder = inner
    done = place.run("worker")
    place.folder = inner.parents[1]
    assert done.code == 3
    assert f"{place.folder} is a Lake project, but there is no lake" in done.err
    assert os.listdir(place.tmp) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_lean_is_prepared_and_examined(terminal: Terminal, tmp_path: Path) -> None:
    lean = str(other_lean(tmp_path / "toolchain"))
    done = terminal.run("env", "prepare", "--lean", lean)
    assert done.code == 0, done.out
    assert done.out.endswith(": prepared, with images of 2 modules and 1248 constants\n")
    done = terminal.run("doctor", "--json", "--lean", lean)
    assert done.code == 0, done.out
    judge = by_name(done.lines)["judge"]["text"]
    assert "Lean 4.28.0 compiles, the kernel of Lean 4.35.0 judges" in judge
    assert "images of 2 modules and 1248 constants, from files of Lean 4.35.0 (layout 2)" in judge


# leanq env


@pytest.mark.slow
def test_an_environment_is_prepared_once(terminal: Terminal, tmp_path: Path) -> None:
    terminal.environ["LEANQ_CACHE"] = str(tmp_path)
    done = terminal.run("env", "prepare")
    assert done.code == 0
    assert done.out.endswith(": prepared\n")
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert any(path.suffix == ".passed" for path in kept)
    assert terminal.run("env", "prepare").out == done.out
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.slow
def test_what_texts_will_import_is_prepared(terminal: Terminal, tmp_path: Path) -> None:
    terminal.environ["LEANQ_CACHE"] = str(tmp_path)
    text = by_name(terminal.run("doctor", "--json").lines)["first texts"]["text"]
    assert text.startswith("wait for their header's import and its proof, unless ")
    file = terminal.folder / "text.lean"
    file.write_text("-- behind Core alone\nprelude\nimport Core\ntheorem t : True := .intro\n")
    done = terminal.run("env", "prepare", "--header", "prelude", "--header", str(file))
    assert done.code == 0, done.out
    assert [line.strip() for line in done.out.splitlines()][1:] == [
        "forks behind 'prelude' are proved",
        "forks behind 'prelude import Core' are proved",
    ]
    text = by_name(terminal.run("doctor", "--json").lines)["first texts"]["text"]
    assert text == "wait for the import of 'prelude', 'prelude import Core', proved here"
    for path in tmp_path.rglob("*.passed"):
        path.unlink()
    text = by_name(terminal.run("doctor", "--json").lines)["first texts"]["text"]
    assert text == "wait for import and proof of 'prelude', 'prelude import Core'"
    done = terminal.run("env", "prepare", "--header", "prelude\nimport Missing")
    assert done.code == 1
    assert "lacks Missing" in done.out


def test_an_environment_without_a_judge_is_not_prepared(terminal: Terminal) -> None:
    lean = terminal.folder / "lean"
    version = "Lean (version 4.35.0, x86_64-unknown-linux-gnu, commit 0123456789ab, Release)"
    lean.write_text(
        f'#!/bin/sh\n[ "$1" = --print-prefix ] && echo {lean.parent} || echo "{version}"\n'
    )
    lean.chmod(0o755)
    done = terminal.run("env", "prepare", "--lean", str(lean))
    assert (done.code, done.err) == (1, "")
    assert "the judge's self-test could not be run: " in done.out
