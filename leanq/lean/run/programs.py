"""Tells by a text's words whether it can run programs of its own while Lean compiles it.

They count where nobody sees what Lean evaluates (:mod:`leanq.lean.run.evaluations`), or
where it evaluated something of the text's.

A program can replace the text's compiled file and end Lean as if all were well. The judge then
truly says that the file's declarations are proved. But nobody has shown that the text makes these
declarations; only a target can tell.

Lean has no escapes outside of strings and characters. So keywords and the names of attributes and
options stand in the text letter by letter, and no program can be hooked in without one. Comments,
strings, imports and longer identifiers do not count where :mod:`leanq.lean.text` is sure
of them. Elsewhere the whole text counts as it stands, so the answer errs towards True.

There are five ways from a text to a program that runs:

- a command, a term or a tactic evaluates code, or a declaration has code called later: `_WORDS` has
  these words, or their beginnings;
- an attribute: `_HARMLESS` lists those that are known to run nothing of the text's;
- an option lets code pass unchecked, or calls compiled functions by name (`_OPTIONS`);
- the configuration of a tactic is a term that Lean evaluates. A literal one runs nothing, unless
  the text gives its words another meaning (`FIELDS`, `_HEADS`, `_is_literal`);
- a tactic fills in a missing argument, from a constant of type `Lean.Syntax` that Lean evaluates.
  The tactic in `(h : p := by …)` is fixed, but a text can compute another one. `_WORDS` and
  `_MAKES_SYNTAX` find the names and the makers of such constants. A text need not name the type:
  it can be that of a library's argument. Then `.node` and its like make it (`_DOTTED_NODE`).

No word is left where a text takes such names out of a library's constant by unification. That is
not found.

These lists are about Lean's own library. :mod:`leanq.lean.run.evaluators` finds in compiled files
which syntax of other libraries evaluates.

`notation`, `infixl` and their like write fixed macros. They can change what a statement means; the
reply to a check shows statements, and `verify` compares them. An antiquotation in one is no part of
a fixed macro: Lean evaluates the term behind its `$` (`_SPLICED`). Nor is an instance: a macro's
code uses those that Lean finds for it, as for `Decidable (b = true)`, and may have their code in
its own. No file tells, since the program may have replaced it. But nothing declares an instance
without that word, so one before a notation counts (`_instance_of_a_notation`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache

from leanq.lean.run.library_syntax import REVIEWED, Evaluators, is_reviewed, symbols, uses
from leanq.lean.text import BareText, Word, bare_text, split_header

# A character behind a word makes another identifier of it. One before it does not: Lean reads
# `#versionelab` as `#version`, then `elab`, and a notation may end in a letter like that.
_AFTER = r"(?![A-Za-z0-9_'!?\u2080-\u2089\u2090-\u209c])"

_KEYWORDS = (
    # Commands, terms and tactics that evaluate, and commands that extend Lean.
    r"run_(?:cmd|elab|meta|tac)",
    r"by_elab",
    r"elab(?:_rules|_stx_quot)?",
    r"macro(?:_rules|_expr)?",
    r"(?:declare_)?syntax(?:_cat|_abbrev)?",
    r"(?:builtin_)?initialize",
    r"(?:builtin_)?d?simproc(?:_decl|_pattern)?",
    r"(?:declare|register|builtin)_[A-Za-z_?!]+|add_aesop_rules|binder_predicate|grind_propagator",
    r"set_(?:library_suggestions|premise_selector)|(?:show|with)_panel_widgets|docs_to_verso",
    r"postprocess_traces|(?:derive|ensure)_eval_[a-z_]+|def_eval_config_item",
    r"include_str|idbg|aux_def",
    r"unsafe",
    r"plausible|slim_check",
    # Evaluation that the kernel takes on trust.
    r"native_decide",
)
_NAMES = (
    # Constants that Lean evaluates: for a missing argument, and of a notation.
    r"_?autoParam|_auto_\d+|_aux_[\w'!?]*",
    # Evaluation that the kernel takes on trust.
    r"reduceBool|reduceNat|ofReduceBool|ofReduceNat|trustCompiler",
)
# Attributes, wherever they are written.
_HOOKS = (
    r"extern|implemented_by|csimp",
    r"(?:builtin_)?(?:term_|command_)elab|[a-z]+_parser|app_unexpander|app_delab|delab|unexpander"
    r"|formatter|parenthesizer|cpass|derive_handler|widget_module",
)
# Types of constants that Lean evaluates, where a text can name what is in the namespace `Lean`.
_TYPES = r"\w*(?:Syntax|ParserDescr)"
# A text without any of these has none of the words. Most texts have none, and this is quick.
_HINT_WORDS = (
    "run_ elab macro syntax initialize simproc declare_ register_ builtin_ aesop include_str "
    "binder_predicate grind_propagator set_library set_premise panel_widgets docs_to_verso "
    "idbg aux_ _traces _eval_ unsafe plausible slim_check autoParam _auto_ Syntax ParserDescr "
    "extern implemented_by csimp native "
    "educeBool educeNat trustCompiler _parser expander formatter parenthesizer cpass "
    "derive_handler widget_module"
)
_HINTS = _HINT_WORDS.split(" ")
_WORD = re.compile(f"(?:{'|'.join((*_KEYWORDS, *_NAMES, *_HOOKS))}|Syntax|ParserDescr){_AFTER}")
_KEYWORD, _NAME, _TYPE = (
    re.compile("|".join(_KEYWORDS)),
    re.compile("|".join(_NAMES)),
    re.compile(_TYPES),
)
# Lean's functions that make syntax for evaluation. Others make nodes of trees, too: they count only
# if the text can name what is in the namespace `Lean`.
_MAKES_SYNTAX = re.compile(rf"mk(?:(?:Null|Group|Optional)?Node|Atom|C?Ident){_AFTER}")
# The same by the expected type, without the type's name: a node, and a leaf with a word in it. An
# honest text has both if it writes such constructors of its own without their type.
_DOT = r"(?<![\w'!?»])\.«?(?:{})»?" + _AFTER
_DOTTED_NODE = re.compile(_DOT.format(r"node\d?|mkC?App|set(?:Args?|Kind)|modifyArgs?"))
_DOTTED_LEAF = re.compile(
    _DOT.format(r"atom|ident|mkC?App|mk(?:Char|Name|Nat|Num|Scientific|Str)?Lit|mkSep")
)
# Words that end in a sign, or begin with one: nothing makes another word of them.
_SIGNS = re.compile(
    # `#guard_msgs` is a word of its own wherever `#guard` is one, and runs nothing.
    r"\#(?:eval|guard(?!_msgs)|html|widget|test|sample|unsat)|(?:eval|elab|unquote)%"
    r"|\+\s*native|native\s*:="
)
# Options by which Lean itself starts a program or writes a file.
_OUTSIDE = re.compile(r"profiler»?\.«?(?:output|serve)|sat»?\.«?solver")
_OPTIONS = re.compile(
    r"(?:debug|bootstrap|compiler|interpreter)»?\.[«A-Za-z][\w.«»]*"
    r"|skipKernelTC|prefer_native|doc»?\.«?verso|profiler»?\.«?(?:output|serve)|sat»?\.«?solver"
)

# Attributes that run nothing of the text's while it is compiled.
_HARMLESS_ATTRIBUTES = (
    "simp simps grind ext local scoped reducible irreducible semireducible instance "
    "instance_reducible implicit_reducible default_instance inline noinline always_inline "
    "specialize nospecialize macro_inline elab_as_elim elab_without_expected_type elab_simple "
    "class match_pattern congr refl symm trans norm_cast push_cast mono gcongr fun_prop "
    "continuity measurability aesop bound deprecated inherit_doc coe cases_eliminator "
    "induction_eliminator pp_nodot pp_with_univ pp_using_anonymous_constructor to_additive "
    "to_dual reassoc elementwise mk_iff stacks kerodon wikidata nolint nontriviality "
    "field_simps mfld_simps parity_simps zify_simps qify_simps rify_simps push pull bool_simps "
    "ghost_simps higher_order algebraize expose recursor unbox defeq univ_out_params "
    "order_dual finiteness spec tactic_alt rcases_patterns tauto push_neg seval never_extract "
    "wf_preprocess cbv_eval cbv_opaque bv_normalize int_toBitVec no_expose suggest_for"
)
_HARMLESS = frozenset(_HARMLESS_ATTRIBUTES.split(" "))
_ATTRIBUTE = re.compile(r"@\[|attribute(?![A-Za-z0-9_'!?])(?P<gap>\s*)(?P<open>\[?)")
_MAX_ATTRIBUTES_CHARS = 4000
_MAX_ODD_ATTRIBUTES = 1000
_SET_OPTION = re.compile(r"set_option\s+([\w.'!?]+)")
_PLAIN = re.compile(r"[A-Za-z0-9_.,\s↓↑←→()]*+\]")
_PLAIN_STRING = re.compile(r'"[^"\\\n]*"')
_ATTRIBUTE_NAME = re.compile(r"(?:(?:local|scoped)\s+|[-↓↑←→]\s*)*([A-Za-z_][A-Za-z0-9_.']*)?")
_NESTED = re.compile(r"\(\s*attr\s*:=")
_MOST_NESTED = 8

# The fields of the configurations of tactics in Lean and Mathlib: terms that Lean evaluates.
_FIELD_WORDS = (
    "abstractProof ac acNf acSteps all allowSynthFailures andFlattening applyHypsTransparency "
    "approx arith assumptionTransparency autoUnfold backtracking beqEqs beta binaryProofs "
    "bitVecOfNat canonHeartbeats canonInstances catchRuntime clean closePost "
    "commitIndependentGoals config congrConsts constructor contextual cutsat decide descend "
    "destructProductsTransparency detailed discharge discharger dsimp elimLets ematch "
    "embeddedConstraintSubst enableSimp enableUnfold enums eta etaReduce etaStruct exfalso exp "
    "ext extAll failIfUnchanged fixedInt funCC funext gen genLocal genLocalDefs graphviz grind "
    "ground harder implicitDefEqProofs implicits index inj instances intro intros "
    "introsTransparency iota jp kernel lax leave letToHave lia lift linarith linear locals "
    "lookahead main matchEqs max maxDepth maxDischargeDepth maxExponent maxGoals "
    "maxNormIterations maxRuleApplicationDepth maxRuleApplications maxSteps maxSuggestions mbtc "
    "memoize merge min missing mode name native newGoals occs offsetCnstrs only onlyGivenNames "
    "options oracle order partialApp preferLHS preprocess preprocessing preserveBinderNames proc "
    "proj proofs qlia red reducible revert ring ringSteps sameFun sat_timeout shortCircuit "
    "simp_config singlePass singleton solverMode splitDisjunctions splitHypotheses splitImp "
    "splitIndPred splitIte splitMatch splitMinMax splitNatAbs splitNatSub splitNe splits star "
    "stepLimit strategy structures suggestions suspend symm synthAssignedInstances targetOnly "
    "terminal timeout trace traceScript transform transparency trimProofs trivial try? typeEqs "
    "types underBinder unfoldPartialApp unfoldReducible useContext useDefaultSimpSet usedOnly "
    "useSimpAll useSorry verbose warnExponents warnOnNonterminal wrapWithBy zeta zetaDelta "
    "zetaDeltaSet zetaHave zetaReduce zetaUnused"
)
FIELDS = frozenset(_FIELD_WORDS.split(" "))
"""The fields of Lean's own library, and of some others."""
_VALUE = r":=(?P<value>[^()]{0,400}+)(?P<end>[()]?)"
# A field of a field, `(simp.maxSteps := …)`, read from its end: a search for its beginning would
# start at each.
_BACKWARDS_PATH = re.compile(r"(?:\.[\w'«»]*[^\W\d])+")
_MAX_GAP_CHARS = 2000
_LITERAL_NUMBERS = r"\[[0-9,\s]*+\]"
_LITERAL_VALUE = (
    rf"(?:true|false|[0-9][0-9_]*|\.[A-Za-z]+(?:\s+{_LITERAL_NUMBERS})?|{_LITERAL_NUMBERS})"
)
_LITERAL_ITEM = rf"[A-Za-z_]+\s*:=\s*{_LITERAL_VALUE}"
_LITERAL = re.compile(rf"\s*(?:{_LITERAL_VALUE}|\{{\s*(?:{_LITERAL_ITEM}\s*,?\s*)*\}})\s*")
# The constructors that a configuration's field can have; no text can make others of them.
_CONSTRUCTORS = re.compile(
    r"occs\s*:=\s*\.(?:all|pos|neg)(?![\w'!?.])"
    r"|(?:t|\w*T)ransparency\s*:=\s*\.(?:all|default|reducible|instances|none)(?![\w'!?.])"
    r"|etaStruct\s*:=\s*\.(?:all|none|notClasses)(?![\w'!?.])"
    r"|newGoals\s*:=\s*\.(?:all|nonDependentFirst|nonDependentOnly)(?![\w'!?.])"
)
# Fields that hold numbers. A number in another field would be what an instance makes of it.
_OF_NUMBERS = re.compile(
    r"(?:max[A-Z]\w*|\w*(?:Depth|Steps|Heartbeats|Limit)|splits|ematch|gen|exp|instances|timeout"
    r"|sat_timeout|degree|min|max)\s*:=\s*[0-9][0-9_]*"
    rf"|occs\s*:=\s*(?:\.(?:pos|neg)\s+)?{_LITERAL_NUMBERS}"
)
_NUMBER = re.compile(r":=[^:]*[0-9]")
_DOTTED = re.compile(r"\.([A-Za-z]+)")
_NOTATIONS = re.compile(r"notation|infix|prefix|postfix")
_NOTATION = re.compile(r"notation3?|infix[lr]?|prefix|postfix")
_INSTANCE = re.compile(r"(?<!\w)\w*instance")
# An antiquotation: `$x`, `$(…)`, `$[…]*`. Behind the `$` that applies a function stands a blank.
_SPLICED = re.compile(r"\$[^\s>)]")
# With a comment before or behind it, a name may be one that is declared.
_OTHER_TRUTH = re.compile(
    r"(?:def|abbrev|opaque|theorem|lemma|axiom|alias|constant|instance|class|structure|inductive"
    r"|simps|to_additive)\s*(?:--|/-|\s[\w.«»]*(?:true|false)(?![\w'!?]))"
    r"|(?<![\w'!?])(?:true|false)»?\s*(?:--|/-|:(?!=)|[({\[⦃]\s*\w+[^()]*:)"
    r"|export|renaming|«(?:true|false)»"
)
# Tactics that take a configuration, and syntax that takes such a tactic's options.
_HEAD_WORDS = (
    "simp simp_all dsimp simpa simp_arith simp_all_arith dsimp_arith simp_intro simp_rw simprocs "
    "norm_num norm_num1 norm_cast push_cast exact_mod_cast apply_mod_cast assumption_mod_cast rw "
    "rewrite erw rwa nth_rewrite nth_rw rw_search apply exact refine eapply constructor "
    "econstructor fconstructor congr convert convert_to ext ext1 funext split split_ifs injection "
    "injections cases induction rcases obtain rintro intro intros omega decide grind cutsat lia "
    "grobner linarith nlinarith polyrith positivity try bv_decide bv_check bv_normalize bv_omega "
    "solve_by_elim apply_assumption apply_rules extract_lets lift_lets let_to_have clean unfold "
    "delta change conv lhs rhs arg pattern enter in mvcgen mspec mintro mvcgen_trivial aesop tauto "
    "itauto fun_prop continuity measurability gcongr bound mono abel abel_nf ring ring_nf "
    "noncomm_ring group module match_scalars linear_combination compute_degree field field_simp "
    "cc duper simps push pull push_neg by_contra contrapose wlog use exists zify qify rify hint "
    "says whnf beta reduce eta zeta subst symm trans rfl ac_rfl ac_nf cbv finish suggestions "
    "find lint check infer_instance inferInstance monotonicity get_elem_tactic positivity reassoc "
    "elementwise to_additive to_dual mk_iff subst_vars specialize generalize set replace choose "
    "lift nontriviality interval_cases fin_cases observe peel slice_lhs slice_rhs coherence "
    "bicategory monoidal sublists rel calc show have suffices let open classical any_goals "
    "all_goals case next first repeat iterate focus done skip stop only at with using from then do"
)
_HEADS = tuple(_HEAD_WORDS.split(" "))
_BEFORE_CONFIGURATION = re.compile(
    r"(?<![\w.'!?])([\w.'!?]+)[!?*]*\s*(?:\([A-Za-z_]+\s*:=[^()]*\)\s*)*\(\s*\Z"
)
# A rule of Aesop's can be a constant of the text's own that is a program. The text then names
# something of Lean's own, or of what is built on it.
_AESOP_RULE = re.compile(r"(?:@\[|attribute\s*\[)[^\]]*(?:aesop|bound|continuity|measurability)")
_ADDED = re.compile(r"(?<![A-Za-z])add(?![\w'])")
_OF_PROGRAMS = re.compile(
    r"Lean|Aesop|IO|Tactic|Meta|Elab|RuleTac|TacGen|Syntax|System|Task|Qq|Mathlib|Batteries"
    r"|ProofWidgets|Plausible|ImportGraph|(?:Core|Simp|Macro|Command|Term|Import|Script)M"
)


