prelude
import Core
namespace Mine
inductive False : Prop where | intro : False
theorem t : False := False.intro
end Mine
