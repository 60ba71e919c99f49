theorem admitted (n : Nat) : n * 0 = 0 := by
  cases n
  case zero => rfl
  case succ n => admit

-- incomplete sorry
-- states: admitted
