"""``leanq campaign run`` at the command line, with real Lean, and killed amid its work."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.campaigns.campaigns import Judge
from support.fleets import look, serving, sweep, until, worker_processes
from support.lean.sites import sample
from support.servers import own_server
from support.terminals import COMMAND_TIMEOUT_S, LEANQ, Terminal, ended, read_terminal, screen

from leanq.campaigns.results import read_results
from leanq.queue.settings import Settings

CORE = "prelude\nimport Core\n"
PROOF = "theorem t{} (p q : Prop) : And p q → And q p := by\n  intro h\n  constructor\n"
GOOD, WRONG = "  exact h.right\n  exact h.left\n", "  exact h.left\n  exact h.right\n"


def jsonl(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def echoes(count: int) -> str:
    return jsonl(*({"id": n, "code": f"-- {n}"} for n in range(count)))


def records(terminal: Terminal, name: str) -> list[dict[str, Any]]:
    return list(read_results(str(terminal.folder / name)))


def assert_only_progress(err: str) -> None:
    """On a busy machine, a run takes long enough to say how far it is."""
    assert all(" rows; " in line for line in err.splitlines()), err


def assert_resumes(err: str, out: str, found: int, total: int) -> None:
    """The first line says that the run resumes, and what it found."""
    first, _, more = err.partition("\n")
    told = f"leanq: resumes {out}: {found:,} of {total:,} rows have results; at the pace so far "
    assert first.startswith(f"{told}the rest takes "), err
    assert_only_progress(more)


@pytest.fixture
def fleet() -> Iterator[Settings]:
    """A server with one echo worker."""
    with own_server() as server, worker_processes(server.settings, slots=8):
        yield server.settings


@pytest.fixture
def client(terminal: Terminal, fleet: Settings) -> Terminal:
    terminal.use(fleet)
    return terminal


@pytest.mark.slow
def test_a_data_set_with_everything_in_it(terminal: Terminal) -> None:
    """Without a queue: a server and a worker are there for the length of the call."""
    rows = [
        {"name": "list", "head": CORE, "goal": PROOF.format(1), "proofs": [WRONG, GOOD]},
        {"name": "text", "head": CORE, "goal": PROOF.format(2), "proofs": WRONG},
        {"name": "whole", "proofs": sample("incomplete")},
        {"name": "text", "proofs": "again"},
        {"name": 7, "head": 7, "proofs": "x"},
    ]
    terminal.file("data.jsonl", jsonl(*rows) + "\n{broken\n")
    run = ("campaign", "run", "data.jsonl", "--out", "out.jsonl")
    fields = [*("--id-field", "name", "--code-field", "proofs"), "--header-field", "head"]
    done = terminal.run(*run, *fields, "--prompt-field", "goal", "--json")
    assert done.code == 2
    assert done.err.splitlines() == [
        "leanq: data.jsonl:4: line 2 has the same id",
        *(line for line in done.err.splitlines() if ":5:" in line or ":7:" in line),
    ]
    (told,) = done.lines
    counts = {"rejected": 2, "accepted": 1, "incomplete": 1, "error": 3}
    assert (told["out"], told["counts"]) == ("out.jsonl", counts)
    found = records(terminal, "out.jsonl")
    assert [(r["id"], r["line"], r.get("sample"), r["verdict"]) for r in found] == [
        ("list", 1, 0, "rejected"),
        ("list", 1, 1, "accepted"),
        ("text", 2, None, "rejected"),
        ("whole", 3, None, "incomplete"),
        ("text", 4, None, None),
        (7, 5, None, None),
        (None, 7, None, None),
    ]
    assert found[1]["axioms"] == []
    (message,) = found[2]["messages"]
    # Places are those of the whole text: two lines of header, then the prompt.
    assert (message["line"], "mismatch" in message["text"]) == (6, True)
    assert sorted(p.name for p in terminal.folder.iterdir() if p.is_file()) == [
        "data.jsonl",
        "out.jsonl",
        "out.jsonl.campaign",
    ]


@pytest.mark.slow
def test_folders_and_parquet(terminal: Terminal) -> None:
    (terminal.folder / "set").mkdir()
    for name in ("and_swap", "or_swap"):
        (terminal.folder / "set" / f"{name}.lean").write_text(sample(name))
    done = terminal.run("campaign", "run", "set", "--out", "out.parquet")
    assert done.code == 0, done.err
    assert done.out.startswith("out.parquet: 2 accepted in ")
    assert [r["id"] for r in records(terminal, "out.parquet")] == ["and_swap.lean", "or_swap.lean"]
    table = pa.table({"id": [1, 2], "code": [sample("and_swap"), sample("wrong")]})
    pq.write_table(table, terminal.folder / "data.parquet")
    done = terminal.run("campaign", "run", "data.parquet", "--out", "out.jsonl")
    assert done.code == 1
    assert [r["verdict"] for r in records(terminal, "out.jsonl")] == ["accepted", "rejected"]


@pytest.mark.slow
def test_a_killed_run_is_resumed_and_checks_nothing_twice(
    client: Terminal, fleet: Settings
) -> None:
    rows = 6000
    client.file("data.jsonl", echoes(rows))
    run = ("campaign", "run", "data.jsonl", "--env", "echo", "--window", "50")
    part = client.folder / "killed.jsonl.part"
    # So many are left that none ends between two looks.
    for share in (0.1, 0.25, 0.4):
        process = client.start(*run, "--out", "killed.jsonl")
        until(lambda share=share: records_in(part) > share * rows)
        process.send_signal(signal.SIGKILL)
        process.wait(COMMAND_TIMEOUT_S)
        assert part.exists()
    with closing(sqlite3.connect(part)) as journal:
        ((kept,),) = journal.execute("SELECT count(*) FROM done")
    done = client.run(*run, "--out", "killed.jsonl")
    assert done.code == 0
    assert_resumes(done.err, "killed.jsonl", kept, rows)
    submitted = look(fleet).counters["submitted"]
    done = client.run(*run, "--out", "whole.jsonl")
    found, whole = (
        [{k: r[k] for k in ("id", "line", "verdict", "code_hash")} for r in records(client, name)]
        for name in ("killed.jsonl", "whole.jsonl")
    )
    assert found == whole
    assert len(found) == rows
    # What was in flight is asked for by the same names.
    assert submitted == rows


def records_in(journal: Path) -> int:
    """How many records are in a journal, which its coordinator keeps locked."""
    return journal.read_bytes().count(b'"verdict":') if journal.exists() else 0


@pytest.mark.slow
def test_an_interrupt_withdraws_and_the_same_command_resumes(
    client: Terminal, fleet: Settings
) -> None:
    client.file("data.jsonl", echoes(20_000))
    run = ("campaign", "run", "data.jsonl", "--out", "out.jsonl", "--env", "echo")
    process = client.start(*run)
    until(lambda: records_in(client.folder / "out.jsonl.part") > 100)
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert (done.code, done.out) == (130, "")
    told = r"leanq: interrupted after [\d,]+ of 20,000 rows; the same command resumes it\n"
    assert re.fullmatch(told, done.err)
    kept = records_in(client.folder / "out.jsonl.part")
    status = look(fleet)
    assert sum(row.waiting for row in status.priorities) == 0
    assert 100 < kept < 20_000
    done = client.run(*run)
    assert done.code == 0
    assert_resumes(done.err, "out.jsonl", kept, 20_000)
    assert [r["line"] for r in records(client, "out.jsonl")] == list(range(1, 20_001))


@pytest.mark.slow
def test_two_interrupts(terminal: Terminal) -> None:
    """The second ends it at once, with all that it has started and without a word."""
    rows = ({"id": n, "code": f"{sample('and_swap')}-- {n}"} for n in range(50))
    terminal.file("data.jsonl", jsonl(*rows))
    process = terminal.start("campaign", "run", "data.jsonl", "--out", "out.jsonl")
    until(lambda: records_in(terminal.folder / "out.jsonl.part") > 0)
    process.send_signal(signal.SIGINT)
    # Or else the two are one.
    status = Path(f"/proc/{process.pid}/status")
    until(lambda: "ShdPnd:\t0000000000000000" in status.read_text())
    process.send_signal(signal.SIGINT)
    done = ended(process)
    assert done.code in (130, -signal.SIGINT)
    assert done.out == ""


@pytest.mark.slow
def test_what_cannot_be_run(client: Terminal) -> None:
    client.file("data.jsonl", echoes(1))
    client.file("there.jsonl", "")
    client.file("data.csv", "id,code\n")
    for arguments, said in {
        ("data.jsonl", "--out", "there.jsonl"): "there.jsonl exists; name another file",
        ("none.jsonl", "--out", "out.jsonl"): "none.jsonl",
        ("data.csv", "--out", "out.jsonl"): "data.csv",
        (
            "data.jsonl",
            "--out",
            "no/out.jsonl",
        ): "no/out.jsonl cannot be written: there is no folder no",
        ("data.jsonl", "--out", "out.jsonl", "--priority", "3"): "--priority",
        ("data.jsonl", "--out", "out.jsonl", "--tenant", "a b"): "tenant",
        ("data.jsonl", "--out", "out.jsonl", "--timeout", "-1"): "timeout",
        ("data.jsonl", "--out", "./data.jsonl"): "./data.jsonl is the data; name another file",
        ("data.jsonl", "--out", ""): "'' names no file",
        ("data.jsonl", "--out", "t/"): "'t/' names no file",
        ("data.jsonl",): "--out",
    }.items():
        done = client.run("campaign", "run", *arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert said in done.err
        assert not (client.folder / "out.jsonl").exists()


@pytest.mark.slow
def test_a_run_with_other_options_is_not_resumed(client: Terminal, fleet: Settings) -> None:
    client.file("data.jsonl", echoes(20_000))
    run = ("campaign", "run", "data.jsonl", "--out", "out.jsonl", "--env", "echo")
    process = client.start(*run)
    until(lambda: records_in(client.folder / "out.jsonl.part") > 10)
    busy = client.run(*run)
    process.kill()
    process.wait(COMMAND_TIMEOUT_S)
    other = client.run(*run, "--memory", "99")
    assert (busy.code, busy.err) == (2, "leanq: out.jsonl is being written by another campaign\n")
    assert other.code == 2
    assert "out.jsonl.part belongs to a campaign with other data or other options" in other.err


@pytest.mark.slow
def test_a_wrong_field_name_stops_at_once_and_blocks_nothing(client: Terminal) -> None:
    client.file("data.jsonl", jsonl(*({"id": n, "proof": f"-- {n}"} for n in range(300))))
    run = ("campaign", "run", "data.jsonl", "--out", "out.jsonl", "--env", "echo")
    done = client.run(*run)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "leanq: data.jsonl has no field 'code' in its first 100 rows, but 'id', 'proof'; "
        "name the right one with --code-field\n"
    )
    assert not [path for path in client.folder.iterdir() if path.name.startswith("out")]
    assert client.run(*run, "--code-field", "proof").code == 0


@pytest.mark.slow
def test_with_first_success_every_problem_solved_is_success(
    terminal: Terminal, settings: Settings
) -> None:
    terminal.use(settings)

    def ends(name: str, *more: object) -> int:
        # Texts of their own, as the judge accepts what it is asked again.
        solved = {"id": 1, "code": [f"rejected {name}", f"accepted {name}", f"timeout {name}"]}
        data = terminal.file(f"{name}.jsonl", jsonl(solved, *more))
        run = ("campaign", "run", data, "--first-success", "--out", f"{name}.out")
        return terminal.run(*run).code

    with serving(settings, Judge()):
        assert ends("solved") == 0
        assert ends("unsolved", {"id": 2, "code": "rejected 2"}) in (1, 3)
        assert ends("bad", {"id": 3}) == 2
    sweep(settings)


@pytest.mark.slow
def test_progress_on_a_terminal(client: Terminal, fleet: Settings) -> None:
    client.file("data.jsonl", echoes(4000) + "{bad\n")
    with screen() as (ours, theirs):
        process = client.start(
            *("campaign", "run", "data.jsonl", "--out", "out.jsonl", "--env", "echo"),
            stdout=theirs,
            stderr=theirs,
            environ={"TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(theirs)
        shown = read_terminal(ours)
        assert process.wait(COMMAND_TIMEOUT_S) == 2
    assert "of 4,001 rows;" in shown
    assert "/s;" in shown
    # Above the bar, and not behind it.
    assert "\r\x1b[2Kleanq: data.jsonl:4001: no JSON" in shown
    assert "out.jsonl: 4,000 echoed, 1 error in " in shown


@pytest.mark.slow
def test_where_nothing_can_be_shown(client: Terminal) -> None:
    client.file("data.jsonl", echoes(3) + "{bad\n")
    run = ("campaign", "run", "data.jsonl", "--env", "echo", "--out")
    closed = ("/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *LEANQ)
    done = ended(client.start(*run, "closed.jsonl", program=closed))
    assert (done.code, len(records(client, "closed.jsonl"))) == (2, 4)
    with open("/dev/full", "wb") as full:
        done = ended(client.start(*run, "full.jsonl", stderr=full))
    assert done.code == 3
