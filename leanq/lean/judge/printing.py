"""Prints statements in Lean's words, from constants that the kernel has accepted.

Lean's own printer does it, in the environment that the judge has made. It knows the header's
notation, and none of the candidate's notation, unexpanders and options. Notation hides instances
and implicit arguments. If a declaration of the text stands in one that is no type, all arguments
are printed.

It comes after the verdict, and nothing rests on it. A statement is "" if it has more than
`_MAX_NODES` expressions, if Lean fails at it, or behind the first `_MAX_THEOREMS`. Long ones end in
an ellipsis.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import zip_longest

from leanq.lean.judge.judge import Judge
from leanq.lean.judge.kernel import (
    WORD_BYTES,
    Kernel,
    KernelUnavailableError,
    lean_function,
    retain,
    word,
)
from leanq.lean.run import layouts
from leanq.lean.run.image import Name, Raw

_CPU_S = 1.0
_WALL_S = 30
_MAX_THEOREMS = 20
_MAX_NODES = 5000
_MAX_CHARS = 2000
_MAX_VISITS = 50_000
_WIDTH = 100
_OPTIONS: dict[str, int | bool] = {
    "maxHeartbeats": 1000,
    "pp.maxSteps": 300,
    "pp.funBinderTypes": True,
    "pp.letVarTypes": True,
    "pp.coercions.types": True,
    "pp.structureInstances": False,
}
# Statements with the text's own names are printed in full.
_BY_NAMES = {"pp.fieldNotation": False}
_WHOLE = {"pp.explicit": True, "pp.notation": False, "pp.coercions": False}
_PRIVATE = "_private"
_EXPLICIT, _IMPLICIT = 0, 1  # Lean's numbers of these kinds of binders
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


class LeanPrinter:
    """Lean's printer in the process of a kernel, called through ctypes.

    Names and types of the functions are a compiler's output, as in :mod:`leanq.lean.judge.kernel`.

    Raises:
        KernelUnavailableError: the library lacks a function; the kernel judges without.
    """

    _set_module = lean_function("l_Lean_Environment_setMainModule", "oo")
    _elaborated = lean_function("l_Lean_Environment_ofKernelEnv", "o")
    _set_option = lean_function("l_Lean_Options_insert", "ooo")
    _print = lean_function("l_Lean_PrettyPrinter_ppExprLegacy", "ooooo")
    _pretty = lean_function("l_Std_Format_pretty", "oooo")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._env = kernel, 0
        try:
            kernel.bind(self)
            self._no_locals = kernel.value("l_Lean_LocalContext_empty")
            self._no_metas = kernel.value("l_Lean_instInhabitedMetavarContext")
        except AttributeError as error:
            raise KernelUnavailableError(f"Lean's library prints nothing: {error}") from None

    def begin(self, module: Name) -> None:
        """Takes over what the kernel has accepted, as declared by this module.

        Private names of other modules cannot be read.
        """
        retain(self._kernel.env)
        environment = int(self._elaborated(self._kernel.env))
        self._env = int(self._set_module(environment, self._kernel.name(module)))

    def printed(self, expression: int, options: Mapping[str, int | bool]) -> str:
        """Returns a closed expression in Lean's own words; "" if Lean cannot print it, or not
        within the options' limits."""
        kernel, chosen = self._kernel, self._kernel.no_options
        for name, value in options.items():
            chosen = self._set_option(chosen, kernel.name(name.split(".")), self._data(value))
        for each in (self._env, expression, self._no_locals, self._no_metas):
            retain(each)
        result = self._print(self._env, self._no_metas, self._no_locals, chosen, expression)
        if kernel.tag(result) != 0:
            return ""
        text = self._pretty(word(result + WORD_BYTES), kernel.nat(_WIDTH), 1, 1)
        return kernel.read_string(text)

    def _data(self, value: int | bool) -> int:
        """Returns a `DataValue`."""
        kernel = self._kernel
        if isinstance(value, bool):
            return kernel.construct(1, scalars=bytes([value]))
        return kernel.construct(3, kernel.nat(value))


