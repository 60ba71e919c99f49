"""Small changes to a file, each of which is a bug that somebody could have written.

Python is changed by its syntax tree and Lua by the line. Only the place itself is written anew.
"""

from __future__ import annotations

import ast
import copy
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from support.paths import ROOT


@dataclass(frozen=True)
class Bug:
    """One change: what stands from ``start`` to ``end`` of the file's text becomes ``new``."""

    path: Path
    text: str
    kind: str
    start: int
    end: int
    new: str

    @property
    def line(self) -> int:
        """The number of its first line, from 1."""
        return self.text.count("\n", 0, self.start) + 1

    def changed(self) -> str:
        """Returns the file's text with the bug."""
        return self.text[: self.start] + self.new + self.text[self.end :]

    def key(self) -> tuple[str, str, str]:
        """Returns what names it wherever its line has moved: file, old and new line."""
        first = self.text.rfind("\n", 0, self.start) + 1
        last = (self.text + "\n").find("\n", self.end)
        old = self.text[first:last]
        new = self.text[first : self.start] + self.new + self.text[self.end : last]
        return str(self.path.relative_to(ROOT)), " ".join(old.split()), " ".join(new.split())


def by_line(path: Path) -> list[list[Bug]]:
    """Returns the possible bugs of a file, those of each line together."""
    text = path.read_text()
    found = _lua_bugs(path, text) if path.suffix == ".lua" else _python_bugs(path, text)
    lines: defaultdict[int, list[Bug]] = defaultdict(list)
    for bug in found:
        lines[bug.line].append(bug)
    return [lines[number] for number in sorted(lines)]


# Python

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_FUNCTIONS = {"all": "any", "any": "all", "min": "max", "max": "min"}
_DROPPED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)
# Their words are for people.
_WORDS = frozenset({"info", "debug", "warning", "print", "warn", "echo"})


def _python_bugs(path: Path, text: str) -> Iterator[Bug]:
    starts = [0]
    for line in text.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    encoded = text.encode()

    def offset(line: int, column: int) -> int:
        return len(encoded[: starts[line - 1] + column].decode())

    for node, kind, new in _changes(ast.parse(text)):
        start = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno or 0, node.end_col_offset or 0)
        # Parentheses keep it one expression wherever it stands.
        written = f"({ast.unparse(new)})" if new else "pass"
        yield Bug(path, text, kind, start, end, written)


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, ast.expr | None]]:
    """Yields what to change, why, and what it becomes; None for a statement that is dropped."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if node in skipped:
            skipped.update(ast.iter_child_nodes(node))
            continue
        for name in (
            "annotation",
            "returns",
            "decorator_list",
            "bases",
            "type_params",
            "format_spec",
        ):
            part = getattr(node, name, None)
            skipped.update(part if isinstance(part, list) else [part] if part else [])
        if isinstance(node, ast.ClassDef | ast.keyword) and _is_promise(node):
            skipped.update(node.keywords if isinstance(node, ast.ClassDef) else [node.value])
        if isinstance(node, ast.JoinedStr | ast.Raise):
            # What an error says, and what a text is made of.
            skipped.update(ast.iter_child_nodes(node))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _WORDS:
            skipped.update(ast.iter_child_nodes(node))
            continue
        if isinstance(node, ast.expr):
            yield from ((node, kind, new) for kind, new in _expressions(node))
        elif isinstance(node, _DROPPED) and not _is_text(node):
            yield node, "a statement is dropped", None
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not _is_for_types(node.test):
            yield node.test, "a condition is negated", ast.UnaryOp(ast.Not(), node.test)


def _is_text(node: ast.AST) -> bool:
    value = getattr(node, "value", None)
    if isinstance(value, ast.Yield | ast.YieldFrom):
        return True  # without it the function is none that yields
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call) and getattr(value.func, "attr", "") in _WORDS
    )


def _is_promise(node: ast.ClassDef | ast.keyword) -> bool:
    """Whether it only says that no other code does something: how a class is made, zip's strict."""
    return isinstance(node, ast.ClassDef) or node.arg == "strict"


