"""Rewrites texts: theorems as statements, each sorry as a lemma, a statement negated.

Lean has to check the new text once more, as :mod:`leanq.commands.extract` has it do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from leanq.errors import UsageError
from leanq.lean.declarations import Declaration
from leanq.lean.steps.holes import find_holes
from leanq.lean.syntax import tokens
from leanq.queue.requests import Sorry

_OPENING, _CLOSING = frozenset("([{⟨⦃"), frozenset(")]}⟩⦄")
_BOUND = re.compile(r"(?P<names>\S+(?: \S+)*) : (?P<type>.*)", re.DOTALL)
_PLAIN_NAME = re.compile(r"[^\W\d][\w'!?₀-₉]*")


def with_statements(code: str, declarations: Sequence[Declaration]) -> str:
    """Returns the text with ``sorry`` for the proof of each of its theorems. Theorems within
    another declaration, such as a structure's fields, stay: that declaration makes them. Raises
    UsageError if a proof is not found where its statement ends."""
    spans = [_span(code, each) for each in declarations]
    # From the last one on, so that the places before it stay valid.
    for theorem, (start, end) in reversed([*zip(declarations, spans, strict=True)]):
        if theorem.kind != "theorem" or any(
            first <= start and end <= last and (first, last) != (start, end)
            for first, last in spans
        ):
            continue
        cut = start + _proof(code[start:end], theorem)
        code = f"{code[:cut].rstrip()} := sorry{code[end:]}"
    return code


def with_negation(code: str, theorem: Declaration, name: str) -> str:
    """Returns the text up to a theorem, and in its place ``name``: the negation of its statement.
    Raises UsageError if it is no theorem, or has no statement that Lean prints."""
    if theorem.kind != "theorem" or theorem.statement is None:
        raise UsageError(f"{theorem.name} is no theorem with a statement that can be negated")
    start, _ = _span(code, theorem)
    universes = _bound(code[:start], theorem.universes)
    return f"{code[:start]}theorem {name}{universes} : ({theorem.statement}) → False := sorry\n"


def with_contradiction(code: str, theorem: Declaration, name: str) -> str:
    """Returns the text up to a theorem's end, and ``name``: the theorem contradicts its negation.
    Lean refuses that if it reads the printed statement as another one."""
    start, end = _span(code, theorem)
    bound, universes = _bound(code[:start], theorem.universes), _universes(theorem.universes)
    return (
        f"{code[:end]}\ntheorem {name}{bound} (no : ({theorem.statement}) → False) : False :=\n"
        f"  no @_root_.{theorem.name}{universes}\n"
    )


def with_lemmas(
    code: str, declarations: Sequence[Declaration], sorries: Sequence[Sorry], prefix: str
) -> str:
    """Returns the text with each sorry of a check, with its goal, as a lemma before its
    declaration. The lemmas' names are ``prefix`` and a number. Raises UsageError if a sorry stands
    in no named declaration, or has no goal that can be stated alone."""
    holes = {hole.offset: hole for hole in find_holes(code)}
    spans = [(*_span(code, each), each) for each in declarations]
    lemmas: dict[int, list[str]] = {}
    fills: dict[int, str] = {}
    for number, sorry in enumerate(sorries, 1):
        offset = _offset(code, sorry.line, sorry.column)
        if offset not in holes:
            raise UsageError(f"there is no sorry at line {sorry.line}, column {sorry.column}")
        binders, names, goal = _stated(sorry)
        around = [each for each in spans if each[0] <= offset < each[1]]
        if not around:
            raise UsageError(f"the sorry at line {sorry.line} stands in no declaration with a name")
        start, _, owner = min(around, key=lambda each: each[0])
        stated = f"{' '.join(binders)} : {goal}".lstrip()
        levels = [each for each in owner.universes if re.search(rf"\b{re.escape(each)}\b", stated)]
        universes = _bound(code[:start], levels)
        name = f"{prefix}{number}"
        lemmas.setdefault(start, []).append(f"theorem {name}{universes} {stated} := sorry\n\n")
        call = " ".join((name, *names))
        fills[offset] = f"exact {call}" if holes[offset].form == "tactic" else f"({call})"
    for offset in sorted({*fills, *lemmas}, reverse=True):
        if offset in fills:
            code = code[:offset] + fills[offset] + code[offset + len("sorry") :]
        code = code[:offset] + "".join(lemmas.get(offset, ())) + code[offset:]
    return code


def _universes(names: Sequence[str]) -> str:
    return f".{{{', '.join(names)}}}" if names else ""


def _bound(before: str, names: Sequence[str]) -> str:
    """Returns the universes to bind behind a text: but for those that its `universe` names."""
    scopes: list[list[str]] = [[]]
    line_end = -1
    for token in tokens(before):
        if token.start < line_end:
            scopes[-1].append(token.text)
        elif token.text == "universe":
            line_end = before.find("\n", token.end) % (len(before) + 1)
        elif token.text in ("section", "namespace", "mutual"):
            scopes.append([])
        elif token.text == "end" and len(scopes) > 1:
            scopes.pop()
    return _universes([name for name in names if not any(name in scope for scope in scopes)])


def _stated(sorry: Sorry) -> tuple[list[str], list[str], str]:
    """Returns the binders of a goal's lemma, its arguments, and the goal."""
    context, turnstile, goal = (sorry.goal or "").partition("⊢ ")
    if not turnstile:
        raise UsageError(f"the sorry at line {sorry.line} has no goal to make a lemma of")
    if "⊢ " in goal:
        raise UsageError(f"the sorry at line {sorry.line} stands for several goals")
    binders: list[str] = []
    names: list[str] = []
    for entry in _entries(context):
        found = _BOUND.fullmatch(entry)
        each = found["names"].split() if found else []
        if not found or ":=" in entry or not all(map(_PLAIN_NAME.fullmatch, each)):
            raise UsageError(
                f"the goal of the sorry at line {sorry.line} has {entry!r}, which a lemma cannot "
                "take; give it a name, or prove it first"
            )
        binders.append(f"({' '.join(each)} : {' '.join(found['type'].split())})")
        names += each
    return binders, names, " ".join(goal.split())


def _entries(context: str) -> Iterator[str]:
    """Yields the lines of a context, each with its continuation lines."""
    entry = ""
    for line in context.splitlines():
        if line.startswith("case "):
            continue
        if line.startswith(" "):
            entry += "\n" + line
            continue
        if entry:
            yield entry
        entry = line
    if entry:
        yield entry


def _proof(text: str, theorem: Declaration) -> int:
    """Returns where a proof begins: its ``:=``, its first alternative, or its ``where``."""
    depth = bound = 0
    for token in tokens(text):
        if token.text in _OPENING:
            depth += 1
        elif token.text in _CLOSING:
            depth -= 1
        elif depth == 0 and token.text in ("let", "have"):
            bound += 1
        elif depth == 0 and text.startswith(":=", token.start):
            if not bound:
                return token.start
            bound -= 1
        elif depth == 0 and token.text in ("where", "|"):
            return token.start
    raise UsageError(f"the proof of {theorem.name} (line {theorem.line}) is not found in the text")


def _span(code: str, declaration: Declaration) -> tuple[int, int]:
    return (
        _offset(code, declaration.line, declaration.column),
        _offset(code, declaration.end_line, declaration.end_column),
    )


def _offset(code: str, line: int, column: int) -> int:
    lines = code.split("\n")
    return sum(len(each) + 1 for each in lines[: line - 1]) + column
