"""Prints statements in Lean's words, from constants that the kernel has accepted.

Lean's own printer does it, in the environment that the judge has made. It knows the header's
notation, and none of the candidate's notation, unexpanders and options.
:mod:`leanq.lean.audit.annotations` makes it show hidden parts that cannot be told.

It comes after the verdict, and nothing rests on it. A statement is "" if it has more than
`_MAX_NODES` expressions, if Lean fails at it, or behind the first `_MAX_THEOREMS`. Long ones end in
an ellipsis.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from leanq.lean.audit.annotations import WHOLE, Annotator
from leanq.lean.audit.image import (
    APP,
    CONST,
    EXPRESSION_PARTS,
    FORALL,
    LAM,
    MDATA,
    Image,
    Name,
    Raw,
)
from leanq.lean.audit.judge import Judge
from leanq.lean.audit.kernel import Kernel, KernelLimitError
from leanq.lean.audit.layouts import Damaged, shape

_CPU_S = 1.0
_MAX_THEOREMS = 20
_MAX_NODES = 5000
_MAX_CHARS = 2000
_WIDTH = 100
_OPTIONS: dict[str, int | bool] = {
    "maxHeartbeats": 1000,
    "pp.maxSteps": 300,
    "pp.funBinderTypes": True,
    "pp.letVarTypes": True,
    "pp.coercions.types": True,
    "pp.structureInstances": False,
}
# The extension in which Lean keeps a file's classes.
_CLASSES: Name = ("Lean", "classExtension")
# Statements with the text's own names are printed in full.
_BY_NAMES = {"pp.fieldNotation": False}
# Python calls these printable, and they have no shape: Unicode's Default_Ignorable_Code_Point, and
# the braille pattern without dots.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def end_when_it_takes_too_long() -> None:
    """This process has a second of CPU time left for printing, and ends then."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)


class Printer:
    """Prints the statements of one file after it was judged."""

    def __init__(
        self, kernel: Kernel, judge: Judge, image: Image, constants: Mapping[Name, Raw]
    ) -> None:
        self._kernel, self._judge, self._image = kernel, judge, image
        self._constants = constants
        self._own = {name for name, raw in constants.items() if raw.kind != "theorem"}
        self._environment = kernel.elaborated()
        parts = {part for name in judge.names for part in name if isinstance(part, str)}
        # Only a program can make a name that Lean cannot write. Letters without a shape, and those
        # that turn the line round, let a name look like something else.
        self._is_speakable = "»" not in (together := "".join(parts)) and _can_be_seen(together)

    @cached_property
    def _annotator(self) -> Annotator:
        return Annotator(
            self._kernel,
            self._own,
            lambda name: self._kernel.is_instance(self._environment, name),
            _classes(self._image, self._constants),
        )

    def statements(self, theorems: Iterable[Name]) -> Iterator[str]:
        """Yields the statement of each theorem, in their order, as long as there is room."""
        for _, name in zip(range(_MAX_THEOREMS), theorems, strict=False):
            raw = self._constants.get(name)
            yield self._statement(raw) if raw is not None and self._is_speakable else ""

    def _statement(self, raw: Raw) -> str:
        type_, reached, nodes = self._judge.type_of(raw)
        if nodes > _MAX_NODES:
            return ""
        options = {**_OPTIONS}
        if not self._own.isdisjoint(reached):
            options |= _BY_NAMES
        try:
            type_ = self._annotator.annotated(type_)
        except KernelLimitError:
            options |= {**_BY_NAMES, **WHOLE}
        if self._annotator.hides_levels:
            options["pp.universes"] = True
        try:
            text = self._kernel.printed(
                self._environment, type_, self._kernel.options(options), _WIDTH
            )
        except KernelLimitError:
            return ""
        if not _can_be_seen(text.replace("\n", "")):
            return ""  # a string has such letters, too
        return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"


def _classes(image: Image, constants: Mapping[Name, Raw]) -> dict[Name, Name]:
    """Returns for each class of a file its own name, and for each definition the constant that its
    value applies."""
    found = {}
    for name, raw in constants.items():
        if raw.kind == "definition" and raw.safe and raw.body is not None:
            applied = _applied(image, raw.body)
            if applied is not None:
                found[name] = applied
    entries = image.entries().get(_CLASSES)
    for address in image.array(entries) if entries is not None else ():
        with contextlib.suppress(Damaged, IndexError):
            name = image.name(image.words[image.object(address, shape(0, 3)) + 1])
            found[name] = name
    return found


def _applied(image: Image, address: int) -> Name | None:
    """Returns the constant that an expression applies, behind its binders."""
    while True:
        index = image.index(address)
        kind = image.words[index] >> 48
        if kind == CONST:
            return image.name(image.words[index + 1])
        if kind not in (APP, LAM, FORALL, MDATA):
            return None
        part = EXPRESSION_PARTS[kind][0 if kind == APP else -1]
        address = image.words[index + part]


def _can_be_seen(text: str) -> bool:
    return text.isprintable() and not _UNSEEN.search(text)