_NONE = Evaluators()


def is_word(symbol: str) -> bool:
    """Returns whether a symbol of Lean's own syntax lets a text run programs."""
    return bool(_WORD.fullmatch(symbol) or _SIGNS.fullmatch(symbol))


def acts_outside(code: str, found: Evaluators = _NONE) -> str | None:
    """Returns the option of a text that has Lean itself start a program or write a file; None if
    there is none."""
    if (match := _OUTSIDE.search(code)) is None:
        return None
    bare = bare_text(code[split_header(code).end_offset :], found.tokens)
    if bare is not None:
        match = _OUTSIDE.search(bare.text)
    return match and match[0]


def runs_programs(code: str, found: Evaluators = _NONE, *, is_watched: bool = False) -> str | None:
    """Returns the part of a text that lets it run programs of its own; None if there is none.

    Args:
        found: the findings in the environment's libraries.
        is_watched: whether it is known that each value that Lean evaluated of it is data. Then a
            number in a configuration is one, whatever field it stands in.
    """
    if (doubtful := _hint(code, found)) is None:
        return None
    # Nothing that is imported counts before the imports' end.
    bare = bare_text(code[split_header(code).end_offset :], found.tokens)
    return doubtful if bare is None else _in_bare(code, bare, found, is_watched=is_watched)


