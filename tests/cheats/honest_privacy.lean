prelude
import Core
namespace Mine
private theorem lemma_ (p : Prop) (h : p) : p := h
opaque secret : Nat
theorem t (p : Prop) : p → p := lemma_ p
end Mine
open Mine in
theorem again (p : Prop) : p → p := Mine.t p
