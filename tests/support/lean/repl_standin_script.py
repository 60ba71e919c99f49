"""What words in texts do to the stand-in for the REPL: its tiny language, and its misbehaviour.

The language is for texts that no transcript knows, so that a test can tell the right answer from
the text alone. In the text of a command:

- every ``sorry`` is a hole with the goal ``⊢ goal N``, and its line gets a warning, unless the
  word ``silent`` stands there;
- ``(by {…})`` and ``{…}`` run the tactics between the braces, if they are ours, on a goal of
  their own. N counts these blocks and the holes outside of them, from 0;
- a line may begin with ``define NAME``, ``use NAME`` or one of `_COMMANDS`; all else is nothing.

The tactics are in `_TACTICS`, each on a line of its own or before a ``;``. As in the REPL, a step
is one tactic: several stand in parentheses. Misbehaviour is told by words such as
``standin:slow=50``, see `_BEFORE`, `_AROUND` and `send`; a text means what it means without them.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

Json = dict[str, Any]

COMPLETED = "Completed"
OPEN = "Incomplete: open goals remain"
SORRY = "Incomplete: contains sorry"
_META = "Incomplete: contains metavariable(s)"
_KERNEL = "(kernel) declaration has free variables"
_TIMEOUT = "(deterministic) timeout at `whnf`, maximum number of heartbeats has been reached"
_UNKNOWN = "unknown tactic"


class UncaughtError(Exception):
    """What ends the process, without a reply."""


class RefusedError(Exception):
    """What is answered as a ``message``, and changes nothing."""


class TacticError(RefusedError):
    """What Lean says of a tactic that fails; ``place`` where it cannot read it."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(f"Lean error:\n{place and f'<input>:{place}: '}{text}")
        self.text = text


@dataclass(frozen=True)
class Hole:
    """A ``sorry``, from the character ``start`` to before ``end``."""

    goal: str
    start: int
    end: int


@dataclass(frozen=True)
class Note:
    """A message about the characters from ``start`` to before ``end``, None where it has no end."""

    severity: str
    text: str
    start: int = 0
    end: int | None = 0

    def message(self, text: str | None = None) -> Json:
        """As the REPL has it in its reply to the command ``text``, or to a tactic."""
        start, end = (position(text, offset) for offset in (self.start, self.end))
        return {"severity": self.severity, "pos": start, "endPos": end, "data": self.text}


def position(text: str | None, offset: int | None) -> Any:
    """A place in a text as Lean counts, lines from 1 and columns from 0; in a tactic it is 0:0."""
    if text is None or offset is None:
        return None if offset is None else {"line": 0, "column": 0}
    column = offset - (text.rfind("\n", 0, offset) + 1)
    return {"line": text.count("\n", 0, offset) + 1, "column": column}


@dataclass
class Trial:
    """Tactics of ``text`` at work on goals, in a block at ``span`` or as a step of the REPL."""

    text: str
    goals: list[str]
    ending: str = COMPLETED
    span: tuple[int, int] | None = None
    notes: list[Note] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    holes: list[Hole] = field(default_factory=list)

    def run(self, start: int, end: int) -> None:
        """The tactics from ``start`` to before ``end``, in order; raises TacticError."""
        for first, last in _split(self.text, start, end):
            piece = self.text[first:last]
            word = piece.split(maxsplit=1)[0]
            if piece[0] == "(" and piece[-1] == ")":
                self.run(first + 1, last - 1)
            elif word in _TACTICS:
                argument = piece[len(word) :].lstrip()
                _TACTICS[word](self, argument, last - len(argument))
            else:
                raise TacticError(_UNKNOWN, "1:1")

    def run_block(self, opening: int, end: int, goal: str) -> None:
        """The tactics between two braces, on a goal of their own."""
        inner = Trial(self.text, [goal], "", (opening, end), self.notes, holes=self.holes)
        try:
            inner.run(opening + 1, end - 1)
        except TacticError as error:
            inner.note("error", error.text)
        else:
            if inner.goals:
                inner.note("error", "unsolved goals\n" + "\n\n".join(inner.goals))

    def take(self) -> str:
        """The first goal, which is none any more."""
        if not self.goals:
            raise TacticError("no goals to be proved")
        return self.goals.pop(0)

    def note(self, severity: str, text: str) -> None:
        self.notes.append(Note(severity, text, *(self.span or ())))


_Tactic = Callable[[Trial, str, int], object]


def _split_goal(trial: Trial, argument: str, _: int) -> None:
    if not argument.isdecimal():
        raise TacticError(_UNKNOWN, "1:6")
    goal = trial.take()
    trial.goals[:0] = [f"{goal}.{number}" for number in range(int(argument))]


def _rename(trial: Trial, argument: str, _: int) -> None:
    trial.take()
    trial.goals.insert(0, f"⊢ {argument}")


_OF_HAVE = re.compile(r"(?s)(?:.*?\s)?(?:(?P<hole>sorry)|(?:\(by )?(?P<block>\{.*\})\)?)\Z")


