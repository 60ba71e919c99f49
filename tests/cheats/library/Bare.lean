/- A library that leaves free most names by which the kernel computes. -/
prelude
set_option genCtorIdx false
set_option warn.classDefReducibility false
universe u
axiom lcErased : Type
unsafe axiom lcProof {α : Prop} : α
unsafe axiom lcAny : Type
unsafe axiom lcVoid : Type
unsafe axiom lcUnreachable {α : Sort u} : α
inductive False : Prop
inductive True : Prop where | intro : True
inductive Bool : Type where | false : Bool | true : Bool
axiom sorryAx (α : Sort u) (synthetic : Bool) : α
inductive Eq {α : Sort u} : α → α → Prop where | refl (a : α) : Eq a a
theorem Eq.trans {α : Sort u} {a b c : α} (h : Eq a b) (k : Eq b c) : Eq a c :=
  @Eq.rec α b (fun x _ => Eq a x) h c k
theorem Eq.symm {α : Sort u} {a b : α} (h : Eq a b) : Eq b a :=
  @Eq.rec α a (fun x _ => Eq x a) (Eq.refl a) b h
inductive Nat where | zero : Nat | succ (n : Nat) : Nat
class OfNat (α : Type u) (_ : Nat) where
  ofNat : α
@[instance, instance_reducible] def instOfNatNat (n : Nat) : OfNat Nat n := OfNat.mk n
theorem Nat.one_is_not_zero (h : Eq (1 : Nat) 0) : False :=
  @Eq.rec Nat 1 (fun x _ => @Nat.rec (fun _ => Prop) False (fun _ _ => True) x) True.intro 0 h
theorem Bool.true_is_not_false (h : Eq Bool.true Bool.false) : False :=
  @Eq.rec Bool Bool.true (fun x _ => @Bool.rec (fun _ => Prop) False True x) True.intro Bool.false h
