"""The words by which an environment's own libraries let a text run programs.

A library can bring a command, a term or a tactic that evaluates what stands behind it, or that
writes one of the words of :mod:`leanq.lean.audit.programs`. Whether it does is not to be told from
outside, so this errs: where the compiled file of a module holds the name of one of Lean's own
functions that evaluate, or one of those words, every word of the syntax that the module declares
counts. What is part of Lean, of Mathlib or of what Mathlib builds on is known, and left out: its
words stand in that module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from leanq.errors import AuditError
from leanq.lean.audit.image import APP, CONST, EXPRESSION_PARTS, LIT, STRING_LIT, Damaged, Image
from leanq.lean.audit.olean import open_image, read_parts

_KNOWN_LIBRARIES = (
    "Init Std Lean Lake Core Batteries Mathlib Aesop Qq ProofWidgets Plausible ImportGraph "
    "LeanSearchClient Cli"
)
_KNOWN = frozenset(_KNOWN_LIBRARIES.split(" "))
# As strings in a compiled file: the last parts of names, and atoms of quoted syntax.
_EVALUATES = re.compile(
    rb"\0(?:eval(?:Expr|Const|Decl|ConstCheck|ExprCore|DeclExpr)'?|elabEvalCoreUnsafe|compileDecls?"
    rb"|addAndCompile|runFrontend|unsafe(?:IO|BaseIO|EIO|Cast)"
    rb"|#eval!?|run_(?:cmd|elab|meta|tac)|by_elab|elab(?:_rules)?|macro(?:_rules)?|syntax"
    rb"|(?:builtin_)?initialize|d?simproc|implemented_by|extern|csimp|native_decide|unsafe) ?\0"
)
_SYMBOLS = frozenset({"symbol", "nonReservedSymbol", "unicodeSymbol"})
_SYNTAX = frozenset({"ParserDescr", "TrailingParserDescr", "Parser", "TrailingParser"})
# What stands in every other text, and is never the first word of a syntax.
_COMMON = frozenset({"at", "with", "using", "only", "from", "then", "else", "fun"})
_WORD = re.compile(r"#?[^\W\d].+")


def own_words(folders: tuple[Path, ...]) -> frozenset[str]:
    """The words of the libraries in these folders."""
    return frozenset(word for folder in folders for path in _modules(folder) for word in _in(path))


def _modules(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.name.removesuffix(".olean") in _KNOWN:
            continue
        if entry.suffix == ".olean":
            yield entry
        elif entry.is_dir():
            yield from sorted(entry.rglob("*.olean"))


def _in(path: Path) -> Iterator[str]:
    """The words of a module; none where it evaluates nothing."""
    try:
        parts = read_parts(path.resolve())
        if any(_EVALUATES.search(part) for part in parts):
            yield from _declared(open_image(parts))
    except (AuditError, Damaged, IndexError):
        return  # Lean cannot import it either


def _declared(image: Image) -> Iterator[str]:
    """The words of the syntax that a module declares."""
    words = image.words
    for raw in image.constants().values():
        type_ = image.index(raw.type_)
        is_syntax = words[type_] >> 48 == CONST and image.name(words[type_ + 1])[-1] in _SYNTAX
        todo, seen = [raw.body] if is_syntax and raw.body is not None else [], set[int]()
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            image.spend(1)
            index = image.index(at)
            kind = words[index] >> 48
            if kind not in EXPRESSION_PARTS:
                raise Damaged("it holds a malformed expression")
            todo += (words[index + part] for part in EXPRESSION_PARTS[kind])
            if kind == APP and (symbol := _symbol(image, words[index + 1], words[index + 2])):
                yield symbol


def _symbol(image: Image, function: int, argument: int) -> str | None:
    """The word of one symbol of a syntax, if this application is one and it is a word."""
    words = image.words
    head, literal = image.index(function), image.index(argument)
    if words[head] >> 48 != CONST or words[literal] >> 48 != LIT:
        return None
    name, value = image.name(words[head + 1]), image.index(words[literal + 1])
    if not name or name[-1] not in _SYMBOLS or words[value] >> 48 != STRING_LIT:
        return None
    word = image.string(words[value + 1]).strip()
    return word if _WORD.fullmatch(word) and word not in _COMMON else None
