"""Prints statements in Lean's words, from constants that the kernel has accepted.

Lean's own printer does it, in the environment that the judge has made. It knows the header's
notation, and none of the candidate's notation, unexpanders and options.
:mod:`leanq.lean.audit.annotations` makes it show hidden parts that cannot be told. Where a variable
or the text's own instances could take the place of an instance that is left out, Lean's elaborator
reads the printed statement again. Unless it reads the same expression, all arguments are printed.

It comes after the verdict, and nothing rests on it. A statement is "" if it has more than
`_MAX_NODES` expressions, if Lean fails at it, or behind the first `_MAX_THEOREMS`. Long ones end in
an ellipsis.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from leanq.lean.audit.annotations import WHOLE, Annotator
from leanq.lean.audit.elaborator import Elaborator
from leanq.lean.audit.image import Image, Name, Raw
from leanq.lean.audit.judge import Judge
from leanq.lean.audit.kernel import Kernel, KernelLimitError
from leanq.lean.audit.layouts import Damaged
from leanq.lean.audit.shapes import shape

_CPU_S = 1.0
_WALL_S = 30
_MAX_THEOREMS = 20
_MAX_NODES = 5000
_MAX_CHARS = 2000
_MAX_READINGS = 3
_WIDTH = 100
_OPTIONS: dict[str, int | bool] = {
    "maxHeartbeats": 1000,
    "pp.maxSteps": 300,
    "pp.funBinderTypes": True,
    "pp.letVarTypes": True,
    "pp.coercions.types": True,
    "pp.structureInstances": False,
}
# The extensions that say what is a class, what is unfolded by which attribute, and what is an
# instance or a default instance of which priority.
_CLASSES: Name = ("Lean", "classExtension")
_REDUCIBILITY: Name = ("reducibilityCore",)
_UNFOLDED = {0: "reducible", 4: "instance_reducible"}
_INSTANCES: Name = ("Lean", "Meta", "instanceExtension")
_DEFAULTS: Name = ("Lean", "Meta", "defaultInstanceExtension")
# An instance of a namespace that is closed counts, too: a reader may open it.
_ANYWHERE_OR_SCOPED = (shape(0, 1), shape(1, 2))
_PRIVATE = "_private"
_READ: Name = ("_leanq", "read")
# Lean's sign for a proof that it leaves out, and the option to print it.
_OMITTED = "⋯"
_PROOFS = {"pp.proofs": True}
# Statements with the text's own names are printed in full.
_BY_NAMES = {"pp.fieldNotation": False}
# Python calls these printable, and they have no shape: Unicode's Default_Ignorable_Code_Point, and
# the braille pattern without dots.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def end_when_it_takes_too_long() -> None:
    """This process has a second of CPU time left for printing, and ends then.

    A thread that waits for ever uses none, so half a minute is the most in any case.
    """
    signal.alarm(_WALL_S)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)


def take_all_the_time() -> None:
    """Takes that back."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)


