"""A model's answer as blocks: the pieces of it that may be code.

All of it takes linear time, since models write what they like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from textwrap import dedent
from typing import NamedTuple

from leanq.lean.text import DECLARING, WORDS, commands

# Where code may begin or end: fences, and marks that are no Lean outside of a fence.
_MARK = re.compile(
    r"""(?xm)
      (?P<line>^[ \t]*)?(?P<ticks>`{3,})
    | ^[ \t]*(?P<tildes>~{3,})(?=[ \t]*\w*[ \t]*$)
    | \\(?P<edge>begin|end)\{(?P<listing>verbatim|lstlisting|minted|code|lean4?)\*?\}
    | <(?:/s|[|｜][^\s|｜<>]+[|｜])>
    | ^[ \t]*(?:</?[a-z]\w*(?:[ ][^<>\n]*)?>)+ | </[a-z]\w*>(?=[ \t]*$|</)
    | \\(?:boxed|text)\{ | \\[][] | \$\$
    """
)
# Marks that end a fence which nothing closes.
_ENDS = ("</", "<|", "<｜")
# The language behind a fence, the rest of that line, and whether the next fence is on it.
_LABEL = re.compile(r"[ \t]*\{?\.?(\w*)([^\n`]*)(`?)")
_OPTIONS = re.compile(r"(?:\[[^]\n]*\])?(?:\{[^}\n]*\})?")
_THOUGHT = re.compile(r"<(/?)(?:think|thinking|reasoning)>", re.IGNORECASE)
# Behind the last one stands the answer of a model that writes in channels (Harmony).
_MESSAGE = "<|message|>"
_QUOTED = re.compile(r"^(?:>[ \t]?)+", re.MULTILINE)
_QUOTED_FENCE = re.compile(_QUOTED.pattern + "(?:`{3}|~{3})", re.MULTILINE)
_TABS = re.compile(r"^[ \t]*\t[ \t]*", re.MULTILINE)
# A label that the prompt's fence gets.
_PROMPTED = re.compile(r"\s*lean4?[ \t]*\n", re.IGNORECASE)
_INLINE = re.compile(r"`([^`\n]+)`")
# Headings, items of lists, bold words and mathematics, and how sentences begin.
_LISTED = re.compile(r"(?:#+|[-*+]|[0-9]+[.)])[ \t]|\*\*|[$\\]")
_SENTENCE = re.compile(r"[A-Z][\w'’]*(?:[ ,:!?]|\.(?:\s|$))")
_PROOF = re.compile(r"\s*(?:by\b|:=|⟨|·|fun\b|λ|[^\W\d][\w']*\.[^\W\d])")
# Tactics that are no terms.
_TACTIC_WORDS = (
    "exact intro intros rintro apply refine rw rewrite simp simp_all simpa dsimp norm_num omega "
    "linarith nlinarith ring ring_nf field_simp decide constructor left right exfalso rcases "
    "obtain cases induction use exists ext by_contra by_cases aesop positivity unfold subst "
    "push_neg specialize contrapose norm_cast push_cast interval_cases assumption contradiction "
    "split split_ifs first repeat try all_goals any_goals nth_rewrite conv set generalize revert "
    "clear case next gcongr grind bv_decide tauto native_decide replace change injection funext "
    "rename_i symm trans congr convert wlog choose lift sorry skip done fin_cases polyrith · <;>"
)
_TACTICS = frozenset(_TACTIC_WORDS.split(" "))
_CODE = _TACTICS | WORDS | {"by"}
# What else begins a line of Lean behind an empty one.
_GOES_ON = (
    *("where", "termination_by", "decreasing_by", "deriving", "have", "show", "calc", "fun", ":="),
    *("--", "/-", "|", "@", "#", ")", "]", "}", "⟨", "⟩"),
)


class Block(NamedTuple):
    """A piece of an answer that may be code. The language is "" for a fence without one, and None
    outside of fences."""

    language: str | None
    text: str


def blocks_of(answer: str) -> list[Block]:
    """Returns the blocks of an answer without its thoughts, in their order."""
    text = answer.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    # Lean refuses tabs and no-break spaces.
    text = _TABS.sub(lambda blanks: blanks[0].expandtabs(2), text.replace("\xa0", " "))
    if _QUOTED_FENCE.search(text):
        text = _QUOTED.sub("", text)
    text = _without_thoughts(text.rpartition(_MESSAGE)[2])
    if label := _PROMPTED.match(text):
        text = text[label.end() :]
    return [*_blocks(text)] or [Block("", inline) for inline in _INLINE.findall(text)]


def _without_thoughts(text: str) -> str:
    kept: list[str] = []
    start, opened = 0, -1
    for tag in _THOUGHT.finditer(text):
        if not tag[1]:
            opened = tag.start() if opened < 0 else opened
            continue
        if opened < 0:
            kept.clear()  # The prompt has opened it.
        else:
            kept.append(text[start:opened])
        start, opened = tag.end(), -1
    return "\n".join([*kept, text[start:]])


