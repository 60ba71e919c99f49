structure Both where
  left : 1 = 1
  right : 2 = 2

theorem incomplete_structure : Both := { left := rfl }

-- rejected lean_error
