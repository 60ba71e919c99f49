"""Makes texts for Lean from models' answers and from data sets.

Nothing here decides on a verdict: the result is verified against its statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from leanq.lean.steps.holes import find_holes
from leanq.lean.syntax import Token, split_header, tokens

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\n`]*)$", re.MULTILINE)
# A fence that closes behind the last word of its block.
_LATE_FENCE = re.compile(r"^([^`\n]*[^`\s])(`{3,}[ \t]*)$", re.MULTILINE)
_QUOTED_FENCE = re.compile(r"^>[ \t>]*(?:`{3,}|~{3,})", re.MULTILINE)
_QUOTED = re.compile(r"^>[ \t]?", re.MULTILINE)
_LABEL = re.compile(r"\{?\.?\w+(?: [0-9]+)?\}?")
_LANGUAGE = re.compile(r"\{?\.?(\w*)")
_LEAN = ("lean", "lean4", "tactics")
_THOUGHT = re.compile(r"<(think|thinking|reasoning)>.*?</\1>", re.DOTALL | re.IGNORECASE)
_THOUGHT_END = re.compile(r"</(?:think|thinking|reasoning)>", re.IGNORECASE)
# Tokens at the end of a model's answer, which some servers leave in the text.
_END = re.compile(r"\s*(?:</s>|<[|｜][^|｜<>\n]*[|｜]>)\s*\Z")
_TAG = re.compile(r"^[ \t]*</?[a-z][a-z_]*>|</[a-z][a-z_]*>[ \t]*$", re.MULTILINE)
# A sentence at the margin. No line of Lean has three words, none of its signs, and a full stop.
_PROSE = re.compile(
    r"(?:\*\*|#+ |[-*] |[0-9]+\. )?[A-Z][\w'’]*(?:[ ,][^:=⟨⟩←→∀∃λ|]*)?[.:!?](?:\*\*)?\s*"
)
_DECLARED = re.compile(r"\b(?:theorem|lemma|def|abbrev|instance|example)\b[ \t\n]*([^\s({\[:]*)")
_HELPER = re.compile(
    r"\b(?:theorem|lemma|def|abbrev|instance|structure|inductive|class)\b[ \t\n]*([^\s({\[:]*)"
)
_NAMESPACE = re.compile(r"^namespace[ \t]+(\S+)", re.MULTILINE)
_BOUND = r"(?:have|let|set|obtain|intro|rintro|fun|λ)[ \t]+"
# Words that stand before a declaration's keyword and belong to it.
_MODIFIERS = re.compile(
    r"(?:/--(?:[^-]|-(?!/))*-/\s*|@\[[^\]\n]*\]\s*|(?:private|protected|noncomputable)\s+)*\Z"
)
_COMMANDS = {"def", "abbrev", "theorem", "lemma", "instance", "example", "axiom", "opaque"}
_COMMAND = re.compile(r"\s*(?:#\w|(?:import|open|theorem|lemma|def|example|namespace)\b)")
_PROVES = re.compile(r":=|^[ \t]*\|", re.MULTILINE)
# How terms begin, and no tactic.
_TERM = re.compile(r"\s*(?:⟨|fun\b|λ|[^\W\d][\w']*\.[^\W\d])")
# How a line ends whose tactic goes on behind it.
_GOES_ON = re.compile(r"(?:\bby|=>|:=|\bdo|\bwith|\bat|[,⟨(\[|·])\s*\Z")
# Tactics that are no terms.
_TACTIC_WORDS = (
    "exact intro intros rintro apply refine rw rewrite simp simp_all simpa dsimp norm_num omega "
    "linarith nlinarith ring ring_nf field_simp decide constructor left right exfalso rcases "
    "obtain cases induction use exists ext by_contra by_cases aesop positivity unfold subst "
    "push_neg specialize contrapose norm_cast push_cast interval_cases assumption contradiction "
    "split split_ifs first repeat try all_goals any_goals nth_rewrite conv set generalize revert "
    "clear case next gcongr grind bv_decide tauto native_decide replace change injection funext "
    "rename_i symm trans congr convert wlog choose lift sorry skip done fin_cases polyrith · <;>"
)
_TACTICS = frozenset(_TACTIC_WORDS.split(" "))


def candidate_of(statement: str, completion: str) -> str:
    """Makes the text to verify against a statement from a model's answer.

    A whole text stands for itself. It gets the statement's imports, and the declarations and
    openings in front of its theorem, if it lacks them. A proof alone takes the place of the
    statement's ``sorry``.

    >>> candidate_of("theorem t : p := by sorry", "I think:\\n```lean\\nintro x\\nexact h\\n```")
    'theorem t : p := by\\n  intro x\\n  exact h'
    """
    block, earlier = _last_block(completion, statement)
    if is_whole(statement, block) or not find_holes(statement):
        return _behind_its_preamble(statement, _behind_helpers(block, earlier, statement))
    helpers = "".join(
        f"{each[split_header(each).end_offset :]}\n" for each in _helpers(block, earlier, statement)
    )
    proved = with_proof(statement, block)
    declared = next(iter(_DECLARED.finditer(statement)), None)
    if not helpers or declared is None:
        return proved
    before = _without_modifiers(statement[: declared.start()])
    return f"{before}{helpers}{proved[len(before) :]}"


def last_block(text: str) -> str:
    """Returns the Lean code of a model's answer without its thoughts: the last fenced block, if
    possible one that is marked as Lean, or else the answer without its prose."""
    return _behind_helpers(*_last_block(text, ""), "")


def _last_block(text: str, statement: str) -> tuple[str, Sequence[str]]:
    """Returns the last block that declares the same as the statement, or else the last one, and the
    blocks before it."""
    text = _plain(text)
    labelled, unlabelled, is_last_labelled = list[str](), list[str](), True
    for language, body in _blocks(text):
        if language in _LEAN:
            labelled.append(body)
        elif not language:
            unlabelled.append(body)
        if language in ("", *_LEAN):
            is_last_labelled = bool(language)
    kinds = [labelled, unlabelled]
    is_last_alone = not is_last_labelled and _is_proved(statement, unlabelled[-1])
    if is_last_alone and not any(_is_proved(statement, body) for body in labelled):
        kinds = [[*labelled, unlabelled[-1]]]  # the whole, of which the others are parts
    for blocks in kinds:
        declaring = [n for n, body in enumerate(blocks) if statement and is_whole(statement, body)]
        if blocks and (declaring or blocks is labelled or not labelled):
            chosen = _chosen(blocks, declaring, statement)
            return _with_spaces(blocks[chosen]), [*map(_with_spaces, blocks[:chosen])]
    return _with_spaces(_without_prose(_TAG.sub("", text))), ()


def _is_proved(statement: str, text: str) -> bool:
    """Returns whether a text proves the statement under its name, as far as its words tell."""
    is_stated = _declared(statement) & _declared(text) and _PROVES.search(text)
    return bool(is_stated) and not find_holes(text)


def _chosen(blocks: Sequence[str], declaring: Sequence[int], statement: str) -> int:
    """Returns the number of the last block that proves the statement under its name. A statement
    alone, after its proof, does not count. If that block lacks the proof, it is the last block
    behind it that may be one: a model's last word counts."""
    stated = _declared(statement)
    proving = [n for n in declaring if stated & _declared(blocks[n]) and _PROVES.search(blocks[n])]
    if not declaring:
        return len(blocks) - 1
    chosen = (proving or declaring)[-1]
    if proving and not find_holes(blocks[chosen]):
        return chosen
    proofs = [n for n in range(chosen + 1, len(blocks)) if not _COMMAND.match(blocks[n])]
    return [chosen, *proofs][-1]


