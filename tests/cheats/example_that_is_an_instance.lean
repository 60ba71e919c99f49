prelude
import Core
class Meaning where
  statement : Prop
@[instance] def first : Meaning := ⟨True⟩
@[instance] example : Meaning := ⟨True → True⟩
theorem t : @Meaning.statement _ → True := fun _ => True.intro
