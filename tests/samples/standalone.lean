-- Accepted: term proofs that import nothing at all.
prelude
theorem modus_ponens (p q : Prop) (hp : p) (hpq : p → q) : q := hpq hp
theorem compose (p q r : Prop) (f : p → q) (g : q → r) : p → r := fun hp => g (f hp)
