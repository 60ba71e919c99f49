inductive Expr' where
  | num (n : Nat)
  | plus (a b : Expr')

def Expr'.eval : Expr' → Nat
  | num n => n
  | plus a b => a.eval + b.eval

def Expr'.fold : Expr' → Expr'
  | num n => num n
  | plus a b =>
    match a.fold, b.fold with
    | num m, num n => num (m + n)
    | a, b => plus a b

theorem Expr'.eval_fold (e : Expr') : e.fold.eval = e.eval := by
  induction e with
  | num n => rfl
  | plus a b iha ihb =>
    simp only [fold, eval]
    split <;> simp_all [eval]

-- accepted
-- states: Expr'.eval_fold
