import Lean

open Lean

theorem with_lean (n : Name) : n = n := rfl

theorem array_size (xs : Array Nat) : (xs.push 1).size = xs.size + 1 := by simp

-- accepted
-- states: with_lean, array_size
