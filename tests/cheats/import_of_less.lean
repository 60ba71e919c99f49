prelude
import Bare
theorem t (p : True) : True := p
