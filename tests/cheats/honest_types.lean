prelude
import Core
universe u
inductive Tree (α : Type u) where
  | leaf : Tree α
  | node (left : Tree α) (value : α) (right : Tree α) : Tree α
inductive Rose (α : Type u) where
  | mk (value : α) (children : List (Rose α)) : Rose α
mutual
inductive Even : Nat → Prop where
  | zero : Even 0
  | next (n : Nat) : Odd n → Even (n + 1)
inductive Odd : Nat → Prop where
  | next (n : Nat) : Even n → Odd (n + 1)
end
structure Point where
  x : Nat
  y : Nat
theorem eta (p : Point) : Point.mk p.x p.y = p := rfl
theorem two : Even 2 := Even.next 1 (Odd.next 0 Even.zero)
def mirror (t : Tree Nat) : Tree Nat :=
  match t with
  | Tree.leaf => Tree.leaf
  | Tree.node l v r => Tree.node r v l
theorem t : mirror (Tree.node Tree.leaf 1 Tree.leaf) = Tree.node Tree.leaf 1 Tree.leaf := rfl
