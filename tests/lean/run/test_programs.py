"""Which texts can run programs of their own while Lean compiles them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanq.lean.run.library_syntax import Evaluators
from leanq.lean.run.programs import runs_programs

ROOT = Path(__file__).parents[3]

RUNNING = [
    '#eval IO.println "x"',
    "#eval! f",
    "#evalf",
    "#guard f = 1",
    "#guard_msgs in #guard f = 1",
    "run_cmd pure ()",
    "def x := 1run_cmd pure ()",
    "def x := 0xFrun_cmd pure ()",
    "theorem t : p := by run_tac pure ()",
    "theorem t : p := by_elab pure default",
    'elab "x" : tactic => pure ()',
    'elab"x" : tactic => pure ()',
    'macro "IsOpen" rest:term* : term => `(True)',
    "local macro_rules | `(x) => `(y)",
    'syntax (name := a) "#print" : command',
    "declare_syntax_cat cat",
    "declare_config_elab f Config",
    "initialize x : Nat ← pure 1",
    "builtin_initialize pure ()",
    "register_option a : Bool := {}",
    "simproc f (_) := fun _ => pure .continue",
    "unsafe def f : Nat := 1",
    "example : x = 1 := by native_decide",
    "set_option trace.profiler.serve true",
    "example : x = 1 := by decide +native",
    "example : x = 1 := by decide + native",
    "example : x = 1 := by decide (native := true)",
    "theorem t := Lean.ofReduceBool f true rfl",
    "theorem t := «Lean».«ofReduceBool» f true rfl",
    '@[extern "lean_io_exit"] def f : Nat := 1',
    '@[simp, extern "lean_io_exit"] def f : Nat := 1',
    "@[«extern» f] def f : Nat := 1",
    "@[ /- ] -/ extern f] def f : Nat := 1",
    "@[implemented_by g] def f : Nat := 1",
    "attribute [local implemented_by g] f",
    "attribute\n-- [simp]\n[term_parser] f",
    "attribute/- -/[tactic t] f",
    "attribute [simp, tactic t] f",
    "@[tactic t] def f := 1",
    "@[to_additive (attr := simp, norm_num f)] def f := 1",
    "@[norm_num _ + _] def f := 1",
    "@[command_elab f] def g := 1",
    "@[app_unexpander f] def g := 1",
    "@[export lean_x] def g := 1",
    "set_option debug.skipKernelTC true",
    "example : x := by simp (config /- a -/ -- b\n := f)",
    "example : x := by simp (config -- a\n /- b -/ := f)",
    "example : x := by simp (config /- a -/ /- b -/ := f)",
    "example : x := by simp (config -- a\n\n  -- b\n := f)",
    "example : x := by simp (config\n-- a\r\n := f)",
    "@[to_additive (attr := simp) (attr := tactic f)] def f := 1",
    "@[to_additive (attr := to_dual (attr := tactic f))] def f := 1",
    "set_option «debug».skipKernelTC true",
    "set_option interpreter.prefer_native true",
    "set_option compiler.extract_closed false",
    "example : x := by simp (config := f)",
    "example : x := by simp (config := { maxSteps := f 1 })",
    "example : x := by simp ( -- y\n maxSteps := f)",
    "example : x := by simp (/- y -/ maxSteps := f)",
    "example : x := by simp (maxSteps /- y -/ := f)",
    "example : x := by simp (maxSteps -- y\n := f)",
    "example : x := by simp («maxSteps» := f)",
    "example : x := by aesop (add safe tactic f)\ndef f : TacticM Unit := g",
    # What ends another token, or may.
    "#versionelab x",
    "#versionset_option debug.x true",
    "#versionattribute [export f] f",
    'notation "(x" => 1\ntheorem t : f = (xmacro x',
    "register_try?_tactic f",
    'binder_predicate x " foo " y => f',
    "#postprocess_traces f",
    "set_library_suggestions f",
    "grind_propagator f",
    'set_option sat.solver "x"',
    'set_option «sat».«solver» "x"',
    "show_panel_widgets [f]",
    # Signs that are no part of an identifier.
    'prefix:max "₊" => id\nrun_cmd₊(f)',
    "example : x := by simp (ground.maxSteps := f)",
    "namespace Lean\nnamespace Elab\ndef f := g\nexample : x := by aesop (add safe tactic f)",
    # A literal that the text gives another meaning; a configuration like an argument.
    "instance : OfNat Nat 100 := ⟨f⟩\nexample : x := by simp (maxSteps := 100)",
    'notation "true" => f\nexample : x := by simp (decide := true)',
    "def true : Bool := f\nexample : x := by simp (decide := true)",
    "def -- a\n A.true := f\nexample : x := by simp (decide := true)",
    "class A where true : Bool\nexample : x := by simp (decide := true)",
    "def Lean.Meta.Occurrences.f := g\nexample : x := by rw (occs := .f) [h]",
    "def Lean.Meta.Occurrences.f (l : List Nat) := g\nexample : x := by rw (occs := .f [1]) [h]",
    "instance : Coe Bool Nat := ⟨f⟩\nexample : x := by simp (maxSteps := true)",
    "instance : NatCast Bool := ⟨f⟩\nexample : x := by simp (decide := 2)",
    "instance : One Bool := ⟨f⟩\nexample : x := by simp (config := { decide := 1, maxSteps := 2 })",
    "open A renaming f → true\nexample : x := by simp (decide := true)",
    "export A (\n true)\nexample : x := by simp (decide := true)",
    "example : x := by decide (native -- a\n := true)",
    "example : x := by decide (native /- a -/ := true)",
    "example : x := by mvcgen' (maxSteps := f)",
    "@[measurability] def f : Lean.Elab.Tactic.TacticM Unit := g",
    "attribute [local bound] f\ndef f : Aesop.TacGen := g",
    "example : x := by simp +arith (maxSteps := f)",
    "example : x := by simp + arith (maxSteps := f)",
    "example : x := by simp -- a\n (maxSteps := f)",
    "example : x := by simp! (maxSteps := f)",
    "example : x := by iterate 3simp (maxSteps := f)",
    "example : x := by simp (zeta := false) (maxSteps := f)",
    "example : x := by solve_by_elim* (maxDepth := f)",
    "example : x := by rw (occs := .pos f) [h]",
    # A constant that Aesop evaluates, with no word for it.
    "@[aesop safe] def f : Aesop.RuleTac := fun _ => do IO.FS.writeFile g h",
    "import Aesop\n@[aesop norm 1] def f : Aesop.TacGen := g",
    "open Lean in\ndef f := g\nexample : x := by aesop (add unsafe 50% f)",
    "example : x := by aesop (/- -/ add safe f)\ndef f : Elab.Tactic.TacticM Unit := g",
    "idbg f",
    # Behind what is a comment or a string by another reading alone.
    'notation "⟪-" => 1\nexample := ⟪--x\nrun_cmd f',
    'notation "⟪-" => 1\nexample := ⟪--x run_cmd f',
    'notation "⟪\\x2d" => 1\nexample := ⟪-- run_cmd f',
    'notation "∑\'" => 1\nexample := ∑\'"\'" run_cmd f --"',
    "theorem t := x \\/- run_cmd f -/",
    'notation "⟪\\"" => 1\nexample := ⟪"run_cmd f --"',
    'notation r#"⟪""# => 1\nexample := ⟪"run_cmd f --"',
    'notation:9 "⟪" a ")" => a\npostfix:5 "." => id\nexample := ⟪ 1 ).run_cmd f',
    'notation "⟪" a ")." => a\nexample := ⟪ 1 ).run_cmd f',
    'def s! (x : String) := x\nexample := s! "{ "\nrun_cmd f "}"',
    'example := throwError "{ " run_cmd f --"',
    'example := m!"a {by run_tac f}"',
    'example := m!"{"a"}" run_cmd f --"',
    "-- a\n/- b -/ run_cmd f",
    "/-- -- a -/\n b -/ run_cmd f",
    "/-/ -/ run_cmd f",
    'r#"a"# run_cmd f',
    'r "a" run_cmd f',
    "example := x'\nrun_cmd f'",
    "/- an open comment\nrun_cmd f",
    # What Lean evaluates for an argument that is left out.
    "theorem f (h : autoParam True g) : True := h",
    "def g : Lean.Syntax := f 1",
    "def g._autoParam := f 1",
    "def g := match f._auto_1 with | .node i k a => .node i (h k) a | s => s",
    "open Lean\ndef g := mkNullNode #[mkAtom x]",
    'def Lean.ParserDescr.symbol := f\nnotation "x" => 1',
    # The same without the type's name, which is that of a library's argument.
    'def g := un (@Array.set Nat #[] 0 0) (.node .none k #[.atom .none "trivial"])',
    "def g := un h (.«node» .none k #[ .«ident» .none s n []])",
    "def g := un h (.mkCApp n #[])",
    "def g := un h (.setArgs (.missing) #[.mkNameLit n])",
    # Names of what a notation makes.
    "aux_def macroRules x : Nat → Nat := f",
    "def A.«_aux_x» := f",
    # An antiquotation in a notation is evaluated.
    'notation "x" => $(f 3)',
    'notation3 "x" y => y + $$f',
    'infixl:65 " + " => $«f»',
    'prefix:max "x" => fun%$(f 3) y => y',
    'local notation "x" => g $[$f]*',
    # An instance that a notation's macro may use.
    'instance (b : Bool) : Decidable (b = true) := f b\nlocal notation "x" => g',
    'def h : Monad M := f\nattribute [local instance] h\nscoped infixl:65 " + " => g',
    '@[default_instance] def h : OfNat Nat 0 := f\nprefix:max "x" => g',
    'notation "1x" => 1\ntheorem t : f = 1xinstance : C := c\npostfix:5 "x" => g',
]

HONEST = [
    "theorem add_comm_simp (n m : Nat) : n + m = m + n := by simp [Nat.add_comm]",
    "@[simp] theorem t : p := h",
    "@[simp, ext] structure A where a : Nat",
    "@[to_additive (attr := simp)] theorem t : p := h",
    '@[deprecated foo (since := "2025-01-01")] theorem t : p := h',
    "attribute [local simp, -ext] f",
    "-- an attribute of this proof",
    "@[elab_as_elim] theorem t : p := h",
    "@[macro_inline] def f := 1",
    "initialize_simps_projections A",
    'notation "x" => 1',
    "infixl:65 \" ++ \" => f",
    'notation "x" => f $ 1 -- $x\nexample := (f <$> y) + (· <$>(z))',
    "def f (x : Term) := `(g $x)",
    "theorem t_aux_1 : p := t_aux",
    "example : x := by simp (config := { decide := true, maxSteps := 100 })",
    "example : x := by simp (maxSteps := 100) only [f]",
    "example : x := f (n := g)",
    "def f (order : Nat) := order\nexample : f (order := k) = k := rfl",
    "example : x := foo.bar (n := 1) (index := g 1)",
    "example : x := by rw (occs := .pos [2]) [h]",
    "example : x := by rw (occs := .neg [1, 3]) [h.pos, h.neg]",
    "example : x := by simp (config := { transparency := .default })\nexample := f.default",
    "import Mathlib\n@[aesop safe apply] theorem t : p := h",
    "-- A bound of Lean's own\n@[simp] theorem bounded : p := h",
    "example : x := by grind (splits := 12) (gen := 3)",
    "import Aesop\nopen Nat in\nexample : x := by aesop (add safe Nat.le, norm simp h)",
    "def f (b : Bool) := b = true\nexample : x := by simp (config := { decide := true })",
    "example : x := { p with a.mode := f }",
    "example : x := by run_cmd₁",
    "example : x := by ring -- done\n\nexample : x\n  := 1",
    "@[to_additive (attr := simp, to_dual (attr := simp))] def f := 1",
    "example : x := by decide -- done\n\nexample := 1",
    "set_option maxHeartbeats 400000 in",
    "set_option pp.all true",
    "-- Lean 4: an aesop proof\nexample : x := by aesop",
    "structure A where a : Nat deriving Repr, DecidableEq",
    "import Lean.Elab",
    "#check f\n#print axioms f\n#reduce f",
    "#guard_msgs (drop all) in\n#check f",
    "def Tree.size : Tree → Nat | .leaf => 0 | .node l r => l.size + r.size",
    'def f : Sexp → Sexp | Sexp.atom a => Sexp.node [Sexp.atom a] | s => s.node.ident',
    "def elaborate := 1",
    "theorem syntactic : p := h",
    "def mkNode (l r : Tree) := Tree.node l r\ntheorem mkNode_size : p := h",
    "theorem t (h : p := by simp) : p := h\ntheorem mk_auto : q := t",
    "-- The debug. option, and a compiler. Or so",
    # Comments, strings, imports and longer identifiers.
    "-- The syntax of this macro, by elab and #eval\n/- unsafe /- extern -/ -/ def f := 1",
    "/-- An unsafe macro: `run_cmd` -/\ntheorem t : p := h",
    'def f := "elab \\" macro" ++ s!"{x} syntax" ++ r#"unsafe" #eval"#',
    "import Lean.Syntax\nimport all Lean.Parser.Syntax\ntheorem t : p := h",
    "namespace Foo.Syntax\ninductive Syntax where | a : Syntax\nend Foo.Syntax",
    "theorem safe_unsafe : p := h\ntheorem unsafe.t : p := x.macro (f).syntax",
    "-- Symmetric.\ntheorem t : Equivalence f where\n  refl := g\n  symm := fun h => h.symm",
    "instance : Min A where -- the least\n  min := fun a b => a",
    "theorem t : a + a = b := by rw (occs := [2]) [h] -- once",
    "@[deprecated new' (since := \"2025-01-01\")] theorem old : p := h -- 'it'",
    "-- simp (config := f)\nexample : x := by simp",
    'notation "{ " a ", " b " }" => f a b -- no macro',
    'notation:9 "{| " a => f a -- no macro',
    'notation "x" => 1\ninstance : Add A := f',
    '-- an instance\nnotation "x" => 1',
    "instance : Add A := f\ntheorem prefix_of (h : a.prefix b) : l.infix_iff := h -- a notation",
    "instance : Add A := f\n@[inherit_doc] theorem notation_of := f",
    "-- no macro\n#check_failure f\n#version\n#check (f)",
    "example (c : Char) := c = '\\\"' -- macro \"",
    "def f (extern delab : Nat) := extern -- an attribute",
]  # fmt: skip


@pytest.mark.parametrize("code", RUNNING)
def test_texts_that_can_run_programs(code: str) -> None:
    assert runs_programs(code) is not None


@pytest.mark.parametrize("code", HONEST)
def test_texts_that_cannot(code: str) -> None:
    assert runs_programs(code) is None


def test_any_field_may_have_a_number_where_values_are_known_to_be_data() -> None:
    code = "theorem t (n : Nat) : n + 0 = n := by simp (config := { depth := 7 })"
    assert runs_programs(code)
    assert runs_programs(code, is_watched=True) is None
    assert runs_programs(f"instance : OfNat Nat 7 := f\n{code}", is_watched=True)
    assert runs_programs(code.replace("7", "f 7"), is_watched=True)


def test_an_instance_before_a_notation_counts_also_where_somebody_watches() -> None:
    """Lean may have put its code into the notation's macro."""
    code = 'instance : Add A := f\nnotation "x" => 1'
    assert runs_programs(code) == runs_programs(code, is_watched=True) == "instance"


