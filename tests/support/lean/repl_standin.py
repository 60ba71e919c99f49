"""A stand-in for leanprover-community/repl: its protocol, and answers that a test can foresee.

Run as ``python -S tests/repl_standin.py [options]``. It needs nothing but the standard library and
writes nowhere but where a request tells it to pickle. What it answers:

- ``--replay DIR/NAME``: the recorded dialogue NAME, word for word, and probes at any time: a
  ``path`` that cannot be read. No other request.
- ``--know DIR``: what is recorded there, in any order and under its own numbers. A text may be
  several recorded commands, each from the margin of a new line on, with imports before them; what
  is recorded without an environment may be asked in one that only imports.
- else by the tiny language of `repl_standin_script`, which also tells how a text asks for
  misbehaviour. What comes of it stands nowhere in a transcript: nothing recorded is known there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

import repl_standin_script as script
from repl_standin_script import Json, Note, RefusedError, UncaughtError, position

# In Lean's order: the first that fits is taken. What ends with ? may be left out.
_SHAPES: dict[str, dict[str, type]] = {
    "tactic": {"tactic": str, "proofState": int},
    "pickle": {"pickleTo": str, "env": int},
    "unpickle": {"unpickleEnvFrom": str},
    "pickle proof": {"pickleTo": str, "proofState": int},
    "unpickle proof": {"unpickleProofStateFrom": str, "env?": int},
    "cmd": {"cmd": str, "env?": int},
    "path": {"path": str, "env?": int},
}


def shape(request: Any) -> str:
    """Which of the shapes a request has; raises UncaughtError if none."""

    def has(name: str, kind: type) -> bool:
        value = request.get(name.rstrip("?"))
        return name.endswith("?") if value is None else isinstance(value, kind)

    for name, fields in _SHAPES.items():
        if isinstance(request, dict) and all(has(*field) for field in fields.items()):
            return name
    raise UncaughtError("Could not parse as a valid JSON command")


def read_blocks(lines: Iterable[bytes]) -> Iterator[Any]:
    """The JSON of every block of lines, at whose end stands a blank one; raises ValueError."""
    block = ""
    for line in chain(lines, [b""]):
        block += line.decode().rstrip()
        if not line.strip() and (line or block):
            if not block.startswith(("#", "--")):
                yield json.loads(block)
            block = ""


def read_path(path: str) -> str:
    """The text of a file; raises RefusedError where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        said = os.strerror(error.errno or 0).lower()
        raise RefusedError(f"{said} (error code: {error.errno})\n  file: {path}") from error


# A transcript, and the number of an environment or proof state in it.
Place = tuple[str, int]
_NO_ENV = -1
_OF_PROOFS = {"tactic", "proofState", "unpickleProofStateFrom"}
_OPTIONS = {"allTactics", "rootGoals", "infotree"}
_LEFT_OUT = {"env", "proofState", "tactics", "infotree"}


def read_transcript(path: Path) -> list[tuple[Json, Json]]:
    """The requests of a dialogue and the replies, as far as there are any."""
    requests, replies = (
        read_blocks(path.with_name(path.name + suffix).read_bytes().strip().splitlines())
        for suffix in (".in", ".expected.out")
    )
    return list(zip(requests, replies, strict=False))


class Replay:
    """One dialogue, word for word."""

    def __init__(self, path: Path) -> None:
        self._rest = read_transcript(path)

    def answer(self, request: Json) -> Json:
        if self._rest and self._rest[0][0] == request:
            return self._rest.pop(0)[1]
        if shape(request) == "path":
            read_path(request["path"])
        raise UncaughtError(f"not what was recorded: {json.dumps(request)}")


@dataclass(frozen=True)
class Fact:
    """``text`` was answered by ``reply``, here without numbers; what came of it, and of its holes.

    ``is_plain``: it was asked without options, which can change the answer. ``infotrees``: those
    that were asked for, by which of their nodes.
    """

    text: str
    reply: Json
    is_plain: bool
    after: frozenset[Place]
    holes: list[frozenset[Place]]
    infotrees: Json


