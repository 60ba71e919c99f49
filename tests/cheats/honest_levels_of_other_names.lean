prelude
import Core
theorem t.{a, b} (α : Type a) (β : Type b) (h : Prod α β) : Prod α β = Prod α β := rfl
