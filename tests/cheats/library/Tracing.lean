/- A library with a tactic that evaluates a term of the text's. -/
prelude
import Core
namespace Lean
opaque Meta.evalExpr : Nat → Nat
abbrev Elab.Tactic.Tactic : Type := Macro
end Lean
def stringOf (n : Nat) : Nat := Lean.Meta.evalExpr n
syntax (name := traced) "trace " term : tactic
@[tactic traced] def evalTraced : Lean.Elab.Tactic.Tactic := fun _ _ _ =>
  cond (Nat.beq (stringOf 1) 1) .none .none
