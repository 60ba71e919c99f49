prelude
theorem t (p q : Prop) (f : p → q) (h : p) : q := f h
