"""Statements as Lean prints them, from constants that the kernel has accepted.

Lean's own printer does it, in the environment that the judge has made: it knows the header's
notation, and of what the candidate brings along (notation, unexpanders, options) nothing. What
notation and implicit arguments would hide is shown where it is the text's own: an instance of its
own in ``5 ≤ 3``, say.

It comes after the verdict, and nothing rests on it. A statement is "" where it cannot be had: of
more than `_MAX_NODES` expressions, one that Lean fails at, any behind the first `_MAX_THEOREMS`.
Long ones end in an ellipsis.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping

from leanq.lean.audit.image import (
    EXPRESSION_PARTS,
    FORALL,
    LAM,
    LET,
    LIT,
    STRING_LIT,
    Image,
    Name,
    Raw,
)
from leanq.lean.audit.judge import Judge
from leanq.lean.audit.kernel import Kernel, KernelLimitError
from leanq.lean.audit.olean import display

_CPU_S = 1.0
_MAX_THEOREMS = 20
_MAX_NODES = 5000
_MAX_CHARS = 2000
_WIDTH = 100
_LIMITS: Mapping[str, int | bool] = {"maxHeartbeats": 1000, "pp.maxSteps": 300}
_BY_NAMES = {**_LIMITS, "pp.fieldNotation": False, "pp.structureInstances": False}
_EXPLICIT = {**_BY_NAMES, "pp.explicit": True, "pp.notation": False, "pp.coercions": False}
_WORD = re.compile(r"(?:«[^»]*»|[^\s()\[\]{}⟨⟩,:;@«»])+")
# Lean cannot write such a name, so a program has made it, perhaps to look like something else.
_UNSPEAKABLE = re.compile(r"[»\x00-\x1f\x7f]")


def end_when_it_takes_too_long() -> None:
    """This process has a second of CPU time left to print in, and is ended then."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)


class Printer:
    """Prints what one file states, after it was judged."""

    def __init__(
        self, kernel: Kernel, judge: Judge, image: Image, constants: Mapping[Name, Raw]
    ) -> None:
        self._kernel, self._judge, self._image = kernel, judge, image
        self._constants = constants
        self._environment = kernel.elaborated()
        self._plainly, self._by_names = kernel.options(_LIMITS), kernel.options(_BY_NAMES)
        self._explicitly = kernel.options(_EXPLICIT)
        parts = {part for name in judge.names for part in name if isinstance(part, str)}
        self._is_speakable = _UNSPEAKABLE.search("".join(parts)) is None

    def statements(self, theorems: Iterable[Name]) -> Iterator[str]:
        """The statement of each theorem, in their order, as long as there is room."""
        for _, name in zip(range(_MAX_THEOREMS), theorems, strict=False):
            raw = self._constants.get(name)
            yield self._statement(raw) if raw is not None and self._is_speakable else ""

    def _statement(self, raw: Raw) -> str:
        type_, reached, nodes = self._judge.type_of(raw)
        if nodes > _MAX_NODES:
            return ""
        own = {display(name) for name in reached if name in self._constants}
        try:
            text = self._printed(type_, self._by_names if own else self._plainly)
            if own and not own <= self._shown(raw.type_, text):
                text = self._printed(type_, self._explicitly)
        except KernelLimitError:
            return ""
        return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"

    def _printed(self, type_: int, options: int) -> str:
        return self._kernel.printed(self._environment, type_, options, _WIDTH)

    def _shown(self, root: int, text: str) -> set[str]:
        """The names that a printed expression shows and that cannot stand for anything else."""
        bound, has_strings = self._bound(root)
        return set() if has_strings else {*_WORD.findall(text)}.difference(map(display, bound))

    def _bound(self, root: int) -> tuple[set[Name], bool]:
        """The names that an expression binds, and whether there are strings in it."""
        image, words = self._image, self._image.words
        names, has_strings = set[Name](), False
        seen, todo = {root}, [root]
        while todo:
            index = image.index(todo.pop())
            kind = words[index] >> 48
            if kind in (LAM, FORALL, LET):
                names.add(image.name(words[index + 1]))
            if kind == LIT:
                literal = image.index(words[index + 1])
                has_strings = has_strings or words[literal] >> 48 == STRING_LIT
            fresh = {words[index + part] for part in EXPRESSION_PARTS[kind]} - seen
            seen |= fresh
            todo += fresh
        return names, has_strings
