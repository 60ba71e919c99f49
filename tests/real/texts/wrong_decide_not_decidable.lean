theorem undecidable (p : Nat → Prop) : p 0 ∨ ¬ p 0 := by decide

-- rejected lean_error
