inductive Move where
  | left (steps : Nat)
  | right (steps : Nat)
  | stay

deriving instance DecidableEq, Inhabited, BEq for Move

def Move.back : Move → Move
  | left n => right n
  | right n => left n
  | stay => stay

theorem Move.back_back (m : Move) : m.back.back = m := by
  cases m <;> rfl

theorem Move.stay_differs : Move.stay ≠ Move.left 0 := by decide

-- accepted
-- states: Move.back_back, Move.stay_differs
