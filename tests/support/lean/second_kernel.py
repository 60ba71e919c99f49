"""A second kernel: types of Lean's, inferred and compared as simply as can be.

It shares nothing with Lean's kernel or with leanq, and is there to confirm what they accept. It is
slow, knows no quotients and no text as a list of characters, takes inductive types for granted, and
compares levels by trying values. What it cannot confirm is an `UnconfirmedError`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from support.lean.second_reader import Tree, Trees

_NAT = ("Nat",)
_OPERATIONS: dict[tuple[str, str], Callable[[int, int], int]] = {
    ("Nat", "add"): lambda m, n: m + n,
    ("Nat", "sub"): lambda m, n: max(m - n, 0),
    ("Nat", "mul"): lambda m, n: m * n,
    ("Nat", "div"): lambda m, n: m // n if n else 0,
    ("Nat", "mod"): lambda m, n: m % n if n else m,
    ("Nat", "gcd"): math.gcd,
}
_MOST_STEPS = 300_000


class UnconfirmedError(Exception):
    """It is wrong, or beyond this kernel."""


class SecondKernel:
    """Confirms constants.

    Args:
        trees: of all constants.
        constants: what there is, as :class:`support.lean.second_reader.SecondReader` gives it.
    """

    def __init__(self, trees: Trees, constants: Mapping[Tree, Tree]) -> None:
        self._make, self._constants = trees.make, constants
        self._types: dict[int, Tree] = {}
        self._inferred: dict[int, tuple[Tree, Tree]] = {}
        self._loose: dict[int, tuple[int, Tree]] = {}
        self._steps = 0

    def confirm(self, name: Tree) -> None:
        """Raises `UnconfirmedError` unless a definition, theorem or opaque value has its type."""
        kind, _, parameters, type_, value, *_ = self._constants[name]
        if kind not in ("definition", "theorem", "opaque"):
            raise UnconfirmedError(f"{name} is a {kind}")
        self._steps = 0
        self._inferred.clear()
        self._parameters = parameters
        self._has_no_cycle(name)
        sort = self._whnf(self._infer(type_))
        self._demand(sort[0] == "sort", "its type is none")
        if kind == "theorem":
            self._demand(self._is_zero(sort[2][0]), "a theorem of no proposition")
        self._demand(self._equal(self._infer(value), type_), f"{name} has another type")

    def _has_no_cycle(self, name: Tree) -> None:
        seen: set[Tree] = set()
        todo = [name]
        while todo:
            found = self._constants[todo.pop()]
            trees = [each for each in found if isinstance(each, tuple) and len(each) == 3]
            for tree in trees:
                for each in self._names(tree) - seen:
                    self._demand(each != name, f"{name} leads to itself")
                    seen.add(each)
                    todo.append(each)

    def _names(self, tree: Tree) -> set[Tree]:
        found, seen, todo = set(), set(), [tree]
        while todo:
            at = todo.pop()
            if id(at) in seen or not isinstance(at[0], str):
                continue
            seen.add(id(at))
            if at[0] == "const":
                found.add(at[1][0])
                self._demand(at[1][0] in self._constants, "an unknown constant")
            elif at[0] in ("app", "lam", "pi", "let", "proj"):
                todo += at[2]
        return found

    def _demand(self, is_so: bool, otherwise: str) -> None:
        self._steps += 1
        if not is_so or self._steps > _MOST_STEPS:
            raise UnconfirmedError(otherwise if not is_so else "it takes too long")

    # Trees

    def _apply(self, head: Tree, arguments: list[Tree]) -> Tree:
        for each in arguments:
            head = self._make("app", (), head, each)
        return head

    def _spine(self, tree: Tree) -> tuple[Tree, list[Tree]]:
        arguments = []
        while tree[0] == "app":
            tree, last = tree[2]
            arguments.append(last)
        return tree, arguments[::-1]

    def _reach(self, tree: Tree) -> int:
        """How many binders around it its variables lead to."""
        if id(tree) not in self._loose:
            what, says, parts = tree
            reach = says[0] + 1 if what == "bvar" else 0
            if what in ("app", "proj"):
                reach = max(map(self._reach, parts))
            elif what in ("lam", "pi", "let"):
                reach = max(*map(self._reach, parts[:-1]), self._reach(parts[-1]) - 1)
            self._loose[id(tree)] = reach, tree
        return self._loose[id(tree)][0]

    def _map(self, tree: Tree, change: Callable[[Tree, int], Tree | None]) -> Tree:
        """Rebuilt, with what `change` says for a tree below so many binders."""
        done: dict[tuple[int, int], Tree] = {}

        def run(at: Tree, depth: int) -> Tree:
            key = id(at), depth
            if key not in done:
                found = change(at, depth)
                if found is None and at[0] in ("app", "proj"):
                    found = self._make(at[0], at[1], *(run(each, depth) for each in at[2]))
                elif found is None and at[0] in ("lam", "pi", "let"):
                    first = (run(each, depth) for each in at[2][:-1])
                    found = self._make(at[0], at[1], *first, run(at[2][-1], depth + 1))
                done[key] = at if found is None else found
            return done[key]

        return run(tree, 0)

    def _put(self, body: Tree, value: Tree) -> Tree:
        """The body of a binder with a closed value for its variable."""

        def change(at: Tree, depth: int) -> Tree | None:
            if self._reach(at) <= depth:
                return at
            if at[0] == "bvar":
                return value if at[1][0] == depth else self._make("bvar", (at[1][0] - 1,))
            return None

        return self._map(body, change)

    def _bind(self, body: Tree, local: Tree) -> Tree:
        """The other way round: a variable for a local constant."""

        def change(at: Tree, depth: int) -> Tree | None:
            return self._make("bvar", (depth,)) if at is local else None

        return self._map(body, change)

    def _at_levels(self, tree: Tree, levels: tuple[Tree, ...]) -> Tree:
        def level(at: Tree) -> Tree:
            if at[0] == "param":
                self._demand(at[1][0] in range(len(levels)), "an unknown universe parameter")
                return levels[at[1][0]]
            return self._make(at[0], at[1], *map(level, at[2]))

        def change(at: Tree, depth: int) -> Tree | None:
            if at[0] in ("sort", "const"):
                return self._make(at[0], at[1], *map(level, at[2]))
            return None

        return self._map(tree, change)

    def _local(self, type_: Tree) -> Tree:
        local = self._make("local", (len(self._types),))
        self._types[len(self._types)] = type_
        return local

    # Levels

    def _value(self, level: Tree, at: tuple[int, ...]) -> int:
        what, says, parts = level
        if what == "param":
            self._demand(says[0] in range(self._parameters), "an unknown universe parameter")
            return at[says[0]]
        values = [self._value(each, at) for each in parts]
        if what == "succ":
            return values[0] + 1
        if what == "imax" and values[1] == 0:
            return 0
        return max(values, default=0)

    def _equal_levels(self, one: Tree, other: Tree) -> bool:
        tried = itertools.product(range(4), repeat=self._parameters)
        return all(self._value(one, at) == self._value(other, at) for at in tried)

    def _is_zero(self, level: Tree) -> bool:
        return self._equal_levels(level, self._make("zero"))

    # Types

    def _infer(self, tree: Tree) -> Tree:
        if id(tree) not in self._inferred:
            self._inferred[id(tree)] = self._read_type(tree), tree
        return self._inferred[id(tree)][0]

    def _sort_of(self, type_: Tree) -> Tree:
        sort = self._whnf(self._infer(type_))
        self._demand(sort[0] == "sort", "no type where one is expected")
        return sort[2][0]

    def _read_type(self, tree: Tree) -> Tree:
        what, says, parts = tree
        make = self._make
        if what == "local":
            return self._types[says[0]]
        if what == "sort":
            self._value(parts[0], (0,) * self._parameters)
            return make("sort", (), make("succ", (), parts[0]))
        if what == "const":
            self._demand(says[0] in self._constants, "an unknown constant")
            found = self._constants[says[0]]
            self._demand(found[2] == len(parts), "too few or too many levels")
            is_safe = found[0] != "definition" or found[-1] == b"\1"
            is_safe &= found[0] not in ("axiom", "opaque") or found[-1] == b"\0"
            self._demand(is_safe, "an unsafe constant")
            return self._at_levels(found[3], parts)
        if what == "lit":
            return make("const", (("String",) if isinstance(says[0], str) else _NAT,))
        if what == "app":
            function = self._whnf(self._infer(parts[0]))
            self._demand(function[0] == "pi", "no function where one is expected")
            is_fit = self._equal(self._infer(parts[1]), function[2][0])
            self._demand(is_fit, "an argument of another type")
            return self._put(function[2][1], parts[1])
        if what in ("lam", "pi"):
            above = self._sort_of(parts[0])
            local = self._local(parts[0])
            body = self._put(parts[1], local)
            if what == "lam":
                return make("pi", (), parts[0], self._bind(self._infer(body), local))
            return make("sort", (), make("imax", (), above, self._sort_of(body)))
        if what == "let":
            self._sort_of(parts[0])
            self._demand(self._equal(self._infer(parts[1]), parts[0]), "a let of another type")
            return self._infer(self._put(parts[2], parts[1]))
        self._demand(what == "proj", "a variable without a binder")
        return self._type_of_projection(says, parts[0])

    def _type_of_projection(self, says: Tree, structure: Tree) -> Tree:
        type_ = self._whnf(self._infer(structure))
        head, arguments = self._spine(type_)
        self._demand(head[0] == "const" and head[1][0] == says[0], "a projection of another type")
        inductive = self._constants[says[0]]
        self._demand(inductive[0] == "inductive" and len(inductive[7]) == 1, "no structure")
        constructor = self._constants[inductive[7][0]]
        found = self._at_levels(constructor[3], head[2])
        before = [self._make("proj", (says[0], n), structure) for n in range(says[1])]
        for each in (*arguments[: inductive[4]], *before):
            found = self._whnf(found)
            self._demand(found[0] == "pi", "too few fields")
            found = self._put(found[2][1], each)
        found = self._whnf(found)
        self._demand(found[0] == "pi", "too few fields")
        if self._is_zero(self._sort_of(type_)):
            self._demand(self._is_zero(self._sort_of(found[2][0])), "data out of a proposition")
        return found[2][0]

    # Computing

    def _whnf(self, tree: Tree) -> Tree:
        while (found := self._step(tree, unfold=True)) is not None:
            tree = found
        return tree

    def _step(self, tree: Tree, *, unfold: bool) -> Tree | None:
        """One step of computing, None where there is none."""
        self._demand(True, "")
        head, arguments = self._spine(tree)
        what, says, parts = head
        if what == "lam" and arguments:
            return self._apply(self._put(parts[1], arguments[0]), arguments[1:])
        if what == "let":
            return self._apply(self._put(parts[2], parts[1]), arguments)
        if what == "proj":
            inner, given = self._spine(self._constructed(self._whnf(parts[0])))
            found = self._constants.get(inner[1][0]) if inner[0] == "const" else None
            if found is None or found[0] != "constructor":
                return None
            return self._apply(given[found[6] + says[1]], arguments)
        if what != "const" or says[0] not in self._constants:
            return None
        found = self._constants[says[0]]
        if found[0] == "recursor":
            return self._recurse(found, parts, arguments)
        if (computed := self._compute(says[0], arguments)) is not None:
            return computed
        if unfold and found[0] in ("definition", "theorem"):
            return self._apply(self._at_levels(found[4], parts), arguments)
        return None

    def _compute(self, name: Tree, arguments: list[Tree]) -> Tree | None:
        if name == ("Nat", "zero") and not arguments:
            return self._make("lit", (0,))
        if name == ("Nat", "succ") and len(arguments) == 1:
            number = self._whnf(arguments[0])
            return self._make("lit", (number[1][0] + 1,)) if _is_number(number) else None
        if name in _OPERATIONS and len(arguments) == 2:
            one, other = map(self._whnf, arguments)
            if _is_number(one) and _is_number(other):
                return self._make("lit", (_OPERATIONS[name](one[1][0], other[1][0]),))
        return None

    def _constructed(self, tree: Tree) -> Tree:
        """A number as what its constructor makes of another."""
        if not _is_number(tree):
            return tree
        if tree[1][0] == 0:
            return self._make("const", (("Nat", "zero"),))
        below = self._make("lit", (tree[1][0] - 1,))
        return self._apply(self._make("const", (("Nat", "succ"),)), [below])

    def _recurse(self, found: Tree, levels: Any, arguments: list[Tree]) -> Tree | None:
        _, name, _, _, _, parameters, indices, motives, minors, rules, flags = found
        first = parameters + motives + minors
        if len(arguments) <= first + indices:
            return None
        major = self._constructed(self._whnf(arguments[first + indices]))
        head, given = self._spine(major)
        by_name = {each: (fields, right) for each, fields, right in rules}
        if head[0] != "const" or head[1][0] not in by_name:
            made = self._eta_or_k(name[:-1], major, is_k=flags[0] == 1)
            if made is None:
                return None
            head, given = self._spine(made)
        fields, right = by_name[head[1][0]]
        own = given[len(given) - fields :] if fields else []
        rest = arguments[first + indices + 1 :]
        return self._apply(self._at_levels(right, levels), [*arguments[:first], *own, *rest])

    def _eta_or_k(self, name: Tree, major: Tree, *, is_k: bool) -> Tree | None:
        """What the only constructor of a type would have made of it."""
        inductive = self._constants[name]
        if inductive[0] != "inductive" or len(inductive[7]) != 1:
            return None
        type_ = self._whnf(self._infer(major))
        head, given = self._spine(type_)
        if head[0] != "const" or head[1][0] != name:
            return None
        constructor = self._constants[inductive[7][0]]
        made = self._make("const", (inductive[7][0],), *head[2])
        made = self._apply(made, given[: inductive[4]])
        if is_k:
            return made if self._equal(self._infer(made), type_) else None
        if inductive[5] or inductive[9][0] or self._is_zero(self._sort_of(type_)):
            return None
        fields = [self._make("proj", (name, n), major) for n in range(constructor[7])]
        return self._apply(made, fields)

    # Equality

    def _equal(self, one: Tree, other: Tree) -> bool:
        if one is other:
            return True
        self._demand(True, "")
        if self._alike(one, other):
            return True
        # What computes numbers is unfolded last, or a large one would be counted down.
        if self._is_operation(one) != self._is_operation(other):
            first, last = (other, one) if self._is_operation(one) else (one, other)
            if (found := self._step(first, unfold=True)) is not None:
                return self._equal(found, last)
        one, other = self._whnf(one), self._whnf(other)
        if one is other or self._alike(one, other):
            return True
        if _is_number(one) != _is_number(other):
            return self._alike(self._constructed(one), self._constructed(other))
        return self._by_proof(one, other) or self._by_eta(one, other) or self._by_eta(other, one)

    def _is_operation(self, tree: Tree) -> bool:
        head, arguments = self._spine(tree)
        return head[0] == "const" and head[1][0] in _OPERATIONS and len(arguments) == 2

    def _alike(self, one: Tree, other: Tree) -> bool:
        """Whether they are made in the same way of equal parts."""
        if one[:2] != other[:2] or len(one[2]) != len(other[2]):
            return False
        what, _, parts = one
        if what in ("sort", "const"):
            return all(map(self._equal_levels, parts, other[2]))
        if what in ("lam", "pi"):
            local = self._local(parts[0])
            bodies = (self._put(each[2][1], local) for each in (one, other))
            return self._equal(parts[0], other[2][0]) and self._equal(*bodies)
        if what in ("app", "proj"):
            return all(map(self._equal, parts, other[2]))
        return False

    def _by_proof(self, one: Tree, other: Tree) -> bool:
        """Whether they are two proofs of one proposition."""
        type_ = self._infer(one)
        return self._is_zero(self._sort_of(type_)) and self._equal(type_, self._infer(other))

    def _by_eta(self, one: Tree, other: Tree) -> bool:
        if one[0] == "lam" and other[0] != "lam":
            local = self._local(one[2][0])
            applied = self._apply(other, [local])
            return self._equal(self._put(one[2][1], local), applied)
        head, given = self._spine(one)
        found = self._constants.get(head[1][0]) if head[0] == "const" else None
        if found is None or found[0] != "constructor" or len(given) != found[6] + found[7]:
            return False
        if len(self._constants[found[4]][7]) != 1:
            return False
        fields = (self._make("proj", (found[4], n), other) for n in range(found[7]))
        types = self._equal(self._infer(one), self._infer(other))
        return types and all(map(self._equal, given[found[6] :], fields))


def _is_number(tree: Tree) -> bool:
    return tree[0] == "lit" and isinstance(tree[1][0], int)
