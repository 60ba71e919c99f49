"""Finds in compiled libraries the syntax that evaluates what a text wrote.

A library brings commands, tactics, terms, macros and attributes. Each is a constant that Lean
calls, and an entry in the compiled file names its syntax. The scan follows the constants behind
each, and functions that implement others. It looks for Lean's own functions that evaluate
(`evalExpr`, `evalConst`, …), and for syntax that a constant makes: nodes of a kind that leads
there, and Lean's own words that run programs. A text with all symbols of a syntax that leads there
can run programs.

The scan leaves out Lean's own library, whose words stand in :mod:`leanq.lean.run.programs`.
Elaborators of configurations (`declare_config_elab`) evaluate a term, too, but a literal one runs
nothing: their fields are listed instead.

The files of a library are trusted, as the judge trusts them. A module may be damaged, or lack the
part with its bodies. Every library that leads to such a module is listed as unseen.
"""

from __future__ import annotations

import itertools
import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from leanq.errors import AuditError, SandboxError
from leanq.lean.environment import Environment
from leanq.lean.run import layouts
from leanq.lean.run.files import hash_bytes, keep, read_kept
from leanq.lean.run.image import Image, Name, Raw
from leanq.lean.run.layouts import Damaged, shape
from leanq.lean.run.library_syntax import GAP, Evaluators
from leanq.lean.run.olean import code_with, display, modules_of, open_image, reachable, read_parts
from leanq.lean.run.programs import is_word
from leanq.lean.run.toolchain import LEANS_OWN
from leanq.lean.text import can_mislead

# Lean's functions that evaluate a term or a constant, now or later.
_EVALUATES = re.compile(
    r"eval(?:Const|Decl|Expr|Term|SyntaxConstant|ParserConst|WidgetInstance|Module"
    r"|UserWidgetDefinition)(?:Check|Core|Expr)?'?"
    r"|elabEvalCore(?:Unsafe)?|runFrontend|runModInitializers|mkParserOfConstant(?:Aux)?"
    r"|mkAttributeImplOfConstant|registerAttributeImplBuilder"
)
_HOOKS = frozenset({("Lean", "KeyedDeclsAttribute", "init")})
_ELABORATORS = re.compile(r"(?:\w*[eE]lab|macro)Attribute")
_INITIALIZED = frozenset({("Lean", "regularInitAttr"), ("Lean", "builtinInitAttr")})
_IMPLEMENTED = ("Lean", "Compiler", "implementedByAttr")
_PARSERS = ("Lean", "Parser", "parserExtension")
_ATOM = ("Lean", "Syntax", "atom")
_MAKES_NODES = re.compile(r"node\d?|mk(?:Null|Group|Optional)?Node\d?")
_MAKES_NAMES = re.compile(r"mkStr\d?|mkSimple|str")
_SYNTAX = frozenset({"ParserDescr", "TrailingParserDescr", "Parser", "TrailingParser"})
_SYMBOLS = frozenset({"symbol", "nonReservedSymbol", "unicodeSymbol"})
# A structure's field for the structure that it extends.
_PARENT = re.compile(r"to[A-Z]")
_CONFIGURED = frozenset({"optConfig", "config", "configItem"})
_REGISTERS = re.compile(r"(?:register|mk)\w*Attr(?:ibute)?\w*")
_DESCRIBES_AN_ATTRIBUTE = (("AttributeImplCore", "mk"), ("Def", "mk"))
# These words stand in every other text, and never begin a syntax.
_COMMON = frozenset({"at", "with", "using", "only", "from", "then", "else", "fun", "in"})
# Parsers that read no token.
_BLANK = re.compile(
    r"pp[A-Z]\w*|(?:col|line)(?:Gt|Ge|Eq)|ws|noWs|linebreak|check\w+|hygieneInfo|many1?Indent"
)
# Parsers that read what another one reads.
_AROUND = re.compile(
    r"atomic|group|pp[A-Z]\w*|with(?:out)?Position|withoutForbidden|(?:incQuot|decQuot)Depth"
    r"|patternIgnore|withResetCache|recover"
)
_TOKEN_ENTRY, _PARSER_ENTRY, _GLOBAL, _SCOPED = 0, 3, shape(0, 1), shape(1, 2)

_CPU_S, _WALL_S, _MEMORY_BYTES = 900, 1800, 8 << 30
_SPARE_CPU_S = 5  # or the kernel sends SIGKILL at the limit, as it does where memory is short
# Whoever ends the scan by these knows nothing of the libraries.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_known: dict[tuple[str, tuple[Path, ...], Path, str], Evaluators] = {}


