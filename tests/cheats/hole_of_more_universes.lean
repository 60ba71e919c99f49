prelude
import Core
def answer.{u, v} (α : Sort u) (_ : Sort v) : Sort u := α
theorem t (p : Prop) (h : p) : answer p p := h
