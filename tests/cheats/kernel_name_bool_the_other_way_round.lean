prelude
inductive False : Prop
inductive Bool : Type where | true : Bool | false : Bool
theorem fine (p : False) : False := p