def test_the_repositorys_own_texts_run_no_programs() -> None:
    folders = ("examples", "tests/samples")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*.lean")]
    texts += (ROOT / "tests" / "cheats").rglob("honest_*.lean")
    assert len(texts) > 14
    assert {path.name: runs_programs(path.read_text()) for path in texts} == dict.fromkeys(
        (path.name for path in texts), None
    )


def test_words_of_the_environments_own() -> None:
    own = Evaluators(
        words={
            "my_command": "command c (M)",
            "my_tactic …": "tactic t (M)",
            "apply ( config := … ) …": "tactic a (M)",
            "with_power ( … ) run_it": "term p (M)",
        },
        attributes={"aesop": "Aesop", "simps": "M"},
        fields=["myField"],
        heads=["mine"],
        unseen={"Hidden": "it is damaged"},
    )
    assert runs_programs("my_command do things", own) == "my_command"
    assert runs_programs("my_command do things") is None
    assert runs_programs("theorem t : p := by my_tactic f", own) == "my_tactic"
    assert runs_programs("theorem t : p := by\n  · .my_tactic f", own) == "my_tactic"
    for name in ("my_tactic_of f", "(my_tactic : Nat)", "fun my_tactic => 1", "f.my_tactic 1"):
        assert runs_programs(f"-- my_tactic f\ndef g := {name}", own) is None
    assert runs_programs("theorem my_tactic : p := by simp", own) is None
    assert runs_programs("theorem t : p := by apply f (config)", own) is None
    assert runs_programs("theorem t : p := by apply (config := { a := true }) f", own) is None
    assert runs_programs("theorem t : p := by apply (config := f) g", own) is not None
    assert runs_programs("example := with_power (2) run_it", own) == "with_power"
    assert runs_programs("example := with_power 2 + (run_it)", own) is None
    assert runs_programs("theorem t : A.my_tactic = f (my_tactic := 1) := by simp", own) is None
    assert runs_programs("@[simps] def f := 1", own) == "@[simps]"
    assert runs_programs("@[aesop safe apply] theorem t : p := q", own) is None
    assert runs_programs("theorem t : p := by mine (myField := f)", own) is not None
    assert runs_programs("theorem t : p := by mine (myField := true)", own) is None
    assert runs_programs("import Mathlib Hidden.A", own) == "import Hidden"
    assert runs_programs("import Hiddens", own) is None
    for between in ("\n\n", " /- its\nname -/\n", " -- Hiddens\n", " all\n\n", "\n«"):
        code = f"import Mathlib\nimport{between}Hidden{'»' * between.count('«')}.A\n\ndef f := 1\n"
        assert runs_programs(code, own) == "import Hidden"
    assert runs_programs("import Mathlib\n\ntheorem Hidden.t : p := q", own) is None


