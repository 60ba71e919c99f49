prelude
import Core
namespace Inner
inductive False : Prop
  | intro
theorem t : False := False.intro
end Inner
open Inner renaming t → told
theorem t : Inner.False := told
