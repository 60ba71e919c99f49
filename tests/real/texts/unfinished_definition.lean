def choose (n : Nat) : Nat := sorry

theorem about_choice (n : Nat) : choose n = choose n := rfl

-- incomplete sorry
-- states: about_choice