def _have(trial: Trial, argument: str, at: int) -> None:
    match = _OF_HAVE.match(argument)
    if not match:
        raise TacticError(_UNKNOWN, "1:5")
    trial.goals.insert(0, goal := trial.take())
    start, end = (at + offset for offset in match.span(match.lastgroup or 0))
    if match["hole"]:
        trial.holes.append(Hole(f"{goal}.have", start, end))
    else:
        trial.run_block(start, end, f"{goal}.have")


def _fail(text: str = "", place: str = "") -> _Tactic:
    def run(_: Trial, argument: str, __: int) -> NoReturn:
        raise TacticError(text or argument, place)

    return run


def _soft(trial: Trial, argument: str, _: int) -> None:
    trial.note("error", argument)
    trial.goals.clear()


def _trace(trial: Trial, argument: str, _: int) -> None:
    if trial.span:
        trial.note("info", argument)
    else:
        trial.traces.append(argument)


def _pretend(status: str, truth: str) -> _Tactic:
    """Ends all goals in a step, while the text with it in a block is wrong."""

    def run(trial: Trial, _: str, __: int) -> None:
        if trial.span:
            raise TacticError(truth)
        trial.goals.clear()
        trial.ending = trial.ending if status == COMPLETED else status

    return run


_SHY = _fail("failed to synthesize")
_TACTICS: dict[str, _Tactic] = {
    "close": lambda trial, *_: trial.take(),
    "split": _split_goal,
    "rename": _rename,
    "skip": lambda *_: None,
    "have": _have,
    "fail": _fail(),
    "parse": _fail(_UNKNOWN, "1:6"),
    "budget": _fail(_TIMEOUT),
    "soft": _soft,
    "trace": _trace,
    "meta": _pretend(_META, "(kernel) declaration has metavariables '_example'"),
    "kernel": _pretend(f"Error: kernel type check failed: {_KERNEL}", _KERNEL),
    # A proof state lacks what the text has: in a block it works.
    "shy": lambda trial, *_: (
        trial.take() if trial.span else _fail("failed to synthesize")(trial, "", 0)
    ),
    "wrong": _pretend(COMPLETED, "type mismatch"),
}


def run_step(tactic: str, goals: Sequence[str], ending: str) -> Trial:
    """One tactic on a proof state; raises TacticError."""
    trial = Trial(tactic, list(goals), ending)
    if len(_split(tactic, 0, len(tactic))) > 1:
        raise TacticError("expected end of input", "2:0")
    trial.run(0, len(tactic))
    if any(note.severity == "error" for note in trial.notes):
        trial.ending = _META
    elif trial.holes and trial.ending == COMPLETED:
        trial.ending = SORRY
    return trial


