def total (xs : List Nat) : Nat := Id.run do
  let mut sum := 0
  for x in xs do
    sum := sum + x
  return sum

theorem total_nil : total [] = 0 := rfl

-- accepted
-- states: total_nil
