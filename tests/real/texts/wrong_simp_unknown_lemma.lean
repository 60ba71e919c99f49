import Std

theorem missing_lemma (a : Nat) : a + 0 = a := by simp [Nat.no_such_lemma]

-- rejected lean_error