class Knowledge:
    """What the transcripts of a folder tell, by the place where it was asked."""

    def __init__(self, folder: Path | None, only: str | None) -> None:
        self._facts: dict[tuple[str, Place], list[Fact]] = {}
        # What one transcript pickled may be unpickled in the next.
        self._pickled: dict[str, Place] = {}
        found = sorted(folder.glob(f"{only or '*'}.expected.out")) if folder else []
        self.names = [path.name.removesuffix(".expected.out") for path in found]
        for path, name in zip(found, self.names, strict=True):
            self._learn(path.with_name(name))

    def find(self, kind: str, places: Iterable[Place], fits: Callable[[str], bool]) -> Fact | None:
        """What is recorded at any of the places for the longest text that fits."""
        facts = [fact for place in sorted(places) for fact in self._facts.get((kind, place), ())]
        facts = [fact for fact in facts if fact.text and fits(fact.text)]
        if not facts:
            return None
        best = max(facts, key=lambda fact: (len(fact.text), fact.is_plain))
        same = [fact for fact in facts if (fact.text, fact.reply) == (best.text, best.reply)]
        after = frozenset[Place]().union(*(fact.after for fact in same))
        holes = zip(*(fact.holes for fact in same), strict=True)
        return replace(best, after=after, holes=[frozenset().union(*each) for each in holes])

    def _learn(self, path: Path) -> None:
        # What was pickled and is unpickled is the same place under another number.
        same: dict[tuple[str, int], Place] = {}

        def place(kind: str, of: Json) -> Place:
            number = _NO_ENV if of.get(kind) is None else of[kind]
            return same.get((kind, number), (path.name, number))

        for request, reply in read_transcript(path):
            kind = "proofState" if request.keys() & _OF_PROOFS else "env"
            before = place(kind, request)
            unpickled = request.get("unpickleEnvFrom") or request.get("unpickleProofStateFrom")
            if pickled := request.get("pickleTo"):
                same[kind, reply[kind]] = self._pickled[pickled] = before
            elif unpickled:
                same[kind, reply[kind]] = self._pickled.get(unpickled, place(kind, reply))
            else:
                if file := request.get("path"):
                    request["cmd"] = read_path(str(path.with_name(Path(file).name)))
                sorries = [dict(sorry) for sorry in reply.get("sorries", ())]
                holes = [frozenset({(path.name, sorry.pop("proofState"))}) for sorry in sorries]
                after = frozenset({(path.name, reply[kind])} if kind in reply else set[Place]())
                bare = {key: value for key, value in reply.items() if key not in _LEFT_OUT}
                text = request["cmd" if kind == "env" else "tactic"].rstrip()
                is_plain = not request.keys() & _OPTIONS
                trees = {request["infotree"]: reply["infotree"]} if "infotree" in reply else {}
                fact = Fact(text, {**bare, "sorries": sorries}, is_plain, after, holes, trees)
                self._facts.setdefault((kind, before), []).append(fact)


_BLANK = r"(?:\s|--[^\n]*|/-(?![-!])(?s:.*?)-/)*"
_IMPORT = r"(?:prelude|module|(?:public[ \t]+)?(?:meta[ \t]+)?import[ \t][^\n]*?)[ \t]*(?=--|\n|\Z)"
_HEADER = re.compile(rf"(?:{_BLANK}{_IMPORT})*")
_COMMENT = re.compile(r"--[^\n]*|/-(?s:.*?)-/")
# A recorded command ends where the next one begins at the margin.
_PIECE_END = re.compile(r"\s*(?:\Z|\n(?=\S))")
_MISSING = re.compile(r"import .*\bMissing\b")
_FAILED_IMPORT = "unknown module prefix 'Missing'\n\nNo directory 'Missing' in the search path"


@dataclass(frozen=True)
class State:
    """An environment with the names that texts defined in it, or a proof state with its goals.

    ``at``: where it stands in transcripts. ``ending``: its status when no goals are left.
    """

    at: frozenset[Place] = frozenset()
    names: frozenset[str] = frozenset()
    goals: tuple[str, ...] = ()
    ending: str = script.COMPLETED


