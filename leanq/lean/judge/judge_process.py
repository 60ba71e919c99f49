"""The program that judges: it never runs a candidate, and reads compiled files as data.

It imports one header, once, and then answers questions about files that were compiled with it. For
each it forks a child, which has all limits and ends with its answer. Frames come through standard
input, and answers go to standard output, a line of JSON each::

    first frame  {"libraries": of the judge's Lean, "fault": why there is none, "is_foreign",
                  "path": where that Lean finds modules, "modules", "is_module", "library",
                  "prints"}
    answer       {"ready": why it cannot judge, or "", "version": of the kernel, "held_bytes": of
                  memory}
    frame        {"sizes": of the parts of each file, "cpu_s", "memory_bytes", "op", …}, the parts
    answer       {"answer": what the child says, or the limit that ended it before it said anything,
                  "statements": of the theorems in it, as far as the child came, "cpu_s",
                  "peak_bytes"}

Without Lean's library it still reads files, and says of none that it is proved. What the child says
is a `leanq.lean.judge.judge_client.Judgement`. The operations:

- ``judge``: one file, ``ending`` (see :mod:`leanq.lean.judge.declarations`).
- ``examples``: the file of a text, and one with a name for each of its examples.
- ``verify``: a target and a candidate.
- ``close``: a source with a hole, and with a tactic in it (:mod:`leanq.lean.judge.closing`).
- ``names``: no file; whether the imports mean what the kernel does by the names that it knows.
- ``axioms``: no file; the axioms behind imported constants of these ``names``.

Call only `main`, and only in a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from pathlib import Path
from typing import Any

from leanq.errors import AuditError
from leanq.lean.judge.closing import File, Marks, close
from leanq.lean.judge.examples import NAME
from leanq.lean.judge.judge import (
    DeniedError,
    DisagreementError,
    Judge,
    check_imports,
    check_reserved,
    renamed_in,
)
from leanq.lean.judge.judge_forks import Forks, Memory, read_files, write
from leanq.lean.judge.kernel import (
    Kernel,
    KernelLimitError,
    KernelUnavailableError,
    Reached,
)
from leanq.lean.judge.known_names import unsettled
from leanq.lean.judge.printing import LeanPrinter, Printer
from leanq.lean.judge.statement import (
    Comparison,
    Difference,
    compare,
    is_leans_own,
)
from leanq.lean.run import layouts
from leanq.lean.run.image import ASTRAY, BOXED_ZERO, Image, Name, Raw
from leanq.lean.run.layouts import Damaged, UnknownLayout
from leanq.lean.run.olean import (
    Survey,
    as_written,
    display,
    find_module,
    led_to,
    open_image,
    places,
    proves_itself,
    read_parts,
    stated_theorems,
    survey,
)

_MAX_THEOREMS = 1000
# What Lean's kernel does not compute, and older ones do.
_NATIVE_REDUCTION = frozenset({("Lean", "reduceBool"), ("Lean", "reduceNat")})
_POWERS = frozenset({"pow", "hPow", "npow"})
_MAX_EXPONENT = 1 << 24


class _Bench:
    """The part that all judgements of this process share."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.modules = [tuple(each) for each in order["modules"]]
        self.is_module = order["is_module"]
        self.path = [Path(each) for each in order["path"]]
        self.library = [tuple(each) for each in order["library"]]
        self.kernel: Kernel | None = None
        self.unavailable = ""
        self._is_foreign = order["is_foreign"]
        self._lean_printer: LeanPrinter | None = None
        self._printer: Printer | None = None
        self._stated: list[Name] = []
        try:
            if not order["libraries"]:
                why = order["fault"] or "this toolchain has no library that the judge knows"
                raise KernelUnavailableError(why)
            kernel = Kernel(order["libraries"])
            try:
                self._lean_printer = LeanPrinter(kernel) if order["prints"] else None
                kernel.import_header(
                    self.modules, order["path"], notation=self._lean_printer is not None
                )
            except KernelUnavailableError:
                self._lean_printer = None
                kernel.import_header(self.modules, order["path"], notation=False)
            self.kernel = kernel
        except KernelUnavailableError as error:
            self.unavailable = str(error)

    def answer(self, order: dict[str, Any], files: Sequence[Sequence[bytes]]) -> dict[str, Any]:
        """Returns the answer about the files."""
        try:
            if order["op"] == "names":
                return {"unsettled": unsettled(self.kernel) if self.kernel else {}}
            if order["op"] == "axioms":
                names = [tuple(each) for each in order["names"]]
                return {"behind": axioms_behind(self.kernel, names) if self.kernel else []}
            images = [open_image(parts) for parts in files]
            if order["op"] == "examples":
                return self._examples(images[0], images[1], order)
            if order["op"] == "verify":
                return self._verify(images[0], images[1], order)
            if order["op"] == "close":
                return self._close(images[0], images[1], order)
            return self._judge(images[0], order)
        except DeniedError as error:
            if self._is_foreign and isinstance(error, DisagreementError):
                return {"rule": "kernels_disagree", "text": str(error)}
            return {"rule": error.rule, "text": str(error)}
        except UnknownLayout as error:
            if self._is_foreign:
                return {"rule": "unknown_layout", "text": str(error)}
            return _damaged(str(error))
        except Damaged as error:
            return _damaged(str(error))
        except IndexError:
            return _damaged(ASTRAY)
        except (KernelLimitError, MemoryError, RecursionError) as error:
            return {"limit": str(error) or type(error).__name__}

    def _read(self, image: Image) -> tuple[dict[Name, Raw], dict[Name, Name]]:
        """Makes all checks of a file that come before the kernel's; returns its constants, and
        other names for those that the kernel shall know by these."""
        constants = image.constants()
        check_imports(image, frozenset(self.modules), is_module=self.is_module)
        if self.kernel is None:
            return constants, {}
        check_reserved(image, constants, *self._declaring(self.kernel))
        visible = partial(self.kernel.visible, self.modules)
        return constants, renamed_in(self.kernel, constants, visible) if self.is_module else {}

    def _before_kernel(self, image: Image) -> tuple[dict[Name, Raw], Judge | None]:
        """Returns a file's constants, and their judge if there is a kernel."""
        constants, renamed = self._read(image)
        if self.kernel is None:
            return constants, None
        return constants, Judge(self.kernel, image, constants, renamed)

    def _judge(
        self, image: Image, order: dict[str, Any], examples: Sequence[Survey] = ()
    ) -> dict[str, Any]:
        constants, judge = self._before_kernel(image)
        ending = endings(image, constants, order["ending"])
        references: dict[Name, set[Name]] = {}
        nodes, disagrees = 0, ""
        stated = stated_theorems(image, constants)
        self._stated = stated[:_MAX_THEOREMS]
        if self.kernel is not None and judge is not None:
            try:
                judge.run()
            except DisagreementError as error:
                if not self._is_foreign:
                    raise
                # Other reasons to say no are found without a kernel.
                disagrees = _disagreement(error, judge.references, image, constants)
            references, nodes = judge.references, judge.build.nodes
            _check_examples(constants, references, order.get("examples", ()))
            if order["statements"] and self._lean_printer is not None and not disagrees:
                self._printer = Printer(self.kernel, self._lean_printer, judge, constants)
        # In an example's file, something else may bear the ending's name.
        surveys = (survey(image, constants, references, ending), *examples)
        return {
            "proved": self.kernel is not None and not disagrees,
            "disagrees": disagrees,
            "ended": bool(ending),
            "survey": _surveyed(*surveys),
            **self._told(len(stated)),
            "nodes": nodes,
            "ran_at": _declared_at(image, order.get("ran", ())),
        }

    def _verify(self, target: Image, candidate: Image, order: dict[str, Any]) -> dict[str, Any]:
        found, differences, _ = self._compared(target, candidate, order)
        said = self._judge(candidate, order)
        self._stated = [] if order["is_whole"] else found.theorems[:_MAX_THEOREMS]
        told = self._told(0 if order["is_whole"] else len(found.theorems))
        return {**said, **told, "differences": differences}

    def _close(self, opened: Image, tried: Image, order: dict[str, Any]) -> dict[str, Any]:
        """Judges what a step makes of its hole; see :mod:`leanq.lean.judge.closing`."""
        constants, renamed = self._read(tried)
        marks = Marks(**order["marks"])
        markers: set[Name] = {(each,) for each in (*marks.filled, *marks.open_, *marks.beside)}
        _, differences, ending = self._compared(opened, tried, order, markers)
        found, nodes, is_value = Survey(frozenset(), (), frozenset()), 0, False
        self._stated = []
        if self.kernel is not None and not differences:
            before, after = (
                File(image, {name: raw for name, raw in every.items() if name not in ending})
                for image, every in ((opened, opened.constants()), (tried, constants))
            )
            refused, found, nodes, is_value = close(self.kernel, before, after, marks, renamed)
            differences += [refused] if refused else []
        return {
            "proved": self.kernel is not None,
            "ended": not ending.isdisjoint(constants),
            "survey": _surveyed(found),
            "differences": differences,
            "nodes": nodes,
            "fills_value": is_value,
        }

    def _compared(
        self,
        target: Image,
        candidate: Image,
        order: dict[str, Any],
        ours: AbstractSet[Name] = frozenset(),
    ) -> tuple[Comparison, list[Difference], set[Name]]:
        """Compares two files, but for what is leanq's own in them; returns the differences, and the
        names of the declarations behind the texts."""
        target_end = endings(target, target.constants(), order["target_ending"])
        ending = target_end | endings(candidate, candidate.constants(), order["ending"])
        found = compare(
            target,
            candidate,
            theorems=[tuple(each) for each in order["theorems"]],
            holes=order["holes"],
            is_whole=order["is_whole"],
            unfilled=order["unfilled"],
            allowed=order["allowed"],
            ignored=ending | ours,
        )
        differences = [*found.differences]
        if any(order["target_ending"]) and not target_end:
            why = "Lean has not read the target to its end"
            differences.append(Difference("", "target_unread", why))
        return found, differences, ending

    def _told(self, count: int) -> dict[str, Any]:
        """Returns the names of the theorems, and how many more there are, of so many."""
        names = [display(as_written(name)) for name in self._stated]
        return {"theorems": names, "more_theorems": count - len(names)}

    def _examples(self, plain: Image, named: Image, order: dict[str, Any]) -> dict[str, Any]:
        """Judges the file of a text, and one with a name for each example with what these lead to.

        ``names`` are the names, ``places`` theirs in the text, and ``notes`` Lean's own names for
        examples.
        """
        constants, judge = self._before_kernel(named)
        at = {whole[:2]: name for name, (_, whole) in places(named).items() if name in constants}
        examples = set[Name]()
        for label, place in zip(order["names"], order["places"], strict=True):
            name = at.get(tuple(place), ("",))
            if name[-1] != label:
                raise _told_apart(
                    f"there is none on line {place[0]}, where the text seems to have one"
                )
            if named.is_module and name[0] != "_private":
                raise _told_apart(
                    f"the one on line {place[0]} stands in a public section, where Lean reads a "
                    "definition without private names; move it out of the section"
                )
            examples.add(name)
        if {display((*name[:-1], NAME)) for name in examples} != {*order["notes"]}:
            raise _told_apart("Lean has read one that leanq has not")
        # Their local declarations, which they need not use, have their names below their own.
        made = [
            name
            for name in constants
            if any(name[:end] in examples for end in range(1, len(name) + 1))
        ]
        references: dict[Name, set[Name]] = {}
        if judge is not None:
            judge.run(made)
            references = judge.references
        reached = led_to(named, constants, made, references)
        _check_examples(constants, reached, order["names"])
        own = {name: constants[name] for name in reached}
        if self.kernel is not None:
            self.kernel.start_anew()
        return self._judge(plain, order, (survey(named, own, reached),))

    def statements(self) -> Iterator[str]:
        """Yields the statements of the last answer's theorems, as far as they can be printed.

        Lean may end this process meanwhile.
        """
        if self._printer is not None:
            yield from self._printer.statements(self._stated)

    def start_anew(self) -> bool:
        """Forgets the last file; returns False if another one needs a new process."""
        self._printer = None
        if self.kernel is None:
            return False
        self.kernel.start_anew()
        return True

    def _declaring(self, kernel: Kernel) -> list[Callable[[Name], Image | None]]:
        """Returns what reads the module of the environment's library that declares a name, and what
        reads the header's."""
        read = cache(lambda path: open_image(read_parts(path, follows=True)))

        def reader(find: Callable[[], Callable[[Name], Name]]) -> Callable[[Name], Image | None]:
            homes = cache(find)

            def declaring(name: Name) -> Image | None:
                try:
                    path = find_module(homes()(name), self.path)
                    found = None if path is None else read(path)
                except (AuditError, KernelUnavailableError):
                    return None
                return found if found and found.constants({name}) else None

            return declaring

        return [reader(lambda: kernel.homes(self.library)), reader(kernel.homes)]


