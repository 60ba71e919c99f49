set_option autoImplicit true

theorem auto (f : α → β) (x y : α) (h : x = y) : f x = f y := by rw [h]

-- accepted
-- states: auto
