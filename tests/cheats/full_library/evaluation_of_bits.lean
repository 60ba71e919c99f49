import Std.Tactic.BVDecide
theorem t (x y : BitVec 8) : x + y = y + x := by bv_decide
