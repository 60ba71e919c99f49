"""Random statements over a small library with instances of the text's own."""

from __future__ import annotations

from hypothesis import strategies as st

from leanq.lean.audit.judge_client import Judges
from leanq.lean.audit.olean import open_image, read_parts
from leanq.lean.audit.statement import Interner, View
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.syntax import split_header
from support.lean.images import Lean

OWN = """structure W where
  n : Nat
instance leW : LE W := ⟨fun a b => @LE.le Nat instLENat b.n a.n⟩
instance addW : Add W := ⟨fun a _ => a⟩
def leNat : LE Nat := ⟨fun _ _ => True⟩
def addNat : Add Nat := ⟨fun _ _ => 5⟩
def pick {α : Type} {β : Type} (a : α) : α := a
def other {α : Type} (n : Nat) : Nat := n
def Alias (n : Nat) : Type := Nat
def size {n : Nat} (x : Alias n) : Nat := n
def bound {n : Nat} (k : Nat) (h : Or (k = k) (n = n)) : Nat := n
def same {α : Type} (a : α) : α := a
@[reducible] def Other := Nat
class Keeps where
  order : LE Nat
attribute [reducible, instance] Keeps.order
class Leads (α : outParam Type) where
  order : LE Nat
attribute [reducible, instance] Leads.order
"""
"""What stands before the statements: types, and instances that are not found by default."""

FEW = "theorem few : 1 < 3 := by decide\n"
"""What stands before those of a full library besides."""

# The one proof in the statements, which is not printed.
_PROOF = "(Or.inl rfl)"
_LIMITS = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=2 << 30)

_NAMES = ("x", "y", "leNat", "Nat'")
_TYPES = ("Nat", "W")
_LIBRARYS_TYPES = ("Int", "Fin 3")
_OTHER_LEAVES = {"W": "(W.mk 1)", "Fin 3": "(Fin.mk 1 few)"}


def _terms(type_: str, bound: tuple[tuple[str, str], ...], depth: int) -> st.SearchStrategy[str]:
    leaves = [st.just(name) for name, of in bound if of == type_]
    if type_ in _OTHER_LEAVES:
        leaves.append(st.just(_OTHER_LEAVES[type_]))
    else:
        leaves.append(st.sampled_from([f"(0 : {type_})", f"(7 : {type_})"]))
    if not depth:
        return st.one_of(leaves)
    below = _terms(type_, bound, depth - 1)
    two = st.tuples(below, below)
    made = [
        two.map(lambda each: f"({each[0]} + {each[1]})"),
        below.map(lambda each: f"(@pick ({type_}) W {each})"),
        below.map(lambda each: f"(@pick ({type_}) Nat {each})"),
        below.map(lambda each: f"((fun (z : {type_}) => z) {each})"),
    ]
    if type_ == "Nat":
        made += [
            two.map(
                lambda each: (
                    f"(@HAdd.hAdd Nat Nat Nat (@instHAdd Nat _root_.addNat) {each[0]} {each[1]})"
                )
            ),
            below.map(lambda each: f"(@other W {each})"),
            two.map(lambda each: f"(@size {each[0]} {each[1]})"),
            two.map(lambda each: f"(@bound {each[0]} {each[1]} {_PROOF})"),
            two.map(
                lambda each: (
                    "(@same ([Add Nat] → Nat) (fun [i : Add Nat] => "
                    f"@HAdd.hAdd Nat Nat Nat (@instHAdd Nat i) {each[0]} {each[1]}) "
                    "_root_.addNat)"
                )
            ),
            _terms("W", bound, depth - 1).map(lambda each: f"({each}).n"),
        ]
    return st.one_of(*leaves, *made)


UNUSED = (
    "(i : LE ({}))",
    "[i : LE ({})]",
    "(i : (α : Type) → LE α)",
    "(i : LE (outParam ({})))",
    "(i : have α : Type := {}; LE α)",
    "(i : (α : Type) → have β : Type := α; LE β)",
    "(i : LE Other)",
    "(i : Keeps)",
    "(i : Leads Nat)",
)
"""Variables that Lean may find as an instance, whatever its type is called."""


