-- Its code is in the notation's macro, which prints. With an axiom `Nat = IO.RealWorld`, it could
-- leave another file than that with this axiom.
@[macro_inline] instance (priority := high) (b : Bool) : Decidable (b = true) :=
  dbgTrace "it ran" fun _ => Bool.decEq b true
notation "yes" => True
theorem t : yes := trivial