def _hint(code: str, found: Evaluators) -> str | None:
    """Returns a part of a text that may let it run programs, whatever is a comment in it. Most
    texts have none, and this is quick."""
    patterns = [_WORD] if any(hint in code for hint in _HINTS) else []
    if "Lean" in code:
        patterns.append(_MAKES_SYNTAX)
    for pattern in (*patterns, _OPTIONS, _SIGNS):
        if match := pattern.search(code):
            return match[0]
    if both := _beside(code):
        return both
    if "instance" in code and _NOTATIONS.search(code, code.index("instance")):
        return "instance"
    configured = _patterns(tuple(found.fields))[0].search(code)
    for syntax in found.words:
        if not is_reviewed(syntax) and all(each in code for each in symbols(syntax)):
            return symbols(syntax)[0]
    return (
        _unseen(code, found)
        or _attribute(code, found.attributes, is_bare=False)
        or (configured[0] if configured else _rule(code))
    )


def _beside(code: str) -> str | None:
    """Returns a word that lets a text run programs only where another one stands, too."""
    for word, other in ((_DOTTED_LEAF, _DOTTED_NODE), (_SPLICED, _NOTATIONS)):
        if (match := word.search(code)) and other.search(code):
            return match[0]
    return None


def _in_bare(code: str, bare: BareText, found: Evaluators, *, is_watched: bool) -> str | None:
    """Returns a part of a text without comments, strings and imports."""
    words = bare.words
    names_lean = any("Lean" in word.text for word in words)
    for word in words:
        if _is_suspect(word, names_lean=names_lean):
            return word.text
    for option in _SET_OPTION.finditer(bare.text):
        if _OPTIONS.search(option[1]):
            return option[1]
    for pattern in (_SIGNS, _MAKES_SYNTAX) if names_lean else (_SIGNS,):
        if match := pattern.search(bare.text):
            return match[0]
    if both := _beside(bare.text):
        return both
    if instance := _instance_of_a_notation(words):
        return instance
    texts, fields = tuple(word.text for word in words), FIELDS.union(found.fields)
    for syntax, what in found.words.items():
        if uses(syntax, texts, fields, is_tactic=what.startswith("tactic ")):
            return symbols(syntax)[0]
    return (
        _unseen(code, found)
        or _attribute(bare.text, found.attributes, is_bare=True)
        or _configuration(bare.text, found, is_watched=is_watched)
    )


