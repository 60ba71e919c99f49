"""Lean's kernel and its constructors, called through ctypes in Lean's shared library.

Lean's importer, elaborator and interpreter never get anything of a candidate: these constructors
make its parts anew. Objects begin with one reference and are never freed, since a judging process
is short. An object in two places must count two references. The kernel takes an object with one for
unshared, and caches nothing about it.

The names and types of the functions belong to the versions in `VERSIONS`. They are a compiler's
output, and no interface, so a self-test comes before any use.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import c_char_p, c_int32, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

from leanq.lean.run.image import Name

VERSIONS = re.compile(r"4\.35\.")
"""The versions of Lean that are known to have these functions."""

_POINTER = c_void_p
# An object, a byte, 32 and 64 bits, bytes of a C string, nothing.
_TYPES: dict[str, Any] = {
    "o": _POINTER,
    "b": c_uint8,
    "u": c_uint32,
    "q": c_uint64,
    "s": c_char_p,
    "-": None,
}

# `Lean.Kernel.Exception`: one that has a text, and those that tell of a limit, and nothing of the
# declaration.
_OTHER = 12
_LIMITS = {
    13: "deterministic timeout",
    14: "excessive memory",
    15: "deep recursion",
    16: "interrupted",
}

# `Lean.OLeanLevel`: how much of the imports is loaded.
_WHAT_IS_PUBLIC, _EVERYTHING = 0, 2

# `Lean.ConstantInfo`: definitions, theorems and opaque constants have a value.
_AXIOM, _DEFINITION, _WITH_VALUE, _INDUCTIVE, _CONSTRUCTOR = 0, 1, (1, 2, 3), 5, 6
_SAFE = 1  # a definition's safety

_OWN = 1  # the reference count of an object that only its maker knows
WORD_BYTES = 8
CLOSED_BOX = 1
_SIGINT, _SIGXFSZ = 2, 25
# This process's memory in words, from the second on.
_MEMORY = ctypes.cast(WORD_BYTES, ctypes.POINTER(c_uint64))


class KernelUnavailableError(Exception):
    """The judge cannot use this library."""


class RefusedError(Exception):
    """The kernel does not accept a declaration."""


class KernelLimitError(Exception):
    """The kernel ran into a limit, which says nothing about the declaration."""


class Reached(NamedTuple):
    """A constant's place among others.

    Attributes:
        is_axiom: whether it is an axiom.
        is_unsafe: whether it is an unsafe or partial definition.
        used: the constants that it leads to.
    """

    is_axiom: bool
    is_unsafe: bool
    used: list[Name]


class _Function(NamedTuple):
    symbol: str
    arguments: str
    result: str


def lean_function(symbol: str, arguments: str, result: str = "o") -> Any:
    """Declares a function of Lean's as an attribute, for `Kernel.bind`.

    Each letter is a type of `_TYPES`.
    """
    return _Function(symbol, arguments, result)


class Objects:
    """Makes and reads Lean's objects, by their addresses."""

    name_str = lean_function("lean_name_mk_string", "oo")
    name_num = lean_function("lean_name_mk_numeral", "oo")
    _string = lean_function("lean_mk_string_from_bytes", "sq")
    _nat_of_digits = lean_function("lean_cstr_to_nat", "s")
    _nat_of_word = lean_function("lean_big_uint64_to_nat", "q")
    _alloc = lean_function("lean_alloc_object", "q")
    _read_names: dict[int, Name]

    def construct(self, tag: int, *fields: int, scalars: bytes = b"") -> int:
        """Makes an object of a constructor that Lean exports no function for."""
        room = len(scalars) + 7 & ~7
        size = WORD_BYTES + WORD_BYTES * len(fields) + room
        found: int = self._alloc(size)
        word = _OWN | tag << 56 | len(fields) << 48 | size << 32
        body = struct.pack(f"<{1 + len(fields)}Q", word, *fields)
        ctypes.memmove(found, body + scalars.ljust(room, b"\0"), size)
        return found

    def array(self, items: list[int]) -> int:
        """Makes an `Array`."""
        found: int = self._alloc(3 * WORD_BYTES + WORD_BYTES * len(items))
        words = (_OWN | 246 << 56, len(items), len(items), *items)
        body = struct.pack(f"<{len(words)}Q", *words)
        ctypes.memmove(found, body, len(body))
        return found

    def list(self, items: Iterable[int]) -> int:
        """Makes a `List`."""
        found = CLOSED_BOX
        for each in reversed([*items]):
            found = self.construct(1, each, found)
        return found

    def name(self, parts: Iterable[str | int]) -> int:
        """Makes a `Name`."""
        found = CLOSED_BOX
        for part in parts:
            found = self.name_part(found, part)
        return found

    def name_part(self, above: int, part: str | int) -> int:
        """Makes a `Name` with one part more."""
        if isinstance(part, int):
            return int(self.name_num(above, self.nat(part)))
        return int(self.name_str(above, self.text(part)))

    def text(self, value: str) -> int:
        """Makes a `String`."""
        data = value.encode()
        return int(self._string(data, len(data)))

    def nat(self, value: int) -> int:
        """Makes a `Nat`."""
        if value < 1 << 63:
            return value << 1 | 1
        if value < 1 << 64:
            return int(self._nat_of_word(value))
        return int(self._nat_of_digits(str(value).encode()))

    def items(self, list_: int) -> Iterator[int]:
        """Yields the items of a `List`."""
        while list_ != CLOSED_BOX:
            yield word(list_ + WORD_BYTES)
            list_ = word(list_ + 2 * WORD_BYTES)

    def read_name(self, name: int) -> Name:
        """Returns the parts of a `Name`."""
        known = self._read_names.get(name)
        if known is None:
            if name == CLOSED_BOX:
                return ()
            above, last = word(name + WORD_BYTES), word(name + 2 * WORD_BYTES)
            part = self.read_string(last) if self.tag(name) == 1 else last >> 1
            known = self._read_names[name] = (*self.read_name(above), part)
        return known

    @staticmethod
    def cell(address: int) -> tuple[int, ...]:
        """Returns the shape of an object, and its fields."""
        first = address >> 3
        shape = _MEMORY[first - 1] >> 48
        return (shape, *_MEMORY[first : first + (shape & 0xFF)])

    @staticmethod
    def byte(address: int, fields: int, number: int) -> int:
        """Returns the byte of this number behind so many fields of an object."""
        return c_uint8.from_address(address + WORD_BYTES + WORD_BYTES * fields + number).value

    def read_string(self, value: int) -> str:
        """Returns a `String`."""
        found = ctypes.string_at(value + 4 * WORD_BYTES, word(value + WORD_BYTES) - 1)
        return found.decode(errors="replace")

    @staticmethod
    def tag(value: int) -> int:
        """Returns the number of an object's constructor."""
        return value >> 1 if value & 1 else c_uint8.from_address(value + 7).value


