"""What a compiled file declares and refers to, as far as axioms go.

An unsafe constant proves nothing, as Lean's kernel keeps it out of safe ones; so only a ``sorry``
in it counts, which its author should hear of. Where a safe constant leads to it all the same (a
file can bypass the kernel), the walk goes on through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from leanq.lean.audit.image import Image, Name, Raw


@dataclass(frozen=True, slots=True)
class Survey:
    """What a file declares and refers to.

    Attributes:
        axioms: its own axioms.
        behind_safe: imported constants that its safe constants lead to.
        behind_any: the same of all its constants.
    """

    axioms: frozenset[Name]
    behind_safe: frozenset[Name]
    behind_any: frozenset[Name]


def survey(
    image: Image, constants: Mapping[Name, Raw], known: Mapping[Name, AbstractSet[Name]]
) -> Survey:
    """What the constants of a file refer to; ``known``: that of some of them."""
    references = dict(known)
    for name, raw in constants.items():
        if name not in references:
            references[name] = image.references(raw)
    safe = [name for name, raw in constants.items() if not raw.unsafe]
    return Survey(
        axioms=frozenset(name for name, raw in constants.items() if raw.kind == "axiom"),
        behind_safe=frozenset(reachable(safe, references) - constants.keys()),
        behind_any=frozenset(set().union(*references.values()) - constants.keys()),
    )


def reachable(start: Iterable[Name], references: Mapping[Name, AbstractSet[Name]]) -> set[Name]:
    """All names that lead there by ``references``, those that are no key of it included."""
    seen = set(start)
    todo = list(seen)
    while todo:
        fresh = references.get(todo.pop(), set()) - seen
        seen |= fresh
        todo += fresh
    return seen