def _instance_of_a_notation(words: Collection[Word]) -> str | None:
    """Returns the word that declares an instance before a notation."""
    found = None
    for word in words:
        has = re.Pattern.search if word.is_glued else re.Pattern.fullmatch
        if found is None and has(_INSTANCE, word.text):
            found = word.text
        elif found is not None and has(_NOTATION, word.text):
            return found
    return None


def _is_suspect(word: Word, *, names_lean: bool) -> bool:
    """Returns whether a token is a word that runs programs, or may have one in it."""
    text = word.text.lstrip("`")
    if word.is_glued and _WORD.search(text):
        return True
    if _KEYWORD.fullmatch(text):
        return True
    return any(
        _NAME.fullmatch(part) or (names_lean and _TYPE.fullmatch(part))
        for part in text.replace("«", "").replace("»", "").split(".")
    )


def _unseen(code: str, found: Evaluators) -> str | None:
    """Returns an import of a library that nobody has examined."""
    head = _imports(code) if found.unseen else ""
    for library in found.unseen:
        if re.search(rf"(?<![\w.]){re.escape(library)}(?!\w)", head):
            return f"import {library}"
    return None


def _imports(code: str) -> str:
    """Returns a text up to the line where its imports end: a name may stand on another line than
    its `import`."""
    header = split_header(code)
    return (
        code[: header.end_offset] + code[header.end_offset :].partition("\n")[0]
        if header.imports
        else ""
    )


