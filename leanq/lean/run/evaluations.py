"""Watches which constants of a text Lean evaluates, and reports them before they run.

Lean's interpreter asks ``lean_ir_find_env_decl(env, name)`` for the code of each function that it
is about to run, roots and callees alike; nothing else asks it. That function asks
``l_Lean_Environment_getModuleIdxFor_x3f(env, name)`` which import has the name, and looks at the
text's own code only if none has. A jump over its first bytes, which stays, asks the same. For an
imported name Lean goes on at once, a dozen instructions later. A name of the text's own comes to
Python, which looks at the code and writes a report to a socket.

Nothing can take that back: whoever would has to run first, and its own report was written before.
The socket's other end is the supervisor's, so what was sent can be neither read nor dropped here.
(A pipe could be opened again by its number in /proc, and emptied.)

Two facts are reported, with the first constant of each: that Lean evaluates one of the text's own,
and that one is *free*. That is a function, unless it is the macro of a notation; or a value that is
more than the data of notations and configurations. Lean may ask for a value by itself, as for the
tactic of a missing argument.

This is for x86-64 and for Lean 4.35, whose interpreter was read for it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

_P = ctypes.c_void_p
_PAGE_BYTES = mmap.PAGESIZE
_READ_EXECUTE, _READ_WRITE_EXECUTE = 5, 7
_VERSION = 4, 35
_FIND = "lean_ir_find_env_decl"
_NEEDED = (
    _FIND,
    "l_Lean_Environment_getModuleIdxFor_x3f",
    "lean_free_object",
    "l_Lean_version_major",
    "l_Lean_version_minor",
)
# push rbp, r15, r14, r13, r12, rbx; sub rsp, 24
_BEGIN = bytes.fromhex("55 4157 4156 4155 4154 53 4883ec18")
_MOST_NAME_CHARS = 200
_SILENCED = 96
EVALUATED, FREE = b"e", b"f"
"""How a report begins; the constant's name follows."""
_FACTS = EVALUATED, FREE
_NONE = _ANONYMOUS = 1  # Lean's `none`, and its empty name

# Lean.IR.Decl, FnBody and Expr: the numbers of constructors and of their fields.
_WITH_CODE, _PARAMETERS, _BODY = 0, 1, 3
_DEFINES, _RETURNS = 0, 10
_ON_THE_WAY = frozenset({2, 3, 4, 5, 6, 7})  # parts of a constructor are set; inc, dec
_MAKES, _CALLS, _CLOSES_OVER, _BOXES, _IS_LITERAL = 0, 6, 7, 9, 11
_MAKES_SYNTAX = frozenset(f"Lean.Syntax.{each}" for each in ("missing", "node", "atom", "ident"))
# What notations and their printing call for values that Lean keeps.
_CALLED = re.compile(
    r"Lean\.Name\.(?:mkStr[1-8]?|mkNum|(?:str|num)\._override)|String\.toRawSubstring'?"
    r"|instOfNatNat|instMonadExceptOfMonadExceptOf|ReaderT\.inst(?:MonadExceptOf|Monad)"
    r"|ReaderT\.instApplicativeOfMonad|EStateM\.(?:nonBacktrackable|instMonad)"
    r"|EStateM\.instMonadExceptOfOfBacktrackable|Array\.mkArray0"
)
# This one gives what the monad says, and another monad could be made for it that gives syntax.
_PLACE_OF_A_MACRO, _OF_MACROS = "Lean.MonadRef.mkInfoFromRefPos", "Lean.Macro.instMonadRefMacroM"


# Lean's names for the tactic in `(h : p := by …)`, of an argument or a structure's field. A text
# that gives one to another constant has to write it, and its words are looked at.
_OF_A_BINDER = re.compile(r"(?:^|\.)(?:_auto_\d+|_autoParam)(?:\._closed_\d+)*\Z")
# Its names for what a notation makes. They count as words, too.
_OF_A_NOTATION = re.compile(r"(?:^|\.)_aux_")


