"""Rebuilds an image's constants as Lean's own objects, by Lean's constructors.

It does not read an expression's hashes, depths and flags: Lean computes them again. Metadata means
nothing to the kernel and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from leanq.lean.judge.kernel import Kernel, share
from leanq.lean.run import layouts
from leanq.lean.run.image import AHEAD, BOXED_ZERO, Image, Name, Raw
from leanq.lean.run.layouts import CONSTANTS, Damaged, shape

_MAX_BVAR = (1 << 20) - 2  # an expression keeps its loose bound variables in 20 bits
_BINDER_KINDS = 4
_BINDER_BYTES = 41  # the size of a binder up to its kind: word 0, three fields, a hash
_REGULAR_HINT = shape(2, 0)


class Rebuilder:
    """The objects of one image, each rebuilt once.

    Attributes:
        by_parts: all names that were made.
        nodes: how many expressions were made.

    Args:
        renamed: the names by which the kernel shall know some constants.
        levels: what stands for some universe parameters, as Lean's objects.
    """

    def __init__(
        self,
        kernel: Kernel,
        image: Image,
        renamed: Mapping[Name, Name] | None = None,
        levels: Mapping[Name, int] | None = None,
    ) -> None:
        self._kernel, self._image = kernel, image
        self._names: dict[int, int] = {}
        self.by_parts: dict[Name, int] = {(): BOXED_ZERO}
        self._known_as = renamed or {}
        self._renamed = {name: self._made(other) for name, other in self._known_as.items()}
        self._parameters = levels or {}
        self._levels: dict[int, int] = {BOXED_ZERO: kernel.level_zero(1)}
        self._level_lists: dict[int, int] = {}
        self._name_lists: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self.nodes = 0

    def name_of(self, parts: Name) -> int:
        """Returns the name of a constant."""
        return self._renamed.get(parts) or self._made(parts)

    def _made(self, parts: Name) -> int:
        known, start = self.by_parts, len(parts)
        found = known.get(parts)
        while found is None:
            start -= 1
            found = known.get(parts[:start])
        for end in range(start + 1, len(parts) + 1):
            found = known[parts[:end]] = self._kernel.name_part(found, parts[end - 1])
        return found

    def name(self, address: int) -> int:
        """Returns the name at an address."""
        found = self._names.get(address)
        if found is None:
            found = self._names[address] = self.name_of(self._image.name(address))
        return found

    def names(self, address: int) -> int:
        """Returns a list of names."""
        found = self._name_lists.get(address)
        if found is None:
            found = self._kernel.list(map(self.name, self._image.linked(address)))
            self._name_lists[address] = found
        if not found & 1:
            share(found)
        return found

    def hints(self, address: int) -> int:
        """Returns how eagerly the kernel unfolds a definition."""
        if address & 1:
            if address >> 1 > 1:
                raise Damaged("it holds a malformed hint")
            return address
        index = self._image.object(address, _REGULAR_HINT)
        height = self._image.words[index + 1] & 0xFFFFFFFF
        return int(self._kernel.regular(height))

    def expressions(self, *roots: int) -> tuple[list[int], set[Name]]:
        """Returns the objects for some expressions, and the names of all constants in them."""
        image, done = self._image, self._done
        walk = image.walk(*roots)
        before = [at for at in walk.addresses if at in done]
        self._make(sorted(walk.addresses))
        self.nodes += len(walk.addresses)
        # These stand in several places, in this constant or in one before it as well.
        for at in (*walk.repeated, *before):
            share(done[at])
        return [done[each] for each in roots], set(map(image.name, walk.named))

    def expression(self, root: int) -> int:
        """Returns the object for an expression, which is to stand in one more place."""
        if (found := self._done.get(root)) is None:
            return self.expressions(root)[0][0]
        share(found)
        return found

    def at_levels(self, parameters: Sequence[Name], levels: int) -> Rebuilder:
        """Returns a builder of expressions in which the levels of this list stand for a constant's
        universe parameters.

        Raises:
            Damaged: these are not as many.
        """
        image = self._image
        given = image.linked(levels)
        if len(given) != len(parameters):
            raise Damaged("it uses a constant with a wrong number of universe levels")
        if all(self._is_parameter(*each) for each in zip(given, parameters, strict=True)):
            return self
        known = dict(zip(parameters, map(self._level, given), strict=True))
        for each in known.values():
            if not each & 1:
                share(each)
        return Rebuilder(self._kernel, image, self._known_as, known)

    def _make(self, addresses: Iterable[int]) -> None:
        """Makes the objects of expressions that have none yet, each after its parts.

        Raises:
            Damaged: an expression is malformed, or comes before its parts.
        """
        image, kernel, done = self._image, self._kernel, self._done
        words, base = image.words, image.base
        app, lam, forall, const = kernel.app, kernel.lam, kernel.forall, kernel.const
        names, name, level_list = self._names, self.name, self._level_list
        try:
            for at in addresses:
                if at in done:
                    continue
                index = (at - base) >> 3
                kind = words[index] >> 48
                if kind == layouts.APP:
                    done[at] = app(done[words[index + 1]], done[words[index + 2]])
                elif kind in (layouts.LAM, layouts.FORALL):
                    binder = words[index + 5] & 0xFF
                    if binder >= _BINDER_KINDS or words[index] >> 32 & 0xFFFF < _BINDER_BYTES:
                        raise Damaged("it holds a malformed binder")
                    of = words[index + 1]
                    done[at] = (lam if kind == layouts.LAM else forall)(
                        names.get(of) or name(of),
                        done[words[index + 2]],
                        done[words[index + 3]],
                        binder,
                    )
                elif kind == layouts.CONST:
                    of = words[index + 1]
                    done[at] = const(names.get(of) or name(of), level_list(words[index + 2]))
                elif kind == layouts.LET:
                    parts = [done[words[index + n]] for n in (2, 3, 4)]
                    done[at] = kernel.let(name(words[index + 1]), *parts, image.flag(index, 8))
                elif kind == layouts.MDATA:
                    done[at] = done[words[index + 2]]
                elif kind == layouts.PROJ:
                    number = kernel.nat(image.small(words[index + 2]))
                    part = done[words[index + 3]]
                    done[at] = kernel.proj(name(words[index + 1]), number, part)
                else:
                    done[at] = self._leaf(kind, words[index + 1])
        except KeyError:
            raise Damaged(AHEAD) from None

    def _leaf(self, kind: int, word: int) -> int:
        kernel = self._kernel
        if kind == layouts.BVAR:
            number = self._image.small(word)
            if number > _MAX_BVAR:
                raise Damaged("it holds a bound variable that is too far away")
            return int(kernel.bvar(kernel.nat(number)))
        if kind == layouts.SORT:
            return int(kernel.sort(self._level(word)))
        value = self._image.literal(word)
        made = kernel.text(value) if isinstance(value, str) else kernel.nat(value)
        return int(kernel.lit(kernel.construct(int(isinstance(value, str)), made)))

    def _level_list(self, address: int) -> int:
        found = self._level_lists.get(address)
        if found is None:
            found = self._kernel.list(map(self._level, self._image.linked(address)))
            self._level_lists[address] = found
        # Each list, name and level may come to stand in many places.
        if not found & 1:
            share(found)
        return found

    def _is_parameter(self, level: int, name: Name) -> bool:
        words = self._image.words
        if level == BOXED_ZERO:
            return False
        index = self._image.index(level)
        is_parameter = words[index] >> 48 == layouts.LEVEL_PARAM
        return is_parameter and self._image.name(words[index + 1]) == name

    def _level(self, address: int) -> int:
        levels, kernel = self._levels, self._kernel
        make = {
            layouts.LEVEL_SUCC: kernel.level_succ,
            layouts.LEVEL_MAX: kernel.level_max,
            layouts.LEVEL_IMAX: kernel.level_imax,
        }
        for at, kind, fields in self._image.levels_behind(address, levels):
            if kind == layouts.LEVEL_PARAM:
                of = self._image.name(fields[0])
                levels[at] = self._parameters.get(of) or kernel.level_param(self.name(fields[0]))
            else:
                levels[at] = make[kind](*map(levels.__getitem__, fields))
        return levels[address]


# Rebuilds the `Lean.ConstantInfo` of an image's constants, in the layout of the judge's Lean.

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