def _propositions(
    bound: tuple[tuple[str, str], ...], depth: int, types: tuple[str, ...]
) -> st.SearchStrategy[str]:
    def relation(type_: str) -> st.SearchStrategy[str]:
        two = st.tuples(_terms(type_, bound, 2), _terms(type_, bound, 2))
        ways = ["{} = {}", "{} ≤ {}"] + ["@LE.le Nat _root_.leNat {} {}"] * (type_ == "Nat")
        return st.tuples(st.sampled_from(ways), two).map(lambda each: each[0].format(*each[1]))

    leaf = st.sampled_from(types).flatmap(relation)
    if not depth:
        return leaf
    below = _propositions(bound, depth - 1, types)

    def bind(name: str, type_: str) -> st.SearchStrategy[str]:
        inner = _propositions(
            (*(each for each in bound if each[0] != name), (name, type_)), depth - 1, types
        )
        return inner.map(lambda each: f"(∀ ({name} : {type_}), {each})")

    def instance(type_: str) -> st.SearchStrategy[str]:
        return _terms(type_, bound, 1).map(
            lambda each: (
                f"(∀ [i : LE ({type_})] [j : LE ({type_})], @LE.le ({type_}) i {each} {each})"
            )
        )

    def unused(type_: str) -> st.SearchStrategy[str]:
        kind = st.sampled_from(UNUSED)
        return st.tuples(kind, below).map(lambda each: f"(∀ {each[0].format(type_)}, {each[1]})")

    def upside_down(parts: tuple[str, str]) -> str:
        of = "Lean.Order.ReverseImplicationOrder"
        return f"(@Lean.Order.PartialOrder.rel {of} {of}.instOrder ({parts[0]}) ({parts[1]}))"

    two = st.tuples(below, below)
    more = [two.map(upside_down)] if types != _TYPES else []
    return st.one_of(
        *more,
        leaf,
        two.map(lambda each: f"({each[0]} ∧ {each[1]})"),
        two.map(lambda each: f"({each[0]} → {each[1]})"),
        st.tuples(st.sampled_from(_NAMES), st.sampled_from(types)).flatmap(
            lambda each: bind(*each)
        ),
        st.sampled_from(types).flatmap(instance),
        st.sampled_from(types).flatmap(unused),
    )


PROPOSITIONS = _propositions((), 3, _TYPES)
"""Closed statements."""
OF_A_LIBRARY = _propositions((), 3, (*_TYPES, *_LIBRARYS_TYPES))
"""Closed statements that need a full library."""


async def check_what_is_printed(lean: Lean, before: str, propositions: list[str]) -> None:
    """What is printed of statements has to be the same expressions, when Lean reads it again."""
    code = before + OWN
    stated = "".join(
        f"theorem t{n} (h : False) : {each} := h.elim\n" for n, each in enumerate(propositions)
    )
    judges = Judges(lean.environment, slots=1)
    try:
        parts = read_parts(lean.compile(code + stated))
        found = await judges.judge(split_header(code), parts, ("none", "here"), _LIMITS)
    finally:
        await judges.close()
    assert found.proved, found
    of_all = dict(zip(found.theorems, found.statements, strict=True))
    printed = [of_all[f"t{n}"].replace("⋯", _PROOF) for n in range(len(propositions))]
    again = "".join(f"axiom t{n} : {each}\n" for n, each in enumerate(printed))
    interner = Interner()
    types = []
    for text in (code + stated, code + again):
        image = open_image(read_parts(lean.compile(text)))
        view = View(interner, image)
        constants = image.constants({(f"t{n}",) for n in range(len(propositions))})
        types.append({name: view.expression(raw, raw.type_)[0] for name, raw in constants.items()})
    for number, each in enumerate(printed):
        name = (f"t{number}",)
        assert types[0][name] == types[1][name], (propositions[number], each)
    for proposition, statement in zip(propositions, printed, strict=True):
        assert ("_root_.leNat" in proposition) <= ("leNat" in statement)
        assert ("_root_.addNat" in proposition) <= ("addNat" in statement)
