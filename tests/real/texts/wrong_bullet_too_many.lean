theorem too_many (p : Prop) (hp : p) : p := by
  · exact hp
  · exact hp

-- rejected lean_error