def endings(image: Image, constants: Mapping[Name, Raw], ending: Sequence[str]) -> set[Name]:
    """Returns the names of the declaration behind the text: an axiom that says nothing.

    Its name alone does not tell: a program of the text's could have read it. It has to be a mere
    proposition, which proves nothing.
    """
    found = set()
    for name, raw in constants.items():
        if name[-2:] == tuple(ending) and raw.kind == "axiom":
            at = image.index(raw.type_)
            if image.words[at] >> 48 == layouts.SORT and image.words[at + 1] == BOXED_ZERO:
                found.add(name)
    return found


def axioms_behind(kernel: Kernel, names: Collection[Name]) -> list[list[str]]:
    """Returns the axioms that each imported constant rests on, as the kernel's environment has it.

    Raises:
        DeniedError: there is no such constant, or it refers to one that is not there; or a proof
            leads back to itself.
    """

    @cache
    def read(name: Name) -> Reached:
        if (said := kernel.references(name)) is None:
            raise DeniedError("kernel_refused", f"no import declares {display(name)}")
        return said

    _check_proofs(names, read)
    found: dict[Name, set[Name]] = {}
    for name in names:
        axioms, seen, todo = set[Name](), {name}, [name]
        while todo:
            each = todo.pop()
            if each in found:
                axioms |= found[each]
                continue
            said = read(each)
            if said.is_axiom:
                axioms.add(each)
            fresh = [other for other in said.used if other not in seen]
            seen |= {*fresh}
            todo += fresh
        found[name] = axioms
    return [sorted(map(display, found[name])) for name in names]


