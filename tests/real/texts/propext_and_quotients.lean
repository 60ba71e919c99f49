theorem same_props (p q : Prop) (h : p ↔ q) : p = q := propext h

def parity : Setoid Nat where
  r a b := a % 2 = b % 2
  iseqv := ⟨fun _ => rfl, fun h => h.symm, fun h k => h.trans k⟩

theorem two_is_four : (Quotient.mk parity 2) = Quotient.mk parity 4 := Quotient.sound rfl

-- accepted
-- states: same_props, two_is_four
