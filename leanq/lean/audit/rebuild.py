"""Rebuilds an image's constants as Lean's own objects, by Lean's constructors.

It does not read an expression's hashes, depths and flags: Lean computes them again. Metadata means
nothing to the kernel and is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from leanq.lean.audit.image import (
    AHEAD,
    APP,
    ASTRAY,
    BOXED_ZERO,
    BVAR,
    CONST,
    FORALL,
    LAM,
    LET,
    LEVEL_IMAX,
    LEVEL_MAX,
    LEVEL_PARAM,
    LEVEL_SUCC,
    LIT,
    MDATA,
    NUMBER_LIT,
    PROJ,
    SORT,
    STRING_LIT,
    Image,
    Name,
)
from leanq.lean.audit.kernel import Kernel, share
from leanq.lean.audit.layouts import Damaged, shape

# An expression keeps its loose bound variables in 20 bits, and a level its depth in 24.
_MAX_BVAR = (1 << 20) - 2
_MAX_LEVELS = 1 << 16
_BINDER_KINDS = 4
_RENAMED = "_candidate"
_REGULAR_HINT = shape(2, 0)


class Rebuilder:
    """The objects of one image, each rebuilt once.

    Attributes:
        nodes: how many expressions were made.

    ``renamed``: constants that the kernel shall know by another name.
    """

    def __init__(self, kernel: Kernel, image: Image, renamed: Collection[Name] = ()) -> None:
        self._kernel, self._image = kernel, image
        self._names: dict[int, int] = {}
        self._by_parts: dict[Name, int] = {(): BOXED_ZERO}
        self._renamed = {name: self._made((_RENAMED, *name)) for name in renamed}
        self._levels: dict[int, int] = {BOXED_ZERO: kernel.level_zero(1)}
        self._level_lists: dict[int, int] = {}
        self._name_lists: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._const_names: dict[int, Name] = {}
        self.nodes = 0

    @property
    def all_names(self) -> Collection[Name]:
        """All names that were made."""
        return self._by_parts.keys()

    def name_of(self, parts: Name) -> int:
        """Returns the name of a constant."""
        return self._renamed.get(parts) or self._made(parts)

    def _made(self, parts: Name) -> int:
        known, start = self._by_parts, len(parts)
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
        image, kernel = self._image, self._kernel
        words, base, done = image.words, image.base, self._done
        app, lam, forall = kernel.app, kernel.lam, kernel.forall
        const_names, name = self._const_names, self.name
        local: dict[int, int] = {}
        get = local.get
        found: set[Name] = set()
        todo = list(roots)
        pop, push = todo.pop, todo.append
        limit = steps = image.steps
        used = list(roots)
        use = used.append
        while todo:
            at = todo[-1]
            if at in local:
                pop()
                continue
            offset = at - base
            if offset < 0 or offset & 7:
                raise Damaged(ASTRAY)
            index = offset >> 3
            kind = words[index] >> 48
            steps -= 1
            if steps < 0:
                raise Damaged("it takes too long to read")
            # Most are applications and binders, so these two have the same branch spelt out.
            if kind == APP:
                a, b = words[index + 1], words[index + 2]
                x, y = get(a), get(b)
                if x is None or y is None:
                    if a >= at or b >= at:
                        raise Damaged(AHEAD)
                    if x is None:
                        push(a)
                    if y is None:
                        push(b)
                    continue
                use(a)
                use(b)
                local[at] = done.get(at) or app(x, y)
            elif kind in (LAM, FORALL):
                a, b = words[index + 2], words[index + 3]
                x, y = get(a), get(b)
                if x is None or y is None:
                    if a >= at or b >= at:
                        raise Damaged(AHEAD)
                    if x is None:
                        push(a)
                    if y is None:
                        push(b)
                    continue
                binder = image.scalar(index, 8)
                if binder >= _BINDER_KINDS:
                    raise Damaged("it holds a malformed binder")
                use(a)
                use(b)
                make = lam if kind == LAM else forall
                local[at] = done.get(at) or make(name(words[index + 1]), x, y, binder)
            elif kind == CONST:
                made = done.get(at)
                if made is None:
                    of, levels = words[index + 1], words[index + 2]
                    const_names[at] = image.name(of)
                    made = done[at] = kernel.const(name(of), self._level_list(levels))
                found.add(const_names[at])
                local[at] = made
            elif kind == LET:
                parts = [words[index + n] for n in (2, 3, 4)]
                if missing := [each for each in parts if each not in local]:
                    if max(parts) >= at:
                        raise Damaged(AHEAD)
                    todo += missing
                    continue
                used += parts
                local[at] = done.get(at) or kernel.let(
                    name(words[index + 1]), *map(local.__getitem__, parts), image.flag(index, 8)
                )
            elif kind in (MDATA, PROJ):
                a = words[index + (2 if kind == MDATA else 3)]
                x = get(a)
                if x is None:
                    if a >= at:
                        raise Damaged(AHEAD)
                    push(a)
                    continue
                use(a)
                if kind == MDATA:
                    local[at] = x
                    pop()
                    continue
                found.add(image.name(words[index + 1]))
                number = kernel.nat(image.small(words[index + 2]))
                local[at] = done.get(at) or kernel.proj(name(words[index + 1]), number, x)
            else:
                local[at] = done.get(at) or self._leaf(kind, words[index + 1])
            pop()
        image.spend(limit - steps)  # beside what names and literals have spent
        self.nodes += len(local)
        self._count_uses(local, used)
        done.update(local)
        return [local[each] for each in roots], found

    def in_order(self, addresses: Iterable[int]) -> dict[int, int]:
        """Returns the objects for expressions, by address; each comes after its parts.

        For files of a library, many times faster than `expressions`, which an image's every
        constant would enter anew.

        Raises:
            Damaged: an expression is malformed, or comes before its parts.
        """
        image, kernel = self._image, self._kernel
        words, base = image.words, image.base
        app, lam, forall, const = kernel.app, kernel.lam, kernel.forall, kernel.const
        done: dict[int, int] = {}
        names, name, level_list = self._names, self.name, self._level_list
        try:
            for at in addresses:
                index = (at - base) >> 3
                kind = words[index] >> 48
                if kind == APP:
                    done[at] = app(done[words[index + 1]], done[words[index + 2]])
                elif kind in (LAM, FORALL):
                    binder = words[index + 5] & 0xFF
                    if binder >= _BINDER_KINDS:
                        raise Damaged("it holds a malformed binder")
                    of = words[index + 1]
                    done[at] = (lam if kind == LAM else forall)(
                        names.get(of) or name(of),
                        done[words[index + 2]],
                        done[words[index + 3]],
                        binder,
                    )
                elif kind == CONST:
                    of = words[index + 1]
                    done[at] = const(names.get(of) or name(of), level_list(words[index + 2]))
                elif kind == LET:
                    parts = [done[words[index + n]] for n in (2, 3, 4)]
                    done[at] = kernel.let(name(words[index + 1]), *parts, image.flag(index, 8))
                elif kind == MDATA:
                    done[at] = done[words[index + 2]]
                elif kind == PROJ:
                    number = kernel.nat(image.small(words[index + 2]))
                    part = done[words[index + 3]]
                    done[at] = kernel.proj(name(words[index + 1]), number, part)
                else:
                    done[at] = self._leaf(kind, words[index + 1])
        except KeyError:
            raise Damaged(AHEAD) from None
        self.nodes += len(done)
        return done

    def _count_uses(self, local: dict[int, int], used: list[int]) -> None:
        """Notes what stands in several places, in this constant or in one before it as well."""
        done = self._done
        used += local.keys() & done.keys()
        for at, times in Counter(used).items():
            if times > 1 or at in done:
                share(local[at])

    def _leaf(self, kind: int, word: int) -> int:
        kernel = self._kernel
        if kind == BVAR:
            number = self._image.small(word)
            if number > _MAX_BVAR:
                raise Damaged("it holds a bound variable that is too far away")
            return int(kernel.bvar(kernel.nat(number)))
        if kind == SORT:
            return int(kernel.sort(self._level(word)))
        if kind == LIT:
            return int(kernel.lit(self._literal(word)))
        raise Damaged("it holds a malformed expression, or a free or meta variable")

    def _literal(self, address: int) -> int:
        image, kernel = self._image, self._kernel
        index = image.index(address)
        kind, value = image.words[index] >> 48, image.words[index + 1]
        if kind == NUMBER_LIT:
            return kernel.construct(0, kernel.nat(image.natural(value)))
        if kind == STRING_LIT:
            return kernel.construct(1, kernel.text(image.string(value)))
        raise Damaged("it holds a malformed literal")

    def _level_list(self, address: int) -> int:
        found = self._level_lists.get(address)
        if found is None:
            found = self._kernel.list(map(self._level, self._image.linked(address)))
            self._level_lists[address] = found
        # Each list, name and level may come to stand in many places.
        if not found & 1:
            share(found)
        return found

    def _level(self, address: int) -> int:
        levels, image, kernel = self._levels, self._image, self._kernel
        words = image.words
        todo = [address]
        while todo:
            at = todo[-1]
            if at in levels:
                todo.pop()
                continue
            image.spend(1)
            index = image.index(at)
            kind = words[index] >> 48
            if kind == LEVEL_PARAM:
                levels[at] = kernel.level_param(self.name(words[index + 1]))
                continue
            if kind not in (LEVEL_SUCC, LEVEL_MAX, LEVEL_IMAX):
                raise Damaged("it holds a malformed universe level")
            parts = [words[index + n] for n in range(1, 2 if kind == LEVEL_SUCC else 3)]
            if missing := [each for each in parts if each not in levels]:
                if max(missing) >= at:
                    raise Damaged(AHEAD)
                todo += missing
            elif kind == LEVEL_SUCC:
                levels[at] = kernel.level_succ(levels[parts[0]])
            else:
                make = kernel.level_max if kind == LEVEL_MAX else kernel.level_imax
                levels[at] = make(levels[parts[0]], levels[parts[1]])
            if len(levels) + len(todo) > _MAX_LEVELS:
                raise Damaged("it holds too many universe levels")
        return levels[address]
