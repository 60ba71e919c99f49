"""``leanq verify``: what is asked of a worker, and what is shown of its answer."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.fleets import Recorder, serving
from support.terminals import Terminal

from leanq.queue.requests import Failure, Reply, Request
from leanq.queue.settings import Settings

TARGET = "theorem t : 1 + 1 = 2 := sorry\n"
GOOD, BAD = "theorem t : 1 + 1 = 2 := rfl\n", "theorem t : 1 = 1 := rfl\n"
FAILED = Failure("t", "statement_differs", "expected 1 + 1 = 2,\ngot 1 = 1")


class Verifier(Recorder):
    """Accepts GOOD, and refuses all else; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__("default")
        self.requests: list[Request] = []

    async def answer(self, request: Request) -> Reply:
        self.requests.append(request)
        if request.code == GOOD:
            return Reply("accepted", axioms=(), wall_s=0.5)
        return Reply("rejected", reason="statement_differs", failed=(FAILED,), wall_s=0.25)


def ask_all(terminal: Terminal, settings: Settings, *arguments: str) -> list[Request]:
    """What a worker is asked by a command that ends well."""
    driver = Verifier()
    with serving(settings, driver):
        assert terminal.run("verify", *arguments).code == 0
    return driver.requests


@pytest.fixture
def place(terminal: Terminal, settings: Settings) -> Terminal:
    """A terminal that uses a queue of its own."""
    terminal.use(settings)
    return terminal


def test_verdicts_and_what_failed(place: Terminal, settings: Settings) -> None:
    target = place.file("target.lean", TARGET)
    good, bad = place.file("good.lean", GOOD), place.file("bad.lean", BAD)
    with serving(settings, Verifier()):
        done = place.run("verify", "--target", target, good, bad)
        assert done.code == 1
        assert f"{good}: accepted (0.50 s; axioms: none)\n" in done.out
        assert (
            f"{bad}: rejected (statement_differs; 0.25 s)\n"
            "  t: statement_differs: expected 1 + 1 = 2,\n"
            "    got 1 = 1\n"
        ) in done.out
        assert done.err.startswith("1 accepted, 1 rejected in ")
        done = place.run("verify", "--target", target, bad, "--json")
        assert (done.code, done.err) == (1, "")
        (line,) = done.lines
        assert (line["file"], line["verdict"]) == (bad, "rejected")
        assert line["failed"] == [
            {"name": "t", "rule": "statement_differs", "text": "expected 1 + 1 = 2,\ngot 1 = 1"}
        ]


def test_what_is_asked(place: Terminal, settings: Settings) -> None:
    target, good = place.file("target.lean", TARGET), place.file("good.lean", GOOD)
    limits = ("--timeout", "7", "--memory", "99", "--scratch", "88", "--trust-programs")
    (request,) = ask_all(
        *(place, settings, "--target", target, "--hole", "a", "--hole", "b", *limits, good)
    )
    assert (request.op, request.target, request.code) == ("verify", TARGET, GOOD)
    assert (request.theorems, request.holes) == ((), ("a", "b"))
    assert (request.timeout_s, request.memory_mb, request.scratch_mb) == (7.0, 99, 88)
    assert request.trust_programs
    (other,) = ask_all(place, settings, "--theorem", "A.t", "--theorem", "u", good)
    assert other == replace(
        *(Request("verify", code=GOOD, theorems=("A.t", "u"), tenant="default"),),
        wall_s=other.wall_s,
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("a.lean",), "name either a target with --target, or theorems with --theorem"),
        (("--target", "a.lean", "--theorem", "t", "a.lean"), "name either a target"),
        (("--target", "blank.lean", "a.lean"), "blank.lean: the target is empty"),
        (("--target", "-", "-"), "cannot both be standard input"),
        (("--target", "missing.lean", "a.lean"), "missing.lean: No such file or directory"),
        (("--target", "a.lean"), "Missing argument"),
    ],
)
def test_wrong_usage(place: Terminal, arguments: tuple[str, ...], text: str) -> None:
    place.file("a.lean", GOOD)
    place.file("blank.lean", "\n")
    done = place.run("verify", *arguments)
    assert (done.code, done.out) == (2, "")
    assert text in done.err
