prelude
import OtherPred
protected noncomputable def Nat.sub (n m : Nat) : Nat :=
  Nat.rec (motive := fun _ => Nat) n (fun _ ih => Nat.pred ih) m
theorem defined : Eq (Nat.rec (motive := fun _ => Nat) 1 (fun _ ih => Nat.pred ih) 1) 1 := Eq.refl 1
theorem same (n m : Nat) : Eq (Nat.sub n m) (Nat.rec (motive := fun _ => Nat) n (fun _ ih => Nat.pred ih) m) :=
  Eq.refl (Nat.rec (motive := fun _ => Nat) n (fun _ ih => Nat.pred ih) m)
attribute [irreducible] Nat.sub
theorem computed : Eq (Nat.sub 1 1) 0 := Eq.refl 0
theorem t : False :=
  Nat.one_is_not_zero (Eq.trans (Eq.symm (Eq.trans (same 1 1) defined)) computed)