class Kernel(Objects):
    """Lean's library, loaded into this process; there can be only one.

    Attributes:
        version: Lean's.
        env: the kernel's environment, as Lean's object.
        imports: the header's, as Lean's elaborator takes it.
        no_options: Lean's empty options.
    """

    level_zero = lean_function("lean_level_mk_zero", "o")
    level_succ = lean_function("lean_level_mk_succ", "o")
    level_max = lean_function("lean_level_mk_max", "oo")
    level_imax = lean_function("lean_level_mk_imax", "oo")
    level_param = lean_function("lean_level_mk_param", "o")
    bvar = lean_function("lean_expr_mk_bvar", "o")
    sort = lean_function("lean_expr_mk_sort", "o")
    const = lean_function("lean_expr_mk_const", "oo")
    app = lean_function("lean_expr_mk_app", "oo")
    lam = lean_function("lean_expr_mk_lambda", "ooob")
    forall = lean_function("lean_expr_mk_forall", "ooob")
    let = lean_function("lean_expr_mk_let", "oooob")
    lit = lean_function("lean_expr_mk_lit", "o")
    proj = lean_function("lean_expr_mk_proj", "ooo")
    axiom_val = lean_function("lean_mk_axiom_val", "ooob")
    definition_val = lean_function("lean_mk_definition_val", "ooooobo")
    theorem_val = lean_function("lean_mk_theorem_val", "ooooo")
    opaque_val = lean_function("lean_mk_opaque_val", "oooobo")
    quot_val = lean_function("lean_mk_quot_val", "ooob")
    inductive_val = lean_function("lean_mk_inductive_val", "oooooooobbb")
    constructor_val = lean_function("lean_mk_constructor_val", "ooooooob")
    recursor_val = lean_function("lean_mk_recursor_val", "ooooooooobb")
    inductive_decl = lean_function("lean_mk_inductive_decl", "ooob")
    regular = lean_function("lean_mk_reducibility_hints_regular", "u")
    _add_decl = lean_function("lean_add_decl", "oqqoo")
    _find = lean_function("lean_environment_find", "oo")
    _same = lean_function("l_Lean_instBEqConstantInfo_beq", "oo", "b")
    _to_message = lean_function("l_Lean_Kernel_Exception_toMessageData", "oo")
    _to_string = lean_function("l_Lean_MessageData_toString", "oo")
    _import = lean_function("l_Lean_importModules", "oouobbbo")
    _kernel_env = lean_function("lean_elab_environment_to_kernel_env", "o")
    _all_modules = lean_function("l_Lean_Environment_allImportedModuleNames", "o")
    _module_of = lean_function("l_Lean_Environment_getModuleIdxFor_x3f", "oo")
    _search_path = lean_function("l_Lean_initSearchPath", "oo")
    _initialize = lean_function("lean_initialize", "", "-")
    _exit_on_panic = lean_function("lean_set_exit_on_panic", "b", "-")
    mark_persistent = lean_function("lean_mark_persistent", "o", "-")
    _run_initialisers = lean_function("lean_enable_initializer_execution", "")
    _save = lean_function("l_Lean_saveModuleData", "ooo")
    _used = lean_function("l_Lean_Expr_getUsedConstants", "o")

    def __init__(self, libraries: Sequence[str]) -> None:
        """Loads the libraries and imports nothing yet.

        Args:
            libraries: their paths; the one that leads to the others, if there is one, comes first.

        Raises:
            KernelUnavailableError: they are of another version, or lack a function.
        """
        os.environ["UV_USE_IO_URING"] = "0"  # the sandbox denies it
        try:
            self._libs = [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in libraries]
            self.bind(self)
            libc = ctypes.CDLL(None)
            for number in (_SIGINT, _SIGXFSZ):  # Python catches or ignores them
                libc.signal(number, None)
            self._initialize()
            # By default Lean goes on with some value after a panic.
            self._exit_on_panic(1)
            self.no_options = self.value("l_Lean_Options_empty")
            self.version = self.read_string(self.value("l_Lean_versionString"))
        except (OSError, AttributeError, ValueError) as error:
            raise KernelUnavailableError(f"the judge cannot use Lean's library: {error}") from None
        if not VERSIONS.match(self.version):
            known = VERSIONS.pattern.replace("\\.", ".")
            raise KernelUnavailableError(
                f"the judge knows the library of Lean {known}x, and this is Lean {self.version}"
            )
        self.env = self.imports = self._header = 0
        self._read_names = {}

    def bind(self, owner: object) -> None:
        """Gives an object the functions that its class declares; raises AttributeError."""
        for attribute, declared in inspect.getmembers_static(type(owner)):
            if isinstance(declared, _Function):
                function = self._function(declared.symbol)
                function.restype = _TYPES[declared.result]
                function.argtypes = [_TYPES[each] for each in declared.arguments]
                setattr(owner, attribute, function)

    def _function(self, symbol: str) -> Any:
        """Returns the symbol of this name in any of the libraries; raises AttributeError."""
        for library in self._libs:
            if (found := getattr(library, symbol, None)) is not None:
                return found
        raise AttributeError(f"there is no {symbol} in it")

    def value(self, symbol: str) -> int:
        """Returns the object in a global variable of Lean's."""
        return word(ctypes.cast(self._function(symbol), _POINTER).value or 0)

    def import_header(
        self,
        modules: Iterable[tuple[str, ...]],
        path: Iterable[str],
        *,
        notation: bool = False,
    ) -> None:
        """Makes an environment from the declarations of these modules.

        Args:
            modules: their names, in parts.
            path: the folders to search.
            notation: whether to load the code that they bring; otherwise nothing is printed in
                their notation.

        Raises:
            KernelUnavailableError: there is no such module, or it cannot be loaded.
        """
        self._search_path(self.text("/nonexistent"), self.list(map(self.text, path)))
        if notation:
            self._run_initialisers()
        self.imports = self._imported(modules, _EVERYTHING, extensions=notation)
        self.mark_persistent(self.imports)
        self.env = self._header = self._kernel_env(self.imports)
        self.mark_persistent(self.env)

    def start_anew(self) -> None:
        """Forgets all that was added behind the header."""
        self.env = self._header
        # Lean may free a name, and make another one in its place.
        self._read_names = {}

    def visible(self, modules: Iterable[tuple[str, ...]]) -> int:
        """Returns an environment of the modules as a module that imports them sees them.

        Proofs and other values that they hide are axioms in it, so nothing may be judged there.
        """
        return int(self._kernel_env(self._imported(modules, _WHAT_IS_PUBLIC)))

    def homes(self, modules: Iterable[tuple[str, ...]] = ()) -> Callable[[Name], Name]:
        """Returns the module that declares a constant among these modules' imports, or among the
        header's; () if none does.

        Raises:
            KernelUnavailableError: there is no such module, or it cannot be loaded.
        """
        imported = self._imported(modules, _EVERYTHING) if modules else self.imports
        names = self._all_modules(imported)

        def home(name: Name) -> Name:
            wanted = self.name(name)
            for each in (imported, wanted):  # this function may consume it
                retain(each)
            option = self._module_of(imported, wanted)
            if option & 1:
                return ()
            number = word(option + WORD_BYTES) >> 1
            return self.read_name(word(names + 3 * WORD_BYTES + number * WORD_BYTES))

        return home

    def _imported(
        self, modules: Iterable[tuple[str, ...]], level: int, *, extensions: bool = False
    ) -> int:
        flags = bytes([0, 1, 0])  # not all, exported, not meta
        imports = self.array(
            [self.construct(0, self.name(each), scalars=flags) for each in modules]
        )
        no_plugins, leak = self.array([]), 1
        result = self._import(
            imports, self.no_options, 0, no_plugins, leak, int(extensions), level, 3
        )
        if self.tag(result) != 0:
            raise KernelUnavailableError("the judge cannot import what the header imports")
        return word(result + WORD_BYTES)

    def add(self, declaration: int) -> None:
        """Adds a declaration to the environment, if the kernel accepts it.

        Raises:
            RefusedError: it does not accept it.
            KernelLimitError: it cannot tell.
        """
        result = self._add_decl(self.env, 0, 0, declaration, CLOSED_BOX)
        value = word(result + WORD_BYTES)
        if self.tag(result) == 1:
            self.env = value
            return
        tag = self.tag(value)
        if tag > _OTHER:
            raise KernelLimitError(_LIMITS.get(tag, "a limit"))
        raise RefusedError(self._words_of(value, tag))

    def has(self, name: int, info: int) -> bool | None:
        """Returns whether the environment's constant of a name is this one; None if it has none.

        Names of bound variables do not matter.
        """
        option = self.found(self.env, name)
        return None if option & 1 else bool(self._same(word(option + WORD_BYTES), info))

    def find(self, name: int) -> int:
        """Returns the environment's `ConstantInfo` of a name, which it has."""
        return word(self.found(self.env, name) + WORD_BYTES)

    def declares(self, environment: int, name: int) -> bool:
        """Returns whether an environment has a constant of this name."""
        return not self.found(environment, name) & 1

    def found(self, environment: int, name: int) -> int:
        """Returns an `Option` of a constant's `ConstantInfo`."""
        for each in (environment, name):  # this function consumes it
            retain(each)
        return int(self._find(environment, name))

    def references(self, name: Name) -> Reached | None:
        """Returns what a constant of the environment leads to; None if there is no such constant.

        An inductive type leads to all in the types and constructors of its block beside the block
        itself, and a constructor to its type alone. So nothing that is safe leads back to itself.
        """
        option = self.found(self.env, self.name(name))
        if option & 1:
            return None
        info = word(option + WORD_BYTES)
        value, kind = word(info + WORD_BYTES), self.tag(info)
        if kind == _CONSTRUCTOR:
            return Reached(False, False, [self.read_name(word(value + 2 * WORD_BYTES))])
        parts, block = [self.type_in(info)], set[Name]()
        if kind in _WITH_VALUE:
            parts.append(word(value + 2 * WORD_BYTES))
        for type_ in self.items(word(value + 4 * WORD_BYTES)) if kind == _INDUCTIVE else ():
            one = self.find(type_)
            for each in (type_, *self.items(word(word(one + WORD_BYTES) + 5 * WORD_BYTES))):
                block.add(self.read_name(each))
                parts.append(self.type_in(self.find(each)))
        used = set[Name]()
        for part in parts:
            retain(part)  # this function may consume it
            names = self._used(part)
            used |= {
                self.read_name(word(names + (3 + number) * WORD_BYTES))
                for number in range(word(names + WORD_BYTES))
            }
        is_unsafe = kind == _DEFINITION and self.byte(value, 4, 0) != _SAFE
        return Reached(kind == _AXIOM, is_unsafe, [*used - block])

    def save_module(
        self, path: str, module: Name, imports: Iterable[Name], constants: Mapping[int, int]
    ) -> None:
        """Writes a module that this Lean can import; raises OSError.

        Args:
            constants: each `ConstantInfo` by its name.
        """
        flags = bytes([0, 1, 0])  # not all, exported, not meta
        imported = [self.construct(0, self.name(each), scalars=flags) for each in imports]
        data = self.construct(
            0,
            *(self.array(each) for each in (imported, [*constants], [*constants.values()], [], [])),
            scalars=bytes([0]),
        )
        if self.tag(self._save(self.text(path), self.name(module), data)) != 0:
            raise OSError(f"Lean cannot write {path}")

    def levels_in(self, info: int) -> int:
        """Returns the universe parameters of a `ConstantInfo`."""
        return word(self._head(info) + 2 * WORD_BYTES)

    def type_in(self, info: int) -> int:
        """Returns the type of a `ConstantInfo`."""
        return word(self._head(info) + 3 * WORD_BYTES)

    @staticmethod
    def _head(info: int) -> int:
        """Returns the `ConstantVal` of a `ConstantInfo`."""
        return word(word(info + WORD_BYTES) + WORD_BYTES)

    def _words_of(self, exception: int, tag: int) -> str:
        if tag == _OTHER:
            return self.read_string(word(exception + WORD_BYTES))
        result = self._to_string(self._to_message(exception, self.no_options), 1)
        is_string = self.tag(result) == 249
        return self.read_string(result if is_string else word(result + WORD_BYTES))


def share(value: int) -> None:
    """Notes that an object stands in more than one place."""
    count = c_int32.from_address(value)
    if count.value == _OWN:
        count.value = 2


def retain(value: int) -> None:
    """Counts one reference more to an object that no other thread knows."""
    if not value & 1:
        count = c_int32.from_address(value)
        if count.value > 0:
            count.value += 1


def word(address: int) -> int:
    """Returns the word at an address."""
    return c_uint64.from_address(address).value
