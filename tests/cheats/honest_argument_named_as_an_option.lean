prelude
import Core
def f (order : Nat) : Nat := order
def index (exp : Nat) (ground : Nat) : Nat := exp + ground
theorem t (k : Nat) : f (order := k) = k := rfl
theorem u : index (exp := f 1) (ground := 2) = 3 := rfl
