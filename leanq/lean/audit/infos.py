"""Rebuilds the `Lean.ConstantInfo` of an image's constants, in the layout of the judge's Lean."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from leanq.lean.audit.image import Image, Name, Raw
from leanq.lean.audit.kernel import Kernel
from leanq.lean.audit.layouts import Damaged, shape
from leanq.lean.audit.rebuild import Rebuilder

_RECURSOR_RULE = shape(0, 3)
_QUOTIENT_KINDS, _SAFETIES = 4, 3


class Infos:
    """The constants of one image as the kernel's environment keeps them.

    Args:
        expression: returns the object for the expression at an address.
    """

    def __init__(
        self,
        kernel: Kernel,
        image: Image,
        constants: Mapping[Name, Raw],
        build: Rebuilder,
        expression: Callable[[int], int],
    ) -> None:
        self._kernel, self._image, self._constants = kernel, image, constants
        self._build, self._expression = build, expression

    @classmethod
    def of_all(
        cls, kernel: Kernel, image: Image, constants: Mapping[Name, Raw], build: Rebuilder
    ) -> tuple[Infos, dict[int, int]]:
        """Returns the constants' maker, and the objects of all their expressions by address."""
        made: dict[int, int] = {}
        infos = cls(kernel, image, constants, build, made.__getitem__)
        roots = [part for raw in constants.values() for part in raw.parts]
        for raw in constants.values():
            if raw.kind == "recursor":
                roots += infos.rule_addresses(raw)
        made |= build.in_order(image.expressions_behind(*roots))
        return infos, made

    def info(self, raw: Raw) -> int:
        """Returns the `ConstantInfo` of a constant; raises `Damaged` or `IndexError`."""
        image, build, kernel = self._image, self._build, self._kernel
        words, value = image.words, raw.value
        head = (
            build.name_of(raw.name),
            build.names(words[raw.head + 2]),
            *map(self._expression, raw.parts),
        )

        def nat(field: int) -> int:
            return kernel.nat(image.small(words[value + field]))

        def flags(count: int) -> tuple[int, ...]:
            return tuple(image.flag(value, number) for number in range(count))

        match raw.kind:
            case "axiom":
                return kernel.construct(0, kernel.axiom_val(*head, *flags(1)))
            case "definition":
                hints, all_ = build.hints(words[value + 3]), build.names(words[value + 4])
                safety = self._below(value, _SAFETIES)
                return kernel.construct(1, kernel.definition_val(*head, hints, safety, all_))
            case "theorem":
                return kernel.construct(2, kernel.theorem_val(*head, build.names(words[value + 3])))
            case "opaque":
                all_ = build.names(words[value + 3])
                return kernel.construct(3, kernel.opaque_val(*head, *flags(1), all_))
            case "quotient":
                kind = self._below(value, _QUOTIENT_KINDS)
                return kernel.construct(4, kernel.quot_val(*head, kind))
            case "inductive":
                blocks = build.names(words[value + 4]), build.names(words[value + 5])
                nested = nat(6) if image.counts_nested(raw) else self._nested(raw)
                made = kernel.inductive_val(*head, nat(2), nat(3), *blocks, nested, *flags(3))
                return kernel.construct(5, made)
            case "constructor":
                owner = build.name(words[value + 2])
                made = kernel.constructor_val(*head, owner, nat(3), nat(4), nat(5), *flags(1))
                return kernel.construct(6, made)
            case "recursor":
                rules = kernel.list([*map(self._rule, image.linked(words[value + 7]))])
                block = build.names(words[value + 2])
                counts = (nat(3), nat(4), nat(5), nat(6))
                return kernel.construct(
                    7, kernel.recursor_val(*head, block, *counts, rules, *flags(2))
                )

    def rule_addresses(self, raw: Raw) -> list[int]:
        """Returns the addresses of the right sides of a recursor's rules."""
        words, image = self._image.words, self._image
        rules = image.linked(words[raw.value + 7])
        return [words[image.object(each, _RECURSOR_RULE) + 3] for each in rules]

    def _rule(self, address: int) -> int:
        words, image = self._image.words, self._image
        rule = image.object(address, _RECURSOR_RULE)
        fields = self._kernel.nat(image.small(words[rule + 2]))
        right = self._expression(words[rule + 3])
        return self._kernel.construct(0, self._build.name(words[rule + 1]), fields, right)

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