class Repl:
    """Environments and proof states, which only ever get more."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._known = Knowledge(arguments.know, arguments.only)
        self._version = arguments.version
        quoted = "'sorry'" if arguments.old_quotes else "`sorry`"
        self._warning = f"declaration uses {quoted}"
        self._states: dict[str, list[State]] = {"env": [], "proofState": []}
        self._answers: dict[str, Callable[[Json], Json]] = {
            "tactic": self._step,
            "pickle": partial(self._pickle, "env"),
            "unpickle": partial(self._unpickle, "env"),
            "pickle proof": partial(self._pickle, "proofState"),
            "unpickle proof": partial(self._unpickle, "proofState"),
            "cmd": lambda request: self._run(
                request["cmd"], request.get("env"), request.get("infotree")
            ),
            "path": lambda request: self._run(read_path(request["path"]), request.get("env")),
        }

    def answer(self, request: Json) -> Json:
        return self._answers[shape(request)](request)

    def _state(self, kind: str, number: int, unknown: str) -> State:
        if not 0 <= number < len(self._states[kind]):
            raise RefusedError(unknown)
        return self._states[kind][number]

    def _keep(self, kind: str, state: State) -> int:
        self._states[kind].append(state)
        return len(self._states[kind]) - 1

    def _run(self, text: str, number: int | None, infotree: str | None = None) -> Json:
        text = script.without_mischief(text)
        messages: list[Json] = []
        sorries: list[Json] = []
        trees: list[Json] = []
        if number is None:
            header = _HEADER.match(text)
            assert header
            if _MISSING.search(header[0]):
                messages.append(Note("error", _FAILED_IMPORT, 0, None).message(text))
            env, text = self._import(header[0]), _blanked(text, header.end())
        else:
            env = self._state("env", number, "Unknown environment.")

        while fact := self._known.find("env", env.at, partial(_begins, text)):
            start = position(text, len(text) - len(text.lstrip()))
            messages += [_moved(message, start) for message in fact.reply.get("messages", ())]
            for sorry, at in zip(fact.reply["sorries"], fact.holes, strict=True):
                sorries.append(self._hole(_moved(sorry, start), at))
            trees += fact.infotrees.get(infotree, ())
            env = replace(env, at=fact.after)
            text = _blanked(text, len(text) - len(text.lstrip()) + len(fact.text))

        if text.strip():
            names = set(env.names)
            notes, holes = script.elaborate(text, names, self._version, self._warning)
            messages += [note.message(text) for note in notes]
            for hole in holes:
                place = {"pos": position(text, hole.start), "endPos": position(text, hole.end)}
                sorries.append(self._hole({"goal": hole.goal, **place}))
            if infotree:
                trees.append(
                    {"node": {"stx": {"pp": text.strip()}}, "kind": "CommandInfo", "children": []}
                )
            env = State(names=frozenset(names))
        found = {"sorries": sorries, "messages": messages, "env": self._keep("env", env)}
        return {**found, "infotree": trees} if infotree and trees else found

    def _import(self, header: str) -> State:
        """Of each transcript what it says of this header, else the place before all commands."""
        words = _COMMENT.sub("", header).split()
        at = set[Place]()
        for name in self._known.names if not _MISSING.search(header) else ():
            fact = self._known.find("env", [(name, _NO_ENV)], lambda text: text.split() == words)
            at |= fact.after if fact else {(name, _NO_ENV)}
        return State(frozenset(at))

    def _hole(self, sorry: Json, at: frozenset[Place] = frozenset()) -> Json:
        return {"proofState": self._keep("proofState", State(at, goals=(sorry["goal"],))), **sorry}

    def _step(self, request: Json) -> Json:
        proof = self._state("proofState", request["proofState"], "Unknown proof state.")
        tactic = script.without_mischief(request["tactic"]).strip()
        same = {tactic, tactic.removeprefix("(\n").removesuffix("\n)").strip()}
        if fact := self._known.find("proofState", proof.at, same.__contains__):
            said = fact.reply
            if "message" in said:
                raise RefusedError(said["message"])
            later = script.SORRY if fact.holes else proof.ending
            ending = later if said["goals"] else said["proofStatus"]
            proof = State(fact.after, goals=tuple(said["goals"]), ending=ending)
            sorries = [self._hole(*each) for each in zip(said["sorries"], fact.holes, strict=True)]
            return self._reached(proof, {**said, "sorries": sorries})
        trial = script.run_step(tactic, proof.goals, proof.ending)
        proof = State(goals=tuple(trial.goals), ending=trial.ending)
        sorries = [self._hole({"goal": hole.goal}) for hole in trial.holes]
        messages = [note.message() for note in trial.notes]
        said = {"sorries": sorries, "traces": trial.traces, "messages": messages}
        return self._reached(proof, said)

    def _reached(self, proof: State, said: Json) -> Json:
        """The reply where a proof state has come up; ``said``: what Lean told on the way."""
        status = script.OPEN if proof.goals else proof.ending
        number = self._keep("proofState", proof)
        reply = {"proofStatus": status, "proofState": number, "goals": list(proof.goals)}
        told = {key: said.get(key, []) for key in ("sorries", "traces", "messages")}
        return {**told, **reply}

    def _pickle(self, kind: str, request: Json) -> Json:
        unknown = "Unknown environment." if kind == "env" else "Unknown proof State."
        state = self._state(kind, request[kind], unknown)
        body = json.dumps({"origin": [kind, self._version], **asdict(state)}, default=sorted)
        Path(request["pickleTo"]).write_text(f"{crc32(body.encode())}\n{body}", encoding="utf-8")
        return {"env": request["env"]} if kind == "env" else self._reached(state, {})

    def _unpickle(self, kind: str, request: Json) -> Json:
        if request.get("env") is not None:
            self._state("env", request["env"], "Unknown environment.")
        path = Path(request["unpickleEnvFrom" if kind == "env" else "unpickleProofStateFrom"])
        digest, _, body = path.read_text(encoding="utf-8").partition("\n")
        found = json.loads(body) if digest == str(crc32(body.encode())) else {}
        if found.pop("origin", None) != [kind, self._version]:
            raise UncaughtError(f"{path} is damaged, or of another kind or version")
        at, names, goals, ending = found.values()
        state = State(frozenset(map(tuple, at)), frozenset(names), tuple(goals), ending)
        return {"env": self._keep("env", state)} if kind == "env" else self._reached(state, {})


def _blanked(text: str, end: int) -> str:
    """The text with blanks in the place of all that stands before ``end``."""
    return re.sub(r"\S", " ", text[:end]) + text[end:]


def _begins(text: str, piece: str) -> bool:
    start = len(text) - len(text.lstrip())
    return text.startswith(piece, start) and bool(_PIECE_END.match(text, start + len(piece)))


def _moved(what: Json, start: Json) -> Json:
    """A message or sorry of a piece, as one of the text in which the piece begins at ``start``."""

    def move(place: Json | None) -> Json | None:
        if place is None:
            return None
        column = place["column"] + (start["column"] if place["line"] == 1 else 0)
        return {"line": place["line"] + start["line"] - 1, "column": column}

    return {**what, "pos": move(what["pos"]), "endPos": move(what["endPos"])}


_STORMS = ("crash", "hang", "noise", "bloat")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speaks the protocol of the Lean REPL.")
    parser.add_argument("--replay", type=Path, metavar="DIR/NAME", help="one recorded dialogue")
    parser.add_argument("--know", type=Path, metavar="DIR", help="recorded dialogues, as facts")
    parser.add_argument("--only", metavar="NAME", help="the only one of them to know")
    parser.add_argument("--version", default="4.35.0", help="what #version says")
    parser.add_argument("--old-quotes", action="store_true", help="'sorry' in its warning")
    parser.add_argument("--banner", metavar="TEXT", default="", help="printed first, as it is")
    parser.add_argument("--start-s", type=float, default=0.0, help="seconds before the start")
    parser.add_argument("--fail-start", action="store_true", help="end before the start")
    parser.add_argument("--split", action="store_true", help="cut all output at random places")
    parser.add_argument("--seed", type=int, default=0, help="of the chances and the cuts")
    parser.add_argument("--mark", metavar="WORD", help="to find its processes by")
    for what in _STORMS:
        name, form = (f"--{what}-mb", "P:MB") if what == "bloat" else (f"--{what}", "P")
        parser.add_argument(name, dest=what, type=_chance, default=(0.0, 0), metavar=form)
    return parser.parse_args()


def _chance(text: str) -> tuple[float, int]:
    """A probability per request, and a size where there is one."""
    chance, _, size = text.partition(":")
    return float(chance), int(size or 0)


def main() -> None:
    arguments = _arguments()
    if arguments.fail_start:
        raise UncaughtError("cannot start")
    time.sleep(arguments.start_s)
    # In a namespace of its own, every process may have the same number.
    rng = random.Random(f"{arguments.seed} {os.getpid()} {time.monotonic_ns()}")
    output = script.Output(rng if arguments.split else None)
    output.write(arguments.banner.encode())
    speaker = Replay(arguments.replay) if arguments.replay else Repl(arguments)
    storms = {what: getattr(arguments, what) for what in _STORMS}
    for request in read_blocks(sys.stdin.buffer):
        is_step = shape(request) == "tactic"
        asked = script.mischief(str(request.get("cmd", request.get("tactic", ""))))
        asked |= {what: size for what, (p, size) in storms.items() if rng.random() < p}
        script.misbehave(asked)
        try:
            reply = speaker.answer(request)
        except RefusedError as refusal:
            reply = {"message": str(refusal)}
        script.send(output, reply, asked, is_step=is_step)


if __name__ == "__main__":
    try:
        main()
    except (UncaughtError, OSError, ValueError) as error:
        sys.exit(f"uncaught exception: {error}")
