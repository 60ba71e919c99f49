prelude
import Core
unsafe def t : False := t
