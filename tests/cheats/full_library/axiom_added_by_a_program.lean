import Lean
open Lean Elab Command in
run_cmd liftCoreM <| addDecl <| .axiomDecl
  { name := `cheat, levelParams := [], type := mkConst ``False, isUnsafe := false }
theorem t : False := cheat
