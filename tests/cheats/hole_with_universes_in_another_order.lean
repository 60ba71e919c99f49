prelude
import Core
def answer.{v, u} (α : Sort u) (_ : Sort v) : Sort u := α
theorem t (p : Prop) (h : p) : answer.{0, 0} p p := h
