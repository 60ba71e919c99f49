namespace Geometry

def area (w h : Nat) : Nat := w * h

end Geometry

open Geometry in
theorem area_comm (w h : Nat) : area w h = area h w := Nat.mul_comm w h

section
open Geometry
theorem area_zero (w : Nat) : area w 0 = 0 := rfl
end

-- accepted
-- states: area_comm, area_zero
