"""A statement with notes for Lean's printer, so that the printed text tells the whole statement.

Lean prints an application without its implicit and instance arguments. The annotator looks at each
application and adds a note where a reader could not tell what is left out:

- An instance argument has to be the one that the header's instances lead to. If it is the text's
  own, no instance of the header, or one for another type, the application is printed whole.
- An implicit argument has to follow from what is printed. If it does not, an explicit argument is
  printed with its type, or the application whole. A printed argument tells something only by its
  own type, which may differ from the one that the function asks for. A hidden proof tells nothing.
- An application is printed with its type if that is not the one that is expected there.
- A number is printed with its type unless that is ``Nat``.

A proof does not change what a statement means, so nothing inside of one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leanq.lean.audit.image import (
    APP,
    BVAR,
    CONST,
    EXPRESSION_PARTS,
    FORALL,
    LAM,
    LET,
    LEVEL_MAX,
    LEVEL_PARAM,
    LEVEL_SUCC,
    LIT,
    MDATA,
    PROJ,
    SORT,
    Name,
)
from leanq.lean.audit.kernel import Kernel, KernelLimitError, share

WHOLE: Mapping[str, bool] = {"pp.explicit": True, "pp.notation": False, "pp.coercions": False}
"""The options by which Lean prints an application with all its arguments."""
_TYPED: Mapping[str, bool] = {"pp.analysis.needsType": True}
_NUMBER: Mapping[str, bool] = {"pp.numericTypes": True}
_RAW: Mapping[str, bool] = {"pp.natLit": True}

_EXPLICIT, _INSTANCE = 0, 3
_THEOREM = 2
_NAT: Name = ("Nat",)
_OF_NAT: Name = ("OfNat", "ofNat")
# All its instances for one proposition are equal.
_DECIDABLE = (CONST, "Decidable")
_FAMILIES = tuple((CONST, f"Decidable{each}") for each in ("Pred", "Rel", "Eq"))
_NATURAL, _STRING = (CONST, "Nat"), (CONST, "String")
_MARKS = frozenset((CONST, each) for each in ("optParam", "autoParam", "outParam", "semiOutParam"))
_OUT = frozenset({("outParam",), ("semiOutParam",)})
_MOST_VISITS = 50_000

Key = object
"""The structure of an expression, to be compared; without universe levels."""


@dataclass(frozen=True, slots=True)
class _Local:
    """A variable that is bound around an expression."""

    type_: int
    is_instance: bool


_Locals = tuple[_Local, ...]


@dataclass(frozen=True, slots=True)
class _Signature:
    """The type of a function.

    Attributes:
        kinds: of each binder, as Lean numbers them.
        types: of each binder.
        told: the parameters that follow from each of these types.
        mentioned: the parameters that each of them mentions.
        result: the type behind the binders.
        told_by_result: the parameters that follow from it.
        depth: how many variables are bound around the type.
        is_proof: whether the function is a theorem.
        hides_levels: whether its arguments do not tell all its universe levels.
    """

    kinds: tuple[int, ...]
    types: tuple[int, ...]
    told: tuple[frozenset[int], ...]
    mentioned: tuple[frozenset[int], ...]
    result: int
    told_by_result: frozenset[int]
    depth: int = 0
    is_proof: bool = False
    hides_levels: bool = False


class Annotator:
    """Adds the notes to statements.

    Args:
        kernel: its environment has all that the statements refer to.
        own: what the text declares, without its theorems.
        is_instance: whether a constant is an instance of the header's.

    Attributes:
        hides_levels: whether the last statement needs its universe levels to be printed.
    """

    def __init__(
        self, kernel: Kernel, own: Collection[Name], is_instance: Callable[[int], bool]
    ) -> None:
        self._kernel, self._own, self._is_instance = kernel, own, is_instance
        self._name = kernel.read_name
        self._cells: dict[int, tuple[int, ...]] = {}
        self._signatures: dict[Name, _Signature] = {}
        self._keys: dict[tuple[int, int], Key] = {}
        self._types: dict[tuple[int, _Locals], Key] = {}
        self._notes: dict[tuple[str, ...], int] = {}
        self._left = 0
        self.hides_levels = False

    def annotated(self, statement: int) -> int:
        """A closed expression with notes.

        Raises:
            KernelLimitError: it is too large.
        """
        self._left = _MOST_VISITS
        self.hides_levels = False
        return self._visit(statement, (), (SORT,))

    def _visit(self, at: int, around: _Locals, expected: Key) -> int:
        """An expression with notes; ``expected``: its type, if what is around it tells that."""
        self._spend()
        kind, word = self._kind(at), self._word
        if kind in (FORALL, LAM):
            type_ = self._visit(word(at, 2), around, (SORT,))
            variable = (BVAR, "around", len(around))
            expected = self._result(expected, variable) if kind == LAM else (SORT,)
            body = self._visit(word(at, 3), self._inside(at, around), expected)
            if (type_, body) == (word(at, 2), word(at, 3)):
                return at
            make = self._kernel.forall if kind == FORALL else self._kernel.lam
            return int(make(*self._used(word(at, 1), type_, body), self._binder(at)))
        if kind == LET:
            type_ = self._visit(word(at, 2), around, (SORT,))
            value = self._visit(word(at, 3), around, self._key(word(at, 2), len(around)))
            body = self._visit(word(at, 4), self._inside(at, around), expected)
            parts = self._used(word(at, 1), type_, value, body)
            return int(self._kernel.let(*parts, self._kernel.byte(at, 4, 8)))
        if kind == PROJ:
            inner = self._visit(word(at, 3), around, None)
            return int(self._kernel.proj(*self._used(word(at, 1), word(at, 2), inner)))
        if kind == APP:
            return self._visit_application(at, around, expected)
        if kind == LIT:
            return self._noted(at, _RAW)
        if kind == CONST:
            self.hides_levels |= self._signature(at, around).hides_levels  # type: ignore[union-attr]
        return at

    def _visit_application(self, at: int, around: _Locals, expected: Key) -> int:
        head, args = self._spine(at)
        signature = self._signature(head, around)
        if signature is None:
            inner = self._visit(head, around, None)
            made = [self._visit(each, around, None) for each in args]
            note = None if self._takes(head, LAM, len(args)) else WHOLE
            return self._noted(self._applied(at, head, args, inner, made), note)
        if signature.is_proof:
            return at
        self.hides_levels |= signature.hides_levels
        type_ = None if expected is None else self._type(at, around)
        is_other = expected not in (None, type_) and not self._is_proof(at, around)
        is_whole = not self._has_defaults(head, args, signature, around)
        if not is_whole and self._is_number(head, args):
            is_natural = self._is_natural(args[0]) and expected in (None, _NATURAL)
            return self._noted(at, None if is_natural else _NUMBER)
        wanted = self._asked(args, signature, around)
        known, typed = set[int](), set[int]()
        if not is_whole:
            from_result = expected is not None and not is_other
            known = self._known(args, signature, around, typed, wanted, from_result=from_result)
            while hidden := self._hidden(args, signature, known):
                more = self._to_type(args, signature, around, hidden, wanted)
                if more is None or more in typed:
                    is_whole = True
                    break
                typed.add(more)
                known = self._known(args, signature, around, typed, wanted, from_result=from_result)
        made = []
        for number, arg in enumerate(args):
            asked = wanted[number] if number < len(wanted) else None
            if is_whole:
                made.append(self._visit(arg, around, asked))
            elif self._kind_of(signature, number) != _EXPLICIT:
                made.append(arg)
            elif number in typed:
                made.append(self._noted(self._visit(arg, around, asked), _TYPED))
            else:
                is_told = self._is_told(signature, number, known)
                made.append(self._visit(arg, around, asked if is_told else None))
        applied = self._applied(at, head, args, head, made)
        note = {**(WHOLE if is_whole else {}), **(_TYPED if is_other else {})}
        return self._noted(applied, note or None)

    def _hidden(self, args: Sequence[int], signature: _Signature, known: set[int]) -> list[int]:
        """The implicit arguments that nothing tells."""
        count = min(len(args), len(signature.kinds))
        return [n for n in range(count) if signature.kinds[n] != _EXPLICIT and n not in known]

    def _to_type(
        self,
        args: Sequence[int],
        signature: _Signature,
        around: _Locals,
        hidden: list[int],
        wanted: Sequence[Key],
    ) -> int | None:
        """An explicit argument whose type tells a hidden one, unless that is the text's own."""
        if any(self._holds_own(args[number]) for number in hidden):
            return None
        for number in range(min(len(args), len(signature.kinds))):
            if (
                signature.kinds[number] == _EXPLICIT
                and not signature.told[number].isdisjoint(hidden)
                and self._is_of(args[number], around, wanted[number])
                and not self._is_proof(args[number], around)
            ):
                return number
        return None

    def _known(
        self,
        args: Sequence[int],
        signature: _Signature,
        around: _Locals,
        typed: set[int],
        wanted: Sequence[Key],
        *,
        from_result: bool,
    ) -> set[int]:
        """The arguments that are printed, or that follow from the others."""
        kinds, types = signature.kinds, signature.types
        count = min(len(args), len(kinds))
        known = {number for number in range(count) if kinds[number] == _EXPLICIT}
        if from_result and len(args) <= len(kinds):
            known |= signature.told_by_result.union(*signature.told[len(args) :])
        for number in range(count):
            if kinds[number] != _EXPLICIT:
                continue
            told, arg = signature.told[number], args[number]
            if told <= known:
                continue
            if number in typed or self._tells_type(arg, around):
                if self._is_of(arg, around, wanted[number]):
                    known |= told
            elif (
                self._kind(arg) == LAM
                and self._kind(types[number]) == FORALL
                and self._key(self._word(arg, 2), len(around)) == _domain(wanted[number])
            ):
                known |= self._rigid(self._word(types[number], 2), number)
        for number in range(count):
            if kinds[number] == _INSTANCE:
                known |= self._told_by_class(types[number], number, known) | {number}
        return known

    def _told_by_class(self, type_: int, depth: int, known: set[int]) -> set[int]:
        """What a class says of its output parameters, once the others are known."""
        head, args = self._spine(type_)
        signature = self._signature(head, ()) if self._kind(head) == CONST else None
        if signature is None:
            return set()
        inputs, outputs = set[int](), set[int]()
        for number, arg in enumerate(args):
            told = self._rigid(arg, depth)
            if number < len(signature.types) and self._is_output(signature.types[number]):
                outputs |= told
            else:
                inputs |= told
        return outputs if inputs <= known else set()

    def _is_output(self, type_: int) -> bool:
        head, _ = self._spine(type_)
        return self._kind(head) == CONST and self._name(self._word(head, 1)) in _OUT

    def _tells_type(self, at: int, around: _Locals) -> bool:
        """Whether what is printed of an expression tells its type."""
        kind = self._kind(at)
        if kind == LAM:
            return self._tells_type(self._word(at, 3), self._inside(at, around))
        if kind == LET:
            return self._tells_type(self._word(at, 4), self._inside(at, around))
        if kind != APP:
            return True
        head, args = self._spine(at)
        signature = self._signature(head, around)
        if signature is None:
            return self._tells_type(head, around)
        if self._is_proof(at, around):
            return False
        if self._is_number(head, args):
            return True
        wanted = self._asked(args, signature, around)
        known = self._known(args, signature, around, set(), wanted, from_result=False)
        return not self._hidden(args, signature, known)

    def _has_defaults(
        self, head: int, args: Sequence[int], signature: _Signature, around: _Locals
    ) -> bool:
        """Whether all instance arguments are those that the header leads to."""
        if more := args[len(signature.kinds) :]:
            result = signature.result
            if self._kind(result) == BVAR:
                place = len(signature.kinds) - 1 - (self._word(result, 1) >> 1)
                result = args[place] if place >= 0 else result
            if not self._takes(result, FORALL, len(more)):
                return False
        return all(
            self._is_default(args[number], around, required)
            for number, required in self._required(args, signature, around)
        )

    def _takes(self, at: int, binder: int, count: int) -> bool:
        """Whether something binds so many variables, each for an explicit argument."""
        for _ in range(count):
            if self._kind(at) != binder or self._binder(at) != _EXPLICIT:
                return False
            at = self._word(at, 3)
        return True

    def _asked(self, args: Sequence[int], signature: _Signature, around: _Locals) -> list[Key]:
        """The types that a function asks for its arguments."""
        values = [self._key(each, len(around)) for each in args]
        return [
            _without_value(self._key(type_, signature.depth, values[:number]))
            for number, type_ in enumerate(signature.types[: len(args)])
        ]

    def _required(
        self, args: Sequence[int], signature: _Signature, around: _Locals
    ) -> Iterator[tuple[int, Key]]:
        """The instance arguments, and the class that each has to be of."""
        if _INSTANCE in signature.kinds:
            for number, asked in enumerate(self._asked(args, signature, around)):
                if signature.kinds[number] == _INSTANCE:
                    yield number, asked

    def _is_default(self, at: int, around: _Locals, required: Key) -> bool:
        """Whether an instance is the one that is found for a class."""
        while self._kind(at) == LAM:
            if _head_of(required) not in _FAMILIES:
                required = self._result(required, (BVAR, "around", len(around)))
                if required is None:
                    return False
            at, around = self._word(at, 3), self._inside(at, around)
        head, args = self._spine(at)
        kind = self._kind(head)
        class_ = _head_of(required)
        if class_ != _DECIDABLE and class_ not in _FAMILIES and self._type(at, around) != required:
            return False
        if kind == BVAR:
            level = len(around) - 1 - (self._word(head, 1) >> 1)
            first, is_found = level + 1, around[level].is_instance
        else:
            first = 0
            is_found = (
                kind == CONST
                and self._name(self._word(head, 1)) not in self._own
                and self._is_instance(self._word(head, 1))
            )
        if not is_found or self._is_bound(required, around, first):
            return False
        signature = self._signature(head, around)
        assert signature is not None
        told = signature.told_by_result
        return all(
            number in told or self._kind_of(signature, number) == _INSTANCE or not own
            for number, own in enumerate(map(self._holds_own, args))
        ) and all(
            self._is_default(args[number], around, each)
            for number, each in self._required(args, signature, around)
        )

    def _is_bound(self, required: Key, around: _Locals, first: int) -> bool:
        """Whether one of the variables from this one on is an instance of a class."""
        return any(
            local.is_instance and self._key(local.type_, level) == required
            for level, local in enumerate(around[first:], first)
        )

    def _is_of(self, at: int, around: _Locals, type_: Key) -> bool:
        """Whether an expression is of a type, without a look at what definitions mean."""
        while self._kind(at) == LAM and type_ is not None:
            if self._key(self._word(at, 2), len(around)) != _domain(type_):
                return False
            type_ = self._result(type_, (BVAR, "around", len(around)))
            at, around = self._word(at, 3), self._inside(at, around)
        return type_ is not None and self._type(at, around) == type_

    def _type(self, at: int, around: _Locals) -> Key:
        """The type of an expression; None where it takes more than a look at its parts."""
        found = self._types.get((at, around))
        if found is None:
            found = self._types[at, around] = self._found_type(at, around)
        return found

    def _found_type(self, at: int, around: _Locals) -> Key:
        kind = self._kind(at)
        if kind in (SORT, FORALL):
            return (SORT,)
        if kind == LIT:
            is_text = isinstance(self._kernel.literal(self._word(at, 1)), str)
            return _STRING if is_text else _NATURAL
        if kind == BVAR:
            level = len(around) - 1 - (self._word(at, 1) >> 1)
            return _without_value(self._key(around[level].type_, level))
        if kind == CONST:
            return self._key(self._kernel.info(self._word(at, 1)).type_, 0)
        if kind != APP:
            return None
        head, args = self._spine(at)
        type_ = self._type(head, around)
        for arg in args:
            type_ = self._result(type_, self._key(arg, len(around)))
        return _without_value(type_)

    def _result(self, type_: Key, value: Key) -> Key:
        """The type of what a function of this type makes of a value; None if it is not plain."""
        if not isinstance(type_, tuple) or type_[0] != FORALL:
            return None
        return self._replaced(type_[3], value, 0)

    def _replaced(self, key: Any, value: Key, inner: int) -> Key:
        """A key with a value for what is bound around it."""
        self._spend()
        kind = key[0]
        if kind == BVAR:
            return value if key == (BVAR, "bound", inner) else key
        if kind in (CONST, SORT, LIT):
            return key
        below = [self._replaced(each, value, inner) for each in key[2:-1]]
        is_inside = kind in (FORALL, LAM, LET)
        return self._made(*key[:2], *below, self._replaced(key[-1], value, inner + is_inside))

    def _made(self, kind: int, number: int, *below: Any) -> Key:
        """The key of an expression with these parts; of a function applied, that of its body."""
        if kind == APP and below[0][0] == LAM:
            return self._replaced(below[0][3], below[1], 0)
        return (kind, number, *below)

    def _is_proof(self, at: int, around: _Locals) -> bool:
        """Whether an expression may be a proof that is not printed."""
        if self._kind(at) in (BVAR, CONST, SORT, FORALL, LIT):
            return False
        type_: Any = self._type(at, around)
        while type_ is not None and type_[0] == FORALL:
            type_ = type_[3]
        head: Any = _head_of(type_)
        if head is None or head[0] in (SORT, LIT):
            return head is None
        if head[:2] == (BVAR, "around") and head[2] < len(around):
            sort = self._telescope(around[head[2]].type_, head[2]).result
            return self._kind(sort) != SORT or self._word(sort, 1) & 1 == 1
        if head[0] != CONST:
            return True
        sort = self._of_constant(self._kernel.name(head[1:])).result
        return self._kind(sort) != SORT or self._may_be_zero(self._word(sort, 1))

    def _may_be_zero(self, level: int) -> bool:
        if level & 1:
            return True
        kind = self._kind(level)
        if kind == LEVEL_MAX:
            return all(self._may_be_zero(self._word(level, number)) for number in (1, 2))
        return kind != LEVEL_SUCC

    def _is_number(self, head: int, args: Sequence[int]) -> bool:
        return (
            len(args) == 3
            and self._kind(head) == CONST
            and self._name(self._word(head, 1)) == _OF_NAT
            and self._kind(args[1]) == LIT
        )

    def _is_natural(self, type_: int) -> bool:
        return self._kind(type_) == CONST and self._name(self._word(type_, 1)) == _NAT

    def _is_told(self, signature: _Signature, number: int, known: set[int]) -> bool:
        """Whether the type of an argument follows from the arguments that are known."""
        if number >= len(signature.types):
            return False
        return signature.mentioned[number] <= known

    def _kind_of(self, signature: _Signature, number: int) -> int:
        return signature.kinds[number] if number < len(signature.kinds) else _EXPLICIT

    def _signature(self, head: int, around: _Locals) -> _Signature | None:
        """The type of what is applied; None if it is neither a constant nor a variable."""
        kind = self._kind(head)
        if kind == BVAR:
            level = len(around) - 1 - (self._word(head, 1) >> 1)
            return self._telescope(around[level].type_, level)
        if kind != CONST:
            return None
        return self._of_constant(self._word(head, 1))

    def _of_constant(self, named: int) -> _Signature:
        name = self._name(named)
        found = self._signatures.get(name)
        if found is None:
            info = self._kernel.info(named)
            params = {self._name(each) for each in self._kernel.items(info.levels)}
            found = self._telescope(
                info.type_, 0, is_proof=info.kind == _THEOREM, params=frozenset(params)
            )
            self._signatures[name] = found
        return found

    def _telescope(
        self,
        type_: int,
        depth: int,
        *,
        is_proof: bool = False,
        params: frozenset[Name] = frozenset(),
    ) -> _Signature:
        kinds, types = [], []
        while self._kind(type_) == FORALL:
            kinds.append(self._binder(type_))
            types.append(self._word(type_, 2))
            type_ = self._word(type_, 3)
        return _Signature(
            tuple(kinds),
            tuple(types),
            tuple(frozenset(self._rigid(each, n)) for n, each in enumerate(types)),
            tuple(frozenset(self._mentioned(each, n)) for n, each in enumerate(types)),
            type_,
            frozenset(self._rigid(type_, len(types))),
            depth,
            is_proof,
            hides_levels=bool(params) and not params <= self._levels_in(types),
        )

    def _levels_in(self, roots: Sequence[int]) -> set[Name]:
        """The universe parameters in some expressions."""
        found, seen = set[Name](), set[int]()
        levels: list[int] = []
        for at in self._below(roots):
            if self._kind(at) == SORT:
                levels.append(self._word(at, 1))
            elif self._kind(at) == CONST:
                levels += self._kernel.items(self._word(at, 2))
        while levels:
            level = levels.pop()
            if level & 1 or level in seen:
                continue
            seen.add(level)
            kind = self._kind(level)
            if kind == LEVEL_PARAM:
                found.add(self._name(self._word(level, 1)))
            else:
                levels += (self._word(level, n) for n in range(1, (kind & 0xFF) + 1))
        return found

    def _rigid(self, type_: int, depth: int) -> set[int]:
        """The parameters that follow from a type, of which ``depth`` are bound around it."""
        kind = self._kind(type_)
        if kind == BVAR:
            index = self._word(type_, 1) >> 1
            return {depth - 1 - index} if index < depth else set()
        if kind == FORALL:
            inner = self._rigid(self._word(type_, 3), depth + 1) - {depth}
            return self._rigid(self._word(type_, 2), depth) | inner
        if kind == LAM:
            return self._rigid(self._word(type_, 3), depth + 1) - {depth}
        if kind != APP:
            return set()
        head, args = self._spine(type_)
        if self._kind(head) != CONST:
            return set()
        return set[int]().union(*(self._rigid(each, depth) for each in args))

    def _mentioned(self, type_: int, depth: int) -> set[int]:
        """The parameters that a type mentions."""
        kind = self._kind(type_)
        if kind == BVAR:
            index = self._word(type_, 1) >> 1
            return {depth - 1 - index} if index < depth else set()
        parts = EXPRESSION_PARTS[kind]
        found = set[int]()
        for part in parts:
            is_inside = kind in (FORALL, LAM, LET) and part == parts[-1]
            below = self._mentioned(self._word(type_, part), depth + is_inside)
            found |= below - {depth} if is_inside else below
        return found

    def _key(self, at: int, depth: int, values: Sequence[Key] = ()) -> Key:
        """The structure of an expression with values for the innermost variables around it."""
        if values:
            return self._new_key(at, depth, values, 0)
        found = self._keys.get((at, depth))
        if found is None:
            found = self._keys[at, depth] = self._new_key(at, depth, values, 0)
        return found

    def _new_key(self, at: int, depth: int, values: Sequence[Key], inner: int) -> Key:
        self._spend()
        kind, word = self._kind(at), self._word
        if kind == BVAR:
            index = word(at, 1) >> 1
            if index < inner:
                return (BVAR, "bound", index)
            index -= inner
            if index < len(values):
                return values[len(values) - 1 - index]
            return (BVAR, "around", depth - 1 - (index - len(values)))
        if kind == CONST:
            return (CONST, *self._name(word(at, 1)))
        if kind == SORT:
            return (SORT,)
        if kind == LIT:
            return (LIT, self._kernel.literal(word(at, 1)))
        parts = EXPRESSION_PARTS[kind]
        below = [
            self._new_key(
                word(at, part),
                depth,
                values,
                inner + (kind in (FORALL, LAM, LET) and part == parts[-1]),
            )
            for part in parts
        ]
        return self._made(kind, word(at, 2) if kind == PROJ else 0, *below)

    def _holds_own(self, at: int) -> bool:
        """Whether an expression refers to what the text declares."""
        return any(
            self._kind(each) == CONST and self._name(self._word(each, 1)) in self._own
            for each in self._below([at])
        )

    def _below(self, roots: Sequence[int]) -> Iterator[int]:
        """All expressions in some, each once."""
        seen, todo = set(roots), list(roots)
        while todo:
            self._spend()
            at = todo.pop()
            yield at
            fresh = {self._word(at, part) for part in EXPRESSION_PARTS[self._kind(at)]} - seen
            seen |= fresh
            todo += fresh

    def _spine(self, at: int) -> tuple[int, list[int]]:
        """What is applied, and to which arguments."""
        args = []
        cell = self._cell(at)
        while cell[0] == APP:
            args.append(cell[2])
            at = cell[1]
            cell = self._cell(at)
        self._spend(len(args) + 1)
        args.reverse()
        return at, args

    def _inside(self, at: int, around: _Locals) -> _Locals:
        is_instance = self._kind(at) != LET and self._binder(at) == _INSTANCE
        return (*around, _Local(self._word(at, 2), is_instance))

    def _binder(self, at: int) -> int:
        return self._kernel.byte(at, 3, 8)

    def _cell(self, at: int) -> tuple[int, ...]:
        """The kind of an expression or a level, and its fields; of metadata those behind it."""
        found = self._cells.get(at)
        if found is None:
            found = self._kernel.cell(at)
            if found[0] == MDATA:
                found = self._cell(found[2])
            self._cells[at] = found
        return found

    def _kind(self, at: int) -> int:
        return self._cell(at)[0]

    def _word(self, at: int, number: int) -> int:
        return self._cell(at)[number]

    def _spend(self, visits: int = 1) -> None:
        self._left -= visits
        if self._left < 0:
            raise KernelLimitError("the statement is too large")

    def _applied(
        self, at: int, head: int, args: Sequence[int], new_head: int, new_args: Sequence[int]
    ) -> int:
        """The application with other parts; itself if they are the same."""
        if new_head == head and [*args] == [*new_args]:
            return at
        made = new_head
        for each in new_args:
            made = int(self._kernel.app(*self._used(made, each)))
        return made

    def _noted(self, at: int, options: Mapping[str, bool] | None) -> int:
        """An expression that is printed with these options."""
        if options is None:
            return at
        key = tuple(options)
        if key not in self._notes:
            self._notes[key] = self._kernel.note(options)
        return int(self._kernel.mdata(*self._used(self._notes[key], at)))

    @staticmethod
    def _used(*objects: Any) -> tuple[Any, ...]:
        for each in objects:
            if not each & 1:
                share(each)
        return objects


def _head_of(key: Any) -> Key:
    while isinstance(key, tuple) and key and key[0] == APP:
        key = key[2]
    return key


def _domain(type_: Any) -> Key:
    """What a function type takes; None for another type."""
    return type_[2] if type_ is not None and type_[0] == FORALL else None


def _without_value(type_: Any) -> Key:
    """The type of a parameter without the mark that it has a default value, or is an output."""
    while _head_of(type_) in _MARKS:
        while type_[2] not in _MARKS:
            type_ = type_[2]
        type_ = type_[3]
    return type_
