namespace Hidden
theorem inside : 1 = 1 := rfl
end Hidden

theorem outside : 1 = 1 := inside

-- rejected lean_error