def _is_for_types(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "TYPE_CHECKING"


def _expressions(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in _TURNED:
            new.ops = [_TURNED[type(op)]()]
            yield "a comparison is turned", new
        case ast.BoolOp():
            new.op = ast.And() if isinstance(new.op, ast.Or) else ast.Or()
            yield "and for or", new
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            new.op = _OPERATORS[type(op)]()
            yield "plus for minus", new
        case ast.Constant(value=bool()):
            new.value = not new.value
            yield "a flag is turned", new
        case ast.Constant(value=int() | float()):
            new.value += 1
            yield "a number is off by one", new
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            new.func = ast.Name(_FUNCTIONS[name])
            yield f"{_FUNCTIONS[name]} for {name}", new
        case ast.Call(args=[first, second, *rest]) if not any(
            isinstance(each, ast.Starred) for each in (first, second)
        ):
            if ast.dump(first) != ast.dump(second):
                new.args = [second, first, *rest]
                yield "two arguments are swapped", new


# Lua

_LUA_CHANGES: Sequence[tuple[str, str, str]] = (
    ("a comparison is turned", r"(?<=\s)<(?=\s)", "<="),
    ("a comparison is turned", r"(?<=\s)<=(?=\s)", "<"),
    ("a comparison is turned", r"(?<=\s)>(?=\s)", ">="),
    ("a comparison is turned", r"(?<=\s)>=(?=\s)", ">"),
    ("a comparison is turned", r"==", "~="),
    ("a comparison is turned", r"~=", "=="),
    ("and for or", r"\band\b", "or"),
    ("and for or", r"\bor\b", "and"),
    ("a condition is negated", r"(?<=\bif )(.+?)(?= then\b)", r"not (\1)"),
    ("a condition is negated", r"\bnot (?=[\w.]+)", ""),
    ("plus for minus", r"(?<=\s)\+(?=\s)", "-"),
    ("plus for minus", r"(?<=\s)-(?=\s)", "+"),
    ("a number is off by one", r"(?<![\w.'%])(\d+)(?![\w.'])", r"(\1 + 1)"),
    ("another end of the list", r"'L(PUSH|POP)'", r"'R\1'"),
    ("another end of the list", r"'R(PUSH|POP)'", r"'L\1'"),
    ("a flag is left out", r", '(?:GT|LT|NX|XX|CH|KEEPTTL|WITHSCORES)'", ""),
    ("min for max", r"\bmath\.min\b", "math.max"),
    ("min for max", r"\bmath\.max\b", "math.min"),
    ("two arguments are swapped", r"(?<=[\w.]\()([\w.]+), ([\w.]+)(?=[,)])", r"\2, \1"),
    ("a flag is turned", r"\btrue\b", "false"),
    ("a flag is turned", r"\bfalse\b", "true"),
    ("a statement is dropped", r"^\s*[\w.]+\(.*\)$", ""),
    ("a statement is dropped", r"^\s*[\w.\[\]]+ = .*[\w)\]}]$", ""),
)


def _lua_bugs(path: Path, text: str) -> Iterator[Bug]:
    at = 0
    for line in text.splitlines(keepends=True):
        code = line.rstrip("\n").partition("--")[0]
        if not line.lstrip().startswith(("--", "#!")):
            for kind, pattern, new in _LUA_CHANGES:
                for found in re.finditer(pattern, code):
                    if kind == "a statement is dropped" and not _is_balanced(code):
                        continue
                    changed = found.expand(new)
                    yield Bug(path, text, kind, at + found.start(), at + found.end(), changed)
        at += len(line)


def _is_balanced(code: str) -> bool:
    return all(code.count(one) == code.count(other) for one, other in ("()", "{}", "[]"))


def scripts_with(path: Path) -> set[str]:
    """Returns the scripts that a file of Lua is in: itself, or those that need the part."""
    if path.parent.name != "parts":
        return {path.stem}
    folder = path.parent.parent
    scripts = {each for each in folder.glob("*.lua") if path.stem in _parts_of(each, folder)}
    return {each.stem for each in scripts}


@cache
def _parts_of(path: Path, folder: Path) -> frozenset[str]:
    head = re.findall(r"^-- parts: (.*)$", path.read_text(), re.MULTILINE)
    own = {name for line in head for name in line.split()}
    return frozenset(
        own.union(*(_parts_of(folder / "parts" / f"{each}.lua", folder) for each in own))
    )
