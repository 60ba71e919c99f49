"""A REPL's commands and answers as values, and how to find answers in its output.

A command is a JSON object and a blank line, and so is its answer. But Lean code can write to the
same output: before an answer, behind it, and something that looks like one. So every command is
followed by a **probe**, a missing file with a random name. The output until its name comes back
holds exactly one answer, or cannot be trusted. Nobody can know the name before. Unlike an
elaborated command, the probe leaves nothing in the process.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from leanq.errors import ReplError
from leanq.lean.diagnostics import Found, Position, message_of, position_of
from leanq.queue.requests import Infotree

Command = Mapping[str, object]

# Possible answers begin so; anything else in the output is noise.
_BEGINNING = re.compile(
    r'\{\s*"(?:env|messages?|sorries|tactics|infotree|traces|proofStatus|proofState|goals)"\s*:'
)
# A candidate can print any number of beginnings, and each is read to its end.
_MOST_BEGINNINGS = 200
_LEAN_ERROR = "Lean error:\n"


def elaborate(code: str, env: int | None = None, infotree: Infotree | Literal[""] = "") -> Command:
    """Elaborates a text, in an environment if it has no header of its own."""
    command: dict[str, object] = {"cmd": code}
    if env is not None:
        command["env"] = env
    if infotree:
        command["infotree"] = infotree
    return command


def run_tactic(tactic: str, proof_state: int) -> Command:
    return {"tactic": tactic, "proofState": proof_state}


@dataclass(frozen=True, slots=True)
class OpenGoal:
    """An open goal: its proof state's number in the process, and the place of its ``sorry``. The
    REPL does not tell the place of one in a tactic."""

    proof_state: int | None
    goal: str
    at: Position | None


@dataclass(frozen=True, slots=True)
class Elaborated:
    """The result of a text: the environment behind it, messages and open goals; and its infotree,
    as JSON in UTF-8, if one was asked for."""

    env: int
    messages: tuple[Found, ...] = ()
    sorries: tuple[OpenGoal, ...] = ()
    infotree: bytes | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    """The result of a tactic. ``status`` is the REPL's own word for how far the proof is, which is
    known to be wrong at times. ``traces`` are texts without places."""

    proof_state: int
    goals: tuple[str, ...]
    status: str
    messages: tuple[Found, ...] = ()
    sorries: tuple[OpenGoal, ...] = ()
    traces: tuple[str, ...] = ()

    @property
    def is_completed(self) -> bool:
        return self.status == "Completed"


@dataclass(frozen=True, slots=True)
class Refused:
    """An error in an answer's place: Lean's, or the REPL's own."""

    text: str

    @property
    def by_lean(self) -> bool:
        """True if a tactic failed; otherwise the command made no sense to the REPL."""
        return self.text.startswith(_LEAN_ERROR)

    @property
    def reason(self) -> str:
        return self.text.removeprefix(_LEAN_ERROR)


Answer = Elaborated | Stepped | Refused


def read_answer(found: Mapping[str, Any]) -> Answer:
    """Reads the fields of an answer that count; raises ReplError if no REPL answers so."""
    match found:
        case {"message": str(text)}:
            return Refused(text)
        case {"proofState": int(number), "goals": list(goals)}:
            return Stepped(
                number,
                tuple(map(_text, goals)),
                _text(found.get("proofStatus", "")),
                _messages(found),
                _sorries(found),
                tuple(map(_text, _list(found, "traces"))),
            )
        case {"env": int(number)}:
            return Elaborated(number, _messages(found), _sorries(found), _infotree(found))
    raise ReplError(f"the REPL's answer is of no known shape: {str(found)[:200]}")


class Exchange:
    """One command on its way, and the output since; see the module."""

    def __init__(self, command: Command) -> None:
        self._probe = f"leanq-probe-{secrets.token_hex(12)}"
        self._marker = self._probe.encode()
        self._printed = bytearray()
        self._looked = 0
        self._marked_at = -1
        # As JSON, no line of these is blank. Letters beyond ASCII stay as they are: older versions
        # of Lean cannot read a pair of surrogates.
        commands = (command, {"path": self._probe})
        lines = (json.dumps(each, ensure_ascii=False) for each in commands)
        self.sent = "".join(f"{line}\n\n" for line in lines).encode(errors="replace")

    @property
    def printed_bytes(self) -> int:
        return len(self._printed)

    def take(self, chunk: bytes) -> bool:
        """Takes output; returns whether the probe has been answered."""
        self._printed += chunk
        if self._marked_at < 0:
            self._marked_at = self._printed.find(self._marker, self._looked)
            self._looked = max(0, len(self._printed) - len(self._marker))
        return self._marked_at >= 0 and self._printed.find(b"}", self._marked_at) >= 0

    def answer(self) -> Mapping[str, Any]:
        """Returns the answer, once the probe has been answered; raises ReplError unless there is
        just one."""
        found = list(find_answers(self._printed.decode(errors="replace")))
        *before, last = found or [{}]
        if self._probe not in str(last.get("message")):
            raise ReplError("the answer to a probe cannot be read")
        if len(before) != 1:
            raise ReplError(f"{len(before)} answers were printed to one command")
        return before[0]


def find_answers(printed: str) -> Iterator[Mapping[str, Any]]:
    """Yields all in the output that could be answers; raises ReplError if too much begins so."""
    decoder = json.JSONDecoder()
    at = 0
    for _ in range(_MOST_BEGINNINGS):
        beginning = _BEGINNING.search(printed, at)
        if not beginning:
            return
        at = beginning.start() + 1
        try:
            value, end = decoder.raw_decode(printed, beginning.start())
        except (ValueError, RecursionError):
            continue
        if _is_answer(value):
            yield value
            at = end
    raise ReplError("what was printed begins too often like an answer")


def _is_answer(value: Any) -> bool:
    """Returns whether it has the fields that no part of an answer has."""
    match value:
        case {"message": str()}:
            return len(value) == 1
        case {"proofState": int(), "goals": list()} | {"env": int()}:
            return True
    return False


def _messages(found: Mapping[str, Any]) -> tuple[Found, ...]:
    read = tuple(map(message_of, _list(found, "messages")))
    if None in read:
        raise ReplError("the REPL's answer has a message that cannot be read")
    return tuple(filter(None, read))


def _sorries(found: Mapping[str, Any]) -> tuple[OpenGoal, ...]:
    opened: list[OpenGoal] = []
    for each in _list(found, "sorries"):
        match each:
            case {"goal": str(goal), **rest}:
                number = rest.get("proofState")
                state = number if type(number) is int else None
                opened.append(OpenGoal(state, _text(goal), position_of(rest.get("pos"))))
            case _:
                raise ReplError("the REPL's answer has a sorry that cannot be read")
    return tuple(opened)


def _infotree(found: Mapping[str, Any]) -> bytes | None:
    if "infotree" not in found:
        return None
    try:
        text = json.dumps(found["infotree"], ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise ReplError("the REPL's answer has an infotree that is no JSON") from None
    return text.encode(errors="replace")


def _list(found: Mapping[str, Any], name: str) -> list[Any]:
    values = found.get(name, [])
    if not isinstance(values, list):
        raise ReplError(f"the REPL's answer has no list of {name}")
    return values


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ReplError(f"the REPL's answer has no text where one belongs: {str(value)[:200]}")
    # JSON can hold half of a surrogate pair; a reply cannot.
    return value.encode(errors="replace").decode()
