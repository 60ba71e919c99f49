section
variable {n : Nat} (h : 0 < n)

include h in
theorem positive_ne_zero : n ≠ 0 := by omega

variable [DecidableEq Nat]

omit [DecidableEq Nat] in
theorem reflexive : n = n := rfl
end

-- accepted
-- states: positive_ne_zero, reflexive
