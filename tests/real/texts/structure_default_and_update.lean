structure Config where
  depth : Nat := 3
  width : Nat := depth + 1

theorem default_width : ({} : Config).width = 4 := rfl

theorem updated (c : Config) : { c with depth := 7 }.depth = 7 := rfl

-- accepted
-- states: default_width, updated
