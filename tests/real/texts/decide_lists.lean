theorem member : 3 ∈ [1, 2, 3] := by decide

theorem no_member : ¬ 4 ∈ [1, 2, 3] := by decide

theorem strings : "ab" ++ "c" = "abc" := by decide

-- accepted
-- states: member, no_member, strings