class UnwatchedError(Exception):
    """What this Lean evaluates cannot be watched."""


class Evaluations:
    """The jump, in a process that has loaded Lean; its forks have it, too. It reports nothing until
    :meth:`report_to`."""

    def __init__(self, lean: ctypes.CDLL) -> None:
        """Raises UnwatchedError."""
        if missing := [name for name in _NEEDED if not hasattr(lean, name)]:
            raise UnwatchedError(f"this Lean has no symbol {', '.join(missing)}")
        version = tuple((_P.in_dll(lean, name).value or 0) >> 1 for name in _NEEDED[3:])
        if version != _VERSION:
            raise UnwatchedError("the interpreter of this version was not read for it")
        find, module_of, free = (_address(lean[name]) for name in _NEEDED[:3])
        if ctypes.string_at(find, len(_BEGIN)) != _BEGIN:
            raise UnwatchedError(f"{_FIND} begins with other instructions")
        self._channel = -1
        self._told: set[bytes] = set()
        self._calls = 0
        kind = ctypes.CFUNCTYPE(_P, _P, _P)
        self._callback = kind(self._on_own)
        self._memory = mmap.mmap(-1, _PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        go_on = _BEGIN + _jump(find + len(_BEGIN))
        code = go_on + _asking(module_of, free, go_on, _address(self._callback))
        self._memory[: len(code)] = code
        self._go_on = kind(start)
        _protect(lean, start, len(code), _READ_EXECUTE)
        jump = _jump(start + len(go_on))
        _protect(lean, find, len(jump), _READ_WRITE_EXECUTE)
        ctypes.memmove(find, jump, len(jump))
        _protect(lean, find, len(jump), _READ_EXECUTE)

    def prove(self, lean: ctypes.CDLL, environment: int) -> None:
        """Has Lean look for the empty name in an environment, which is given away.

        Raises:
            UnwatchedError: it is not seen.
        """
        find = lean[_FIND]
        find.argtypes, find.restype = [_P, _P], _P
        calls = self._calls
        if find(environment, _ANONYMOUS) != _NONE or self._calls != calls + 1:
            raise UnwatchedError(f"a call of {_FIND} was not seen")

    def report_to(self, channel: int) -> None:
        """In a fork: sends reports to the socket of this number from now on."""
        self._channel = channel

    @property
    def has_reported(self) -> bool:
        return bool(self._told)

    def _on_own(self, environment: int, name: int) -> int:
        """Lean is about to run a constant that no import declares, if there is code for it."""
        self._calls += 1
        if self._channel < 0 or len(self._told) == len(_FACTS):
            return int(self._go_on(environment, name))
        spelled = _spelled(name)
        found: int = self._go_on(environment, name)
        if found != _NONE:
            # Where Lean does not import one of those that data may call, it is no part of Lean.
            is_free = _is_trusted(spelled) or (
                not _OF_A_BINDER.search(spelled) and _is_free(_field(found, 0), spelled)
            )
            self._report(FREE if is_free else EVALUATED, spelled)
        return found

    def _report(self, fact: bytes, name: str) -> None:
        """Tells each fact until it is written: another thread must not run before that."""
        if fact in self._told:
            return
        try:
            os.write(self._channel, fact + name[:_MOST_NAME_CHARS].encode())
        except OSError:  # somebody runs here, and has closed it
            os._exit(_SILENCED)
        self._told.add(fact)


def _is_free(declaration: int, name: str) -> bool:
    """Returns whether it is a function, but none of a notation's; or a value, but no plain data."""
    if _tag(declaration) == _WITH_CODE and _size(_field(declaration, _PARAMETERS)):
        return not _OF_A_NOTATION.search(name)
    return _tag(declaration) != _WITH_CODE or not _is_data(_field(declaration, _BODY))


def _is_data(body: int) -> bool:
    """Returns whether the code of a constant puts plain data together, and no syntax."""
    of_macros = set[int]()  # the variables that say what macros do
    while not body & 1:
        tag = _tag(body)
        if tag == _RETURNS:
            return True
        if tag == _DEFINES:
            expression = _field(body, 2)
            if not _is_plain(expression, of_macros):
                return False
            if _called(expression) == _OF_MACROS:
                of_macros.add(_field(body, 0))
            body = _field(body, 3)
        elif tag in _ON_THE_WAY:
            body = _field(body, ctypes.c_uint8.from_address(body + 6).value - 1)
        else:
            return False
    return False


def _is_plain(expression: int, of_macros: AbstractSet[int]) -> bool:
    tag = _tag(expression)
    if tag in (_IS_LITERAL, _CLOSES_OVER, _BOXES):
        return True
    if tag == _MAKES:
        return _spelled(_field(_field(expression, 0), 0)) not in _MAKES_SYNTAX
    if tag != _CALLS:
        return False
    arguments = _field(expression, 1)
    if not _size(arguments):
        return True
    called = _called(expression)
    if called == _PLACE_OF_A_MACRO:
        given = (_field(arguments, 2 + number) for number in range(_size(arguments)))
        return not of_macros.isdisjoint(_field(each, 0) for each in given if not each & 1)
    return bool(_CALLED.fullmatch(called))


def _is_trusted(name: str) -> bool:
    return bool(_CALLED.fullmatch(name)) or name in (_PLACE_OF_A_MACRO, _OF_MACROS)


def _called(expression: int) -> str:
    return _spelled(_field(expression, 0)) if _tag(expression) == _CALLS else ""


def _tag(value: int) -> int:
    """Returns the number of a constructor (lean.h)."""
    return value >> 1 if value & 1 else ctypes.c_uint8.from_address(value + 7).value


def _field(value: int, number: int) -> int:
    return ctypes.c_uint64.from_address(value + 8 + 8 * number).value


def _size(array: int) -> int:
    return _field(array, 0)


def _spelled(name: int) -> str:
    return ".".join(reversed([*_parts(name)]))


def _parts(name: int) -> Iterator[str]:
    while not name & 1:
        part = _field(name, 1)
        if _tag(name) == 1:
            yield ctypes.string_at(part + 32, _field(part, 0) - 1).decode(errors="replace")
        else:
            yield str(part >> 1)
        name = _field(name, 0)


def _address(function: object) -> int:
    address = ctypes.cast(function, _P).value  # type: ignore[arg-type]
    assert address is not None
    return address


def _jump(target: int) -> bytes:
    return b"\x48\xb8" + target.to_bytes(8, "little") + b"\xff\xe0"  # mov rax; jmp rax


def _call(target: int) -> bytes:
    return b"\x48\xb8" + target.to_bytes(8, "little") + b"\xff\xd0"  # mov rax; call rax


def _asking(module_of: int, free: int, go_on: bytes, on_own: int) -> bytes:
    """Returns code that goes on for an imported name, and jumps to ``on_own`` for another one."""
    restore = bytes.fromhex("4883c408 5e 5f")  # add rsp, 8; pop rsi; pop rdi
    # The answer `some index` is the caller's, and nobody else has it as a rule: cmp dword [rax], 1;
    # jne behind; mov rdi, rax; call.
    drop = bytes.fromhex("4889c7") + _call(free)
    imported = bytes.fromhex("833801 75") + bytes([len(drop)]) + drop + restore + go_on
    return (
        bytes.fromhex("57 56 4883ec08")  # push rdi; push rsi; sub rsp, 8
        + _call(module_of)
        + bytes.fromhex("a801 75")  # test al, 1; jne behind
        + bytes([len(imported)])
        + imported
        + restore
        + _jump(on_own)
    )


def _protect(lean: ctypes.CDLL, address: int, size: int, rights: int) -> None:
    first = address & -_PAGE_BYTES
    if lean.mprotect(_P(first), ctypes.c_size_t(address + size - first), rights):
        raise UnwatchedError("this machine does not let Lean's code be written to")
