prelude
import Core
theorem t (p q : Prop) (h : p ↔ q) : p = q := propext h
