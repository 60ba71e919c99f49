prelude
import Core
def t.match_1 (_motive : Nat → Type) (_n : Nat) (_zero : Unit → Prop) (_succ : Nat → Prop) : Prop := True
theorem t (n : Nat) : t.match_1 (fun _ => Prop) n (fun _ => True) (fun m => m = 1) := True.intro
