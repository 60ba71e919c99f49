prelude
inductive False : Prop
namespace Classical
axiom choice {p : Prop} : p
end Classical
theorem t : False := Classical.choice
