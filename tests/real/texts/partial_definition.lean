partial def search' (p : Nat → Bool) (n : Nat) : Nat :=
  match p n with
  | true => n
  | false => search' p (n + 1)

theorem about_partial (p : Nat → Bool) (n : Nat) : search' p n = search' p n := rfl

-- accepted
-- states: about_partial
