/-
Copyright: nobody's. A comment stands above the imports, as in most libraries.
-/
import Std

/-! A text with documentation. -/

/-- Addition commutes. -/
theorem documented (a b : Nat) : a + b = b + a := by omega -- and a remark

-- accepted
-- states: documented
