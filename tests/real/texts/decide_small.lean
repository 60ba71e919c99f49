theorem primes_below_ten : ∀ n, n < 10 → n % 2 = 1 → n * n % 8 = 1 := by decide

theorem fin_exists : ∃ x : Fin 7, x * x = 4 := by decide

example : 2 ^ 10 = 1024 := by decide

-- accepted
-- states: primes_below_ten, fin_exists