@dataclass(slots=True)
class _Body:
    """The parts of a constant's value that tell whether it evaluates."""

    constants: set[Name] = field(default_factory=set)
    atoms: set[str] = field(default_factory=set)
    kinds: set[Name] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Scan:
    """Collects findings while modules are read from importers to imports.

    ``wanted``: the constants to read that no module had yet.
    """

    bodies: dict[Name, _Body] = field(default_factory=dict)
    implementations: dict[Name, Name] = field(default_factory=dict)
    wanted: set[Name] = field(default_factory=set)
    elaborated: list[tuple[Name, Name]] = field(default_factory=list)
    registered: list[Name] = field(default_factory=list)
    categories: dict[Name, str] = field(default_factory=dict)
    syntax: dict[Name, tuple[list[str], bool]] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    configurations: set[Name] = field(default_factory=set)
    configured_by: set[Name] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    home: dict[Name, str] = field(default_factory=dict)

    def want(self, names: Iterable[Name]) -> None:
        """Notes which constants to read, unless a module had them already."""
        self.wanted |= {each for each in names if not (each in self.bodies or each in self.syntax)}


def evaluators(environment: Environment) -> Evaluators:
    """Returns the syntax of the environment's libraries that evaluates, kept in the cache folder.

    The first call for an environment reads all its libraries, in a process of its own.

    Raises:
        SandboxError: this machine did not let it come to an end.
    """
    key = environment.fingerprint, environment.search_path, environment.cache, environment.stamp
    if key not in _known:
        _known[key] = _evaluators(environment)
    return _known[key]


def _evaluators(environment: Environment) -> Evaluators:
    # A toolchain's own folder may have more than Lean's own libraries.
    folders = environment.folders()
    if environment.toolchain.source == "wheel":
        folders = folders[:-1]  # leanq's own Core
    if not any(_modules(folders)):
        return Evaluators()
    code = code_with("text", "run/evaluators", "run/library_syntax", "run/programs")
    key = f"{environment.fingerprint}-{hash_bytes(code).hex()[:16]}"
    path = environment.cache / "evaluators" / f"{key}.json"
    try:
        return Evaluators(**json.loads(read_kept(path) or b""))
    except (OSError, ValueError, TypeError):
        found = _in_a_process(folders)
    # The fingerprint is that of the files as they were found.
    if not environment.changed():
        keep(path, json.dumps(asdict(found)).encode())
    return found


def _in_a_process(folders: tuple[Path, ...]) -> Evaluators:
    """Scans in another process; if the libraries keep it from an end, all are unseen.

    Raises:
        SandboxError: something else does, which must not be kept as a fact of the libraries.
    """
    command = (sys.executable, "-m", __name__, *map(str, folders))
    said = "the scan of the libraries came to no end"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_WALL_S, check=True
        )
        return Evaluators(**json.loads(done.stdout))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{said}: {error}"[:200]) from None
    except subprocess.CalledProcessError as error:
        if -error.returncode in _FROM_OUTSIDE:
            raise SandboxError(f"{said}: signal {-error.returncode} ended it") from None
        why = f"{said}: {error}"[:200]
    except ValueError as error:
        why = f"{said}: {error}"[:200]
    return Evaluators(unseen={str(module[0]): why for module, _ in _modules(folders)})


def scan(folders: tuple[Path, ...], *, leave_out: Collection[str] = LEANS_OWN) -> Evaluators:
    """Returns the syntax that evaluates in the libraries of a search path, except those to
    ``leave_out``."""
    modules = dict(_modules(folders, leave_out))
    imports: dict[Name, list[Name]] = {}
    unseen: dict[Name, str] = {}
    for name, path in modules.items():
        try:
            imports[name] = [
                each.module for each in open_image(read_parts(path, follows=True)).imports()
            ]
        except (AuditError, Damaged, IndexError) as error:
            imports[name], unseen[name] = [], str(error) or "it is damaged"
    try:
        order = [*TopologicalSorter(imports).static_order()]
    except CycleError:
        order, unseen = [], dict.fromkeys(modules, "its modules import each other")
    found = _Scan()
    for name in reversed(order):
        if name in modules and name not in unseen:
            try:
                _look_into(
                    open_image(read_parts(modules[name], follows=True)), display(name), found
                )
            except (AuditError, Damaged, IndexError) as error:
                unseen[name] = str(error) or "it is damaged"
    return _told(found, _lead_to(unseen, imports, order))


