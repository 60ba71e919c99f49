"""As much of Lean's surface syntax as the audit needs.

Without Lean, it finds where a file's import header ends, and where words such as ``example`` and
``sorry`` stand outside comments and strings. It reads comments, literals and identifiers exactly as
Lean's tokenizer does, oddities included. It does not know a file's own macros, so it misses
commands that a macro hides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

# The characters of `Lean.isIdFirst` and `Lean.isIdRest`. λ, Π and Σ are tokens and no letters.
_FIRST = (
    "A-Za-z_"
    "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017f"  # Latin
    "\u0391-\u039f\u03a1\u03a2\u03a4-\u03a9"  # Greek capitals
    "\u03b1-\u03ba\u03bc-\u03c9\u03ca-\u03fb\u1f00-\u1ffe"  # Greek, Coptic, polytonic
    "\u2100-\u214f\U0001d49c-\U0001d59f"  # letter-like, script, double-struck, Fraktur
)
_REST = _FIRST + "0-9'!?\u2080-\u2089\u2090-\u209c\u1d62-\u1d6a\u2c7c"
_PART = f"(?:«[^»]*(?:»|\\Z)|[{_FIRST}][{_REST}]*)"
_IDENTIFIER = rf"{_PART}(?:\.{_PART})*"

_PLAIN_PART = re.compile(f"[{_FIRST}][{_REST}]*")
_IDENTIFIER_PART = re.compile(_PART)

# Lean has no other blanks: a token may have a no-break space inside.
_BLANKS = " \t\r\n"
_SPACE = re.compile(r"(?:[ \t\r\n]+|--[^\n]*)+")
_COMMENT_EDGE = re.compile(r"/-|-/")

# An unfinished token reaches to the end of the file: an error for Lean, and time stays linear.
_TOKEN = re.compile(
    rf"""(?xs)
      (?P<doc>       /-[-!] )
    | (?P<name>      ``?{_IDENTIFIER} )
    | (?P<raw>       r(?P<hashes>\#*)".*?(?:"(?P=hashes)|\Z) )
    | (?P<string>    " )
    | (?P<image>     '' )
    | (?P<char>      '(?:\\(?:x..|u....|.)|[^\\])' )
    | (?P<number>    0[xX][0-9a-fA-F_]+ | 0[bB][01_]+ | 0[oO][0-7_]+
                   | [0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][+-]?[0-9_]+)? )
    | (?P<dots>      \.\.+ )
    | (?P<field>     \.(?:[0-9]+|{_IDENTIFIER}) )
    | (?P<ident>     {_IDENTIFIER} )
    | (?P<other>     . )
    """
)
_STRING_REST = re.compile(r'(?s)[^"\\]*(?:\\.[^"\\]*)*"')
_INTERPOLATED_REST = re.compile(r'(?s)[^"\\{]*(?:\\.[^"\\{]*)*["{]')
_INTERPOLATING = frozenset({"s!", "m!", "f!", "throwError", "dbg_trace"})

# Words that are copied into a source of ours stay on their line.
_MODULE_NAME = re.compile(_IDENTIFIER.replace("[^»]*(?:»|\\Z)", "[^»\n]*»"))

_IMPORT_MODIFIERS = frozenset({"public", "meta"})
_HEADER_WORDS = _IMPORT_MODIFIERS | {"module", "prelude", "import"}

# Words of programs: commands that run them, attributes that hook them in, ways around the type
# checker, and the libraries that every program needs.
_ACTING_WORD = re.compile(
    r"\#eval!? | run_(?:cmd|elab|meta|tac) | by_elab | elab(?:_rules)? | (?:builtin_)?initialize"
    r"| (?:builtin_)?d?simproc(?:_decl)? | println! | dbg_trace | implemented_by | extern"
    r"| unsafe(?:IO|BaseIO|EIO)? | IO | BaseIO | EIO | Task | Lean",
    re.VERBOSE,
)

_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|\r?\n\s*|(.))", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Header:
    """The import header of a file: the source up to the end of its last token, in characters. The
    names of the imported modules are written as `quote` writes them, without modifiers."""

    text: str
    end_offset: int
    imports: tuple[str, ...]
    is_module: bool
    is_prelude: bool


_NO_HEADER = Header("", 0, (), is_module=False, is_prelude=False)
_MAY_HAVE_HEADER = re.compile("module|prelude|import")


def quote(part: str) -> str:
    """Returns one component of a name as Lean writes it, in «» if it needs them. Lean has no syntax
    for a » inside; it is doubled, so that no two components look the same."""
    return part if _PLAIN_PART.fullmatch(part) else "«" + part.replace("»", "»»") + "»"


def split_header(code: str) -> Header:
    """Reads the header as Lean's parser does: ``module``, ``prelude``, then the imports. Never
    fails: the header ends before the first token that Lean finds no part of it."""
    # Most texts have none, and searching them is ten times as fast as reading their beginning.
    if not _MAY_HAVE_HEADER.search(code):
        return _NO_HEADER
    end = 0
    imports: list[str] = []

    def word(offset: int) -> tuple[str, int]:
        start = _skip_space(code, offset)
        match = _PLAIN_PART.match(code, start)
        return (match[0], match.end()) if match else ("", start)

    token, after = word(end)
    if is_module := token == "module":
        end = after
        token, after = word(end)
    if is_prelude := token == "prelude":
        end = after
        token, after = word(end)
    while True:
        if token == "public":
            token, after = word(after)
        if token == "meta":
            token, after = word(after)
        if token != "import":
            break
        token, after_all = word(after)
        match = _MODULE_NAME.match(code, _skip_space(code, after_all if token == "all" else after))
        if not match:
            break
        end = match.end()
        imports.append(_canonical(match[0]))
        token, after = word(end)
    return Header(code[:end], end, tuple(imports), is_module, is_prelude)


def header_statements(header: Header) -> tuple[tuple[str, int], ...]:
    """Returns the statements of a header, single-spaced, and where each begins. Headers with the
    same statements mean the same, whatever blanks and comments they have."""
    statements: list[tuple[list[str], int]] = []
    previous = ""
    for token in tokens(header.text):
        if token.text in _HEADER_WORDS and previous not in _IMPORT_MODIFIERS:
            statements.append(([], token.start))
        statements[-1][0].append(token.text)
        previous = token.text
    return tuple((" ".join(words), start) for words, start in statements)


def can_act(text: str) -> bool:
    """Returns whether a text may do more than its elaboration: run programs of its own, which leave
    threads, files and changed references behind. It judges by words, so it errs on the side of
    True. It does not know words that an import hides."""
    previous = ""
    for token in tokens(text):
        # `eval` alone is what polynomials do.
        word = previous + token.text if previous == "#" else token.text.lstrip("`")
        if any(_ACTING_WORD.fullmatch(part.strip("«»")) for part in word.split(".")):
            return True
        previous = token.text
    return False


def string_content(literal: str) -> str:
    """Returns what a literal of a string says, raw or not."""
    if literal.startswith("r"):
        return literal.lstrip("r#").rstrip("#")[1:-1]
    return _ESCAPE.sub(_unescaped, literal[1:-1])


def _unescaped(match: re.Match[str]) -> str:
    digits = match[1] or match[2]
    return chr(int(digits, 16)) if digits else _CONTROLS.get(match[3], match[3] or "")


def _canonical(identifier: str) -> str:
    parts = _IDENTIFIER_PART.findall(identifier)
    return ".".join(quote(part[1:-1] if part[0] == "«" else part) for part in parts)


def _skip_space(code: str, offset: int) -> int:
    """Returns the offset past blanks and comments; doc comments are tokens and stay."""
    while True:
        if match := _SPACE.match(code, offset):
            offset = match.end()
        if not code.startswith("/-", offset) or code[offset + 2 : offset + 3] in {"-", "!"}:
            return offset
        # Lean skips the character behind the opening, too: `/-/- -/` is one comment.
        offset = _skip_comment_body(code, offset + 3)


def _skip_comment_body(code: str, offset: int) -> int:
    depth = 1
    for edge in _COMMENT_EDGE.finditer(code, offset):
        depth += 1 if edge[0] == "/-" else -1
        if depth == 0:
            return edge.end()
    return len(code)


def place_of(text: str, offset: int) -> tuple[int, int]:
    """Returns the line, from 1, and the column, from 0, of an offset."""
    return text.count("\n", 0, offset) + 1, offset - (text.rfind("\n", 0, offset) + 1)


class Token(NamedTuple):
    """A token from ``start`` to ``end``, in characters; for a string or comment, its opening."""

    text: str
    start: int
    end: int


def tokens(code: str) -> Iterator[Token]:
    """Yields the tokens of ``code``. A string or doc comment is one, and reaches to the end of the
    text if it is not closed. An interpolated string gives a token for each of its pieces, and
    tokens between them."""
    offset = 0
    previous = ""
    open_braces: list[int] = []  # for each interpolation `{…}` around us, its own open braces
    while match := _TOKEN.match(code, _skip_space(code, offset)):
        token, offset = match[0], match.end()
        resume_string = False
        match match.lastgroup:
            case "doc":
                # Lean skips blanks behind the opening as behind any token, comments included.
                offset = _skip_comment_body(code, _skip_space(code, offset))
            case "string" if previous in _INTERPOLATING:
                resume_string = True
            case "string":
                offset = _end(_STRING_REST, code, offset)
            case "other" if open_braces and token == "{":
                open_braces[-1] += 1
            case "other" if open_braces and token == "}":
                if open_braces[-1]:
                    open_braces[-1] -= 1
                else:
                    open_braces.pop()
                    resume_string = True
        if resume_string:
            offset = _end(_INTERPOLATED_REST, code, offset)
            if code[offset - 1] == "{":
                open_braces.append(0)
            # The braces of an interpolation belong to the string.
            token = '"'
        yield Token(token, match.start(), offset)
        previous = token


def _end(pattern: re.Pattern[str], code: str, offset: int) -> int:
    match = pattern.match(code, offset)
    return match.end() if match else len(code)
