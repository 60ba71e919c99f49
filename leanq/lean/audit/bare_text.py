"""A text without its comments and the contents of its strings, where both are certain.

leanq's tokenizer knows no notation. A token such as ``⟪-`` or ``⟪x`` ends where leanq sees none
end, and can make code of what looks like a comment. Tokens come from Lean, from libraries, whose
compiled files have them, and from strings of the text. As long as each of them that could stand
somewhere ends where one of leanq's tokens begins or ends, Lean reads the same tokens.

A string with a brace may be interpolated or not. It must end at the same quote either way, and
what stands in its braces counts as code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from leanq.lean.syntax import string_content, tokens

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
_IDENTIFIER = re.compile(r"[^\W\d][\w'!?]*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ANY_STRING = re.compile(rf'r(?P<hashes>#*)".*?"(?P=hashes)|{_STRING.pattern}', re.DOTALL)
_BRACES = r"\{(?P<inner>(?:(?!--|/-)[^\"{}«'`\\])*)\}"
_INTERPOLATED = re.compile(rf'"[^"\\{{]*(?:(?:\\.|{_BRACES})[^"\\{{]*)*"', re.DOTALL)
_INNER = re.compile(rf"\\.|{_BRACES}", re.DOTALL)
_QUOTED = re.compile("«([^»]*)»")
_PLAIN_PART = re.compile(r"[\w'!?]+")
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
    return _read(code, table)


def can_mislead(token: str) -> bool:
    """Returns whether leanq's tokenizer may see no end where a token ends."""
    return bool(len(token) > 1 and _CAN_MATTER.search(token) and not _IDENTIFIER.fullmatch(token))


def _declared(code: str) -> set[str]:
    """Returns the tokens that a text may declare: what its strings say.

    Up to the first token that leanq reads otherwise than Lean, both read the same strings.
    """
    return {
        string_content(match[0]).strip()
        for token in tokens(code)
        if '"' in token.text and (match := _ANY_STRING.match(code, token.start))
    }


def _read(code: str, table: dict[str, list[str]]) -> BareText | None:
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
        is_name = bool(_IDENTIFIER.match(whole, start))
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
        if (read := _read(match["inner"], table)) is None:
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
    return match[1] if _PLAIN_PART.fullmatch(match[1]) else "_"
