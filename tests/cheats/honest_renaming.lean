prelude
import Core
namespace Inner
theorem known : 1 + 1 = 2 := rfl
end Inner
open Inner renaming known → told
theorem t : 1 + 1 = 2 := told
