import Aesop
@[aesop safe] def evil : Aesop.RuleTac := fun _ => do
  IO.FS.writeFile "Evil.olean" "x"
  failure
theorem t : True := by aesop
