"""Surveys a compiled file: its declarations, their places, and their references.

An unsafe constant proves nothing, since Lean's kernel keeps it out of safe ones. So only a
``sorry`` in it counts, for its author's sake. A file can bypass the kernel and lead from a safe
constant to an unsafe one; the walk then goes on through it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from leanq.lean.audit.image import Image, Name, Raw
from leanq.lean.audit.layouts import Damaged
from leanq.lean.audit.olean import display
from leanq.lean.audit.shapes import shape

# The extension in which Lean keeps the places of declarations.
_PLACES: Name = ("Lean", "declRangeExt")


@dataclass(frozen=True, slots=True)
class Survey:
    """A file's declarations and references.

    Attributes:
        axioms: its own axioms.
        safe: its safe constants in the order of the text, each with the imported constants that it
            is the first to lead to.
        behind_any: imported constants that any of its constants lead to.
    """

    axioms: frozenset[Name]
    safe: tuple[tuple[Name, frozenset[Name]], ...]
    behind_any: frozenset[Name]

    @property
    def behind_safe(self) -> frozenset[Name]:
        """The imported constants that its safe constants lead to."""
        return frozenset[Name]().union(*(led for _, led in self.safe))


class Place(NamedTuple):
    """Where a declaration stands: lines from 1, columns from 0."""

    line: int
    column: int
    end_line: int
    end_column: int

    def is_inside(self, other: Place) -> bool:
        """Returns whether it is a part of another place, and not all of it."""
        return other[:2] <= self[:2] and self[2:] <= other[2:] and self != other


def places(image: Image) -> dict[Name, tuple[Place, Place]]:
    """Returns where the file's declarations stand, as a whole and by their names.

    A declaration is left out if its start cannot be read. Its start stands in for a damaged end,
    and the whole for a damaged place of its name: no damage behind the start hides a declaration.
    """
    words, found = image.words, {}
    entries = image.entries().get(_PLACES)
    for address in image.array(entries) if entries is not None else ():
        with contextlib.suppress(Damaged, IndexError):
            pair = image.object(address, shape(0, 2))
            ranges = image.object(words[pair + 2], shape(0, 2))
            whole = named = _place(image, words[ranges + 1])
            with contextlib.suppress(Damaged, IndexError):
                named = _place(image, words[ranges + 2])
            found[image.name(words[pair + 1])] = whole, named
    return found


def _place(image: Image, address: int) -> Place:
    words = image.words
    index = image.object(address, shape(0, 4))
    start = end = _position(image, words[index + 1])
    with contextlib.suppress(Damaged, IndexError):
        end = _position(image, words[index + 3])
    return Place(*start, *end)


def _position(image: Image, address: int) -> tuple[int, int]:
    words = image.words
    at = image.object(address, shape(0, 2))
    return image.small(words[at + 1]), image.small(words[at + 2])


def stated_theorems(image: Image, constants: Mapping[Name, Raw]) -> list[Name]:
    """Returns the theorems that the text states, in its order.

    Lean notes no place for the lemmas that it makes on its way. A structure's fields, and an
    attribute's products, stand inside another declaration.
    """
    known = {name: whole for name, (whole, _) in places(image).items() if name in constants}
    by_place = sorted(known, key=lambda name: (known[name][:2], *(-end for end in known[name][2:])))
    stated, around = [], Place(0, 0, 0, 0)
    for name in by_place:
        place = known[name]
        if place.is_inside(around):
            continue
        around = place
        if constants[name].kind == "theorem":
            stated.append(name)
    return stated


def survey(
    image: Image,
    constants: Mapping[Name, Raw],
    known: Mapping[Name, AbstractSet[Name]],
    ending: AbstractSet[Name] = frozenset(),
) -> Survey:
    """Surveys the constants of a file; ``known`` has the references of some of them. The axioms
    ``ending`` are ours."""
    references = {**known, **led_to(image, constants, constants, known)}
    at = {name: whole for name, (whole, _) in places(image).items()}
    last = Place(1 << 62, 0, 0, 0)
    seen, safe = set[Name](), []
    for name in sorted(constants, key=lambda name: at.get(name, last)):
        if not constants[name].unsafe and name not in seen:
            fresh = reachable([name], references, seen)
            seen |= fresh
            if led := frozenset(fresh - constants.keys()):
                safe.append((name, led))
    return Survey(
        axioms=frozenset(name for name, raw in constants.items() if raw.kind == "axiom") - ending,
        safe=tuple(safe),
        behind_any=frozenset(set().union(*references.values()) - constants.keys()),
    )


def led_to(
    image: Image,
    constants: Mapping[Name, Raw],
    start: Iterable[Name],
    known: Mapping[Name, AbstractSet[Name]],
) -> dict[Name, AbstractSet[Name]]:
    """Returns the file's own constants that some of them lead to, each with its references.

    ``known``: the references of some of them.
    """
    found: dict[Name, AbstractSet[Name]] = {}
    todo = [*start]
    while todo:
        name = todo.pop()
        if name in constants and name not in found:
            found[name] = known[name] if name in known else image.references(constants[name])
            todo += found[name]
    return found


def proves_itself(theorem: Name) -> str:
    """Returns the words for imports of which each was right, and all together are circular."""
    return (
        f"the imports prove {display(theorem)} by itself: several modules declare it, or what its "
        "proof uses; import one of them"
    )


def reachable(
    start: Iterable[Name],
    references: Mapping[Name, AbstractSet[Name]],
    but: AbstractSet[Name] = frozenset(),
) -> set[Name]:
    """Returns all names that ``start`` leads to by ``references``, itself included, and not through
    those in ``but``."""
    seen = set(start)
    todo = list(seen)
    while todo:
        fresh = references.get(todo.pop(), set()) - seen - but
        seen |= fresh
        todo += fresh
    return seen
