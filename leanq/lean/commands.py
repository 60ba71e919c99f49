"""The commands of a Lean text, as far as they can be told without Lean: where each begins, and the
whole name that it declares."""

from __future__ import annotations

import re
from typing import NamedTuple

from leanq.lean.syntax import tokens

DECLARING = frozenset(
    {"theorem", "lemma", "example", "def", "abbrev", "instance", "axiom", "opaque"}
    | {"structure", "inductive", "class"}
)
SCOPES = frozenset({"namespace", "section", "mutual", "end"})
# Words that stand before a declaration's keyword and belong to it.
_MODIFIERS = {"@", "/--", "private", "protected", "noncomputable", "partial", "unsafe", "nonrec"}
_MODIFIERS |= {"local", "scoped"}
_ANYWHERE = DECLARING | SCOPES
WORDS = _ANYWHERE | _MODIFIERS
WORDS |= {"#", "prelude", "import", "open", "variable", "universe", "set_option", "attribute"}
WORDS |= {"notation", "infix", "infixl", "infixr", "prefix", "postfix", "macro", "macro_rules"}
WORDS |= {"syntax", "elab", "export", "include", "omit", "alias"}
"""Words that begin a command."""

_NAME = re.compile(r"[^\W\d]|«")
# Namespaces longer than this are cut short, so that a hostile text takes no time by its names.
_LONGEST_CHARS = 300


class Command(NamedTuple):
    """A command from ``start`` to the next one at ``end``, with its modifiers and comments: its
    keyword, and the whole name that it declares, or the name of its scope."""

    word: str
    name: str
    start: int
    end: int


class Scope(NamedTuple):
    """An open section or namespace: the prefix of names in it, and the command that closes it."""

    prefix: str
    closing: str


def commands(text: str) -> list[Command]:
    """Returns the commands of a text. Each begins a line, and most of them at the margin."""
    return _read(text)[0]


def scopes(text: str) -> list[Scope]:
    """Returns the scopes that are open at the end of a text, from the outermost one on."""
    return _read(text)[1][1:]


def whole_name(prefix: str, name: str) -> str:
    """Returns the whole name of a declaration behind a scope's prefix."""
    return name.removeprefix("_root_.") if name.startswith("_root_.") else prefix + name


def _read(text: str) -> tuple[list[Command], list[Scope]]:
    found: list[Command] = []
    opened = [Scope("", "")]
    word = name = last = ""
    start = -1
    end = depth = 0
    is_before_name = is_modifier = False
    for token in tokens(text):
        is_same_line = "\n" not in text[end : token.start] and end > 0
        if is_before_name and token.text != "inductive":
            is_before_name = False
            if _NAME.match(token.text) and (is_same_line or word in DECLARING):
                name = token.text
            if word == "end":
                del opened[max(1, len(opened) - 1 - name.count(".")) :]
            elif word in SCOPES:
                for part in name.split("."):
                    prefix = opened[-1].prefix + (f"{part}." if word == "namespace" else "")
                    opened.append(Scope(prefix[-_LONGEST_CHARS:], f"end {part}".rstrip()))
            elif name:
                name = whole_name(opened[-1].prefix, name)
        if is_modifier:
            depth += (token.text == "[") - (token.text == "]")
        goes_on = (is_modifier and depth == 0) or last == "in"
        at_margin = text[token.start - 1 : token.start] in ("", "\n")
        known = WORDS if at_margin or goes_on else _ANYWHERE
        is_attribute = token.text != "@" or text.startswith("[", token.end)
        if token.text in known and is_attribute and (goes_on or not is_same_line):
            if not goes_on:
                found += [Command(word, name, start, token.start)] if start >= 0 else []
                start = token.start
            word, name, depth = token.text, "", 0
            is_modifier, is_before_name = word in _MODIFIERS, word in _ANYWHERE
        last, end = token.text, token.end
    found += [Command(word, name, start, len(text))] if start >= 0 else []
    return found, opened
