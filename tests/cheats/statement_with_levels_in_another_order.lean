prelude
import Core
theorem t.{v, u} (α : Type u) (β : Type v) (h : Prod α β) : Prod α β = Prod α β := rfl