def _modules(
    folders: Sequence[Path], leave_out: Collection[str] = LEANS_OWN
) -> Iterator[tuple[Name, Path]]:
    """Yields the modules of a search path as Lean finds them, except those of some libraries."""
    return ((name, Path(path)) for name, path in modules_of(folders, leave_out))


def _lead_to(
    unseen: dict[Name, str], imports: dict[Name, list[Name]], order: list[Name]
) -> dict[str, str]:
    """Returns the libraries with a module that leads to an unreadable one."""
    reached = dict(unseen)
    for name in order:
        for each in imports.get(name, ()):
            if each in reached:
                reached.setdefault(name, f"{display(each)}: {reached[each]}"[:200])
    return {str(name[0]): why for name, why in sorted(reached.items(), reverse=True)}


def _look_into(image: Image, module: str, found: _Scan) -> None:
    """Adds a module's part of the wanted names, after all modules that import it."""
    for name, address in image.entries().items():
        if _ELABORATORS.fullmatch(str(name[-1])):
            for key, declaration in _pairs(image, address):
                found.elaborated.append((key, declaration))
                found.want((key, declaration))
                found.home.setdefault(key, module)
        elif name in _INITIALIZED:
            for declaration, initial in _pairs(image, address):
                start = initial or declaration
                found.registered.append(start)
                found.home.setdefault(start, module)
                found.want([start])
        elif name == _IMPLEMENTED:
            found.implementations |= dict(_pairs(image, address))
        elif name == _PARSERS:
            categories = _categories(image, address, found.tokens)
            found.categories |= categories
            found.want(categories)
    _look_at_configurations(image, found)
    while fresh := image.constants(found.wanted):
        for name, raw in fresh.items():
            type_, arguments = _applied(image, raw.type_)
            if _last(type_) in _SYNTAX and not arguments:
                found.syntax[name] = _syntax_of(image, raw)
                continue
            body = found.bodies[name] = _body_of(image, raw)
            found.want(body.constants)
            found.want((*each, "_unsafe_rec") for each in body.constants)
            if name in found.implementations:
                found.want([found.implementations[name]])
        found.wanted -= fresh.keys()


def _pairs(image: Image, address: int) -> Iterator[tuple[Name, Name]]:
    """Yields the entries of an extension that are pairs of names, whatever their scope."""
    for entry in image.array(address):
        index = image.index(entry)
        kind = image.words[index] >> 48
        if kind in (_GLOBAL, _SCOPED):
            index = image.index(image.words[index + (1 if kind == _GLOBAL else 2)])
            kind = image.words[index] >> 48
        if kind == shape(0, 2):
            yield image.name(image.words[index + 1]), image.name(image.words[index + 2])


def _categories(image: Image, address: int, symbols: set[str]) -> dict[Name, str]:
    """Returns the syntax that entries of the parsers' extension declare, with its category. Adds
    the tokens that they declare."""
    words, found = image.words, {}
    for entry in image.array(address):
        index = image.index(entry)
        if words[index] >> 48 not in (_GLOBAL, _SCOPED):
            continue
        index = image.index(words[index + (2 if words[index] >> 48 == _SCOPED else 1)])
        if words[index] >> 56 == _TOKEN_ENTRY:
            symbols.add(image.string(words[index + 1]).strip())
        elif words[index] >> 56 == _PARSER_ENTRY:
            category, declaration = (image.name(words[index + number]) for number in (1, 2))
            found[declaration] = display(category)
    return found


def _walk(
    image: Image, roots: Iterable[int], cut: Callable[[int], bool] = lambda _: False
) -> Iterator[int]:
    """Yields the indices of all expressions below some, each once, in the order of the text."""
    todo, seen = [*roots], set[int]()
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        image.spend(1)
        index = image.index(at)
        kind = image.words[index] >> 48
        if kind not in layouts.PARTS:
            raise Damaged("it holds a malformed expression")
        if cut(index):
            continue
        yield index
        todo += (image.words[index + part] for part in reversed(layouts.PARTS[kind]))


def _text(image: Image, address: int) -> str | None:
    """Returns the text of a literal expression."""
    literal = image.index(address)
    if image.words[literal] >> 48 != layouts.LIT:
        return None
    value = image.literal(image.words[literal + 1])
    return value if isinstance(value, str) else None


