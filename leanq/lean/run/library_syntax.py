"""Tells whether a text has a library's syntax that evaluates.

A bare word such as `trace` or `apply` is also a name. A text has the syntax if it has all symbols
that each use of it has, in their order, and those that stand side by side so. A tactic's word
counts as a name behind what no tactic follows, and before what no argument begins with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from leanq.lean.text import tokens

GAP = "…"
"""What stands between the symbols of a syntax."""

# What no tactic stands behind, and what no argument of a tactic begins with.
_BEFORE_NAME_WORDS = (
    "fun λ ∀ ∃ let have def theorem lemma abbrev instance structure class inductive namespace end "
    "section open scoped export variable exact refine apply show change @ : = + * / ^ ≤ ≥ < ≠ ∈ ∧ "
    "∨ ¬ ↔ → ← [ ⟨"
)
_BEHIND_NAME_WORDS = (
    ") ] } ⟩ , : = + * / ^ ≤ ≥ < > ≠ ∈ ∧ ∨ ↔ → ; ∘ ∣ • then else in at with where from theorem "
    "lemma def abbrev example instance structure class inductive namespace section end open "
    "variable"
)
_BEFORE_NAMES = frozenset(_BEFORE_NAME_WORDS.split(" "))
_BEHIND_NAMES = frozenset(_BEHIND_NAME_WORDS.split(" "))
# The scan finds these. Aesop has a rule below; `notation3` makes fixed syntax.
REVIEWED = frozenset({"aesop", "aesop?", "notation3"})


@dataclass(frozen=True, slots=True)
class Evaluators:
    """The syntax of an environment's libraries that evaluates what a text wrote.

    Attributes:
        words: the symbols of commands, terms and tactics in their order, with a GAP between those
            that do not stand side by side; each with the syntax that it belongs to.
        tokens: the tokens in which a comment, a string or an identifier could begin or end.
        attributes: attributes that evaluate their declaration, each with the module that brings it.
        heads: words that a tactic's configuration can follow.
        fields: names of configurations' fields.
        wordless: syntax that evaluates, and has no word to find it by.
        unseen: libraries that cannot be examined, and why.
    """

    words: dict[str, str] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    wordless: list[str] = field(default_factory=list)
    unseen: dict[str, str] = field(default_factory=dict)


def symbols(syntax: str) -> list[str]:
    """Returns the symbols of a library's syntax."""
    return [each for each in syntax.split(" ") if each != GAP]


def is_reviewed(syntax: str) -> bool:
    return symbols(syntax)[0] in REVIEWED


@lru_cache(maxsize=256)
def _runs(syntax: str) -> tuple[tuple[str, ...], ...]:
    """Returns the tokens of a library's syntax that stand side by side."""
    runs = (run.split() for run in syntax.split(GAP))
    return tuple(
        tuple(token.text for symbol in run for token in tokens(symbol)) for run in runs if run
    )


def uses(syntax: str, texts: tuple[str, ...], fields: frozenset[str], *, is_tactic: bool) -> bool:
    """Returns whether a text of these tokens may use a library's syntax that evaluates.

    Some syntax begins with a field of a configuration, and Lean evaluates the term behind it. A
    literal there runs nothing; :mod:`leanq.lean.run.programs` finds all other terms.
    """
    first, *later = _runs(syntax)
    if is_reviewed(syntax) or (first[-2:] == (":", "=") and not fields.isdisjoint(first[-3:-2])):
        return False
    end = -1
    for start in range(len(texts) - len(first) + 1):
        if texts[start : start + len(first)] == first and not (
            is_tactic
            and not syntax.startswith(GAP)
            and _is_no_tactic(texts, start, start + len(first), syntax)
        ):
            end = start + len(first)
            break
    for run in later if end >= 0 else ():
        end = next(
            (
                start + len(run)
                for start in range(end, len(texts) - len(run) + 1)
                if texts[start : start + len(run)] == run
            ),
            -1,
        )
        if end < 0:
            break
    return end >= 0


def _is_no_tactic(texts: tuple[str, ...], start: int, end: int, syntax: str) -> bool:
    """Returns whether a tactic's word is a name there: no keyword of the term's."""
    before = texts[max(0, start - 2) : start]
    if before[-1:] and before[-1] in _BEFORE_NAMES and before != (":", "="):
        return True
    takes_more = syntax.endswith(GAP)
    return takes_more and (end >= len(texts) or texts[end] in _BEHIND_NAMES)