class Printer:
    """Prints the statements of one file after it was judged."""

    def __init__(
        self,
        kernel: Kernel,
        elaborator: Elaborator,
        judge: Judge,
        image: Image,
        constants: Mapping[Name, Raw],
    ) -> None:
        self._kernel, self._elaborator = kernel, elaborator
        self._judge, self._image = judge, image
        self._constants = constants
        self._own = {name for name, raw in constants.items() if raw.kind != "theorem"}
        elaborator.begin(next(filter(None, map(_module_of, constants)), ()))
        parts = {part for name in judge.build.by_parts for part in name if isinstance(part, str)}
        # Only a program can make a name that Lean cannot write. Letters without a shape, and those
        # that turn the line round, let a name look like something else.
        self._is_speakable = "»" not in (together := "".join(parts)) and _can_be_seen(together)

    @cached_property
    def _annotator(self) -> Annotator:
        return Annotator(self._kernel, self._elaborator, self._own)

    def statements(self, theorems: Iterable[Name]) -> Iterator[str]:
        """Yields the statement of each theorem, in their order, as long as there is room."""
        for _, name in zip(range(_MAX_THEOREMS), theorems, strict=False):
            raw = self._constants.get(name)
            yield self._statement(raw) if raw is not None and self._is_speakable else ""

    def _statement(self, raw: Raw) -> str:
        stated, reached, nodes = self._judge.type_of(raw)
        if nodes > _MAX_NODES:
            return ""
        options = {**_OPTIONS}
        if not self._own.isdisjoint(reached):
            options |= _BY_NAMES
        try:
            text = self._readable(raw, stated, options)
        except KernelLimitError:
            text = ""
        text = text or self._whole(stated)
        if not _can_be_seen(text.replace("\n", "")):
            return ""  # a string has such letters, too
        return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"

    def _readable(self, raw: Raw, stated: int, options: dict[str, int | bool]) -> str:
        """Returns a statement by notation; "" if that does not tell it.

        Raises:
            KernelLimitError: it is too large.
        """
        annotator, shown = self._annotator, set[int]()
        for _ in range(_MAX_READINGS):
            annotated = annotator.annotated(stated, shown)
            if annotator.hides_levels:
                options["pp.universes"] = True
            text = self._printed(annotated, options)
            is_doubtful = annotator.has_variables or self._instances
            if not annotator.hides_instances or not is_doubtful:
                return text
            read = self._read(
                self._printed(annotated, options | _PROOFS) if _OMITTED in text else text, raw
            )
            if read is None:
                return ""
            if self._elaborator.same(read, stated):
                return text
            shown |= annotator.unlike(stated, read)
        return ""

    def _whole(self, stated: int) -> str:
        options = {**_OPTIONS, **_BY_NAMES, **WHOLE}
        return self._printed(stated, options | {"pp.universes": self._annotator.hides_levels})

    def _printed(self, expression: int, options: Mapping[str, int | bool]) -> str:
        try:
            return self._elaborator.printed(expression, self._elaborator.options(options), _WIDTH)
        except KernelLimitError:
            return ""

    def _read(self, text: str, raw: Raw) -> int | None:
        """Returns what Lean reads in a printed statement; None if it reads none.

        It knows the header's instances and the text's, and the header's notation alone.
        """
        levels = ", ".join(map(_quoted, self._image.levels(raw)))
        axiom = f"axiom {_quoted(_READ)}{f'.{{{levels}}}' if levels else ''} : {text}\n"
        made = self._elaborator.elaborate(self._attributes + axiom)
        return None if made is None else self._elaborator.type_of(made, self._kernel.name(_READ))

    @cached_property
    def _attributes(self) -> str:
        """The commands that give the text's constants their part in the search for instances."""
        image, found = self._image, dict[str, list[Name]]()
        for entry in self._entries(_CLASSES, shape(0, 3)):
            found.setdefault("class", []).append(image.name(entry[0]))
        for entry in self._entries(_REDUCIBILITY, shape(0, 2)):
            name, attribute = image.name(entry[0]), _UNFOLDED.get(entry[1] >> 1)
            if attribute:
                found.setdefault(attribute, []).append(name)
        for attribute, name in self._instances:
            found.setdefault(attribute, []).append(name)
        return "".join(
            f"attribute [{attribute}] {' '.join(map(_quoted, names))}\n"
            for attribute, names in found.items()
        )

    @cached_property
    def _instances(self) -> list[tuple[str, Name]]:
        """The text's instances and default instances, each with its attribute."""
        image, found = self._image, list[tuple[str, Name]]()
        for entry in self._entries(_INSTANCES, *_ANYWHERE_OR_SCOPED):
            instance = image.words[image.index(entry[-1]) + 1 :][:3]
            made = image.words[image.index(instance[1]) + 1]
            found.append((f"instance {image.small(instance[2])}", image.name(made)))
        for entry in self._entries(_DEFAULTS, shape(0, 3)):
            found.append((f"default_instance {image.small(entry[2])}", image.name(entry[1])))
        return found

    def _entries(self, extension: Name, *shapes: int) -> Iterator[Sequence[int]]:
        image = self._image
        entries = image.entries().get(extension)
        for address in image.array(entries) if entries is not None else ():
            index = image.index(address)
            if (found := image.words[index] >> 48) not in shapes:
                raise Damaged("an object is not what it should be")
            yield image.words[index + 1 : index + 1 + (found & 0xFF)]


def _module_of(name: Name) -> Name:
    """Returns the module that a private name belongs to; () for other names."""
    return name[1 : name.index(0)] if name[:1] == (_PRIVATE,) and 0 in name else ()


def _quoted(name: Name) -> str:
    """Returns a name as the text writes it, so that no part is one of Lean's words; one that no
    text can have is none."""
    module = _module_of(name)
    return ".".join(f"«{part}»" for part in name[len(module) + 2 if module else 0 :])


def _can_be_seen(text: str) -> bool:
    return text.isprintable() and not _UNSEEN.search(text)
