@[ext]
structure Pair where
  first : Nat
  second : Nat

theorem Pair.eq_of_parts (p q : Pair) (h : p.first = q.first) (k : p.second = q.second) : p = q :=
  Pair.ext h k

-- accepted
-- states: Pair.eq_of_parts
