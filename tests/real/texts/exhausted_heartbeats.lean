set_option maxHeartbeats 20

theorem too_little (a b c d : Nat) (h : a < b) (k : b < c) (l : c < d) : a + 3 ≤ d := by omega

-- exhausted heartbeats
