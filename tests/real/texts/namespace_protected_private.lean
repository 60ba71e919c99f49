namespace Counter

protected def next (n : Nat) : Nat := n + 1

private theorem secret (n : Nat) : Counter.next n = n + 1 := rfl

theorem next_ne (n : Nat) : Counter.next n ≠ n := by
  rw [secret]
  omega

end Counter

-- accepted
-- states: Counter.secret, Counter.next_ne
