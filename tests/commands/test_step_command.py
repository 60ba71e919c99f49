"""``leanq step``, ``leanq state`` and the search example, as people use them."""

from __future__ import annotations

import base64
import re
import signal
import sys

import pytest
from support.fleets import look, until
from support.paths import ROOT
from support.terminals import Done, Terminal, ended, samples

from leanq.client import LeanQClient
from leanq.queue.settings import Settings

FIELDS = ["verdict", "reason", "state", "goals", "messages", "cpu_s", "wall_s"]
THEOREM = "prelude\nimport Core\ntheorem t (p q : Prop) (hp : p) (hq : q) : And p q :=\n  sorry\n"


@pytest.fixture(scope="module")
def state(fleet: Settings) -> str:
    """A state of THEOREM."""
    with LeanQClient(fleet) as lean:
        return lean.check(THEOREM).result().sorries[0].state


@pytest.mark.slow
def test_step_by_step(client: Terminal, state: str) -> None:
    (line,) = client.run("submit", "--json", client.file("t.lean", THEOREM)).lines
    (sorry,) = line["sorries"]
    assert (sorry["line"], sorry["column"], sorry["state"]) == (4, 2, state)
    done = client.run("step", state, "constructor", "--json")
    assert (done.code, done.err) == (1, "")
    (line,) = done.lines
    assert list(line) == FIELDS
    assert line["verdict"] == "incomplete"
    assert min(line["cpu_s"], line["wall_s"]) > 0
    assert [goal.splitlines()[0] for goal in line["goals"]] == ["case left", "case right"]
    last = client.run("step", line["state"], "-", "--json", stdin=b"exact hp\nexact hq\n")
    assert (last.code, last.err) == (0, "")
    (line,) = last.lines
    assert (line["verdict"], line["state"], line["goals"]) == ("accepted", None, [])


def test_steps_for_people(client: Terminal, state: str) -> None:
    done = client.run("step", state, "constructor")
    assert done.code == 1
    first, second, *rest = done.out.splitlines()
    assert first.startswith("incomplete (")
    assert second.startswith("state ")
    assert "⊢ p" in rest
    assert "case right" in rest
    rejected = client.run("step", state, "exact hq", "--env", "default")
    assert rejected.code == 1
    assert rejected.out.startswith("rejected (")
    assert "1:0: error: Type mismatch" in rejected.out


def test_show(client: Terminal, state: str) -> None:
    tactic = "constructor\nexact (fun «\x1b[2J» => «\x1b[2J») hp"
    (step,) = client.run("step", state, tactic, "--json").lines
    done = client.run("state", "show", step["state"])
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-2:] == [
        "tactic       constructor",
        "             exact (fun «�[2J» => «�[2J») hp",
    ]
    assert "      4   sorry" in done.out
    (shown,) = client.run("state", "show", step["state"], "--json").lines
    assert (shown["state"], shown["source"]) == (step["state"], THEOREM)
    assert (shown["line"], shown["column"]) == (4, 2)
    assert shown["tactics"] == [tactic]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_withdraws_a_step(
    client: Terminal, fleet: Settings, state: str, number: signal.Signals, code: int
) -> None:
    def cancelled() -> int:
        return look(fleet).counters.get("verdict:cancelled", 0)

    def waiting() -> int:
        return sum(row.waiting for row in look(fleet).priorities)

    before = cancelled()
    assert client.run("pause", "--env", "default").code == 0
    try:
        process = client.start("step", state, "constructor")
        until(waiting)
        process.send_signal(number)
        done = ended(process)
        assert (done.code, done.out, done.err) == (code, "", "")
        assert cancelled() == before + 1
    finally:
        assert client.run("resume", "--env", "default").code == 0


def test_what_is_no_state_is_refused(client: Terminal) -> None:
    for text, said in (("0123", "'0123'"), (64 * "0", 64 * "0")):
        done = client.run("step", text, "constructor")
        assert (done.code, said in done.err) == (2, True), done.err


def test_export_and_import(client: Terminal, state: str) -> None:
    file = client.folder / "state"
    assert client.run("state", "export", state, "--output", str(file)) == Done(0, "", "")
    assert client.run("state", "import", str(file)) == Done(0, f"{state}\n", "")
    (line,) = client.run("state", "export", state, "--json").lines
    assert line["state"] == state
    assert base64.b64decode(line["exported"]) == file.read_bytes()
    done = client.run("state", "import", "-", "--json", stdin=file.read_bytes())
    assert done.lines == [{"state": state}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("step", "0" * 64, "exact h"), "is not known here"),
        (("step", "nonsense", "exact h"), "'nonsense' is not a state"),
        (("step", "STATE", " "), "the text is empty"),
        (("step", "--", "STATE", "-- comment"), "no tactic to run"),
        (("step", "STATE", "exact h", "--env", "other"), "no worker has ever offered"),
        (("state", "show", "0" * 64), "is not known here"),
        (("state", "import", "/nowhere"), "cannot read /nowhere"),
        (("state", "import", "FILE"), "no exported state"),
        (("state", "export", "STATE", "--output", "/nowhere/x"), "cannot write /nowhere/x"),
    ],
)
def test_bad_input(client: Terminal, state: str, arguments: tuple[str, ...], said: str) -> None:
    file = client.file("nothing", "nothing")
    words = [{"STATE": state, "FILE": file}.get(word, word) for word in arguments]
    done = client.run(*words)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert said in done.err


def test_without_a_queue(terminal: Terminal) -> None:
    done = terminal.run("step", "0" * 64, "exact h")
    assert (done.code, done.out) == (2, "")
    assert "leanq up" in done.err


@pytest.mark.slow
def test_the_search_example(client: Terminal, fleet: Settings) -> None:
    search = ROOT / "examples" / "search.py"
    assert len(search.read_text().splitlines()) <= 60
    done = ended(client.start(program=(sys.executable, str(search))), b"")
    assert (done.code, done.err) == (0, "")
    assert len(re.findall(r"^proved: \d+ steps, \d+ states$", done.out, re.MULTILINE)) == 4
    assert "And q p := by\n  constructor\n  exact h.right\n  exact h.left\n" in done.out


def test_a_check_shows_goals(client: Terminal) -> None:
    done = client.run("submit", *samples("incomplete"))
    assert done.code == 1
    assert "    ⊢ q ∧ p\n" in done.out
    assert re.search(
        r"incomplete\.lean:\d+:\d+: sorry\n(    .*\n)+    state [0-9a-f]{64}\n", done.out
    )
