prelude
import Core
theorem fine : True := True.intro
mutual
theorem t : 1 = 2 := missing
theorem u : sorryAx Nat true := missing
end
