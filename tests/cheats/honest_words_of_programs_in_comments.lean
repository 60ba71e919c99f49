prelude
import Tracing
/-! The syntax of no macro: `run_cmd`, #eval, unsafe, @[extern "x"] and trace 1. -/
namespace Foo.Syntax
def macros : String := "elab" -- simp (config := f)
inductive Syntax : Type where
  | unsafely (name : Nat) : Syntax
end Foo.Syntax
/-- Its symmetry, by a macro. -/
structure Trace (trace : Prop) : Prop where
  symm : trace
theorem t : Trace True where
  symm := True.intro