def _behind_helpers(block: str, earlier: Sequence[str], statement: str) -> str:
    """Returns a block that declares the same as a statement behind the helpers that it lacks."""
    if not is_whole(statement, block):
        return block
    for helper in reversed(_helpers(block, earlier, statement)):
        theirs, own = split_header(helper), split_header(block)
        header = own if own.imports or own.is_prelude else theirs
        block = "\n".join((header.text, helper[theirs.end_offset :], block[own.end_offset :]))
    return block


def _helpers(block: str, earlier: Sequence[str], statement: str) -> list[str]:
    """Returns the earlier blocks that declare what a block names and lacks, up to the theorem."""
    found: list[str] = []
    text = block
    stated = _declared(statement)
    for body in reversed(earlier):
        attempts = (match for match in _DECLARED.finditer(body) if match[1] in stated)
        if (attempt := next(attempts, None)) is not None:
            body = _without_modifiers(body[: attempt.start()])
        declared = _helpful(body)
        if find_holes(body) or declared & (stated | _helpful(text)):
            continue
        spaces = [match[1] for match in _NAMESPACE.finditer(body)]
        names = declared | {f"{space}.{each}" for space in spaces for each in declared}
        if any(_names(text, each) for each in names):
            found.insert(0, body)
            text = f"{body}\n{text}"
    return found


