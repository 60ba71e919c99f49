namespace Outer
namespace Inner

def f (n : Nat) : Nat := n + 1

theorem f_pos (n : Nat) : 0 < f n := Nat.succ_pos n

end Inner

theorem f_three : Inner.f 3 = 4 := rfl

end Outer

theorem from_outside : Outer.Inner.f 1 = 2 := rfl

-- accepted
-- states: Outer.Inner.f_pos, Outer.f_three, from_outside
