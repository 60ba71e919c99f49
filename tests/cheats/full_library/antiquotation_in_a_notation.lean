@[never_extract, noinline] def evil (n : Nat) : Lean.Term :=
  ⟨.ident .none default (.mkStr (.mkStr .anonymous "True") (if n = 1 then "elim" else "intro")) []⟩
notation "proof" => $(evil 3)
theorem t : True := proof