def _helpful(text: str) -> set[str]:
    """Returns the names in a text that another can use."""
    return {match[1] for match in _HELPER.finditer(text)} - {""}


def _names(text: str, name: str) -> bool:
    """Returns whether a text may mean a declaration by a name that it does not bind."""
    whole = rf"(?<![\w.]){re.escape(name)}(?![\w'])"
    return bool(re.search(whole, text)) and not re.search(_BOUND + whole, text)


def _without_modifiers(before: str) -> str:
    """Returns what stands before a declaration, without the words that belong to this."""
    return before[: _MODIFIERS.search(before).start()]  # type: ignore[union-attr]


def _declared(text: str) -> set[str]:
    """Returns the names that a text declares; "" for one without a name."""
    return {match[1] for match in _DECLARED.finditer(text)}


def _plain(text: str) -> str:
    """Returns an answer without thoughts, with line ends that Lean knows."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    text = _THOUGHT.sub("", _END.sub("\n", text))
    while _QUOTED_FENCE.search(text):
        text = _QUOTED.sub("", text)
    # A prompt may have opened the thought, or the fence.
    ended = [match.end() for match in _THOUGHT_END.finditer(text)]
    return text[ended[-1] :] if ended else text


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    opened: re.Match[str] | None = None
    if len(_FENCE.findall(text)) % 2:
        text = _LATE_FENCE.sub(r"\1\n\2", text)
    fences = [*_FENCE.finditer(text)]
    if len(fences) % 2 and not fences[0][2].strip() and text[: fences[0].start()].strip():
        # The prompt has opened the block that ends here.
        yield "", text[: fences.pop(0).start()]
    for fence in fences:
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not _LABEL.fullmatch(fence[2].strip()):
            yield _language(opened), text[opened.end() + 1 : fence.start()]
            opened = None
    if opened is not None:
        yield _language(opened), text[opened.end() + 1 :]


def _language(fence: re.Match[str]) -> str:
    match = _LANGUAGE.match(fence[2].strip())
    return match[1].lower() if match else ""


def _with_spaces(text: str) -> str:
    """Returns a text without tabs at the beginning of its lines, since Lean refuses them."""
    if "\t" not in text:
        return text
    lines = text.split("\n")
    for number, line in enumerate(lines):
        code = line.lstrip(" \t")
        lines[number] = line[: len(line) - len(code)].expandtabs(2) + code
    return "\n".join(lines)


def _without_prose(text: str) -> str:
    """Returns a text without the sentences before and behind it."""
    lines = text.split("\n")
    while lines and (not lines[0].strip() or _PROSE.fullmatch(lines[0])):
        del lines[0]
    kept = len(lines)
    for number in reversed(range(len(lines))):
        if _PROSE.fullmatch(lines[number]):
            kept = number
        elif lines[number].strip():
            break
    return "\n".join(lines[:kept]) if lines else text


def _behind_its_preamble(statement: str, text: str) -> str:
    """Returns a whole text behind the parts of the statement's beginning that it lacks."""
    own = split_header(text)
    if own.imports or own.is_prelude:
        return text
    declared = [*_DECLARED.finditer(statement)]
    first = next((each for each in declared if each[1] in _declared(text)), None)
    header = split_header(statement).text
    before = _without_modifiers(statement[: first.start()] if first is not None else header)
    # The text has this part already.
    behind_header = before.removeprefix(header).strip()
    lent = header if behind_header and behind_header in text else before
    return f"{lent.rstrip()}\n{text}" if lent.strip() else text


def with_header(header: str, text: str) -> str:
    """Returns a text behind a header, unless it has imports or begins with that header."""
    if not header.strip() or text.startswith(header.rstrip()):
        return text
    own = split_header(text)
    if own.imports or own.is_prelude:
        return text
    return f"{header.rstrip()}\n{text}"


def with_sorry(statement: str) -> str:
    """Returns a statement that stops at ``:=`` or ``by`` with ``sorry`` for its proof.

    >>> with_sorry("theorem t : p := by\\n")
    'theorem t : p := by\\n  sorry'
    """
    shown = statement.rstrip()
    if shown.endswith(":="):
        return f"{shown} sorry"
    if shown.endswith("by") and shown[:-2].rstrip().endswith(":="):
        return f"{shown}\n  sorry"
    return statement


