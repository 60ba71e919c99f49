structure Animal where
  legs : Nat
  deriving Repr

structure Dog extends Animal where
  name : String
  legs_eq : toAnimal.legs = 4

theorem Dog.legs_pos (d : Dog) : 0 < d.legs := by
  rw [d.legs_eq]
  decide

-- accepted
-- states: Dog.legs_pos