def _attribute(code: str, evaluating: Collection[str], *, is_bare: bool) -> str | None:
    """Returns an attribute that is not known to be harmless."""
    odd = 0
    for match in _ATTRIBUTE.finditer(code):
        if match[0] != "@[" and not match["open"]:
            # A word of a sentence, unless a comment stands before its bracket.
            if code.startswith(("/-", "--"), match.end()):
                return match[0].strip()
            continue
        odd += not _PLAIN.match(code, match.end())
        content = None
        if odd <= _MAX_ODD_ATTRIBUTES:
            content = _bracketed(code, match.end(), "" if is_bare else "'")
        if content is None:
            return code[match.start() : match.start() + 40]
        if (found := _unknown(content, evaluating)) is not None:
            return f"@[{found}]"
    return None


def _unknown(content: str, evaluating: Collection[str], depth: int = 0) -> str | None:
    """Returns the first attribute of a list that is unknown, or nested too deep."""
    for item in _split(content):
        name = _ATTRIBUTE_NAME.match(item.strip())
        assert name is not None
        # `-simp` takes an attribute away, and an empty list has none.
        is_known = name[1] in _HARMLESS and (name[1] not in evaluating or name[1] in REVIEWED)
        if depth > _MOST_NESTED or (item.strip() and not is_known):
            return item.strip()[:40]
        end = 0
        # A nested list is checked together with the list around it.
        while nested := _NESTED.search(item, end):
            begin = end = nested.end()
            open_ = 1
            while open_ and end < len(item):
                open_ += {"(": 1, ")": -1}.get(item[end], 0)
                end += 1
            if (found := _unknown(item[begin : end - 1], evaluating, depth + 1)) is not None:
                return found
    return None


