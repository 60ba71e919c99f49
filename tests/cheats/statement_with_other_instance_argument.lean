prelude
import Core
theorem t (order : LE Nat) (h : order.le 5 3) : order.le 5 3 := h