def is_whole(statement: str, text: str) -> bool:
    """Returns whether a text declares the same as the statement, and is no proof alone."""
    if split_header(text).imports:
        return True
    return bool(_declared(statement) & _declared(text))


def open_definitions(statement: str) -> tuple[str, ...]:
    """Returns the definitions of a statement whose value is exactly a ``sorry``, in its order.

    The names are whole ones, as for a target's holes.

    >>> open_definitions("namespace A\\nabbrev b : Nat := sorry\\ntheorem t : b = 2 := sorry")
    ('A.b',)
    """
    names: list[str] = []
    spaces: list[str | None] = []
    command = name = ""
    first, second = Token("", 0, 0), Token("", 0, 0)
    for token in tokens(statement):
        if second.text in _COMMANDS:
            command, name = second.text, token.text
        elif second.text == "namespace":
            spaces.append(token.text)
        elif token.text in ("section", "mutual"):
            spaces.append(None)
        elif token.text == "end" and spaces:
            spaces.pop()
        is_value = (first.text, second.text, first.end) == (":", "=", second.start)
        if token.text == "sorry" and is_value and command in ("def", "abbrev"):
            whole = ".".join((*filter(None, spaces), name))
            names.append(name.removeprefix("_root_.") if name.startswith("_root_.") else whole)
        first, second = second, token
    return tuple(names)


def with_proof(statement: str, proof: str) -> str:
    """Returns a statement with a proof in the place of its last ``sorry``.

    If both the proof and the statement have ``:=`` or ``by`` there, the proof's takes the
    statement's place.

    >>> with_proof("theorem t : p := by sorry", "by\\n  exact h")
    'theorem t : p := by exact h'
    """
    holes = find_holes(statement)
    if not holes:
        return statement + proof
    hole = holes[-1]
    before, behind = statement[: hole.offset], statement[hole.offset + len("sorry") :]
    if proof.lstrip().startswith(":="):
        proof = proof.lstrip().removeprefix(":=")
    proof = proof.strip("\n").rstrip()
    if (rest := behind.strip()) and proof.endswith(f"\n{rest}"):
        proof = proof.removesuffix(rest).rstrip()
    opened = re.search(r"\bby\s*\Z", before)
    if match := re.match(r"\s*by\b(?!\s*(?:--|/-))", proof):
        if not opened:
            return before + proof.lstrip() + behind
        proof = proof[match.end() :].strip("\n")
        if "\n" not in proof or not proof.strip():
            return f"{before[: opened.start()]}by {proof.strip()}{behind}"
        before = f"{before[: opened.start()]}by"
    elif opened and _TERM.match(proof):
        return before[: opened.start()] + proof.strip() + behind
    elif opened:
        before = before[: opened.start()] + "by"
        if "\n" not in proof and "\n" not in opened[0]:
            return f"{before} {proof.strip()}{behind}"
    elif _is_of_tactics(proof):
        before = f"{before.rstrip()} by"
    else:
        return before + proof.strip() + behind
    return f"{before}\n{_further_in(proof)}{behind}"


def _is_of_tactics(proof: str) -> bool:
    """Returns whether a line of a proof without ``by`` begins with a tactic: it is no term."""
    lines = [line for line in proof.split("\n") if line.strip()]
    least = min((len(line) - len(line.lstrip()) for line in lines[1:]), default=0)
    ways = (line.split(None, 1)[0] for line in lines if len(line) - len(line.lstrip()) <= least)
    return any(re.split(r"[\[(⟨;!?]", word)[0] in _TACTICS for word in ways)


def _further_in(proof: str) -> str:
    """Returns the lines of tactics, none of them at the margin, and the first no deeper than
    others. A first line that stood behind ``by``, or lost its blanks, comes as deep as the next
    one."""
    lines = proof.split("\n")
    depths = [len(line) - len(line.lstrip(" ")) for line in lines if line.strip()]
    rest = min(depths[1:], default=depths[0] if depths else 0)
    if (
        len(depths) > 1
        and depths[0] != rest
        and (depths[1] > rest or not _GOES_ON.search(lines[0]))
    ):
        lines[0] = " " * rest + lines[0].lstrip()
    shift = max(0, 2 - rest)
    return "\n".join(" " * shift + line if line.strip() else line for line in lines)
