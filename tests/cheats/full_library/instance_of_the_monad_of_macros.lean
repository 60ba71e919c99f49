import Lean
@[always_inline, inline] instance (priority := high) : Monad Lean.MacroM where
  pure a := fun _ s => .ok a s
  bind x f := fun context s => match x context s with
    | .ok a s => f a context s
    | .error e s => .error e s
notation "yes" => True
theorem t : yes := trivial