def _check_proofs(names: Iterable[Name], read: Callable[[Name], Reached]) -> None:
    """Raises DeniedError if a proof behind the constants leads back to itself.

    Lean imports a theorem that several modules prove, and takes one of the proofs. Two theorems can
    then prove each other, though each module was right.
    """
    todo, opened, done = [*names], set[Name](), set[Name]()
    while todo:
        name = todo[-1]
        if name in opened or name in done:
            todo.pop()
            opened.discard(name)
            done.add(name)
            continue
        opened.add(name)
        for each in read(name).used:
            if each in opened and not read(each).is_unsafe:
                raise DeniedError("kernel_refused", proves_itself(each))
            if each not in opened and each not in done:
                todo.append(each)


def _check_examples(
    constants: Mapping[Name, Raw],
    references: Mapping[Name, AbstractSet[Name]],
    examples: Collection[str],
) -> None:
    """Raises DeniedError if anything uses an example, which only has a name while it is judged."""
    if not examples:
        return
    of = {
        name: next((part for part in name if part in examples), None)
        for name in {*constants, *set[Name]().union(*references.values())}
    }
    for name, used in references.items():
        for each in used:
            # Lean shares what it makes itself.
            if of[each] not in (None, of[name]) and not is_leans_own(each, constants):
                raise _told_apart(f"{display(name)} uses one of them")


