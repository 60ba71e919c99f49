prelude
import Core
theorem t (α : Type) (a b : α) (h : HEq a b) : a = b := eq_of_heq h