def _bracketed(code: str, start: int, doubtful: str) -> str | None:
    """Returns the text up to the bracket's end; None if that is not plain to see, as with one of
    the ``doubtful`` signs."""
    if match := _PLAIN.match(code, start):
        return match[0][:-1]
    content = _PLAIN_STRING.sub(" ", code[start : start + _MAX_ATTRIBUTES_CHARS])
    depth = 1
    for offset, character in enumerate(content):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if not depth:
            content = content[:offset]
            plain = not any(sign in content for sign in ('"', "«", "--", "/-", *doubtful))
            return content if plain else None
    return None


def _split(content: str) -> list[str]:
    """Returns the items between commas that stand in no brackets."""
    items, depth, start = [], 0, 0
    for offset, character in enumerate(content):
        if character in "([{⟨":
            depth += 1
        elif character in ")]}⟩":
            depth -= 1
        elif character == "," and depth <= 0:
            items.append(content[start:offset])
            start = offset + 1
    return [*items, content[start:]]


def _configuration(code: str, found: Evaluators, *, is_watched: bool) -> str | None:
    """Returns a tactic's configuration that is no literal, or a rule that is a program."""
    for match in _patterns(tuple(found.fields))[1].finditer(code):
        start = match.start()
        name = code[start : match.start("value")]
        if match["end"] and _is_literal(code, name, match, takes_numbers=is_watched):
            continue
        before = _without_path(code[max(0, start - _MAX_GAP_CHARS) : start])
        if before.rstrip().endswith("(") and not _is_argument(before, found):
            return code[start : start + 40].strip()
    return _rule(code)


