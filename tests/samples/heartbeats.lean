-- Exhausted: a deterministic budget runs out, at the same place on any machine.
prelude
import Core
noncomputable def double (n : Nat) : Nat :=
  Nat.rec (motive := fun _ => Nat) Nat.zero (fun _ ih => Nat.succ (Nat.succ ih)) n
noncomputable def pow2 (n : Nat) : Nat :=
  Nat.rec (motive := fun _ => Nat) 1 (fun _ ih => double ih) n
set_option maxRecDepth 10000000
set_option maxHeartbeats 2000
theorem heartbeats : Eq (pow2 22) (Nat.add (pow2 21) (pow2 21)) := by exact rfl