def _applied(image: Image, address: int) -> tuple[Name, list[int]]:
    """Returns the constant that an expression applies, () if it applies none, and its arguments."""
    index, arguments = image.index(address), list[int]()
    while image.words[index] >> 48 == layouts.APP:
        arguments.append(image.words[index + 2])
        index = image.index(image.words[index + 1])
    head = image.name(image.words[index + 1]) if image.words[index] >> 48 == layouts.CONST else ()
    return head, arguments[::-1]


def _head(image: Image, address: int) -> Name:
    return _applied(image, address)[0]


def _simple_name(image: Image, address: int) -> str | None:
    """Returns the text of an expression that is a name of one part."""
    head, arguments = _applied(image, address)
    if head[-1:] in (("mkStr1",), ("mkSimple",)) and arguments:
        return _text(image, arguments[-1])
    if head[-1:] in (("str",), ("mkStr",)) and len(arguments) == 2:
        is_first = _head(image, arguments[0])[-1:] == ("anonymous",)
        return _text(image, arguments[1]) if is_first else None
    return None


def _name(image: Image, address: int) -> Name:
    """Returns the name that an expression is, () if it is none."""
    head, arguments = _applied(image, address)
    if head[:2] != ("Lean", "Name") or not _MAKES_NAMES.fullmatch(_last(head)):
        return ()
    begin: Name = ()
    if _last(head) in ("str", "mkStr") and len(arguments) == 2:
        begin, arguments = _name(image, arguments[0]), arguments[1:]
    parts = [_text(image, each) for each in arguments]
    return (*begin, *(part for part in parts if part is not None))


def _body_of(image: Image, raw: Raw) -> _Body:
    """Returns the constants in a constant's value; none for a proof."""
    body = _Body()
    if raw.body is None or raw.kind == "theorem":
        return body
    words = image.words
    for index in _walk(image, [raw.body]):
        kind = words[index] >> 48
        if kind in (layouts.CONST, layouts.PROJ):
            body.constants.add(image.name(words[index + 1]))
        elif kind == layouts.APP:
            head, arguments = _applied(image, image.base + 8 * index)
            if head[:1] == ("Lean",) and _MAKES_NODES.fullmatch(_last(head)):
                body.kinds.update(name for each in arguments if (name := _name(image, each)))
            elif head == _ATOM and (text := _text(image, arguments[-1])) is not None:
                body.atoms.add(text.strip())
            elif _REGISTERS.fullmatch(_last(head)) or head[-2:] in _DESCRIBES_AN_ATTRIBUTE:
                # It gets the name of an attribute that it brings.
                names = (_simple_name(image, each) for each in arguments)
                body.attributes.update(name for name in names if name)
    return body


def _last(name: Name) -> str:
    return str(name[-1]) if name else ""


def _syntax_of(image: Image, raw: Raw) -> tuple[list[str], bool]:
    """Returns the symbols that stand in each use of a syntax, with a GAP between those that do not
    stand side by side, and whether it has a configuration.

    If no symbol has to stand there, returns all symbols.
    """
    if raw.body is None:
        return [], False
    everything, configured = list[str](), False
    for index in _walk(image, [raw.body]):
        kind = image.words[index] >> 48
        # The declaring constant names it, or its own name.
        if kind == layouts.CONST:
            configured |= _last(image.name(image.words[index + 1])) in _CONFIGURED
        elif kind == layouts.APP and (text := _text(image, image.words[index + 2])) is not None:
            configured |= text in _CONFIGURED
            if _last(_head(image, image.words[index + 1])) in _SYMBOLS:
                everything.append(text.strip())
    # Gaps that stand side by side are one.
    needed = [
        symbol
        for symbol, behind in itertools.pairwise([*_in_order(image, raw.body), ""])
        if (symbol, behind) != (GAP, GAP)
    ]
    return (needed if set(needed) > {GAP} else everything), configured


def _in_order(image: Image, address: int) -> Iterator[str]:
    """Yields the symbols of a syntax, and a GAP for whatever else it has."""
    image.spend(1)
    head, arguments = _applied(image, address)
    names = [_last(_name(image, each)) for each in arguments[:1]]
    match _last(head):
        case "symbol" | "nonReservedSymbol" | "unicodeSymbol" if arguments:
            text = _text(image, arguments[0])
            yield GAP if text is None or _last(head) == "unicodeSymbol" else text.strip()
        case "binary" if names == ["andthen"] and len(arguments) == 3:
            yield from _in_order(image, arguments[1])
            yield from _in_order(image, arguments[2])
        case "node" | "trailingNode" | "nodeWithAntiquot" if arguments:
            if _last(head) == "trailingNode":
                yield GAP
            yield from _in_order(image, arguments[-1])
        case "unary" if len(arguments) == 2 and _AROUND.fullmatch(names[0]):
            yield from _in_order(image, arguments[1])
        case "const" if names and _BLANK.fullmatch(names[0]):
            pass
        case _:
            yield GAP