def _rule(code: str) -> str | None:
    """Returns the word of Aesop's if a rule of its can be a program."""
    is_rule = _AESOP_RULE.search(code) or ("aesop" in code and _ADDED.search(code))
    return "aesop" if is_rule and _OF_PROGRAMS.search(code) else None


def _is_argument(before: str, found: Evaluators) -> bool:
    """Returns whether a name in brackets is plainly that of a function's argument.

    Args:
        before: the text in front of the name.
    """
    match = _BEFORE_CONFIGURATION.search(before)
    if match is None or found.unseen:
        return False
    # An option of a tactic can follow another one.
    if before[: match.start()].rstrip().endswith(("+", "-")):
        return False
    # A word may stand directly behind a number or a sign.
    return not match[1].rstrip("!?'0123456789").endswith(_heads(tuple(found.heads)))


@lru_cache(maxsize=16)
def _heads(more: tuple[str, ...]) -> tuple[str, ...]:
    return (*_HEADS, *(each.rstrip("!?*") for each in more))


@lru_cache(maxsize=1)
def _changes(code: str) -> tuple[bool, bool]:
    """Returns whether a text may change what a value is, and what `true` and `false` are."""
    changes_values = bool(_NOTATIONS.search(code)) or "OfNat" in code or "Coe" in code
    return changes_values, bool(_OTHER_TRUTH.search(code))


@lru_cache(maxsize=16)
def _count(code: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){word}(?!\w)", code))


def _is_literal(code: str, name: str, match: re.Match[str], *, takes_numbers: bool) -> bool:
    """Returns whether a configuration's value is a literal with its usual meaning.

    Args:
        takes_numbers: whether any field may have one.
    """
    value = match["value"]
    if match["end"] != ")" or not _LITERAL.fullmatch(value):
        return False
    # An instance of the text's can give a number, or a value of another type, another meaning.
    changes_values, changes_truth = _changes(code)
    if changes_values:
        return False
    item = f"{name}{value}"
    if name.startswith(("native", "«native")):
        return False
    if not takes_numbers and _NUMBER.search(_OF_NUMBERS.sub("", item)):
        return False
    if changes_truth and re.search(r"true|false", value):
        return False
    for dotted in _DOTTED.finditer(_CONSTRUCTORS.sub("", item)):
        # The text may declare what the word means; an honest one has it nowhere else.
        if _count(code, dotted[1]) > item.count(dotted[0]):
            return False
    return True


@lru_cache(maxsize=16)
def _patterns(more: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Returns patterns of a field's name with what may be its value, and with its value."""
    fields = "|".join(map(re.escape, sorted(FIELDS.union(more), key=len, reverse=True)))
    name = rf"(?<![A-Za-z0-9_])«?(?:{fields})»?\s*+"
    return re.compile(rf"{name}(?::=|--|/-)"), re.compile(rf"{name}{_VALUE}")


def _without_path(before: str) -> str:
    """Returns a text without the fields in front of a last one."""
    path = _BACKWARDS_PATH.match(before[::-1])
    return before[: len(before) - path.end()] if path else before
