prelude
import Core
import NoSuchLibrary
theorem t : False := nothing
