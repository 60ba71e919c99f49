import Mathlib.Tactic
open Real
variable {G : Type*} [CommGroup G]
@[simp] theorem aux (a b : G) : a * b * a⁻¹ = b := by rw [mul_comm a b, mul_inv_cancel_right]
theorem t {G : Type*} [CommGroup G] (a b : G) : a * b * a⁻¹ = b := by simp
