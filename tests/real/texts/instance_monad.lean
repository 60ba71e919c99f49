def State' (σ α : Type) := σ → α × σ

instance : Monad (State' σ) where
  pure a := fun s => (a, s)
  bind m f := fun s => let (a, s') := m s; f a s'

theorem pure_bind' (a : α) (f : α → State' σ β) : (pure a >>= f) = f a := rfl

-- accepted
-- states: pure_bind'