def _blocks(text: str) -> Iterator[Block]:
    if text.lstrip()[:1] in ("{", "[", '"') and (strings := _strings(text)):
        for each in strings:
            yield from _blocks(each)
        return
    start, fence, language = 0, "", ""
    marks = [*_MARK.finditer(text)]
    ticks = [mark for mark in marks if mark["ticks"]]
    if len(ticks) % 2 and not _label(text, ticks[0])[1] and is_code(text[: ticks[0].start()]):
        fence = ticks[0]["ticks"]  # The prompt has opened it.
    for mark in marks:
        sign = mark["ticks"] or mark["tildes"] or mark["listing"] or ""
        if mark.start() < start:
            continue
        if not fence:
            yield from _runs(text[start : mark.start()])
        elif language == "json" and mark["line"] is None:
            continue
        elif sign.startswith(fence) or mark[0].lstrip().startswith(_ENDS):
            yield from _fenced(language, text[start : mark.start()])
            # The next one opens here if its language stands close to it.
            is_next = mark["line"] is not None and text[mark.end() : mark.end() + 1].isalnum()
            if not is_next:
                sign = ""
            elif len(sign) >= 2 * len(fence):
                sign = sign[len(fence) :]  # No line stands between the two.
        else:
            continue
        start, fence = mark.end(), "" if mark["edge"] == "end" else sign
        if fence:
            language, start = _opened(text, mark)
    # Words may stand behind the code in a fence that is never closed.
    for block in _runs(text[start:]):
        yield from _fenced(language, block.text) if fence else (block,)


def _label(text: str, mark: re.Match[str]) -> re.Match[str]:
    label = _LABEL.match(text, mark.end())
    assert label
    return label


def _opened(text: str, mark: re.Match[str]) -> tuple[str, int]:
    """Returns the language of a fence, and where its code begins."""
    if mark["listing"]:
        options = _OPTIONS.match(text, mark.end())
        return "", options.end() if options else mark.end()
    label = _label(text, mark)
    language, rest, next_fence = label.groups()
    first = rest.split(None, 1)[:1]
    if (language in _CODE and first) or (next_fence and not first):
        return "", mark.end()
    is_code_behind = next_fence or (first and first[0] in _CODE)
    return language.lower(), label.end(1) if is_code_behind else label.end()


def _fenced(language: str, text: str) -> Iterator[Block]:
    if language == "json" and (strings := _strings(text)):
        for each in strings:
            yield from _blocks(each)
    elif text.strip():
        yield Block(language, dedent(text))


def _strings(text: str) -> list[str]:
    """Returns the texts in a value of JSON; none if it is no JSON."""
    try:
        values = [json.loads(text, strict=False)]
    except (ValueError, RecursionError):
        return []
    found: list[str] = []
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif isinstance(value, str):
            found.append(value)
    return found[::-1]


def _runs(text: str) -> Iterator[Block]:
    """Yields the lines outside of fences that stand between lines of prose."""
    run: list[str] = []
    depth = 0  # of comments, which hold prose too
    is_closed = False  # whether words at the margin behind an empty line are no part of the run
    for line in text.split("\n"):
        word = line.split(None, 1)[0] if line.strip() else ""
        is_margin = line[:1] not in ("", " ")
        is_behind = is_closed and is_margin and not (run and run[-1].strip())
        is_words = is_behind and word not in _CODE and not line.startswith(_GOES_ON)
        if not depth and (is_words or _is_prose(line)):
            yield from _run("\n".join(run))
            run, is_closed = [], False
            continue
        if word and not depth:
            is_closed = is_closed or word in DECLARING or not (is_margin or any(run))
        depth = max(0, depth + line.count("/-") - line.count("-/"))
        run.append(line)
    yield from _run("\n".join(run))


def _run(text: str) -> Iterator[Block]:
    if text.lstrip()[:1] in ("{", "[") and (strings := _strings(text)):
        for each in strings:
            yield from _blocks(each)
        return
    # The end of a box, and of words in single signs.
    surplus = text.count("}") - text.count("{")
    if surplus > 0:
        text = text.rstrip(" \n$")
        text = text[: len(text) - min(surplus, len(text) - len(text.rstrip("}")))]
    if text.strip()[:1] == "`" == text.strip()[-1:]:
        text = text.strip().strip("`")
    found = commands(text)
    if any(each.word in DECLARING for each in found):
        text = text[found[0].start :]
    if text.strip():
        yield Block(None, text)


def _is_prose(line: str) -> bool:
    """Returns whether a line at the margin is no Lean: no line of Lean begins with a capital letter
    and goes on as a sentence does."""
    if not _SENTENCE.match(line):
        return bool(_LISTED.match(line))
    return line.rstrip()[-1] in ".:!?*" or line.count(" ") >= 2


def is_code(text: str) -> bool:
    """Returns whether a text looks like commands, or like a proof alone."""
    return bool(commands(text) or _PROOF.match(text) or is_of_tactics(text))


def is_of_tactics(proof: str) -> bool:
    """Returns whether a line of a proof without ``by`` begins with a tactic: it is no term."""
    lines = [line for line in proof.split("\n") if line.strip()]
    least = min((len(line) - len(line.lstrip()) for line in lines[1:]), default=0)
    ways = (line.split(None, 1)[0] for line in lines if len(line) - len(line.lstrip()) <= least)
    return any(re.split(r"[\[(⟨;!?]", word)[0] in _TACTICS for word in ways)
