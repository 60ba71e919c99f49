structure Point where
  x : Nat
  y : Nat
  deriving Repr, DecidableEq

namespace Point

def add (p q : Point) : Point := { x := p.x + q.x, y := p.y + q.y }

instance : Add Point := ⟨add⟩

theorem add_x (p q : Point) : (p + q).x = p.x + q.x := rfl

theorem add_comm (p q : Point) : p + q = q + p := by
  show Point.mk _ _ = Point.mk _ _
  rw [Nat.add_comm p.x, Nat.add_comm p.y]

end Point

-- accepted
-- states: Point.add_x, Point.add_comm
