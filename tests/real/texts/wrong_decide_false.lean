theorem not_so : 2 + 2 = 5 := by decide

-- rejected lean_error
