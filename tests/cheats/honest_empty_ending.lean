prelude
import Core
theorem t : True := True.intro
section
namespace Open
