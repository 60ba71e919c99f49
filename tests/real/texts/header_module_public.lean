module
public import Std

public section

theorem visible (xs : List Nat) : xs.reverse.length = xs.length := by simp

@[expose] def twice (n : Nat) : Nat := n + n

theorem twice_eq (n : Nat) : twice n = 2 * n := by unfold twice; omega

end

-- accepted
-- states: visible, twice_eq