def test_tokens_of_libraries() -> None:
    assert runs_programs("example := a +--> b -- macro") is None
    assert runs_programs("example := a +--> b -- macro", Evaluators(tokens=["+--"])) == "macro"
    assert runs_programs("example := ∫⁻x -- macro", Evaluators(tokens=["∫⁻", "∑x"])) is None
    assert runs_programs("example := ∑xmacro -- a", Evaluators(tokens=["∑x"])) == "macro"


def test_the_word_is_shown_whole() -> None:
    assert runs_programs("set_option debug.skipKernelTC true") == "debug.skipKernelTC"
    assert runs_programs("set_option compiler.extract_closed true") == "compiler.extract_closed"


@pytest.mark.slow
@given(
    st.text(st.characters(exclude_characters="-\"'«`")),
    st.text(),
    st.sampled_from(["#eval", "run_cmd", "native_decide"]),
)
def test_no_text_around_a_word_hides_it(before: str, after: str, word: str) -> None:
    before += " " * bool(re.search(r"[^\W\d][\w'!?.]*\Z", before))
    if re.match(r"[\w'!?]|[^\x00-\x7f]", after):
        after = "\n" + after
    assert runs_programs(before + word + after) is not None


@pytest.mark.parametrize(
    "piece", ["config --", "--config\n", "config\n--\n:=", f"{'a.' * 900}exp:=1("]
)
def test_a_comment_is_not_read_once_for_each_word_in_it(piece: str) -> None:
    """Whoever reads a text by a pattern holds up everything else of the process."""
    code = "-- " + piece * (100_000 // len(piece))
    started = time.process_time()
    runs_programs(code)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("depth", [2, 20, 300])
def test_attributes_in_attributes_are_read_once(depth: int) -> None:
    code = "@[" + "to_additive (attr := " * depth + "simp" + ")" * depth + "]\n"
    started = time.process_time()
    assert (runs_programs(code) is None) == (depth == 2)
    assert time.process_time() - started < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    [
        "aesop ",
        "def /-",
        "true /-",
        "simp (exp:=1) ",
        "-",
        '@[""]',
        "@[]",
        "exp := ",
        "0x",
        "F",
        "decide /-",
        "open ",
        "\n",
        "attribute ",
        "@[[",
    ],
)
def test_long_texts_take_no_longer_than_their_length_asks_for(piece: str) -> None:
    code = "example : x := by simp (decide := true)\n" + piece * (200_000 // len(piece))
    started = time.process_time()
    runs_programs(code)
    assert time.process_time() - started < 10
