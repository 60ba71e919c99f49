prelude
import Core
def answer.{w} (α : Sort w) : Sort w := α
theorem t (p : Prop) (h : p) : answer p := h
