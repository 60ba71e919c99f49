prelude
import Core
#exit
