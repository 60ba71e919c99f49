def collatz (n : Nat) : Nat :=
  if n ≤ 1 then 0 else if n % 2 = 0 then collatz (n / 2) + 1 else collatz (3 * n + 1) + 1
termination_by n

-- rejected lean_error