def _declared_at(image: Image, ran: Sequence[str]) -> list[tuple[int, int] | None]:
    """Returns where a file's text declares constants, or what Lean made them of."""
    if not ran:
        return []
    at = {".".join(map(str, name)): whole for name, (whole, _) in places(image).items()}
    found: list[tuple[int, int] | None] = []
    for name in ran:
        parts = name.split(".")
        behind = (at.get(".".join(parts[:count])) for count in range(len(parts), 0, -1))
        place = next(filter(None, behind), None)
        found.append(place and (place.line, place.column))
    return found


def _disagreement(
    error: DisagreementError,
    references: Mapping[Name, AbstractSet[Name]],
    image: Image,
    constants: Mapping[Name, Raw],
) -> str:
    """Returns the kernel's words, and which of its known limits may be behind them."""
    used = set[Name]().union(*references.values())
    limits = ["computes nothing by compiled code"] if used & _NATIVE_REDUCTION else []
    if any(name[-1] in _POWERS for name in used) and _has_large_number(image, constants):
        limits.append("computes no power above 2^24")
    return f"{error} (this kernel {' and '.join(limits)})" if limits else str(error)


def _has_large_number(image: Image, constants: Mapping[Name, Raw]) -> bool:
    roots = (part for raw in constants.values() if raw.safe for part in raw.parts)
    for each in map(image.index, image.walk(*roots).addresses):
        if image.words[each] >> 48 == layouts.LIT:
            value = image.literal(image.words[each + 1])
            if isinstance(value, int) and value > _MAX_EXPONENT:
                return True
    return False


def _surveyed(*surveys: Survey) -> dict[str, Any]:
    return {
        "axioms": [*set[Name]().union(*(each.axioms for each in surveys))],
        "safe": [(name, [*led]) for each in surveys for name, led in each.safe],
        "behind_any": [*set[Name]().union(*(each.behind_any for each in surveys))],
    }


def _told_apart(why: str) -> DeniedError:
    return DeniedError("told_apart", why)


def _damaged(why: str) -> dict[str, Any]:
    text = f"the compiled result cannot be audited: it is no readable .olean file: {why}"
    return {"rule": "kernel_refused", "text": text}


def main() -> None:
    """Answers until standard input ends."""
    sys.set_int_max_str_digits(0)
    stream, answers = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # a library may print lines of its own when it is loaded
    bench = _Bench(json.loads(stream.readline()))
    gc.collect()
    gc.freeze()
    gc.disable()
    ready = {
        "ready": bench.unavailable,
        "version": bench.kernel.version if bench.kernel else "",
        "held_bytes": Memory.of("self").anonymous_bytes,
    }
    write(answers, json.dumps(ready).encode() + b"\n")
    forks = Forks(bench, (0, answers))
    while line := stream.readline():
        order = json.loads(line)
        write(answers, forks.answer(order, read_files(stream, order)).encode())
