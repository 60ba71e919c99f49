theorem and_swap (p q : Prop) : p ∧ q ↔ q ∧ p := by
  constructor
  · intro h
    exact ⟨h.right, h.left⟩
  · rintro ⟨hq, hp⟩
    exact ⟨hp, hq⟩
theorem or_swap (p q : Prop) (h : p ∨ q) : q ∨ p := by
  cases h with
  | inl hp => exact Or.inr hp
  | inr hq => exact Or.inl hq
theorem or_swap_cases (p q : Prop) (h : p ∨ q) : q ∨ p := by
  cases h
  case inl hp => right; exact hp
  case inr hq => left; exact hq
theorem or_swap_rcases (p q : Prop) (h : p ∨ q) : q ∨ p := by
  rcases h with hp | hq
  · right; assumption
  · left; assumption
theorem contrapositive (p q : Prop) (h : p → q) (no : ¬ q) : ¬ p := by
  intro hp
  apply no
  exact h hp
theorem de_morgan (p q : Prop) : ¬ (p ∧ q) ↔ ¬ p ∨ ¬ q := by
  constructor
  · intro h
    by_cases hp : p
    · exact Or.inr (fun hq => h ⟨hp, hq⟩)
    · exact Or.inl hp
  · intro h ⟨hp, hq⟩
    cases h <;> contradiction
theorem double_negation (p : Prop) : ¬ ¬ p ↔ p := by simp
theorem excluded_middle (p : Prop) : p ∨ ¬ p := Classical.em p
theorem peirce (p q : Prop) : ((p → q) → p) → p := by
  intro h
  by_cases hp : p
  · exact hp
  · apply h
    intro hp'
    exact absurd hp' hp
theorem modus_ponens_twice (p q r : Prop) (hp : p) (f : p → q) (g : q → r) : r := by
  have hq : q := f hp
  have := g hq
  exact this
theorem suffices_it (p q : Prop) (hp : p) (f : p → q) : q := by
  suffices h : p from f h
  assumption
theorem distribute (p q r : Prop) : p ∧ (q ∨ r) ↔ (p ∧ q) ∨ (p ∧ r) := by
  constructor
  · rintro ⟨hp, hq | hr⟩
    · exact Or.inl ⟨hp, hq⟩
    · exact Or.inr ⟨hp, hr⟩
  · rintro (⟨hp, hq⟩ | ⟨hp, hr⟩)
    · exact ⟨hp, Or.inl hq⟩
    · exact ⟨hp, Or.inr hr⟩
theorem exists_swap (r : Nat → Nat → Prop) (h : ∃ x, ∀ y, r x y) : ∀ y, ∃ x, r x y := by
  intro y
  obtain ⟨x, hx⟩ := h
  exact ⟨x, hx y⟩
theorem not_exists_not (f : Nat → Prop) : (¬ ∃ x, ¬ f x) ↔ ∀ x, f x := by simp
theorem exists_square : ∃ x, x * x = 9 := by
  exists 3
theorem subst_it (a b : Nat) (f : Nat → Nat) (h : a = b) : f a = f b := by
  subst h
  rfl
theorem rewrite_it (a b c : Nat) (h : a = b) (h' : b = c) : c = a := by
  rw [h, h']
theorem calculate (a b c d : Nat) (h : a = b) (h' : b = c) (h'' : c = d) : a = d := by
  calc a = b := h
    _ = c := h'
    _ = d := h''
theorem calculate_order (a b c : Nat) (h : a ≤ b) (h' : b < c) : a < c := calc
  a ≤ b := h
  _ < c := h'
theorem four : 2 + 2 = 4 := by rfl
theorem decided : 17 < 19 ∧ ¬ 19 ≤ 17 := by decide
theorem zero_plus (n : Nat) : 0 + n = n := by
  induction n with
  | zero => rfl
  | succ n ih => rw [← Nat.add_assoc, ih]
theorem plus_comm (a b : Nat) : a + b = b + a := Nat.add_comm a b
theorem times_two (n : Nat) : n * 2 = n + n := by
  rw [Nat.mul_succ, Nat.mul_one]
theorem square_of_sum (a b : Nat) : (a + b) * (a + b) = a * a + 2 * (a * b) + b * b := by
  rw [Nat.mul_add, Nat.add_mul, Nat.add_mul, Nat.mul_comm b a, Nat.succ_mul, Nat.one_mul]
  simp [Nat.add_assoc]
theorem successor_is_not_zero (n : Nat) (h : n + 1 = 0) : False := by contradiction
theorem successor_injective (m n : Nat) (h : m + 1 = n + 1) : m = n := by
  injection h
theorem cancel_two (m n : Nat) (h : m + 2 = n + 2) : m = n := by
  simp at h
  exact h
theorem has_predecessor (n : Nat) (h : n ≠ 0) : ∃ m, n = m + 1 := by
  cases n with
  | zero => contradiction
  | succ m => exact ⟨m, rfl⟩
theorem add_monotone (a b c d : Nat) (h : a = b) (h' : c ≤ d) : a + c ≤ b + d := by
  rw [h]
  exact Nat.add_le_add_left h' b
theorem if_small (c : Prop) [Decidable c] : (if c then 1 else 2) ≤ 2 := by
  split
  · decide
  · decide
theorem if_true : (if 2 < 3 then 1 else 4) = 1 := by simp
def double : Nat → Nat
  | 0 => 0
  | n + 1 => double n + 2
theorem double_is_sum (n : Nat) : double n = n + n := by
  induction n with
  | zero => rfl
  | succ n ih =>
    rw [double, ih, Nat.add_one_add]
    rfl
def sum : List Nat → Nat
  | [] => 0
  | x :: xs => x + sum xs
theorem sum_append (xs ys : List Nat) : sum (xs ++ ys) = sum xs + sum ys := by
  induction xs with
  | nil => simp [sum]
  | cons x xs ih => simp [sum, ih, Nat.add_assoc]
theorem append_nil_again (xs : List Nat) : xs ++ [] = xs := by simp
theorem length_of_append (xs ys : List Nat) : (xs ++ ys).length = ys.length + xs.length := by
  rw [List.length_append, Nat.add_comm]
theorem reverse_twice (xs : List Nat) : xs.reverse.reverse = xs := by simp
theorem map_keeps_length (f : Nat → Nat) (xs : List Nat) : (xs.map f).length = xs.length := by
  induction xs with
  | nil => rfl
  | cons x xs ih => simp [ih]
theorem member_of_append (x : Nat) (xs ys : List Nat) (h : x ∈ xs) : x ∈ xs ++ ys := by
  simp
  left
  exact h
theorem three_is_member : 3 ∈ [1, 2, 3] := by simp
theorem extensional (f g : Nat → Nat) (h : ∀ x, f x = g x) : f = g := by
  funext x
  exact h x
structure Point where
  x : Nat
  y : Nat
theorem same_points (a b c d : Nat) (h : Point.mk a b = Point.mk c d) : a = c ∧ b = d := by
  simp at h
  exact h
inductive Color | red | green
theorem colors_differ : Color.red ≠ Color.green := by
  intro h
  cases h
inductive Tree | leaf | node (left right : Tree)
def Tree.mirror : Tree → Tree
  | .leaf => .leaf
  | .node left right => .node right.mirror left.mirror
theorem Tree.mirror_mirror (t : Tree) : t.mirror.mirror = t := by
  induction t with
  | leaf => rfl
  | node left right ihl ihr => simp [Tree.mirror, ihl, ihr]
