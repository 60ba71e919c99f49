import Init.Data.List.Lemmas
import Std.Data.HashMap

open Std

theorem empty_map : (∅ : HashMap Nat Nat).isEmpty = true := by simp

theorem list_length (xs : List Nat) : (xs ++ []).length = xs.length := by simp

-- accepted
-- states: empty_map, list_length
