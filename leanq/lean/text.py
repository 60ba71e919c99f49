"""A Lean text as far as it can be read without Lean: tokens, header, commands.

Without Lean, it finds where a file's import header ends, and where words such as ``example`` and
``sorry`` stand outside comments and strings. It reads comments, literals and identifiers exactly as
Lean's tokenizer does, oddities included. It does not know a file's own macros, so it misses
commands that a macro hides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
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


# The commands of a Lean text, as far as they can be told without Lean: where each begins, and the
# whole name that it declares.

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


# A text without its comments and the contents of its strings, where both are certain.
#
# leanq's tokenizer knows no notation. A token such as ``⟪-`` or ``⟪x`` ends where leanq sees none
# end, and can make code of what looks like a comment. Tokens come from Lean, from libraries, whose
# compiled files have them, and from strings of the text. As long as each of them that could stand
# somewhere ends where one of leanq's tokens begins or ends, Lean reads the same tokens.
#
# A string with a brace may be interpolated or not. It must end at the same quote either way, and
# what stands in its braces counts as code.

# Tokens of Lean's own, of several versions, behind which leanq may see no token begin.
_LEANS_OWN_WORDS = (
    "]' ⊕' ×' /\\ \\/ // - -> <- <-> |>. .( .{ .. ... *... *...< *...* *...= ...< ...* ...= <... "
    "<...< <...* <...= for_in'% exact?% Π₀ ∑' ∏' '' ·. $. ∘. <| |> #version #eval #eval! #check "
    "#check_failure #check_tactic #check_tactic_failure #check_simp #check_assertions #exit #print "
    "#reduce #synth #where #widget #guard #guard_expr #guard_msgs #info_trees #import_path #time "
    "#discr_tree_key #discr_tree_simp_key #show_deprecated_modules #with_exporting #grind_lint "
    "#dump_async_env_state #help #find #lint #html #test #sample #v["
)
_LEANS_OWN = frozenset(_LEANS_OWN_WORDS.split(" "))
# Only these characters of a token can make its end another one.
_CAN_MATTER = re.compile(r"[\w'\"/.«»\s-]")
_BARE_IDENTIFIER = re.compile(r"[^\W\d][\w'!?]*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ANY_STRING = re.compile(rf'r(?P<hashes>#*)".*?"(?P=hashes)|{_STRING.pattern}', re.DOTALL)
_BRACES = r"\{(?P<inner>(?:(?!--|/-)[^\"{}«'`\\])*)\}"
_INTERPOLATED = re.compile(rf'"[^"\\{{]*(?:(?:\\.|{_BRACES})[^"\\{{]*)*"', re.DOTALL)
_INNER = re.compile(rf"\\.|{_BRACES}", re.DOTALL)
_QUOTED = re.compile("«([^»]*)»")
_BARE_PART = re.compile(r"[\w'!?]+")
_COMMON_SIGNS = frozenset("()[]{}⟨⟩,;:.=<>+-*/|&^~@$%←→↔↦∀∃λ¬∧∨≤≥≠×·•∘∣∈∉⊆∪∩▸")
_ENDS_A_TERM = re.compile(r"[)\]}⟩\"']")
_NOTATIONS = frozenset({"notation", "infix", "infixl", "infixr", "prefix", "postfix"})
_END = "leanqEnd"


@dataclass(frozen=True, slots=True)
class Word:
    """A token of a text. ``is_glued``: a sign or a number stands directly before it, so that Lean
    may end a token of its own within it."""

    text: str
    is_glued: bool = False


@dataclass(frozen=True, slots=True)
class BareText:
    """The tokens of a text, and the text with blanks for comments, "" for literals, and names
    without «»."""

    words: tuple[Word, ...]
    text: str

    def __add__(self, other: BareText) -> BareText:
        return BareText(self.words + other.words, f"{self.text}\n{other.text}")


def bare_text(code: str, declared: Collection[str] = ()) -> BareText | None:
    """Returns a text without comments and strings; None if they are in doubt.

    Args:
        declared: the tokens of libraries.
    """
    table: dict[str, list[str]] = {}
    own = _declared(code)
    for symbol in {*_LEANS_OWN, *declared, *own}:
        # A dot of the text's own need not begin a field.
        if can_mislead(symbol) or (symbol == "." and symbol in own):
            table.setdefault(symbol[0], []).append(symbol)
    return _read_bare(code, table)


def can_mislead(token: str) -> bool:
    """Returns whether leanq's tokenizer may see no end where a token ends."""
    return bool(
        len(token) > 1 and _CAN_MATTER.search(token) and not _BARE_IDENTIFIER.fullmatch(token)
    )


