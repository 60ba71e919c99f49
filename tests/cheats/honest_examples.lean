prelude
import Core
example : True := True.intro
theorem t (p : Prop) (h : p) : p := h
example (p q : Prop) (h : p ∧ q) : q ∧ p := ⟨h.right, h.left⟩
instance : LE Bool := ⟨fun a b => a = b⟩
example : true ≤ true := rfl
