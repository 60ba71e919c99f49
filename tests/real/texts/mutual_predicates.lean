mutual
inductive EvenN : Nat → Prop where
  | zero : EvenN 0
  | succ : OddN n → EvenN (n + 1)
inductive OddN : Nat → Prop where
  | succ : EvenN n → OddN (n + 1)
end

theorem even_two : EvenN 2 := .succ (.succ .zero)

theorem not_odd_zero : ¬ OddN 0 := by
  intro h
  cases h

-- accepted
-- states: even_two, not_odd_zero
