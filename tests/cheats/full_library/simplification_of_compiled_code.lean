def slow (n : Nat) : Nat := n + n
def fast (n : Nat) : Nat := 2 * n
@[csimp] theorem same : @slow = @fast := by funext n; simp [slow, fast]; omega
theorem t : slow 2 = 4 := rfl
