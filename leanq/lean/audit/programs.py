"""Whether a text can run programs of its own while Lean compiles it.

Such a program can write another compiled file in the place of the text's own and end Lean as if all
were well. The judge then says, truly, that what that file declares is proved, but nobody has shown
that it is what the text declares; only a target can tell.

The answer is given on the whole text as it stands, comments, strings and «quoted» names included,
and never by our tokenizer, since where that and Lean's disagree a text could hide a word. Lean has
no escapes outside of strings and characters, so a keyword, an attribute's or an option's name
stands in the text letter by letter, and what hooks a program in cannot be written without one.
What a text may be suspected of for its comments alone is the price: the answer errs towards True.

There are five ways from a text to a program that runs:

- a command, a term or a tactic that evaluates code, or a declaration by which code is called
  later: their words, or how their words begin (`_WORDS`);
- an attribute: those that are known to run nothing of the text's are listed (`_HARMLESS`);
- an option that lets code pass unchecked or calls compiled functions by name (`_OPTIONS`);
- the configuration of a tactic, a term that Lean evaluates: a literal one runs nothing
  (`_FIELDS`);
- the tactic that is run for an argument that is left out, a constant of type `Lean.Syntax` that
  Lean evaluates. What stands in `(h : p := by …)` is fixed, but a text can compute another one:
  what names such a constant or makes it is looked for (`_WORDS`, `_MAKES_SYNTAX`).

`notation`, `infixl` and their like write macros, but fixed ones. They can change what a statement
means, which the statements in the reply to a check and `verify` show.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

# What follows makes another identifier of a word. What stands before it does not: Lean reads
# `#versionelab` as `#version`, then `elab`, and a notation may end in a letter like that.
_AFTER = r"(?![A-Za-z0-9_'!?\u2080-\u2089\u2090-\u209c])"

_WORDS = (
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
    r"include_str",
    r"unsafe",
    r"plausible|slim_check",
    # Constants that Lean evaluates: for an argument that is left out, and of a notation.
    r"autoParam|_auto_\d+|Syntax|ParserDescr",
    # Code that is not what its declaration says.
    r"extern|implemented_by|csimp",
    # Evaluation that the kernel takes on trust.
    r"native_decide|reduceBool|reduceNat|ofReduceBool|ofReduceNat|trustCompiler",
    # Hooks, wherever they are written.
    r"(?:builtin_)?(?:term_|command_)elab|[a-z]+_parser|app_unexpander|app_delab|delab|unexpander"
    r"|formatter|parenthesizer|cpass|derive_handler|widget_module",
)
# A text with none of these has none of the words: most have none, and this is quickly seen.
_HINT_WORDS = (
    "run_ elab macro syntax initialize simproc declare_ register_ builtin_ aesop include_str "
    "binder_predicate grind_propagator set_library set_premise panel_widgets docs_to_verso "
    "postprocess_traces _eval_ unsafe plausible slim_check autoParam _auto_ Syntax ParserDescr "
    "extern implemented_by csimp native "
    "educeBool educeNat trustCompiler _parser expander formatter parenthesizer cpass "
    "derive_handler widget_module"
)
_HINTS = _HINT_WORDS.split(" ")
_WORD = re.compile(f"(?:{'|'.join(_WORDS)}){_AFTER}")
# Lean's functions that make what it evaluates. Others make nodes of trees, too: they are meant only
# where the text can name what is in the namespace `Lean`.
_MAKES_SYNTAX = re.compile(rf"mk(?:(?:Null|Group|Optional)?Node|Atom|C?Ident){_AFTER}")
# Words that end in a sign, or begin with one: nothing makes another word of them.
_SIGNS = re.compile(
    r"\#(?:eval|guard|html|widget|test|sample|unsat)|(?:eval|elab|unquote)%"
    r"|\+\s*native|native\s*:="
)
_OPTIONS = re.compile(
    r"(?:debug|bootstrap|compiler|interpreter)»?\.[«A-Za-z][\w.«»]*"
    r"|skipKernelTC|prefer_native|doc»?\.«?verso|profiler»?\.«?output|sat»?\.«?solver"
)

# Attributes by which nothing of the text's is run while it is compiled.
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
_PLAIN = re.compile(r"[A-Za-z0-9_.,\s↓↑←→()]*+\]")
_PLAIN_STRING = re.compile(r'"[^"\\\n]*"')
_ATTRIBUTE_NAME = re.compile(r"(?:(?:local|scoped)\s+|[-↓↑←→]\s*)*([A-Za-z_][A-Za-z0-9_.']*)?")
_NESTED = re.compile(r"\(\s*attr\s*:=")
_MOST_NESTED = 8

# The fields of the configurations of tactics in Lean and Mathlib: terms that Lean evaluates.
_FIELDS = (
    "abstractProof ac acNf acSteps allowSynthFailures andFlattening applyHypsTransparency "
    "approx arith assumptionTransparency autoUnfold backtracking beqEqs beta binaryProofs "
    "bitVecOfNat canonHeartbeats canonInstances catchRuntime clean closePost "
    "commitIndependentGoals config congrConsts constructor contextual cutsat decide "
    "destructProductsTransparency discharge discharger dsimp ematch embeddedConstraintSubst "
    "enableSimp enableUnfold enums eta etaReduce etaStruct exfalso exp failIfUnchanged fixedInt "
    "funCC funext gen genLocal genLocalDefs graphviz grind ground implicitDefEqProofs index inj "
    "instances intros introsTransparency iota kernel lax letToHave lia linarith linear locals "
    "matchEqs maxDepth maxDischargeDepth maxExponent maxGoals maxNormIterations "
    "maxRuleApplicationDepth maxRuleApplications maxSteps maxSuggestions mbtc memoize mode "
    "native newGoals occs offsetCnstrs options oracle order partialApp preferLHS preprocess "
    "preprocessing proc proj qlia red revert ring ringSteps sameFun sat_timeout shortCircuit "
    "simp_config singlePass singleton solverMode splitHypotheses splitImp splitIndPred splitIte "
    "splitMatch splitNe splits star strategy structures suggestions suspend symm "
    "synthAssignedInstances terminal timeout trace traceScript transform transparency typeEqs "
    "unfoldPartialApp unfoldReducible useDefaultSimpSet useSimpAll useSorry verbose "
    "warnExponents warnOnNonterminal zeta zetaDelta zetaDeltaSet zetaHave zetaReduce zetaUnused"
)
_FIELD = rf"(?<![A-Za-z0-9_])«?(?:{_FIELDS.replace(' ', '|')})»?"
_VALUE = r"(?::=(?P<value>[^()]{0,400}+)(?P<end>[()]?)|/-)"
_CONFIGURATION = re.compile(rf"{_FIELD}\s*+{_VALUE}")
# The same with comments to the end of a line in between. What begins a line is looked for first,
# and then the lines above it: a pattern for all of it would read a comment once for each field.
_BEHIND_COMMENTS = re.compile(rf"^[^\S\n]*+{_VALUE}", re.MULTILINE)
_FIELD_BEFORE_COMMENT = re.compile(rf"{_FIELD}\s*+(?:--|\Z)")
_COMMENT_OR_BLANK = re.compile(r"\s*+(?:--|\Z)")
# A field of a field, `(simp.maxSteps := …)`, read from its end: a search for its beginning would
# read it from each.
_BACKWARDS_PATH = re.compile(r"(?:\.[\w'«»]*[^\W\d])+")
_VALUE_AFTER_COMMENT = re.compile(r"-/\s*+(?::=|--|/-)")
_MAX_GAP_CHARS = 2000
_LITERAL_ITEM = r"[A-Za-z_]+\s*:=\s*(?:true|false|[0-9]+|\.[A-Za-z]+)"
_LITERAL = re.compile(
    rf"\s*(?:true|false|[0-9][0-9_]*|\.[A-Za-z]+|\{{\s*(?:{_LITERAL_ITEM}\s*,?\s*)*\}})\s*"
)
# A rule of Aesop's can be a tactic that is a function of the text's own.
_AESOP = (
    re.compile(r"aesop"),
    re.compile(r"(?<![A-Za-z])tactic(?![A-Za-z0-9_'])"),
    re.compile(
        r"(?:Tactic|Meta|Core|Elab|Simp)M|(?:Lean|Tactic)»?\.«?[A-Za-z]|open|export|namespace"
    ),
)


def runs_programs(code: str, more_words: Collection[str] = ()) -> str | None:
    """What lets a text run programs of its own while it is compiled, as it stands there.

    None: nothing does.

    Args:
        more_words: words of commands, tactics and attributes of the environment that run programs.
    """
    patterns = [_WORD] if any(hint in code for hint in _HINTS) else []
    if "Lean" in code:
        patterns.append(_MAKES_SYNTAX)
    for pattern in (*patterns, _OPTIONS, _SIGNS):
        if match := pattern.search(code):
            return match[0]
    for word in more_words:
        if word in code and re.search(re.escape(word) + _AFTER * word[-1].isalnum(), code):
            return word
    return _attribute(code) or _configuration(code)


def _attribute(code: str) -> str | None:
    """An attribute that is not known to be harmless."""
    odd = 0
    for match in _ATTRIBUTE.finditer(code):
        if match[0] != "@[" and not match["open"]:
            # A word of a sentence, unless a comment stands before its bracket.
            if code.startswith(("/-", "--"), match.end()):
                return match[0].strip()
            continue
        odd += not _PLAIN.match(code, match.end())
        content = _bracketed(code, match.end()) if odd <= _MAX_ODD_ATTRIBUTES else None
        if content is None:
            return code[match.start() : match.start() + 40]
        if (found := _unknown(content)) is not None:
            return f"@[{found}]"
    return None


def _unknown(content: str, depth: int = 0) -> str | None:
    """The first of a list of attributes that is not known, or is nested too deep."""
    for item in _split(content):
        name = _ATTRIBUTE_NAME.match(item.strip())
        assert name is not None
        # `-simp` takes an attribute away, and an empty list has none.
        if depth > _MOST_NESTED or (item.strip() and name[1] not in _HARMLESS):
            return item.strip()[:40]
        end = 0
        # What is nested in a nested list is looked at with that list.
        while nested := _NESTED.search(item, end):
            begin = end = nested.end()
            open_ = 1
            while open_ and end < len(item):
                open_ += {"(": 1, ")": -1}.get(item[end], 0)
                end += 1
            if (found := _unknown(item[begin : end - 1], depth + 1)) is not None:
                return found
    return None


def _bracketed(code: str, start: int) -> str | None:
    """What stands up to the bracket's end; None where that is not plain to see."""
    if match := _PLAIN.match(code, start):
        return match[0][:-1]
    content = _PLAIN_STRING.sub(" ", code[start : start + _MAX_ATTRIBUTES_CHARS])
    depth = 1
    for offset, character in enumerate(content):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if not depth:
            content = content[:offset]
            plain = not any(sign in content for sign in ('"', "«", "--", "/-", "'"))
            return content if plain else None
    return None


