"""Rebuilds the `Lean.ConstantInfo` of an image's constants, in the layout of the judge's Lean."""

from __future__ import annotations

from collections.abc import Mapping

from leanq.lean.audit.image import Image, Name, Raw
from leanq.lean.audit.kernel import Kernel
from leanq.lean.audit.layouts import CONSTANTS, Damaged
from leanq.lean.audit.rebuild import Rebuilder

_TAGS = {layout.kind: tag for tag, layout in enumerate(CONSTANTS)}
_QUOTIENT_KINDS, _SAFETIES = 4, 3


class Infos:
    """The constants of one image as the kernel's environment keeps them."""

    def __init__(
        self, kernel: Kernel, image: Image, constants: Mapping[Name, Raw], build: Rebuilder
    ) -> None:
        self._kernel, self._image, self._constants = kernel, image, constants
        self._build = build

    def prepare(self) -> None:
        """Makes the expressions of all constants: for a library's file, many times faster than one
        constant after another, each of which enters what they share."""
        roots = [part for raw in self._constants.values() for part in raw.parts]
        for raw in self._constants.values():
            if raw.kind == "recursor":
                roots += (right for _, _, right in self._image.rules(raw))
        self._build.expressions(*roots)

    def info(self, raw: Raw) -> int:
        """Returns the `ConstantInfo` of a constant; raises `Damaged` or `IndexError`."""
        image, build, kernel = self._image, self._build, self._kernel
        words, value = image.words, raw.value
        head = (
            build.name_of(raw.name),
            build.names(words[raw.head + 2]),
            *map(build.expression, raw.parts),
        )

        def nat(field: int) -> int:
            return kernel.nat(image.small(words[value + field]))

        def flags(count: int) -> tuple[int, ...]:
            return tuple(image.flag(value, number) for number in range(count))

        match raw.kind:
            case "axiom":
                made = kernel.axiom_val(*head, *flags(1))
            case "definition":
                hints, safety = build.hints(words[value + 3]), self._below(value, _SAFETIES)
                made = kernel.definition_val(*head, hints, safety, build.names(words[value + 4]))
            case "theorem":
                made = kernel.theorem_val(*head, build.names(words[value + 3]))
            case "opaque":
                made = kernel.opaque_val(*head, *flags(1), build.names(words[value + 3]))
            case "quotient":
                made = kernel.quot_val(*head, self._below(value, _QUOTIENT_KINDS))
            case "inductive":
                blocks = build.names(words[value + 4]), build.names(words[value + 5])
                nested = nat(6) if image.counts_nested(raw) else self._nested(raw)
                made = kernel.inductive_val(*head, nat(2), nat(3), *blocks, nested, *flags(3))
            case "constructor":
                owner = build.name(words[value + 2])
                made = kernel.constructor_val(*head, owner, nat(3), nat(4), nat(5), *flags(1))
            case "recursor":
                block, counts = build.names(words[value + 2]), (nat(3), nat(4), nat(5), nat(6))
                rules = kernel.list([self._rule(*each) for each in image.rules(raw)])
                made = kernel.recursor_val(*head, block, *counts, rules, *flags(2))
        return kernel.construct(_TAGS[raw.kind], made)

    def _rule(self, constructor: int, fields: int, right: int) -> int:
        build, kernel = self._build, self._kernel
        return kernel.construct(
            0, build.name(constructor), kernel.nat(fields), build.expression(right)
        )

    def _below(self, value: int, limit: int) -> int:
        found = self._image.scalar(value, 0)
        if found >= limit:
            raise Damaged("it holds a malformed constant")
        return found

    def _nested(self, raw: Raw) -> int:
        """Returns how many types are nested in one whose file does not say.

        The recursor has a motive for each type of the block, and for each nested one.
        """
        image = self._image
        block = image.names(image.words[raw.value + 4])
        recursor = self._constants.get((*block[0], "rec")) if block else None
        if recursor is None or recursor.kind != "recursor":
            raise Damaged("it holds an inductive type without a recursor")
        motives = image.small(image.words[recursor.value + 5])
        return self._kernel.nat(max(motives - len(block), 0))
