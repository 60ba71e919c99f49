mutual
def isEven : Nat → Bool
  | 0 => true
  | n + 1 => isOdd n
def isOdd : Nat → Bool
  | 0 => false
  | n + 1 => isEven n
end

theorem even_or_odd (n : Nat) : isEven n = true ∨ isOdd n = true := by
  induction n with
  | zero => exact .inl (by simp [isEven])
  | succ n ih =>
    rcases ih with h | h
    · exact .inr (by simp [isOdd, h])
    · exact .inl (by simp [isEven, h])

mutual
theorem even_not_odd : (n : Nat) → isEven n = true → isOdd n = false
  | 0, _ => by simp [isOdd]
  | n + 1, h => by
    simp only [isEven] at h
    simp only [isOdd]
    exact odd_not_even n h
theorem odd_not_even : (n : Nat) → isOdd n = true → isEven n = false
  | 0, h => by simp [isOdd] at h
  | n + 1, h => by
    simp only [isOdd] at h
    simp only [isEven]
    exact even_not_odd n h
end

-- accepted
-- states: even_or_odd, even_not_odd, odd_not_even
