"""Makes texts for Lean from models' answers and from data sets, and says which to try.

Nothing here decides on a verdict: each text is verified against its statement, so a wrong one earns
nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal, TypeVar

from leanq.lean.goals.answers import Block, blocks_of, is_code, is_of_tactics
from leanq.lean.goals.holes import find_holes
from leanq.lean.text import (
    DECLARING,
    SCOPES,
    Command,
    commands,
    scopes,
    split_header,
    tokens,
    whole_name,
)
from leanq.queue.requests import LEAN_NO, Failure, Reply

MAX_CANDIDATES = 4
"""How many texts are made of one answer at most."""

Outcome = Literal["decides", "refuses", "unknown"]
"""What a verification says of an answer: no other text can change it, this one proves nothing, or
it might have."""

_Candidate = TypeVar("_Candidate")
_Answer = TypeVar("_Answer")
_OF_TARGET = frozenset({"target_lacks", "target_unread"})

# The languages of fences that hold proofs alone, the likeliest first; None is outside of fences.
_LEAN = ("lean", "lean4", "tactics")
_LANGUAGES = (_LEAN, ("",), (None,))
_PROVES = re.compile(r":=|^[ \t]*\||\bwhere\b", re.MULTILINE)
_UNPROVED = re.compile(r":=\s*(?:by\s*)?\Z")
_GOAL = re.compile(r"^[ \t]*⊢", re.MULTILINE)
# A command that is meant for the next one alone.
_FOR_NEXT = re.compile(r"^((?:open|set_option|variable)\b[^\n]*?)\s+in\b", re.MULTILINE)
# How terms begin, and no tactic.
_TERM = re.compile(r"\s*(?:⟨|fun\b|λ|[^\W\d][\w']*\.[^\W\d])")
# How a line ends whose tactic goes on behind it.
_GOES_ON = re.compile(r"(?:\bby|=>|:=|\bdo|\bwith|\bat|[,⟨(\[|·])\s*\Z")


def candidates_of(statement: str, completion: str) -> tuple[str, ...]:
    """Makes the texts to verify against a statement from a model's answer, best first: one to
    ``MAX_CANDIDATES``.

    Blocks that declare the statement's theorem come first, the last one before earlier ones. Each
    gets the helpers that it names from other blocks, and what it lacks of the statement's
    beginning. Then come blocks that may be a proof alone, in the place of the statement's
    ``sorry``. A text with ``sorry`` is made only if there is no other.

    >>> candidates_of("theorem t : p := by sorry", "I think:\\n```lean\\nintro x\\nexact h\\n```")
    ('theorem t : p := by\\n  intro x\\n  exact h',)
    """
    made = dict.fromkeys(_Statement(statement).candidates(blocks_of(completion)))
    proved = [text for text in made if not find_holes(text)]
    return (*proved[:MAX_CANDIDATES],) or (next(iter(made)),)


async def best_of(
    candidates: Iterable[_Candidate],
    verify: Callable[[_Candidate], Awaitable[tuple[_Answer, Outcome]]],
) -> _Answer | None:
    """Verifies candidates in their order until one decides, and returns its answer.

    Otherwise it returns the answer to the first one of which nothing is known, since that may be
    right, or else to the first one. None if there is no candidate.
    """
    first: dict[Outcome, _Answer] = {}
    for candidate in candidates:
        answer, outcome = await verify(candidate)
        if outcome == "decides":
            return answer
        first.setdefault(outcome, answer)
    return first.get("unknown", first.get("refuses"))


def outcome_of(reply: Reply) -> Outcome:
    """Returns what the reply to a candidate's verification says of the answer."""
    if reply.verdict == "accepted" or fault_of_target(reply):
        return "decides"
    return "refuses" if reply.verdict in LEAN_NO else "unknown"


def fault_of_target(reply: Reply) -> Failure | None:
    """Returns why no text can prove the target; None if that is not known."""
    return next((failure for failure in reply.failed if failure.rule in _OF_TARGET), None)


class _Text:
    """A Lean text with its header and its commands."""

    def __init__(self, text: str) -> None:
        header = split_header(text)
        self.text, self.header, self.body_start = text, header.text, header.end_offset
        self.commands = [each for each in commands(text) if each.start >= header.end_offset]
        self.declared = [each for each in self.commands if each.word in DECLARING]
        self.names = {each.name for each in self.declared} - {""}
        self.holes = [hole.offset for hole in find_holes(text)]

    def of(self, command: Command) -> str:
        return self.text[command.start : command.end].strip("\n")

    def has_hole(self, command: Command) -> bool:
        at = bisect_left(self.holes, command.start)
        return at < len(self.holes) and self.holes[at] < command.end

    def without(self, removed: Sequence[Command]) -> str:
        """Returns the text without its header and these commands."""
        pieces, start = [], self.body_start
        for each in removed:
            pieces.append(self.text[start : each.start])
            start = each.end
        return "".join([*pieces, self.text[start:]]).strip("\n")


