-- For example: an honest text may say "example" where it likes.
prelude
import Core
def my_example : Nat := 1
/-- As an example. -/
theorem t : my_example = 1 := rfl
def «example» : String := "for example"
theorem s : «example» = "for example" := rfl
