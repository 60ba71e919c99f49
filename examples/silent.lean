-- Incomplete: the warning is switched off, and the audit of the compiled result finds the sorry.
prelude
import Core

set_option warn.sorry false
theorem anything (p : Prop) : p := sorry