class _Part(_Text):
    """A block of an answer, and its attempts at theorems of a statement."""

    def __init__(self, block: Block, statement: _Statement) -> None:
        super().__init__(block.text)
        self.language = block.language
        self.attempts = [each for each in self.declared if self._is_proved(each, statement)]
        self.helps = self.names - {each.name for each in self.attempts}
        self.shown = {_one_line(self.of(each)) for each in self.commands}
        helper = self.without(self.attempts) if self.helps else ""
        self.helper = "" if find_holes(helper) else helper

    @property
    def is_proof(self) -> bool:
        """Whether the text may be a proof alone: neither commands nor goals."""
        first = self.commands[0].start if self.commands else len(self.text)
        is_command = not self.text[:first].strip()
        return not (is_command or self.header or self.names or _GOAL.search(self.text))

    @cached_property
    def is_likely(self) -> bool:
        """Whether the text looks like code."""
        return is_code(self.text)

    def _is_proved(self, command: Command, statement: _Statement) -> bool:
        text = self.of(command).rstrip()
        is_stated = statement.goal_of(command) is not None
        return is_stated and bool(_PROVES.search(text)) and not _UNPROVED.search(text)


class _Statement(_Text):
    """A statement, and the candidates that blocks make for it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        stated = [each for each in self.declared if each.word in ("theorem", "lemma", "example")]
        goals = [*filter(self.has_hole, stated)] or [*filter(self.has_hole, self.declared)]
        self._goals = {each.name: each for each in goals or stated or self.declared}
        opened = scopes(text[: goals[0].start] if goals else "")
        self._attempted: dict[Command | None, str] = {}
        self._closing = [each.closing for each in reversed(opened)]
        self._prefix = opened[-1].prefix if opened else ""

    def candidates(self, blocks: Sequence[Block]) -> Iterator[str]:
        """Yields texts that may prove the statement, best first; at least one."""
        # A model that labels Lean means something else by other labels.
        if any(each.language in _LEAN for each in blocks):
            blocks = [each for each in blocks if each.language in (*_LEAN, "", None)]
        parts = [_Part(block, self) for block in blocks]
        attempts = [(part, each) for part in parts for each in part.attempts]
        attempts.sort(key=lambda attempt: not attempt[0].has_hole(attempt[1]))
        for part, each in attempts:
            self._attempted[self.goal_of(each)] = part.of(each)
        alone: list[str] = []
        for part, attempt in reversed(attempts[-MAX_CANDIDATES:]):
            helpers = self._helpers(part, parts)
            yield self._whole(part, attempt, helpers)
            alone += [self._whole(part, attempt, ())] if helpers else []
        yield from alone
        proofs = _proofs(parts)[:MAX_CANDIDATES]
        for part in proofs:
            yield self._proved(part.text, self._helpers(part, parts))
        if not attempts and not proofs:
            yield self._proved(parts[-1].text if parts else "", ())

    def goal_of(self, command: Command) -> Command | None:
        """Returns the theorem of the statement that a declaration of an answer names."""
        inside = whole_name(self._prefix, command.name)
        return self._goals.get(command.name) or self._goals.get(inside)

    def _whole(self, part: _Part, attempt: Command, helpers: Sequence[str]) -> str:
        """Returns a block with one of its attempts, behind what it lacks of the statement's
        beginning."""
        goal = self.goal_of(attempt)
        assert goal
        is_inside = goal.name != attempt.name
        lent = [
            each for each in self.commands if each.start < goal.start and not self._has(part, each)
        ]
        # A block with imports is meant as it is, unless it cannot be.
        is_lacking = is_inside or any(each.name for each in lent if each.word in DECLARING)
        is_needed = is_lacking if part.header else any(each.word not in SCOPES for each in lent)
        if not is_needed and not is_inside:
            lent = []
        closing = self._closing if lent and not is_inside else []
        own = [each for each in part.attempts if each.name == attempt.name and each != attempt]
        text = part.without(own)
        once = [each for each in _FOR_NEXT.findall(self.of(goal)) if each not in text]
        header = (part.header or self.header).rstrip()
        # A theorem that another block proves stands there with its proof.
        before = [self._attempted.get(each) or self.of(each) for each in lent]
        pieces = (header, *before, *once, *closing, *helpers, text)
        return "\n".join(filter(None, pieces))

    def _has(self, part: _Part, command: Command) -> bool:
        """Returns whether a block repeats a command of the statement."""
        if command.word in DECLARING and command.name:
            short = command.name.removeprefix(self._prefix)
            return not part.names.isdisjoint((command.name, short))
        return command.word not in SCOPES and _one_line(self.of(command)) in part.shown

    def _proved(self, proof: str, helpers: Sequence[str]) -> str:
        """Returns the statement with a proof, behind the helpers that this names."""
        if not self.holes:
            return with_header(self.header, proof)
        text = with_proof(self.text, proof)
        starts = [each.start for each in self.commands if each.start <= self.holes[-1]]
        if not helpers or not starts:
            return text
        return "\n".join((text[: starts[-1]].rstrip("\n"), *helpers, text[starts[-1] :]))

    def _helpers(self, part: _Part, parts: Sequence[_Part]) -> list[str]:
        """Returns what other blocks declare that a block names and lacks, in their order."""
        # The last block counts that declares a name.
        places = {
            name: place
            for place, each in enumerate(parts)
            if each.helper
            for full in each.helps
            for name in (full, full.rpartition(".")[2])
        }
        taken, seen = self.names | part.names, dict[int, bool]()
        texts = [part.text] if places else []
        while texts:
            for name in _names_in(texts.pop()):
                place = places.get(name, -1)
                if place < 0 or place in seen:
                    continue
                seen[place] = taken.isdisjoint(parts[place].helps)
                if seen[place]:
                    taken |= parts[place].helps
                    texts.append(parts[place].helper)
        return [parts[place].helper for place in sorted(seen) if seen[place]]


def _proofs(parts: Sequence[_Part]) -> list[_Part]:
    """Returns the blocks that may be proofs alone, best first."""
    found: list[_Part] = []
    for languages in _LANGUAGES:
        some = [each for each in reversed(parts) if each.language in languages and each.is_proof]
        likely = [each for each in some if each.is_likely]
        found += likely if found else sorted(some, key=lambda each: not each.is_likely)
    return found


def _names_in(text: str) -> dict[str, None]:
    """Returns the words of a text, each also without its last part."""
    words = (token.text for token in tokens(text))
    return dict.fromkeys(name for word in words for name in (word, word.rpartition(".")[0]))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def with_header(header: str, text: str) -> str:
    """Returns a text behind a header, unless it has imports or begins with that header."""
    if not header.strip() or text.startswith(header.rstrip()):
        return text
    own = split_header(text)
    if own.imports or own.is_prelude:
        return text
    return f"{header.rstrip()}\n{text}"


def with_sorry(statement: str) -> str:
    """Returns a statement that stops at ``:=`` or ``by`` with ``sorry`` for its proof.

    >>> with_sorry("theorem t : p := by\\n")
    'theorem t : p := by\\n  sorry'
    """
    shown = statement.rstrip()
    if shown.endswith(":="):
        return f"{shown} sorry"
    if shown.endswith("by") and shown[:-2].rstrip().endswith(":="):
        return f"{shown}\n  sorry"
    return statement


def open_definitions(statement: str) -> tuple[str, ...]:
    """Returns the definitions of a statement whose value is exactly a ``sorry``, in its order.

    The names are whole ones, as for a target's holes.

    >>> open_definitions("namespace A\\nabbrev b : Nat := sorry\\ntheorem t : b = 2 := sorry")
    ('A.b',)
    """
    holes = [hole.offset for hole in find_holes(statement)]
    return tuple(
        each.name
        for each in commands(statement)
        for hole in holes
        if each.word in ("def", "abbrev")
        and each.start <= hole < each.end
        and statement[each.start : hole].rstrip().endswith(":=")
    )


def with_proof(statement: str, proof: str) -> str:
    """Returns a statement with a proof in the place of its last ``sorry``.

    If both the proof and the statement have ``:=`` or ``by`` there, the proof's takes the
    statement's place.

    >>> with_proof("theorem t : p := by sorry", "by\\n  exact h")
    'theorem t : p := by exact h'
    """
    holes = find_holes(statement)
    if not holes:
        return statement + proof
    hole = holes[-1]
    before, behind = statement[: hole.offset], statement[hole.offset + len("sorry") :]
    if proof.lstrip().startswith(":="):
        proof = proof.lstrip().removeprefix(":=")
    proof = proof.strip("\n").rstrip()
    if (rest := behind.strip()) and proof.endswith(f"\n{rest}"):
        proof = proof.removesuffix(rest).rstrip()
    opened = re.search(r"\bby\s*\Z", before)
    if match := re.match(r"\s*by\b(?!\s*(?:--|/-))", proof):
        if not opened:
            return before + proof.lstrip() + behind
        proof = proof[match.end() :].strip("\n")
        if "\n" not in proof or not proof.strip():
            return f"{before[: opened.start()]}by {proof.strip()}{behind}"
        before = f"{before[: opened.start()]}by"
    elif opened and _TERM.match(proof):
        return before[: opened.start()] + proof.strip() + behind
    elif opened:
        before = before[: opened.start()] + "by"
        if "\n" not in proof and "\n" not in opened[0]:
            return f"{before} {proof.strip()}{behind}"
    elif is_of_tactics(proof):
        before = f"{before.rstrip()} by"
    else:
        return before + proof.strip() + behind
    return f"{before}\n{_further_in(proof)}{behind}"


def _further_in(proof: str) -> str:
    """Returns the lines of tactics, none of them at the margin, and the first no deeper than
    others. A first line that stood behind ``by``, or lost its blanks, comes as deep as the next
    one."""
    lines = proof.split("\n")
    depths = [len(line) - len(line.lstrip(" ")) for line in lines if line.strip()]
    rest = min(depths[1:], default=depths[0] if depths else 0)
    if (
        len(depths) > 1
        and depths[0] != rest
        and (depths[1] > rest or not _GOES_ON.search(lines[0]))
    ):
        lines[0] = " " * rest + lines[0].lstrip()
    shift = max(0, 2 - rest)
    return "\n".join(" " * shift + line if line.strip() else line for line in lines)
