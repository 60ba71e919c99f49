"""What models write and data sets hold, made into texts that Lean checks.

Nothing here decides on a verdict: what it makes is verified against its statement.
"""

from __future__ import annotations

import re

from leanq.lean.steps.holes import find_holes
from leanq.lean.syntax import Token, split_header, tokens

_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_LEAN = ("", "lean", "lean4")
_DECLARED = re.compile(r"\b(?:theorem|lemma|def|abbrev|instance|example)\b[ \t\n]*([^\s({\[:]*)")


_COMMANDS = {"def", "abbrev", "theorem", "lemma", "instance", "example", "axiom", "opaque"}


def last_block(text: str) -> str:
    """The last fenced block of Lean in a model's answer, or without any the whole answer."""
    blocks = [body for language, body in _FENCED.findall(text) if language.lower() in _LEAN]
    return blocks[-1] if blocks else text


def with_header(header: str, text: str) -> str:
    """A text behind a header, unless it has imports of its own or begins with that header."""
    if not header.strip() or text.startswith(header.rstrip()):
        return text
    own = split_header(text)
    if own.imports or own.is_prelude:
        return text
    return f"{header.rstrip()}\n{text}"


def with_sorry(statement: str) -> str:
    """A statement with ``sorry`` for its proof, where it stops at ``:=`` or ``by``.

    >>> with_sorry("theorem t : p := by\\n")
    'theorem t : p := by\\n  sorry'
    """
    shown = statement.rstrip()
    if shown.endswith(":="):
        return f"{shown} sorry"
    if shown.endswith("by") and shown[:-2].rstrip().endswith(":="):
        return f"{shown}\n  sorry"
    return statement


def is_whole(statement: str, text: str) -> bool:
    """Whether a text declares what the statement does, and is no proof alone."""
    if split_header(text).imports:
        return True
    names = {match[1] for match in _DECLARED.finditer(statement)}
    return any(match[1] in names for match in _DECLARED.finditer(text))


def open_definitions(statement: str) -> tuple[str, ...]:
    """The definitions of a statement whose value is a ``sorry`` and nothing else, in its order.

    >>> open_definitions("abbrev answer : Nat := sorry\ntheorem t : answer = 2 := sorry")
    ('answer',)
    """
    names: list[str] = []
    command = name = ""
    first, second = Token("", 0, 0), Token("", 0, 0)
    for token in tokens(statement):
        if second.text in _COMMANDS:
            command, name = second.text, token.text
        is_value = (first.text, second.text, first.end) == (":", "=", second.start)
        if token.text == "sorry" and is_value and command in ("def", "abbrev"):
            names.append(name)
        first, second = second, token
    return tuple(names)


def with_proof(statement: str, proof: str) -> str:
    """A statement with a proof alone in the place of its last ``sorry``.

    A proof that begins with ``:=`` or ``by`` where the statement has one too takes its place.

    >>> with_proof("theorem t : p := by sorry", "by\\n  exact h")
    'theorem t : p := by\\n  exact h'
    """
    holes = find_holes(statement)
    if not holes:
        return statement + proof
    hole = holes[-1]
    before, behind = statement[: hole.offset], statement[hole.offset + len("sorry") :]
    if proof.lstrip().startswith(":="):
        proof = proof.lstrip().removeprefix(":=").lstrip()
    if re.match(r"\s*by\b", proof) and (opened := re.search(r"\bby\s*\Z", before)):
        return before[: opened.start()] + proof.lstrip() + behind
    if before.endswith("\n  "):
        # The lines of a proof are as far in as the model has put them.
        first = proof.lstrip("\n")
        return (before[:-2] if first.startswith((" ", "\t")) else before) + first + behind
    return before + proof.strip() + behind