def _declared(code: str) -> set[str]:
    """Returns the tokens that a text may declare: what its strings say.

    Up to the first token that leanq reads otherwise than Lean, both read the same strings.
    """
    return {
        string_content(match[0]).strip()
        for token in tokens(code)
        if '"' in token.text and (match := _ANY_STRING.match(code, token.start))
    }


def _read_bare(code: str, table: dict[str, list[str]]) -> BareText | None:
    whole = f"{code}\n{_END}"
    found = [*tokens(whole)]
    if not found or found[-1].start != len(code) + 1:
        return None
    ends = {edge for token in found for edge in (token.start, token.end)}
    starts: list[tuple[int, int]] = []  # where a token may begin, and how far leanq's goes from it
    for start, end in ((token.start, token.end) for token in found):
        text = whole[start:end]
        starts.append((start, end))
        if text.startswith(("/--", "/-!")):
            ends.add(start + 3)
        elif text[0] == "." and len(text) > 1:
            inner = range(start + 1, end if text[1] == "." else start + 2)
            ends.update(inner)
            starts += ((each, end) for each in inner)
    after = set[int]()  # where longer tokens may end
    for start, end in starts:
        # Lean takes the longer one of a token and an identifier.
        is_name = bool(_BARE_IDENTIFIER.match(whole, start))
        here = [each for each in table.get(whole[start], ()) if whole.startswith(each, start)]
        after.update(start + len(each) for each in here)
        # Lean has all its own tokens at once, and takes the longest.
        longest = max((len(each) for each in here if each in _LEANS_OWN), default=0)
        for symbol in here:
            is_shadowed = symbol in _LEANS_OWN and len(symbol) < longest
            if (
                start + len(symbol) not in ends
                and not is_shadowed
                and not (is_name and start + len(symbol) < end)
            ):
                return None
    words: list[Word] = []
    pieces: list[str] = []
    done = read_to = 0
    for token in found[:-1]:
        if token.start < read_to:
            continue
        gap = whole[done : token.start]
        pieces.append(_blank(gap))
        done = token.end
        first = token.text[0]
        if token.text.startswith(("/--", "/-!")):
            pieces.append(" ")
            continue
        if first == '"':
            string = _STRING.match(whole, token.start)
            if string is None:
                return None
            done = read_to = string.end()
            is_token = _is_declared([word.text for word in words[-3:]])
            braces = BareText((), "") if is_token else _in_braces(string[0], table)
            if braces is None:
                return None
            words += braces.words
            pieces.append(f'"" ({braces.text}) ' if braces.words else '""')
        elif (first == "'" and len(token.text) > 2) or (first == "r" and '"' in token.text):
            pieces.append('""')
        else:
            before = whole[token.start - 1 : token.start].strip()
            text = token.text
            is_field = _ENDS_A_TERM.match(before) and token.start + 1 not in after
            if first == "." and text.strip(".") and not is_field:
                words.append(Word("."))
                text = text[1:]
            words.append(Word(text, bool(before) and before not in _COMMON_SIGNS))
            pieces.append(_QUOTED.sub(_unquoted, token.text))
    return BareText(tuple(words), "".join([*pieces, _blank(whole[done : -len(_END)])]))


def _is_declared(before: Sequence[str]) -> bool:
    """Returns whether a string begins a notation, which interpolates none: `notation:9 "{"`."""
    if len(before) == 3 and before[1] == ":" and before[2].isdigit():
        before = before[:1]
    return not _NOTATIONS.isdisjoint(before[-1:])


def _in_braces(string: str, table: dict[str, list[str]]) -> BareText | None:
    """Returns what stands in a string's braces; None if they could make it end elsewhere."""
    inner = BareText((), "")
    if "{" not in string:
        return inner
    if not _INTERPOLATED.fullmatch(string):
        return None
    over = [each for symbols in table.values() for each in symbols if "}" in each]
    for match in _INNER.finditer(string):
        if match["inner"] is None:
            continue
        start, end = match.span("inner")
        # A token that begins in a brace and goes on behind it.
        if any(string.find(each, start, end + len(each) - 1) >= 0 for each in over):
            return None
        if (read := _read_bare(match["inner"], table)) is None:
            return None
        inner += read
    return inner


def _blank(gap: str) -> str:
    """Returns what is left of blanks and comments between two tokens."""
    _, line, indent = gap.rpartition("\n")
    if line:
        return f"\n{' ' * (len(indent) - len(indent.lstrip()))}"
    return " " if gap else ""


def _unquoted(match: re.Match[str]) -> str:
    return match[1] if _BARE_PART.fullmatch(match[1]) else "_"