def _look_at_configurations(image: Image, found: _Scan) -> None:
    """Adds the types of evaluated configurations, and the fields of those found here."""
    # Each has a function `Expr → TermElabM T` that another one implements.
    evaluating = {name for name in found.implementations if "eval" in name}
    for name, raw in image.constants(evaluating).items():
        for index in _walk(image, [raw.type_]):
            if image.words[index] >> 48 == layouts.APP and (
                type_ := _head(image, image.words[index + 2])
            ):
                found.configurations.add(type_)
                found.configured_by |= {name, found.implementations[name]}
    wanted = {(*name, "mk") for name in found.configurations}
    while constructors := image.constants(wanted):
        parents = set[Name]()
        for constructor in constructors.values():
            index = image.index(constructor.type_)
            while image.words[index] >> 48 == layouts.FORALL:
                label = display(image.name(image.words[index + 1]))
                if _PARENT.match(label):
                    parents.add(_head(image, image.words[index + 2]))
                else:
                    found.fields.add(label)
                index = image.index(image.words[index + 3])
        wanted = {(*name, "mk") for name in parents - found.configurations}
        found.configurations |= parents


def _told(found: _Scan, unseen: dict[str, str]) -> Evaluators:
    """Returns the scan's findings about texts."""
    words: dict[str, str] = {}
    wordless: list[str] = []
    evaluating: set[Name] = set()
    kinds, before = set[Name](), -1
    while len(kinds) > before:
        evaluating, before = _evaluating(found, kinds), len(kinds)
        kinds = {key for key, declaration in found.elaborated if declaration in evaluating}
    for key in sorted(kinds, key=display):
        symbols, _ = found.syntax.get(key, ([], False))
        what = f"{found.categories.get(key, 'syntax')} {display(key)} ({found.home[key]})"
        if _most_telling(symbols) is None:
            wordless.append(what)
        else:
            words.setdefault(" ".join(symbols), what)
    attributes = {
        name: found.home[start]
        for start in found.registered
        if start in evaluating
        for name in found.bodies[start].attributes
    }
    heads = {
        word
        for symbols, configured in found.syntax.values()
        if configured and (word := _most_telling(symbols))
    }
    return Evaluators(
        words=dict(sorted(words.items())),
        attributes=dict(sorted(attributes.items())),
        tokens=sorted(each for each in found.tokens if can_mislead(each)),
        heads=sorted(heads),
        fields=sorted(found.fields),
        wordless=sorted(set(wordless)),
        unseen=unseen,
    )


def _evaluating(found: _Scan, kinds: AbstractSet[Name]) -> set[Name]:
    """Returns the constants that reach an evaluator, or make syntax that does."""
    users: dict[Name, set[Name]] = {}
    reached: list[Name] = []
    for name, body in found.bodies.items():
        if name in found.configured_by:
            continue
        for each in body.constants | {found.implementations.get(name, name)}:
            users.setdefault(each, set()).add(name)
            users.setdefault((*each, "_unsafe_rec"), set()).add(name)
        makes = not kinds.isdisjoint(body.kinds) or any(map(is_word, body.atoms))
        if makes or any(map(_evaluates, body.constants)):
            reached.append(name)
    return reachable(reached, users)


def _evaluates(name: Name) -> bool:
    """Returns whether a constant is one of Lean's own evaluators."""
    if name[:1] == ("_private",):
        name = name[name.index(0) + 1 :] if 0 in name else name
    return name in _HOOKS or (name[:1] == ("Lean",) and bool(_EVALUATES.fullmatch(str(name[-1]))))


def _most_telling(symbols: Iterable[str]) -> str | None:
    """Returns the symbol by which to find uses of a syntax: a word, or else a sign of its own."""
    wordlike = [each for each in symbols if re.fullmatch(r"[#@]?[^\W\d].+", each)]
    for symbol in wordlike:
        if symbol not in _COMMON:
            return symbol
    signs = [each for each in symbols if each != GAP and (len(each) > 1 or not each.isascii())]
    return max(signs, key=len, default=None)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S + _SPARE_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    print(json.dumps(asdict(scan(tuple(map(Path, sys.argv[1:]))))))
