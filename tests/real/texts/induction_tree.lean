inductive Tree (α : Type) where
  | leaf : Tree α
  | node : Tree α → α → Tree α → Tree α

namespace Tree

def mirror : Tree α → Tree α
  | leaf => leaf
  | node l x r => node (mirror r) x (mirror l)

def size : Tree α → Nat
  | leaf => 0
  | node l _ r => size l + 1 + size r

theorem mirror_mirror (t : Tree α) : t.mirror.mirror = t := by
  induction t with
  | leaf => rfl
  | node l x r ihl ihr => simp [mirror, ihl, ihr]

theorem size_mirror (t : Tree α) : t.mirror.size = t.size := by
  induction t with
  | leaf => rfl
  | node l x r ihl ihr =>
    simp only [mirror, size, ihl, ihr]
    omega

end Tree

-- accepted
-- states: Tree.mirror_mirror, Tree.size_mirror
