"""Sends a compiled file's constants through the kernel once more, to see whether they are proved.

This runs in a process that has imported what the file imports and nothing else. Each safe constant
is rebuilt (see :mod:`leanq.lean.judge.rebuild`), and the kernel adds it after the constants that it
refers to. The kernel makes inductive types, constructors, recursors with their rules, and quotients
by itself. The file must then hold the same. Unsafe and partial constants are left out, so the
kernel does not know one that a safe constant leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

from leanq.lean.judge.kernel import Kernel, RefusedError
from leanq.lean.judge.known_names import KERNEL_NAMES, QUOT_DECL
from leanq.lean.judge.rebuild import Infos, Rebuilder
from leanq.lean.judge.statement import Interner, View
from leanq.lean.run.image import Image, Name, Raw
from leanq.lean.run.olean import display

# The parts of `View.whole`.
_ASPECTS = (
    "kind",
    "safety",
    "the number of universe parameters",
    "type",
    "value",
    "constructors, rules or flags",
)
_RENAMED = "_candidate"
_MADE_BY_KERNEL = ("inductive", "constructor", "recursor", "quotient")

Denial = Literal["kernel_refused", "reserved_name", "told_apart"]
"""Why a file is denied; `leanq.lean.judge.check` gives each its reason."""


class DeniedError(Exception):
    """The file is denied: by which rule, and why."""

    def __init__(self, rule: Denial, text: str) -> None:
        super().__init__(text)
        self.rule = rule


class DisagreementError(DeniedError):
    """Lean's kernel does not take what the file says, which another Lean's may have taken."""


def check_imports(image: Image, expected: frozenset[Name], *, is_module: bool) -> None:
    """Raises `DeniedError` unless the file imports what its header says.

    leanq's reading of the header decides what the judge imports, and Lean's own reading made the
    file. They must not differ.
    """
    if image.is_module != is_module:
        what = "a file of the module system" if image.is_module else "no file of the module system"
        raise DeniedError("kernel_refused", f"the compiled result is {what}, unlike its header")
    init = {("Init",)}  # Lean adds it unless the file says prelude
    found = {each.module for each in image.imports()}
    if found | init != expected | init:
        raise DeniedError(
            "kernel_refused", "the compiled result imports other modules than its header says"
        )


def check_reserved(
    image: Image,
    constants: dict[Name, Raw],
    library: Callable[[Name], Image | None],
    imported: Callable[[Name], Image | None],
) -> None:
    """Raises `DeniedError` for a name that the kernel knows and that is not the library's own.

    A definition is the library's own only if everything it refers to is, too: `Nat.sub` means
    something else on another `Nat.pred`, of the text or of another module. The names of universe
    parameters do not matter.

    Args:
        library: reads the module of the library that declares a name.
        imported: reads the module behind the text's header that does; the library's image is the
            same object in both.
    """
    known = sorted(constants.keys() & KERNEL_NAMES, key=str)
    if not known:
        return
    interner = Interner()
    views: dict[int, View] = {id(image): View(interner, image)}
    seen = set(known)
    todo = [(name, name) for name in known]
    while todo:
        name, first = todo.pop()
        ours = image if name in constants else imported(name)
        theirs = library(name)
        if ours is not None and ours is theirs:
            continue  # what it refers to is the library's as well
        if ours is None or theirs is None:
            where = "the library" if theirs is None else "the header"
            raise _reserved(name, first, f"{where} has no such constant", name in constants)
        raws = [each.constants({name})[name] for each in (ours, theirs)]
        wholes = [
            views.setdefault(id(each), View(interner, each)).whole(raw)
            for each, raw in zip((ours, theirs), raws, strict=True)
        ]
        pairs = zip(_ASPECTS, *wholes, strict=True)
        if different := [aspect for aspect, mine, other in pairs if mine != other]:
            why = f"it differs from the library's in {different[0]}"
            raise _reserved(name, first, why, name in constants)
        reached = theirs.references(raws[1]) - seen
        seen |= reached
        todo += ((each, first) for each in reached)


def renamed_in(
    kernel: Kernel, constants: Collection[Name], visible: Callable[[], int]
) -> dict[Name, Name]:
    """Returns other names for the constants of a module whose names are taken by constants that its
    imports hide from it.

    The kernel has imported everything behind the header, since only that tells what is safe and
    which axioms there are. So it has to know these constants, and those named after them, by other
    names. The kernel refuses a name that the module could see.

    Args:
        visible: makes an environment of what the module can see.
    """
    taken = {each for each in constants if kernel.declares(kernel.env, kernel.name(each))}
    if taken:
        seen = visible()
        taken -= {each for each in taken if kernel.declares(seen, kernel.name(each))}
    if not taken:
        return {}
    return {
        each: (_RENAMED, *each)
        for each in constants
        if any(each[:end] in taken for end in range(len(each) + 1))
    }


class Judge:
    """One file in the kernel.

    ``renamed``: the constants that have another name there; see `renamed_in`.

    Attributes:
        build: the objects of the file.
        references: the constants that each rebuilt constant refers to.
    """

    def __init__(
        self,
        kernel: Kernel,
        image: Image,
        constants: dict[Name, Raw],
        renamed: Mapping[Name, Name] | None = None,
    ) -> None:
        self._kernel, self._image, self._constants = kernel, image, constants
        self.build = build = Rebuilder(kernel, image, renamed)
        self._infos = Infos(kernel, image, constants, build)
        self._state: dict[Name, Literal["pending", "done"]] = {}
        self._has_quotients = False
        self.references: dict[Name, set[Name]] = {}

    def type_of(self, raw: Raw) -> tuple[int, set[Name], int]:
        """Returns the type of a constant as Lean's object, the constants in it, and its size."""
        before = self.build.nodes
        [type_], reached = self.build.expressions(raw.type_)
        return type_, reached, self.build.nodes - before

    def run(self, only: Iterable[Name] | None = None) -> None:
        """Raises `DeniedError` unless the kernel accepts every safe constant.

        With ``only``, it takes these constants and all that they lead to.

        Also raises `Damaged` or `IndexError` for bytes that are not Lean's, and `KernelLimitError`
        if the kernel cannot tell.
        """
        for name in self._constants if only is None else only:
            if self._constants[name].safe:
                self._add_with_needs(name)
        for name in self._state:
            raw = self._constants[name]
            if raw.kind in _MADE_BY_KERNEL:
                same = self._kernel.has(self.build.name_of(name), self._infos.info(raw))
                if not same:
                    known = "no such" if same is None else "another"
                    raise _disagrees(name, f"the kernel has made {known} {raw.kind}")

    def _add_with_needs(self, first: Name) -> None:
        """Adds a constant after those that it refers to; without recursion."""
        stack: list[tuple[Name, Callable[[], None] | None]] = [(first, None)]
        state, constants = self._state, self._constants
        while stack:
            name, declare = stack.pop()
            if declare is not None:
                if state[name] == "pending":
                    declare()
                    state[name] = "done"
                continue
            raw = constants.get(name)
            if raw is None or not raw.safe or name in state:
                continue
            state[name] = "pending"
            declare, needs = self._prepare(raw)
            # The kernel never sees these. Something else there may bear the same name.
            if unsafe := [each for each in needs if each in constants and not constants[each].safe]:
                why = f"it uses {display(min(unsafe, key=str))}, which is unsafe or partial"
                raise _disagrees(name, why)
            stack.append((name, declare))
            stack += [(each, None) for each in needs if each in constants and each not in state]

    def _prepare(self, raw: Raw) -> tuple[Callable[[], None], set[Name]]:
        """Returns how to declare a constant, and which constants have to come before."""
        image, build, name = self._image, self.build, raw.name
        if raw.kind in ("constructor", "recursor"):
            # The kernel makes them with their type.
            field = image.words[raw.value + 2]
            owners = [image.name(field)] if raw.kind == "constructor" else image.names(field)
            [_], self.references[name] = build.expressions(raw.type_)
            return (lambda: None), {*owners}
        if raw.kind == "quotient":
            return self._declare_quotients, {("Eq",)}
        if raw.kind == "inductive":
            return self._prepare_inductive(raw)
        _, self.references[name] = build.expressions(*raw.parts)
        # A `Declaration` of one of these kinds has the number and the value of its `ConstantInfo`.
        declaration = self._infos.info(raw)
        return (lambda: self._add(name, declaration)), self.references[name]

    def _declare_quotients(self) -> None:
        if not self._has_quotients:
            self._has_quotients = True
            self._add(("Quot",), QUOT_DECL)

    def _prepare_inductive(self, raw: Raw) -> tuple[Callable[[], None], set[Name]]:
        """Returns the same for a type with all that are defined together with it."""
        image, build, kernel = self._image, self.build, self._kernel
        words = image.words
        block = image.names(words[raw.value + 4])
        if raw.name not in block or len(set(block)) != len(block):
            raise _refused(raw.name, "it is not of its own block")
        levels, params = image.levels(raw), image.small(words[raw.value + 2])
        types, own, needs = [], set(block), set()
        for each in block:
            one = self._constants.get(each)
            if (
                one is None
                or one.kind != "inductive"
                or not one.safe
                or image.names(words[one.value + 4]) != block
                or image.levels(one) != levels
                or image.small(words[one.value + 2]) != params
            ):
                raise _refused(each, f"it does not belong to the block of {display(raw.name)}")
            [type_], used = build.expressions(one.type_)
            constructors = image.names(words[one.value + 5])
            self.references[each] = used | {*constructors}
            needs |= used
            own |= {*constructors}
            made = []
            for constructor in constructors:
                part = self._constants.get(constructor)
                if part is None or part.kind != "constructor" or not part.safe:
                    raise _refused(constructor, f"it is no constructor of {display(each)}")
                [part_type], used = build.expressions(part.type_)
                needs |= used
                made.append(kernel.construct(0, build.name_of(constructor), part_type))
            types.append(kernel.construct(0, build.name_of(each), type_, kernel.list(made)))
        for each in block:
            self._state.setdefault(each, "pending")

        def declare() -> None:
            parameters = build.names(words[raw.head + 2])
            self._add(
                raw.name,
                kernel.inductive_decl(parameters, kernel.nat(params), kernel.list(types), 0),
            )
            for each in block:
                self._state[each] = "done"

        return declare, needs - own

    def _add(self, name: Name, declaration: int) -> None:
        try:
            self._kernel.add(declaration)
        except RefusedError as error:
            raise _disagrees(name, str(error)) from None


def _refused(name: Name, text: str, kind: type[DeniedError] = DeniedError) -> DeniedError:
    return kind("kernel_refused", f"Lean's kernel does not accept {display(name)}: {text}")


def _disagrees(name: Name, text: str) -> DeniedError:
    return _refused(name, text, DisagreementError)


def _reserved(name: Name, known: Name, why: str, is_own: bool) -> DeniedError:
    through = "" if name == known else f", which leads to {display(name)}"
    has = "declares" if is_own else "imports another"
    return DeniedError(
        "reserved_name",
        f"the kernel knows {display(known)} by its name{through}. This text {has} "
        f"{display(name)}, and {why}: import the library's {display(name)}, or choose other names",
    )
