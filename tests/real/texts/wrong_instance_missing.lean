structure Opaque where
  value : Nat

theorem no_addition (a b : Opaque) : a + b = b + a := sorry

-- rejected lean_error
