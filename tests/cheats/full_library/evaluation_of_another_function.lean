def wrong (_ : Nat) : Bool := true
@[implemented_by wrong] def right (_ : Nat) : Bool := false
theorem same : right 0 = true := by native_decide
theorem t : False := nomatch same
