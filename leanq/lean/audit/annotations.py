"""Adds notes to a statement for Lean's printer, so that the printed text tells all of it.

Lean prints an application without its implicit and instance arguments. The annotator looks at each
application, and adds a note if a reader could not tell the missing part:

- An instance argument has to be the one that the header's instances lead to. If it is the text's
  own, no instance of the header, or one for another type, the application is printed whole.
- An implicit argument has to follow from the printed part. If it does not, an explicit argument is
  printed with its type, or the application whole. A printed argument tells something only by its
  own type, which may differ from the one that the function asks for. A hidden proof tells nothing.
- An application is printed with its type if another type is expected there.
- A number is printed with its type unless that is ``Nat``.

A proof does not change what a statement means, so nothing inside of one counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from leanq.lean.audit import shapes
from leanq.lean.audit.elaborator import Elaborator
from leanq.lean.audit.expressions import (
    EXPLICIT,
    INSTANCE,
    NATURAL,
    Expressions,
    Key,
    Local,
    Locals,
    Signature,
    domain,
    head_of,
    without_mark,
)
from leanq.lean.audit.image import Name
from leanq.lean.audit.kernel import Kernel, share

WHOLE: Mapping[str, bool] = {"pp.explicit": True, "pp.notation": False, "pp.coercions": False}
"""The options by which Lean prints an application with all its arguments."""
_TYPED: Mapping[str, bool] = {"pp.analysis.needsType": True}
_NUMBER: Mapping[str, bool] = {"pp.numericTypes": True}
_RAW: Mapping[str, bool] = {"pp.natLit": True}

_NAT: Name = ("Nat",)
_OF_NAT: Name = ("OfNat", "ofNat")
# All its instances for one proposition are equal.
_DECIDABLE = (shapes.CONST, "Decidable")
_FAMILIES = tuple((shapes.CONST, f"Decidable{each}") for each in ("Pred", "Rel", "Eq"))
_OUT = frozenset({("outParam",), ("semiOutParam",)})
_MOST_VISITS = 50_000


class Annotator(Expressions):
    """Adds the notes to statements.

    Args:
        kernel: its environment has all that the statements refer to.
        elaborator: it knows the header's instances, and has taken over that environment.
        own: the text's declarations, without its theorems.

    Attributes:
        hides_levels: whether the last statement needs its universe levels to be printed.
        hides_instances: whether it leaves out instances of the header's.
        has_variables: whether Lean may find a variable instead of one of them.
    """

    def __init__(self, kernel: Kernel, elaborator: Elaborator, own: Collection[Name]) -> None:
        super().__init__(kernel)
        self._elaborator, self._own = elaborator, own
        self._notes: dict[tuple[str, ...], int] = {}
        self._shown: Collection[int] = ()
        self.hides_levels = self.hides_instances = self.has_variables = False

    def annotated(self, statement: int, shown: Collection[int] = ()) -> int:
        """Returns a closed expression with notes.

        Args:
            shown: applications in it whose instances are to be printed.

        Raises:
            KernelLimitError: it is too large.
        """
        self._left, self._shown = _MOST_VISITS, shown
        self.hides_levels = self.hides_instances = self.has_variables = False
        return self._visit(statement, (), (shapes.SORT,))

    def unlike(self, statement: int, other: int) -> set[int]:
        """Returns the applications in a statement that have other instances in another one.

        Raises:
            KernelLimitError: they are too large.
        """
        found: set[int] = set()
        todo: list[tuple[int, int, Locals]] = [(statement, other, ())]
        while todo:
            self._spend()
            one, other, around = todo.pop()
            kind = self._kind(one)
            if self._elaborator.same(one, other) or kind != self._kind(other):
                continue
            if kind == shapes.APP:
                (head, args), (other, others) = self._spine(one), self._spine(other)
                signature = self._signature(head, around)
                todo.append((head, other, around))
                for number, pair in enumerate(zip(args, others, strict=False)):
                    todo.append((*pair, around))
                    if signature and self._kind_of(signature, number) == INSTANCE:
                        found |= set() if self._elaborator.same(*pair) else {one}
                continue
            pairs = zip(self._parts(one), self._parts(other), strict=True)
            for (mine, is_inside), (theirs, _) in pairs:
                todo.append((mine, theirs, self._inside(one, around) if is_inside else around))
        return found

    def _visit(self, at: int, around: Locals, expected: Key) -> int:
        """Returns an expression with notes; ``expected``: its type, if its surroundings tell
        that."""
        self._spend()
        kind, word = self._kind(at), self._word
        if kind in (shapes.FORALL, shapes.LAM):
            type_ = self._visit(word(at, 2), around, (shapes.SORT,))
            variable = (shapes.BVAR, "around", len(around))
            expected = self._result(expected, variable) if kind == shapes.LAM else (shapes.SORT,)
            body = self._visit(word(at, 3), self._inside(at, around), expected)
            if (type_, body) == (word(at, 2), word(at, 3)):
                return at
            make = self._kernel.forall if kind == shapes.FORALL else self._kernel.lam
            return int(make(*self._used(word(at, 1), type_, body), self._binder(at)))
        if kind == shapes.LET:
            type_ = self._visit(word(at, 2), around, (shapes.SORT,))
            value = self._visit(word(at, 3), around, self._key(word(at, 2), len(around)))
            body = self._visit(word(at, 4), self._inside(at, around), expected)
            parts = self._used(word(at, 1), type_, value, body)
            return int(self._kernel.let(*parts, self._kernel.byte(at, 4, 8)))
        if kind == shapes.PROJ:
            inner = self._visit(word(at, 3), around, None)
            return int(self._kernel.proj(*self._used(word(at, 1), word(at, 2), inner)))
        if kind == shapes.APP:
            return self._visit_application(at, around, expected)
        if kind == shapes.LIT:
            return self._noted(at, _RAW)
        if kind == shapes.CONST:
            self.hides_levels |= self._signature(at, around).hides_levels  # type: ignore[union-attr]
        return at

    def _visit_application(self, at: int, around: Locals, expected: Key) -> int:
        head, args = self._spine(at)
        signature = self._signature(head, around)
        if signature is None:
            inner = self._visit(head, around, None)
            made = [self._visit(each, around, None) for each in args]
            note = None if self._takes(head, shapes.LAM, len(args)) else WHOLE
            return self._noted(self._applied(at, head, args, inner, made), note)
        if signature.is_proof:
            return at
        self.hides_levels |= signature.hides_levels
        type_ = None if expected is None else self._type(at, around)
        is_other = expected not in (None, type_) and not self._is_proof(at, around)
        is_whole = at in self._shown or not self._has_defaults(head, args, signature, around)
        if not is_whole and self._is_number(head, args):
            is_natural = self._constant(args[0]) == _NAT and expected in (None, NATURAL)
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
            elif self._kind_of(signature, number) != EXPLICIT:
                made.append(arg)
            elif number in typed:
                made.append(self._noted(self._visit(arg, around, asked), _TYPED))
            else:
                is_told = number < len(wanted) and signature.mentioned[number] <= known
                made.append(self._visit(arg, around, asked if is_told else None))
        applied = self._applied(at, head, args, head, made)
        note = {**(WHOLE if is_whole else {}), **(_TYPED if is_other else {})}
        return self._noted(applied, note or None)

    def _hidden(self, args: Sequence[int], signature: Signature, known: set[int]) -> list[int]:
        """Returns the implicit arguments that nothing tells."""
        count = min(len(args), len(signature.kinds))
        return [n for n in range(count) if signature.kinds[n] != EXPLICIT and n not in known]

    def _to_type(
        self,
        args: Sequence[int],
        signature: Signature,
        around: Locals,
        hidden: list[int],
        wanted: Sequence[Key],
    ) -> int | None:
        """Returns an explicit argument whose type tells a hidden one, unless that is the text's
        own."""
        if any(self._holds_own(args[number]) for number in hidden):
            return None
        for number in range(min(len(args), len(signature.kinds))):
            if (
                signature.kinds[number] == EXPLICIT
                and not signature.told[number].isdisjoint(hidden)
                and self._is_of(args[number], around, wanted[number])
                and not self._is_proof(args[number], around)
            ):
                return number
        return None

    def _known(
        self,
        args: Sequence[int],
        signature: Signature,
        around: Locals,
        typed: set[int],
        wanted: Sequence[Key],
        *,
        from_result: bool,
    ) -> set[int]:
        """Returns the arguments that are printed, or that follow from the others."""
        kinds, types = signature.kinds, signature.types
        count = min(len(args), len(kinds))
        known = {number for number in range(count) if kinds[number] == EXPLICIT}
        if from_result and len(args) <= len(kinds):
            known |= signature.told_by_result.union(*signature.told[len(args) :])
        for number in range(count):
            if kinds[number] != EXPLICIT:
                continue
            told, arg = signature.told[number], args[number]
            if told <= known:
                continue
            if number in typed or self._tells_type(arg, around):
                if self._is_of(arg, around, wanted[number]):
                    known |= told
            elif (
                self._kind(arg) == shapes.LAM
                and self._kind(types[number]) == shapes.FORALL
                and self._key(self._word(arg, 2), len(around)) == domain(wanted[number])
            ):
                known |= self._rigid(self._word(types[number], 2), number)
        for number in range(count):
            if kinds[number] == INSTANCE:
                known |= self._told_by_class(types[number], number, known) | {number}
        return known

    def _told_by_class(self, type_: int, depth: int, known: set[int]) -> set[int]:
        """Returns the output parameters of a class that follow from the known ones."""
        head, args = self._spine(type_)
        signature = self._signature(head, ()) if self._kind(head) == shapes.CONST else None
        if signature is None:
            return set()
        inputs, outputs = set[int](), set[int]()
        for number, arg in enumerate(args):
            told = self._rigid(arg, depth)
            types = signature.types[number : number + 1]
            if any(self._constant(self._spine(each)[0]) in _OUT for each in types):
                outputs |= told
            else:
                inputs |= told
        return outputs if inputs <= known else set()

    def _tells_type(self, at: int, around: Locals) -> bool:
        """Returns whether the printed part of an expression tells its type."""
        if self._is_proof(at, around):
            return False
        kind = self._kind(at)
        if kind == shapes.LAM:
            return self._tells_type(self._word(at, 3), self._inside(at, around))
        if kind == shapes.LET:
            return self._tells_type(self._word(at, 4), self._inside(at, around))
        if kind != shapes.APP:
            return True
        head, args = self._spine(at)
        signature = self._signature(head, around)
        if signature is None:
            return self._tells_type(head, around)
        if self._is_number(head, args):
            return True
        wanted = self._asked(args, signature, around)
        known = self._known(args, signature, around, set(), wanted, from_result=False)
        return not self._hidden(args, signature, known)

    def _has_defaults(
        self, head: int, args: Sequence[int], signature: Signature, around: Locals
    ) -> bool:
        """Returns whether all instance arguments are those that the header leads to."""
        if more := args[len(signature.kinds) :]:
            result = signature.result
            if self._kind(result) == shapes.BVAR:
                place = len(signature.kinds) - 1 - (self._word(result, 1) >> 1)
                result = args[place] if place >= 0 else result
            if not self._takes(result, shapes.FORALL, len(more)):
                return False
        return all(
            self._is_default(args[number], around, required)
            for number, required in self._required(args, signature, around)
        )

    def _takes(self, at: int, binder: int, count: int) -> bool:
        """Returns whether something binds so many variables, each for an explicit argument."""
        for _ in range(count):
            if self._kind(at) != binder or self._binder(at) != EXPLICIT:
                return False
            at = self._word(at, 3)
        return True

    def _asked(self, args: Sequence[int], signature: Signature, around: Locals) -> list[Key]:
        """Returns the types that a function asks for its arguments."""
        values = [self._key(each, len(around)) for each in args]
        return [
            without_mark(self._key(type_, signature.depth, values[:number]))
            for number, type_ in enumerate(signature.types[: len(args)])
        ]

    def _required(
        self, args: Sequence[int], signature: Signature, around: Locals
    ) -> Iterator[tuple[int, Key]]:
        """Yields the instance arguments, and the class of each."""
        if INSTANCE in signature.kinds:
            for number, asked in enumerate(self._asked(args, signature, around)):
                if signature.kinds[number] == INSTANCE:
                    yield number, asked

    def _is_default(self, at: int, around: Locals, required: Key) -> bool:
        """Returns whether an instance is the one that is found for a class."""
        while self._kind(at) == shapes.LAM:
            if head_of(required) not in _FAMILIES:
                required = self._result(required, (shapes.BVAR, "around", len(around)))
                if required is None:
                    return False
            at, around = self._word(at, 3), self._inside(at, around)
        head, args = self._spine(at)
        kind = self._kind(head)
        class_ = head_of(required)
        if class_ != _DECIDABLE and class_ not in _FAMILIES and self._type(at, around) != required:
            return False
        if kind == shapes.BVAR:
            level = len(around) - 1 - (self._word(head, 1) >> 1)
            first, is_found = level + 1, around[level].is_instance
        else:
            name = self._constant(head)
            is_new = bool(name) and name not in self._own
            first, is_found = 0, is_new and self._elaborator.is_instance(self._word(head, 1))
        if not is_found:
            return False
        self.hides_instances = True
        self.has_variables |= any(map(self._may_be_instance, around[first:]))
        signature = self._signature(head, around)
        assert signature is not None
        told = signature.told_by_result
        return all(
            number in told or self._kind_of(signature, number) == INSTANCE or not own
            for number, own in enumerate(map(self._holds_own, args))
        ) and all(
            self._is_default(args[number], around, each)
            for number, each in self._required(args, signature, around)
        )

    def _may_be_instance(self, local: Local) -> bool:
        """Returns whether Lean may find a variable where it looks for an instance.

        It takes each variable whose type is a class, or leads to one by definitions that it
        unfolds, whatever its brackets.
        """
        type_ = local.type_
        harmless: tuple[int, ...] = (shapes.SORT, shapes.BVAR)
        while True:
            while self._kind(type_) in (shapes.FORALL, shapes.LAM):
                type_ = self._word(type_, 3)
            head, _ = self._spine(type_)
            if self._kind(head) in harmless:
                return False
            if (name := self._constant(head)) in self._own or not name:
                return True
            if not self._elaborator.may_be_class(self._word(head, 1)):
                return False
            type_ = self._kernel.info(self._word(head, 1)).value
            if not type_:
                return True
            harmless = (shapes.SORT,)  # the definition's variables stand for something

    def _is_of(self, at: int, around: Locals, type_: Key) -> bool:
        """Returns whether an expression is of a type, without unfolding definitions."""
        while self._kind(at) == shapes.LAM and type_ is not None:
            if self._key(self._word(at, 2), len(around)) != domain(type_):
                return False
            type_ = self._result(type_, (shapes.BVAR, "around", len(around)))
            at, around = self._word(at, 3), self._inside(at, around)
        return type_ is not None and self._type(at, around) == type_

    def _is_number(self, head: int, args: Sequence[int]) -> bool:
        is_literal = len(args) == 3 and self._kind(args[1]) == shapes.LIT
        return is_literal and self._constant(head) == _OF_NAT

    def _kind_of(self, signature: Signature, number: int) -> int:
        return signature.kinds[number] if number < len(signature.kinds) else EXPLICIT

    def _holds_own(self, at: int) -> bool:
        """Returns whether an expression refers to the text's own declarations."""
        return any(self._constant(each) in self._own for each in self._below([at]))

    def _applied(
        self, at: int, head: int, args: Sequence[int], new_head: int, new_args: Sequence[int]
    ) -> int:
        """Returns the application with other parts; itself if they are the same."""
        if new_head == head and [*args] == [*new_args]:
            return at
        made = new_head
        for each in new_args:
            made = int(self._kernel.app(*self._used(made, each)))
        return made

    def _noted(self, at: int, options: Mapping[str, bool] | None) -> int:
        """Returns an expression that is printed with these options."""
        if options is None:
            return at
        key = tuple(options)
        if key not in self._notes:
            self._notes[key] = self._elaborator.note(options)
        return int(self._kernel.mdata(*self._used(self._notes[key], at)))

    @staticmethod
    def _used(*objects: Any) -> tuple[Any, ...]:
        for each in objects:
            if not each & 1:
                share(each)
        return objects
