theorem fine : 1 + 1 = 2 := rfl

example : 1 + 1 = 3 := by decide

-- rejected lean_error
