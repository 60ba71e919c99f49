inductive Bad where
  | mk : (Bad → Nat) → Bad

theorem about_bad : True := trivial

-- rejected lean_error
