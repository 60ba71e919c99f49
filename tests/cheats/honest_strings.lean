-- A text that holds the word "sorry" and the line #exit, which are no words of Lean there.
prelude
import Core
theorem t : "#exit sorry".data = '#' :: "exit sorry".data := rfl
theorem char : Char.ofNat 97 = 'a' := rfl
