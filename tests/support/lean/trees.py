"""Lean texts that the judge is tested with: an inductive type, a recursor, a structure, proofs."""

from __future__ import annotations

PRELUDE = "prelude\nimport Core\nset_option linter.all false\nset_option genCtorIdx false\n"
TREES = """inductive Tree (α : Type) where
  | leaf : Tree α
  | node (left : Tree α) (value : α) (right : Tree α) : Tree α
structure Two (p q : Prop) : Prop where
  one : p
  two : q
noncomputable def Tree.mirror (t : Tree α) : Tree α :=
  Tree.rec (motive := fun _ => Tree α) Tree.leaf (fun _ v _ l r => Tree.node r v l) t
theorem swap (p q : Prop) (h : Two p q) : Two q p := Two.mk h.two h.one
"""
