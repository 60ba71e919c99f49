-- Rejected: Lean has nothing against a new axiom, leanq's audit does.
prelude
import Core

axiom cheat : False
theorem anything (p : Prop) : p := False.elim cheat