class Printer:
    """Prints the statements of one file after it was judged."""

    def __init__(
        self, kernel: Kernel, lean: LeanPrinter, judge: Judge, constants: Mapping[Name, Raw]
    ) -> None:
        self._kernel, self._lean, self._judge = kernel, lean, judge
        self._constants = constants
        self._own = {name for name, raw in constants.items() if raw.kind != "theorem"}
        lean.begin(next(filter(None, map(_module_of, constants)), ()))
        parts = {part for name in judge.build.by_parts for part in name if isinstance(part, str)}
        # Only a program can make a name that Lean cannot write. Letters without a shape, and those
        # that turn the line round, let a name look like something else.
        self._is_speakable = "»" not in (together := "".join(parts)) and _can_be_seen(together)

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
            if _Arguments(self._kernel, self._own).hide_one(stated):
                options |= _WHOLE
        text = self._lean.printed(stated, options)
        if not _can_be_seen(text.replace("\n", "")):
            return ""  # a string has such letters, too
        return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"


class _Arguments:
    """The arguments in a statement of which notation leaves some out.

    Args:
        kernel: its environment has all that the statement refers to.
        own: the text's declarations, without its theorems.
    """

    def __init__(self, kernel: Kernel, own: Collection[Name]) -> None:
        self._kernel, self._own = kernel, own
        self._holding: dict[int, bool] = {}

    def hide_one(self, statement: int) -> bool:
        """Returns whether an instance, or an implicit argument that is no type, holds a declaration
        of the text, or may do so in a statement that is too large to tell."""
        todo: list[tuple[int, tuple[int, ...]]] = [(statement, ())]
        for _ in range(_MAX_VISITS):
            if not todo:
                return False
            at, around = todo.pop()
            if not self._holds_own(at):
                continue
            kind, *fields = self._cell(at)
            if kind == layouts.APP:
                head, args = self._spine(at)
                shown = self._shown(head, around)
                todo.append((head, around))
                for arg, is_shown in zip_longest(args, shown[: len(args)]):
                    if not is_shown and self._holds_own(arg):
                        return True
                    todo.append((arg, around))
                continue
            parts = [fields[number - 1] for number in layouts.PARTS[kind]]
            inside = (*around, fields[1]) if kind in layouts.BINDERS else around
            todo += [(part, around) for part in parts[:-1]]
            todo += [(part, inside) for part in parts[-1:]]
        return True

    def _holds_own(self, at: int) -> bool:
        """Returns whether a declaration of the text stands in an expression."""
        todo = [at]
        while todo:
            each = todo[-1]
            if each in self._holding:
                todo.pop()
                continue
            kind, *fields = self._cell(each)
            if kind == layouts.CONST:
                self._holding[each] = self._kernel.read_name(fields[0]) in self._own
                continue
            parts = [fields[number - 1] for number in layouts.PARTS[kind]]
            if fresh := [part for part in parts if part not in self._holding]:
                todo += fresh
            else:
                self._holding[each] = any(self._holding[part] for part in parts)
        return self._holding[at]

    def _shown(self, head: int, around: tuple[int, ...]) -> list[bool]:
        """Returns for each argument that a function's type tells whether it is printed, or is a
        type, which the others tell nearly always."""
        kind, *fields = self._cell(head)
        if kind == layouts.CONST:
            type_ = self._kernel.type_in(self._kernel.find(fields[0]))
        elif kind == layouts.BVAR:
            type_ = around[-1 - (fields[0] >> 1)]
        else:
            type_ = head
        shown = []
        while self._cell(type_)[0] in (layouts.FORALL, layouts.LAM):
            binder = self._kernel.byte(self._bare(type_), 3, 8)
            _, _, of, type_ = self._cell(type_)
            while binder == _IMPLICIT and self._cell(of)[0] == layouts.FORALL:
                of = self._cell(of)[3]
            is_type = binder == _IMPLICIT and self._cell(of)[0] == layouts.SORT
            shown.append(binder == _EXPLICIT or is_type)
        return shown

    def _spine(self, at: int) -> tuple[int, list[int]]:
        """Returns the head of an application, and its arguments."""
        args = []
        while (cell := self._cell(at))[0] == layouts.APP:
            args.append(cell[2])
            at = cell[1]
        args.reverse()
        return at, args

    def _cell(self, at: int) -> tuple[int, ...]:
        """Returns the kind of an expression, and its fields; for metadata, those behind it."""
        return self._kernel.cell(self._bare(at))

    def _bare(self, at: int) -> int:
        while (cell := self._kernel.cell(at))[0] == layouts.MDATA:
            at = cell[2]
        return at


def _module_of(name: Name) -> Name:
    """Returns the module that a private name belongs to; () for other names."""
    return name[1 : name.index(0)] if name[:1] == (_PRIVATE,) and 0 in name else ()


def _can_be_seen(text: str) -> bool:
    return text.isprintable() and not _UNSEEN.search(text)
