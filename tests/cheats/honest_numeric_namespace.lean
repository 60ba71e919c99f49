prelude
import Core
namespace «123»
theorem t : 1 + 1 = 2 := rfl
end «123»
