prelude
import Core
noncomputable def answer : Nat := (fun _ : Nat => 17) (sorryAx Nat false)
theorem t : answer + 17 = 34 := rfl
