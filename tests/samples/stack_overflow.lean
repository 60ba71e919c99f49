-- Crashed: after some 20 s of CPU Lean's stack overflows and it aborts; no budget of its own ends it.
prelude
import Core
noncomputable def double (n : Nat) : Nat :=
  Nat.rec (motive := fun _ => Nat) Nat.zero (fun _ ih => Nat.succ (Nat.succ ih)) n
noncomputable def pow2 (n : Nat) : Nat :=
  Nat.rec (motive := fun _ => Nat) 1 (fun _ ih => double ih) n
set_option maxRecDepth 10000000
set_option maxHeartbeats 0
theorem stack_overflow : Eq (pow2 30) (Nat.add (pow2 29) (pow2 29)) := by exact rfl
