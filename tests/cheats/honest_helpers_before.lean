prelude
import Core
structure Small where
  n : Nat
  h : ¬ n = 5
def other : Small := ⟨3, by decide⟩
theorem helper (n : Nat) : (match n with | 0 => True | Nat.succ m => m = m) :=
  match n with | 0 => True.intro | Nat.succ _ => rfl
def small : Small := ⟨3, by decide⟩
theorem t (n : Nat) : (match n with | 0 => small.n = 3 | Nat.succ m => m = m) :=
  match n with | 0 => rfl | Nat.succ _ => rfl
