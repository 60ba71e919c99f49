"""Random statements over a small library with instances of the text's own."""

from __future__ import annotations

from hypothesis import strategies as st

OWN = """structure W where
  n : Nat
instance leW : LE W := ⟨fun a b => @LE.le Nat instLENat b.n a.n⟩
instance addW : Add W := ⟨fun a _ => a⟩
def leNat : LE Nat := ⟨fun _ _ => True⟩
def addNat : Add Nat := ⟨fun _ _ => 5⟩
def pick {α : Type} {β : Type} (a : α) : α := a
def other {α : Type} (n : Nat) : Nat := n
"""
"""What stands before the statements: a type, and instances that are not found by default."""

_NAMES = ("x", "y", "leNat", "Nat'")
_TYPES = ("Nat", "W")


def _terms(type_: str, bound: tuple[tuple[str, str], ...], depth: int) -> st.SearchStrategy[str]:
    leaves = [st.just(name) for name, of in bound if of == type_]
    leaves.append(st.just("(W.mk 1)") if type_ == "W" else st.sampled_from(["0", "7"]))
    if not depth:
        return st.one_of(leaves)
    below = _terms(type_, bound, depth - 1)
    two = st.tuples(below, below)
    made = [
        two.map(lambda each: f"({each[0]} + {each[1]})"),
        below.map(lambda each: f"(@pick {type_} W {each})"),
        below.map(lambda each: f"(@pick {type_} Nat {each})"),
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
            _terms("W", bound, depth - 1).map(lambda each: f"({each}).n"),
        ]
    return st.one_of(*leaves, *made)


def _propositions(bound: tuple[tuple[str, str], ...], depth: int) -> st.SearchStrategy[str]:
    def relation(type_: str) -> st.SearchStrategy[str]:
        two = st.tuples(_terms(type_, bound, 2), _terms(type_, bound, 2))
        ways = ["{} = {}", "{} ≤ {}"] + ["@LE.le Nat _root_.leNat {} {}"] * (type_ == "Nat")
        return st.tuples(st.sampled_from(ways), two).map(lambda each: each[0].format(*each[1]))

    leaf = st.sampled_from(_TYPES).flatmap(relation)
    if not depth:
        return leaf
    below = _propositions(bound, depth - 1)

    def bind(name: str, type_: str) -> st.SearchStrategy[str]:
        inner = _propositions(
            (*(each for each in bound if each[0] != name), (name, type_)), depth - 1
        )
        return inner.map(lambda each: f"(∀ ({name} : {type_}), {each})")

    def instance(type_: str) -> st.SearchStrategy[str]:
        return _terms(type_, bound, 1).map(
            lambda each: f"(∀ [i : LE {type_}] [j : LE {type_}], @LE.le {type_} i {each} {each})"
        )

    two = st.tuples(below, below)
    return st.one_of(
        leaf,
        two.map(lambda each: f"({each[0]} ∧ {each[1]})"),
        two.map(lambda each: f"({each[0]} → {each[1]})"),
        st.tuples(st.sampled_from(_NAMES), st.sampled_from(_TYPES)).flatmap(
            lambda each: bind(*each)
        ),
        st.sampled_from(_TYPES).flatmap(instance),
    )


PROPOSITIONS = _propositions((), 3)
"""Closed statements."""