def _split(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Where the tactics are: what lies between line ends and ``;`` that no bracket holds."""
    depth, cuts = 0, [start - 1]
    for offset in range(start, end):
        depth += (text[offset] in "({") - (text[offset] in ")}")
        if depth == 0 and text[offset] in "\n;":
            cuts.append(offset)
    pieces = []
    for before, after in itertools.pairwise([*cuts, end]):
        piece = text[before + 1 : after]
        if piece.strip():
            pieces.append((after - len(piece.lstrip()), before + 1 + len(piece.rstrip())))
    return pieces


_WORD = re.compile(
    r"(?m)^[ \t]*(?P<command>#error|#info|#budget|#noend|#version|import)\b[ \t]*(?P<text>.*)$"
    r"|^[ \t]*(?P<naming>define|use)[ \t]+(?P<name>[\w.]+)"
    r"|(?P<hole>\bsorry\b)"
    r"|(?P<by>\(by )?(?P<block>\{)"
)
_COMMANDS = {
    "#error": ("error", "{text}"),
    "#info": ("info", "{text}"),
    "#budget": ("error", _TIMEOUT),
    "#noend": ("error", "{text}"),
    "#version": ("info", "Lean {version}\nTarget: x86_64-unknown-linux-gnu"),
    "import": ("error", "invalid 'import' command, it must be used in the beginning of the file"),
}


def elaborate(
    text: str, names: set[str], version: str, warning: str
) -> tuple[list[Note], list[Hole]]:
    """The messages and the holes of a text, which defines its own ``names`` beside those given."""
    done = Trial(text, [])
    warned: set[int] = set()
    start = number = 0
    while match := _WORD.search(text, start):
        start, known = match.end(), len(done.holes)
        if word := match["command"]:
            severity, said = _COMMANDS[word]
            said = said.format(text=match["text"], version=version)
            end = None if word == "#noend" else start
            done.notes.append(Note(severity, said, match.start("command"), end))
        elif match["naming"] == "define":
            names.add(match["name"])
        elif match["naming"] and match["name"] not in names:
            said = f"Unknown identifier `{match['name']}`"
            done.notes.append(Note("error", said, *match.span("name")))
        elif match["hole"]:
            done.holes.append(Hole(f"⊢ goal {number}", *match.span()))
            number += 1
        elif match["block"] and (end := _block_end(text, start - 1, is_sure=bool(match["by"]))):
            done.run_block(start - 1, end, f"⊢ goal {number}")
            start = end
            number += 1
        for hole in done.holes[known:]:
            line = text.rfind("\n", 0, hole.start) + 1
            words = text[line:].partition("\n")[0]
            if line not in warned and not re.search(r"\bsilent\b", words):
                warned.add(line)
                done.notes.append(Note("warning", warning, line, line + len(words)))
    return done.notes, done.holes


def _block_end(text: str, opening: int, *, is_sure: bool) -> int | None:
    """Where the block ends that begins with the brace at ``opening``, if it is one."""
    depth = 0
    for match in re.compile("[{}]").finditer(text, opening):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            pieces = _split(text, opening + 1, match.start())
            words = [text[slice(*piece)].split(maxsplit=1)[0] for piece in pieces]
            is_block = is_sure or all(word in _TACTICS or word[0] == "(" for word in words)
            return match.end() if is_block else None
    return None


_MISCHIEF = re.compile(r"(?:--[ \t]*)?standin:(?P<what>[a-z-]+)(?:=(?P<size>\d+))?")
_KEPT: list[bytes] = []


def mischief(text: str) -> dict[str, int]:
    """The misbehaviour that a text asks for, with sizes; raises UncaughtError for what is none."""
    asked = {match["what"]: int(match["size"] or 0) for match in _MISCHIEF.finditer(text)}
    if unknown := asked.keys() - _BEFORE.keys() - _AROUND.keys() - _SENDING:
        raise UncaughtError(f"no such misbehaviour: {', '.join(unknown)}")
    return asked


def without_mischief(text: str) -> str:
    """The text with blanks in the place of such words."""
    return _MISCHIEF.sub(lambda match: " " * len(match[0]), text)


def _forever(act: Callable[[], object] = int) -> NoReturn:
    while True:
        act()


# Before the answer.
_BEFORE: dict[str, Callable[[int], object]] = {
    "hang": lambda _: threading.Event().wait(),
    "spin": lambda _: _forever(),
    "crash": lambda _: os.abort(),
    "exit": lambda _: os._exit(0),
    "bloat": lambda mb: _KEPT.append(b"x" * (mb << 20)),
    "eat": lambda _: _forever(lambda: _KEPT.append(b"x" * (16 << 20))),
    "stderr": lambda kb: print("x" * (kb * 1024), file=sys.stderr, flush=True),
    "flood": lambda _: _forever(lambda: sys.stdout.buffer.write(b"flood " * 10_000)),
    "slow": lambda ms: time.sleep(ms / 1000),
    "leave": lambda _: threading.Thread(target=_forever, daemon=True).start(),
}
# What stands before a reply, right behind it, and after its blank line.
_AROUND = {
    "noise": (b'hello {"x": 1} [', b' ] bye "', b"later {"),
    "binary": (b"\xff\xfe\x80 ", b" \xc3\x28\xff", b""),
}
_SENDING = {"fake", "late-fake", "cut", "die-after", "long"}


class Output:
    """Standard output, for several threads; ``rng`` cuts every write at random places."""

    def __init__(self, rng: random.Random | None) -> None:
        self._rng, self._lock = rng, threading.Lock()

    def write(self, data: bytes) -> None:
        with self._lock:
            cuts = self._rng.choices(range(len(data)), k=3) if self._rng and data else []
            for start, end in itertools.pairwise([0, *sorted(cuts), len(data)]):
                sys.stdout.buffer.write(data[start:end])
                sys.stdout.buffer.flush()
                # A reader sees a part alone now, most of the time.
                time.sleep(self._rng.uniform(0, 0.002) if self._rng else 0)


def misbehave(asked: Mapping[str, int]) -> None:
    """Does what is to be done before the answer."""
    for what, size in asked.items():
        if what in _BEFORE:
            _BEFORE[what](size)


def send(output: Output, reply: Json, asked: Mapping[str, int], *, is_step: bool) -> None:
    """Writes the reply as the REPL does, and with what misbehaviour does to it."""
    reply = {key: value for key, value in reply.items() if value != [] or key == "goals"}
    if "long" in asked:
        note = Note("info", "x" * (asked["long"] << 10)).message(None if is_step else "")
        reply = {**reply, "messages": [*reply.get("messages", []), note]}
    fake, true = (
        json.dumps(each, indent=1, ensure_ascii=False).encode(errors="replace")
        for each in ({"proofState": 0, "goals": []} if is_step else {"env": 0}, reply)
    )
    around = [_AROUND[what] for what in asked if what in _AROUND]
    front, behind, after = (b"".join(texts) for texts in zip(*around, (b"", b"", b""), strict=True))
    data = front + true + behind + b"\n\n" + after
    if "fake" in asked:
        data = fake + b"\n\n" + data
    if "cut" in asked:
        output.write(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    output.write(data)
    if "late-fake" in asked:
        threading.Timer(0.05, output.write, [fake + b"\n\n"]).start()
    if "die-after" in asked:
        os._exit(0)
