"""The protocol of leanprover-community/repl, answered by the program ``lean``.

    python -S tests/lean_repl.py --lean-arg ARG [--lean-arg ARG …]

The arguments together are the command of Lean, to which options are appended. Where the REPL holds
an environment or a proof state in memory, this holds the text that leads there, and runs Lean on
all of it each time: every verdict and every goal is Lean's own. It keeps to the framing, the shape
of the replies and the ends of the real one; ``allTactics``, ``infotree`` and the like are ignored.

What is tried in place of a ``sorry`` is written into a block, ``(by {…})`` for a term and ``{…}``
for a tactic. Of a block Lean says at its own end what is left to prove in it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from io import TextIOWrapper
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeAlias

Form: TypeAlias = Literal["term", "tactic"]
Reply: TypeAlias = dict[str, object]

_SORRY = "sorry"
_UNSOLVED = "unsolved goals\n"
# Between two commands, so that none continues the one before, and no import the header.
_SEAM = "\nsection end\n"
_OPEN: dict[Form, str] = {"term": "(by {", "tactic": "{"}
_CLOSE: dict[Form, str] = {"term": "})", "tactic": "}"}
_FLIPPED: dict[Form, Form] = {"term": "tactic", "tactic": "term"}
_MOST_PROBES = 3
_OPEN_GOALS = "Incomplete: open goals remain"
_FREE_VARIABLES = "(kernel) declaration has free variables '[anonymous]'"

_NAME = r"(?:«[^»]*»|[^\W\d][\w'!?]*)"
_TOKEN = re.compile(
    rf"""(?xs)
      --[^\n]* | /-(?:/-.*?-/|.)*?(?:-/|\Z)
    | r(\#*)".*?"\1 | "(?:\\.|[^"\\])*" | '(?:\\.[^']*|[^\\'])'
    | [`.]*{_NAME}(?:\.{_NAME})* | <;> | \S
    """
)


def tokens(text: str) -> Iterator[re.Match[str]]:
    """The tokens of a Lean text, roughly, without its comments."""
    return (found for found in _TOKEN.finditer(text) if not found[0].startswith(("--", "/-")))


def _depth_change(token: re.Match[str]) -> int:
    return (token[0] in ("(", "[", "{", "⟨")) - (token[0] in (")", "]", "}", "⟩"))


def find_sorries(text: str) -> dict[int, Form]:
    """The offset of every ``sorry``, with the form that its surroundings suggest."""
    found: dict[int, Form] = {}
    before, end = "", 0
    for token in tokens(text):
        if token[0] == _SORRY:
            begins_line = "\n" in text[end : token.start()]
            after_end = before[-1:].isalnum() or before[-1:] in tuple(")]}⟩_'\"")
            is_tactic = before in ("by", ";", "·", "<;>", "{") or (begins_line and after_end)
            found[token.start()] = "tactic" if is_tactic else "term"
        before, end = token[0], token.end()
    return found


def read_tactic(text: str) -> str:
    """A tactic without the parentheses around all of it.

    A core without its library may have no parentheses for tactics. A block has their meaning.
    """
    text = text.strip()
    depth = 0
    for token in tokens(text):
        depth += _depth_change(token)
        if not depth:
            if token[0] == ")" and token.end() == len(text) and text.startswith("("):
                return textwrap.dedent(f" {text[1:-1]}").strip()
            break
    return text


def read_bare(text: str) -> tuple[str, int | None]:
    """A tactic without brackets, as the real one reads it: without positions, so what begins a line
    goes on with the one before. And where a second one begins, which it does not take."""
    depth, second = 0, None
    for token in tokens(text):
        if not depth and token.start() and text[token.start() - 1] == "\n":
            text = text[: token.start() - 1] + " " + text[token.start() :]
        if not depth and token[0] == ";" and second is None:
            second = token.start()
        depth += _depth_change(token)
    return text, second


def place(text: str, offset: int) -> dict[str, int]:
    """The line, from 1, and the column of an offset."""
    line_start = text.rfind("\n", 0, offset) + 1
    return {"line": text.count("\n", 0, offset) + 1, "column": offset - line_start}


def lean_error(why: str) -> Reply:
    """The reply to a tactic that failed."""
    return {"message": f"Lean error:\n{why}"}


def parse_error(text: str, offset: int, why: str) -> Reply:
    """The reply to a tactic that cannot be read."""
    return lean_error(":".join(["<input>", *map(str, place(text, offset).values()), f" {why}"]))


@dataclass(frozen=True)
class Message:
    """A message of Lean's about what lies between two offsets of its text; ``reply`` shows it."""

    data: str
    start: int
    stop: int
    is_error: bool
    is_parsing: bool
    reply: Reply

    @property
    def goals(self) -> list[str]:
        """The goals that it says are left."""
        is_left = self.is_error and self.data.startswith(_UNSOLVED)
        return self.data.removeprefix(_UNSOLVED).split("\n\n") if is_left else []


def imports_failed(messages: Sequence[Message]) -> bool:
    """Whether Lean went no further than the header of its text."""
    return [(m.is_error, m.is_parsing, m.reply["endPos"]) for m in messages] == [
        (True, False, None)
    ]


@dataclass(frozen=True)
class Hole:
    """A ``sorry`` at ``offset`` in ``host``, and the tactics that stand in its place."""

    host: str
    offset: int
    form: Form
    tactics: Sequence[str] = ()


@dataclass(frozen=True)
class ProofState:
    """The hole in a command behind ``text``; each further one is in a tactic at the end of the one
    before. ``status`` and ``goals`` are what was answered when it came to be.
    """

    text: str
    holes: Sequence[Hole]
    goals: Sequence[str]
    status: str = _OPEN_GOALS

    def around(self) -> tuple[str, str, list[int]]:
        """The text before and after the next tactic, and where the blocks around that begin."""
        before, after = self.text, ""
        starts: list[int] = []
        for hole in self.holes:
            before += hole.host[: hole.offset]
            starts.append(len(before))
            before += _OPEN[hole.form] + "\n" + "".join(f"{each}\n;\n" for each in hole.tactics)
            after = "\n" + _CLOSE[hole.form] + hole.host[hole.offset + len(_SORRY) :] + after
        return before, after, starts


class Lean:
    """The program ``lean``."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = (*command, "--json", "--stdin")

    def run(self, before: str, text: str) -> list[Message]:
        """Its messages about two texts, with lines as in the second one, in what they show.

        What ends Lean ends this process in the same way.
        """
        given = (before + text).encode(errors="replace")
        done = subprocess.run(self._command, input=given, stdout=subprocess.PIPE, check=False)
        if done.returncode < 0:
            os.kill(os.getpid(), -done.returncode)
        if done.returncode not in (0, 1):
            sys.exit(done.returncode)
        lines = [0, *accumulate(len(line) + 1 for line in (before + text).split("\n"))]
        up = before.count("\n")

        def message(raw: dict[str, Any]) -> Message:
            ends = [raw["pos"], raw["endPos"] or raw["pos"]]
            start, stop = (lines[at["line"] - 1] + at["column"] for at in ends)
            pos, end = ({**at, "line": max(1, at["line"] - up)} for at in ends)
            severity = {"information": "info"}.get(raw["severity"], raw["severity"])
            data, end_pos = raw["data"].strip(), raw["endPos"] and end
            shown = {"severity": severity, "pos": pos, "endPos": end_pos, "data": data}
            # Nothing else tells an error of the parser's from one of elaboration.
            is_parsing = severity == "error" and raw["keepFullRange"]
            return Message(data, start, stop, severity == "error", is_parsing, shown)

        printed = done.stdout.decode(errors="replace").split("\n")
        return [message(json.loads(line)) for line in printed if line.startswith("{")]

    def look(self, before: str, host: str, after: str) -> list[tuple[Hole, str]]:
        """The holes in the middle one of three texts, each with its goal, where Lean shows one."""
        missing = find_sorries(host)
        found: dict[int, tuple[Hole, str]] = {}
        for _ in range(_MOST_PROBES):
            if not missing:
                break
            done, text = 0, before
            blocks: dict[int, range] = {}
            for offset, form in missing.items():
                text += host[done:offset]
                start = len(text)
                text += _OPEN[form] + _CLOSE[form]
                blocks[offset] = range(start, len(text))
                done = offset + len(_SORRY)
            messages = self.run(text, host[done:] + after)
            for offset, block in blocks.items():
                touching = [m for m in messages if m.start <= block.stop and m.stop >= block.start]
                if goals := [goal for m in touching if m.start in block for goal in m.goals]:
                    found[offset] = Hole(host, offset, missing.pop(offset)), goals[0]
                # Behind what was misread Lean may not have looked: there it can be right.
                elif any(m.is_error for m in touching):
                    missing[offset] = _FLIPPED[missing[offset]]
        return [found[offset] for offset in sorted(found)]


class Repl:
    """All environments, as texts, and all proof states of one session, by their numbers."""

    def __init__(self, lean: Lean) -> None:
        self._lean = lean
        self._envs: dict[object, str] = {}
        self._states: dict[object, ProofState] = {}

    def answer(self, request: object) -> Reply:
        """Raises ValueError or OSError where the real one ends without a reply."""
        match request:
            case {"tactic": str(tactic), "proofState": number}:
                state = self._states.get(number)
                return self._step(state, tactic) if state else {"message": "Unknown proof state."}
            case {"pickleTo": str(path), "env": number}:
                if number not in self._envs:
                    return {"message": "Unknown environment."}
                Path(path).write_text(json.dumps(self._envs[number]))
                return {"env": number}
            case {"pickleTo": str(path), "proofState": number}:
                if number not in self._states:
                    return {"message": "Unknown proof State."}
                Path(path).write_text(json.dumps(asdict(self._states[number])))
                return self._new_state(self._states[number])
            case {"unpickleEnvFrom": str(path)}:
                return self._new_env(str(json.loads(Path(path).read_text())))
            case {"unpickleProofStateFrom": str(path)}:
                kept = json.loads(Path(path).read_text())
                holes = [Hole(**hole) for hole in kept["holes"]]
                return self._new_state(ProofState(**{**kept, "holes": holes}))
            case {"path": str(path), **options}:
                try:
                    text = Path(path).read_text(encoding="utf-8")
                except OSError as error:
                    why = f"{error.strerror} (error code: {error.errno})".lower()
                    return {"message": f"{why}\n  file: {path}"}
                return self._command(text, options.get("env"))
            case {"cmd": str(text), **options}:
                return self._command(text, options.get("env"))
        raise ValueError(f"Could not parse as a valid JSON command: {json.dumps(request)}")

    def _new_env(self, text: str) -> Reply:
        number = len(self._envs)
        self._envs[number] = text
        return {"env": number}

    def _new_state(self, state: ProofState) -> Reply:
        number = len(self._states)
        self._states[number] = state
        return {"proofStatus": state.status, "proofState": number, "goals": state.goals}

    def _new_sorry(self, text: str, holes: Sequence[Hole], goal: str) -> Reply:
        number = self._new_state(ProofState(text, holes, [goal]))["proofState"]
        return {"proofState": number, "goal": goal}

    def _command(self, text: str, number: object) -> Reply:
        before = ""
        if number is not None:
            if number not in self._envs:
                return {"message": "Unknown environment."}
            before = self._envs[number] + _SEAM
        elif text.strip() == "#version":
            # It has to be answered even where there is no library to import.
            before = "prelude" + _SEAM
        messages = self._lean.run(before, text)
        if not imports_failed(messages):
            messages = [m for m in messages if m.start >= len(before)]
        sorries: list[Reply] = []
        if not any(m.is_error for m in messages):
            for hole, goal in self._lean.look(before, text, ""):
                ends = (place(text, hole.offset + length) for length in (0, len(_SORRY)))
                places = dict(zip(("pos", "endPos"), ends, strict=True))
                sorries.append({**self._new_sorry(before, [hole], goal), **places})
        told = [m.reply for m in messages]
        return _filled(sorries=sorries, messages=told) | self._new_env(before + text)

    def _step(self, state: ProofState, given: str) -> Reply:
        tactic = read_tactic(given)
        if not any(tokens(tactic)):
            return parse_error("", 0, "unexpected end of input")
        # What stands in parentheses may be several.
        tactic, second = read_bare(tactic) if tactic == given.strip() else (tactic, None)
        if second is not None:
            return parse_error(tactic, second, "expected end of input")

        before, after, starts = state.around()
        messages = self._lean.run(before, tactic + after)
        trial = range(len(before), len(before + tactic))
        block = range(starts[-1], trial.stop + 1 + len(_CLOSE[state.holes[-1].form]))
        goals: list[str] = []
        elsewhere: list[str] = []
        for m in messages:
            if m.goals and m.start >= starts[0] and m.start not in trial:
                # The blocks around are not at their end yet.
                goals += m.goals if m.start in block else []
            elif m.is_error and m.is_parsing and m.start in block:
                why = m.data.replace("unexpected token '}'", "unexpected end of input")
                at = min(max(0, m.start - trial.start), len(tactic))
                return parse_error(tactic, at, why)
            elif m.is_error and (m.start in block or imports_failed(messages)):
                return lean_error(m.data)
            elif m.is_error and m.start >= len(state.text):
                elsewhere.append(m.data)

        sorries = [
            self._new_sorry(state.text, [*state.holes, hole], goal)
            for hole, goal in self._lean.look(before, tactic, after)
        ]
        *outer, hole = state.holes
        holes = [*outer, replace(hole, tactics=[*hole.tactics, tactic])]
        status = "Completed"
        if goals:
            status = _OPEN_GOALS
        elif elsewhere:
            kernel = next((why for why in elsewhere if "(kernel)" in why), _FREE_VARIABLES)
            status = f"Error: kernel type check failed: {kernel}"
        elif outer:
            status = "Incomplete: contains metavariable(s)"
        elif any(map(find_sorries, holes[0].tactics)):
            status = "Incomplete: contains sorry"
        traces = [m.data for m in messages if m.reply["severity"] == "info" and m.start in trial]
        reached = ProofState(state.text, holes, goals, status)
        return _filled(sorries=sorries, traces=traces) | self._new_state(reached)


def _filled(**lists: Sequence[object]) -> Reply:
    """Those that are not empty."""
    return {name: entries for name, entries in lists.items() if entries}


def read_request() -> str:
    """The lines up to a blank one, without their ends; empty at the end of the input."""
    joined = ""
    for line in sys.stdin:
        if not line.strip():
            return joined + line
        joined += line.rstrip()
    return joined


def main() -> None:
    """Answer every request on the standard input."""
    flags, command = sys.argv[1::2], sys.argv[2::2]
    if set(flags) != {"--lean-arg"} or len(flags) != len(command):
        sys.exit("usage: lean_repl.py --lean-arg ARG [--lean-arg ARG ...]")
    for stream in (sys.stdin, sys.stdout):
        assert isinstance(stream, TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors="replace")
    repl = Repl(Lean(command))
    while request := read_request():
        if request.startswith(("#", "--")):
            continue
        try:
            reply = repl.answer(json.loads(request))
        except (OSError, ValueError, LookupError, TypeError) as error:
            sys.exit(f"uncaught exception: {error}")
        print(json.dumps(reply, indent=1, ensure_ascii=False), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
