prelude
import Core
def always : LE Nat := ⟨fun _ _ => True⟩
attribute [local instance] always
theorem t : 5 ≤ 3 := True.intro
