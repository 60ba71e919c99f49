theorem unknown (n : Nat) : n + 0 = n := add_zero_of_nowhere n

-- rejected lean_error
