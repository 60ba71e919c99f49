def fib : Nat → Nat
  | 0 => 0
  | 1 => 1
  | n + 2 => fib n + fib (n + 1)

theorem fib_ten : fib 10 = 55 := rfl

theorem fib_step (n : Nat) : fib (n + 2) = fib n + fib (n + 1) := rfl

-- accepted
-- states: fib_ten, fib_step
