-- Incomplete: the warning is switched off, and only the audit finds the sorry.
prelude
import Core
set_option warn.sorry false
theorem silent (p : Prop) : p := sorry