def _split(content: str) -> list[str]:
    """The items between commas that stand in no brackets."""
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


def _configuration(code: str) -> str | None:
    """A tactic's configuration that is no literal, or a rule that is a tactic."""
    hides_values: bool | None = None
    for start, match in _configured(code):
        if match["end"] == ")" and _LITERAL.fullmatch(match["value"]):
            continue
        if match["value"] is None:
            if hides_values is None:
                hides_values = bool(_VALUE_AFTER_COMMENT.search(code))
            if not hides_values:
                continue
        before = _without_path(code[max(0, start - _MAX_GAP_CHARS) : start])
        above, _, line = before.rpartition("\n")
        # A name for the value of an argument, unless a comment stands between it and the bracket.
        if before.rstrip().endswith(("(", "-/")) or (not line.strip() and "--" in above):
            return code[start : start + 40].strip()
    if all(each.search(code) for each in _AESOP):
        return "aesop"
    return None


def _configured(code: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Where a field's name begins, and its value."""
    for match in _CONFIGURATION.finditer(code):
        yield match.start(), match
    for match in _BEHIND_COMMENTS.finditer(code):
        end = match.start()
        while end > 0:
            begin = code.rfind("\n", 0, end - 1) + 1
            line = code[begin : end - 1]
            for field in _FIELD_BEFORE_COMMENT.finditer(line):
                yield begin + field.start(), match
            if not _COMMENT_OR_BLANK.match(line):
                break
            end = begin


def _without_path(before: str) -> str:
    """A text without the fields in front of a last one."""
    path = _BACKWARDS_PATH.match(before[::-1])
    return before[: len(before) - path.end()] if path else before
