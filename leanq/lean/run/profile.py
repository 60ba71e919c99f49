"""Where Lean spends its time in a text, by declaration, as Lean's own profiler tells it.

The profiler prints a line for each piece of work. The lines stand in messages, which have the place
of the command or the declaration that the work was for. No time is counted twice. A text can print
such lines as well, so they decide nothing.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, islice, pairwise

from msgspec.structs import replace

from leanq.lean.run.process import PROFILER, Lean, Run, limits_of
from leanq.lean.text import Token, tokens
from leanq.queue.requests import LEAN_VERDICTS, DeclarationTime, Message, Profile, Reply, Request

_OPTIONS = (PROFILER, "-Dprofiler.threshold=0")
_TOOK = re.compile(r"(?m)^(.{1,300}?) took (\d[\d.e+-]{0,20}?)(m?s)$\n?")
# Each command has a message of these, at its beginning.
_OF_COMMAND = frozenset({"elaboration", "linting"})
_DECLARES = {"theorem", "lemma", "def", "abbrev", "instance", "example", "axiom", "opaque"}
_DECLARES |= {"structure", "class", "inductive"}
# What may stand before a command's own declaration. Any other reading of a text would cost time.
_BEFORE = re.compile(
    r"(?s)(?:\s|(?:mutual|class)\s|/--.*?-/|@\[[^\]]*\]"
    r"|(?:private|protected|noncomputable|unsafe|partial|nonrec|local|scoped|public|meta)\s)*"
)
_NAME = re.compile(r"[^\W\d]|«")
_MOST_DECLARATIONS, _MOST_PARTS, _MOST_CHARS = 1000, 3, 100


async def profile(lean: Lean, request: Request) -> Reply:
    """Runs Lean on the text of a check with its profiler, within the request's budgets.

    The reply says where the time went. Nothing is judged, and the profiler takes time itself, so
    Lean's word on the text is no verdict to keep.
    """
    async with lean.slot() as slot:
        run = await lean.run(slot, request.code, limits_of(request), options=_OPTIONS)
    return await asyncio.to_thread(profiled, run, request.code)


def profiled(run: Run, code: str) -> Reply:
    """Returns what a run of Lean with its profiler said of a text."""
    outcome = run.outcome
    lines = [0, *accumulate(len(line) + 1 for line in code.split("\n"))]

    def place(message: Message) -> int:
        return lines[min(message.line, len(lines)) - 1] + message.column

    # leanq's own message about Lean's end quotes the profiler, too.
    lean_said = [m for m in outcome.messages if m.severity == "information"]
    works = [(place(message), [*_works(message.text)]) for message in lean_said]
    starts = sorted({at for at, found in works if any(w in _OF_COMMAND for w, _ in found)})
    declared, unfinished = [*_declared(code)], ""
    if outcome.verdict not in LEAN_VERDICTS:
        # The last command that Lean told of may declare something behind its modifiers.
        until = _own_until(code, starts[-1]) if starts else -1
        behind = ((at, name) for at, name in declared if at > until)
        for start, name in islice(behind, 1):
            starts.append(start)
            unfinished = name or _line_at(code, start)
    starts = starts or [0]
    untils = [_own_until(code, *each) for each in pairwise([*starts, len(code)])]
    names: defaultdict[int, list[str]] = defaultdict(list)
    for offset, name in declared:
        at = bisect_right(starts, offset) - 1
        # Lean may have read no declaration behind a command, or told nothing of it.
        is_own = names[at] or starts[at] <= offset <= untils[at]
        names[at] += [name] if name and is_own else []
    spent: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for offset, found in works:
        # Lean may say something of the text as a whole.
        parts = spent[max(0, bisect_right(starts, offset) - 1)]
        for what, ms in found:
            parts[what] += ms
    rows = []
    for at, parts in spent.items():
        most = sorted(parts.items(), key=lambda part: -part[1])[:_MOST_PARTS]
        label = ", ".join(names[at])[:_MOST_CHARS] or _line_at(code, starts[at])
        total_ms, line = round(sum(parts.values()), 3), bisect_right(lines, starts[at])
        rows.append(
            DeclarationTime(label, line, total_ms, tuple((w, round(n, 3)) for w, n in most))
        )
    rows.sort(key=lambda row: -row.ms)
    head = dict(reversed([*_works(run.done.stderr.decode(errors="replace"))]))
    told = Profile(tuple(rows[:_MOST_DECLARATIONS]), head.get("import"), unfinished)
    # Other output stands among the profiler's lines.
    texts = ((message, _TOOK.sub("", message.text)) for message in outcome.messages)
    left = tuple(replace(m, text=text) for m, text in texts if text or not m.text)
    reply = replace(outcome, messages=left, profile=told, spent=run.spent)
    if reply.verdict == "accepted":
        reply = replace(reply, verdict="unjudged", reason="not_audited")
    return reply


def _works(text: str) -> Iterator[tuple[str, float]]:
    """Yields the pieces of work that the profiler names in a text, with their milliseconds."""
    for what, number, unit in _TOOK.findall(text):
        try:
            ms = float(number) * (1 if unit == "ms" else 1000)
        except ValueError:
            continue
        # A text may have printed any number.
        yield what.replace("Lean.Parser.Tactic.", "")[:_MOST_CHARS], min(ms, 1e9)


def _declared(code: str) -> Iterator[tuple[int, str]]:
    """Yields where declarations begin, with the beginnings of their full names; ""
    for those without."""
    spaces: list[str] = []
    word = Token("", 0, 0)
    for token in tokens(code):
        space = spaces[-1] if spaces else ""
        if word.text == "namespace":
            spaces.append(f"{space}{token.text}."[:_MOST_CHARS])
        elif token.text in ("section", "mutual"):
            spaces.append(space)
        elif token.text == "end" and spaces:
            spaces.pop()
        if word.text in _DECLARES and token.text not in _DECLARES:
            name = token.text if _NAME.match(token.text) else ""
            if name and not name.startswith("_root_."):
                name = space + name
            yield word.start, name.removeprefix("_root_.")[:_MOST_CHARS]
        word = token


def _own_until(code: str, start: int, end: int | None = None) -> int:
    """Returns up to where the own declaration of a command begins at ``start``, if it has one."""
    found = _BEFORE.match(code, start, len(code) if end is None else end)
    return found.end() if found else start


def _line_at(code: str, start: int) -> str:
    return code[start : start + _MOST_CHARS].partition("\n")[0].strip() or "(end of the text)"
