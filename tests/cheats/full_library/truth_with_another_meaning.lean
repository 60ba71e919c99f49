import Lean
namespace A
def true : Bool := Bool.false
theorem t (n : Nat) : n + 0 = n := by simp (zeta := true)
end A
