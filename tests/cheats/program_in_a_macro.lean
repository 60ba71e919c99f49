prelude
import Core
syntax (name := mine) "another" : term
@[macro mine, extern "x"] opaque Lean.Meta.main : Lean.Macro := fun _ _ _ => .none
theorem t : True := True.intro
