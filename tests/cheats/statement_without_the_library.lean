prelude
inductive False : Prop where | intro : False
theorem t : False := False.intro
