prelude
import Core
def answer (α : Prop) : Prop := α
theorem t (p : Prop) (h : p) : answer p := h
