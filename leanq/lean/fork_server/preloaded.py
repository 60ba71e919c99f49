"""Lean in this process, stopped behind an import header and ready to be forked.

Lean's `lean_main` runs here once on a header alone. Where it would exit, this process stops, with
everything imported in its memory. A child that was forked from it goes on from there
(:meth:`Preloaded.go_on`): it calls `lean_shell_main` again with the same arguments, reads its own
text from standard input, elaborates it, prints, writes the compiled file and exits, all by Lean's
own code. The one difference to plain `lean` is that `Lean.Language.Lean.process` is given the
snapshot of the first run as its ``old?``, as the language server does after an edit: a header that
is unchanged is taken over, and everything else is done as ever.

Lean itself reads the header of each text and compares it with the preloaded one. Here it compares
their words alone, without blanks, comments and positions, on which no import depends. If Lean says
something about the header, its messages have positions, and Lean compares those, too.

A child can itself stop in the same way, behind a whole prefix of texts to come
(:meth:`Preloaded.stop_behind`). Its own children then elaborate nothing but the rest of theirs:
the first command that Lean would parse behind the header is parsed behind the prefix instead, in
the state in which the prefix has left Lean.

Functions are caught by a jump that is written over their first bytes, and let go again:

- ``lean_shell_main(args, options)``: Lean.Shell.shellMain.
- ``l_Lean_Language_Lean_process(setup, old?, context)``: gives an `InitialSnapshot`.
- ``lean_io_exit(code)``: IO.Process.exit, by which a run of the command line ends.
- ``l_Lean_mkEmptyEnvironment(trustLevel)``: what the header is parsed in, which is made once.
- ``l_Lean_Syntax_eqWithInfo(one, other)``: how Lean compares two headers, once for each text.
- ``lean_io_app_path()``: where Lean's program is, as Lean looks for its library beside it.
- ``…process_parseCmd(old?, parserState, cmdState, …)``: for prefixes alone, as it is private.

Symbols are looked up in everything that is loaded, since official toolchains split Lean into
several libraries. x86-64 alone: elsewhere :class:`PreloadError` is raised.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_P = ctypes.c_void_p
_SIGINT, _SIGXFSZ = 2, 25
_PAGE_BYTES = mmap.PAGESIZE
_READ_WRITE_EXECUTE = 7
_NEEDED = (
    "lean_main",
    "lean_shell_main",
    "l_Lean_Language_Lean_process",
    "lean_io_exit",
    "l_Lean_Language_Lean_truncateToHeader",
    "lean_alloc_object",
    "lean_mark_mt",
    "lean_mark_persistent",
    "lean_init_task_manager_using",
    "lean_finalize_task_manager",
    "lean_enable_initializer_execution",
    "l_Lean_Syntax_eqWithInfo",
    "l_Lean_Syntax_structEq",
    "lean_io_app_path",
    "lean_mk_string",
)
# What the header of each text is parsed in: it does not depend on the text, and takes as much time
# as a small text.
_EMPTY = "l_Lean_mkEmptyEnvironment"
_PARSE = "l___private_Lean_Language_Lean_0__Lean_Language_Lean_process_parseCmd"
# As many as it may have: what a caller does not pass is handed on and not looked at.
_PARSE_ARITY = 10
# What is left unresolved behind a text keeps the task manager from ending: `lean --incr-save` does
# the same before it saves.
_RESOLVE = "l___private_Lean_Elab_Frontend_0__Lean_Elab_resolveCancelTokensForSave"
_TREE, _TREE_OF = (
    "l_Lean_Language_toSnapshotTree___redArg",
    "l_Lean_Language_Lean_instToSnapshotTreeHeaderParsedSnapshot",
)
_FINAL_STATE = "l_Lean_Language_Lean_waitForFinalCmdState_x3f"
_NEEDED_FOR_PREFIXES = (_PARSE, _RESOLVE, _TREE, _TREE_OF, _FINAL_STATE)


class PreloadError(Exception):
    """This Lean, or this machine, cannot be preloaded."""


class Preloaded:
    """Lean with a header imported.

    Args:
        program: Lean's program, beside which its library stands; empty where Lean has none.
        libraries: Lean's shared libraries, in the order in which they are loaded.
        arguments: Lean's command line, which must read its text from standard input.
        header: a text that imports and does nothing else.
        when_ready: called once, with the exit code of the header's run. It must not return.
    """

    def __init__(
        self,
        program: str,
        libraries: Sequence[str],
        arguments: Sequence[str],
        header: bytes,
        when_ready: Callable[[int], NoReturn],
    ) -> None:
        machine = os.uname().machine
        if machine != "x86_64":
            raise PreloadError(f"no jump is written for {machine}")
        # libuv would keep a ring whose kernel thread acts for this process, and all children
        # would share it.
        os.environ["UV_USE_IO_URING"] = "0"
        self._program = os.fsencode(program)
        self._arguments = [b"lean", *map(os.fsencode, arguments)]
        self._header = header
        self._when_ready = when_ready
        self._threads = os.cpu_count() or 1
        # Lean's interpreter looks compiled functions up among the process's global symbols.
        for library in libraries:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        self._lean = ctypes.CDLL(None)
        if missing := [name for name in _NEEDED if not hasattr(self._lean, name)]:
            raise PreloadError(f"this Lean has no symbol {', '.join(missing)}")
        self._lean.lean_alloc_object.argtypes = [ctypes.c_size_t]
        self._lean.lean_alloc_object.restype = _P
        self._lean.l_Lean_Language_Lean_truncateToHeader.argtypes = [_P]
        self._lean.l_Lean_Language_Lean_truncateToHeader.restype = _P
        self._lean.l_Lean_Syntax_structEq.argtypes = [_P, _P]
        self._lean.l_Lean_Syntax_structEq.restype = ctypes.c_uint8
        self._lean.lean_mk_string.restype = _P
        self._main_arguments: tuple[int, int] | None = None
        self._snapshot = 0
        self._is_ready = False
        self._header_is_silent = False
        self._empty_environment = 0
        # Of a prefix: its length, what Lean has made of it, and the state that this has left.
        self._prefix_bytes = 0
        self._prefix_snapshot = 0
        self._prefix_state = 0

    def run(self) -> None:
        """Runs the header and calls ``when_ready``; never returns. PreloadError: it cannot."""
        self._shell = _Hook(self._lean, "lean_shell_main", 2, self._on_shell_main)
        self._process = _Hook(self._lean, "l_Lean_Language_Lean_process", 3, self._on_process)
        self._exit = _Hook(self._lean, "lean_io_exit", 1, self._on_exit)
        self._equal = _Hook(self._lean, "l_Lean_Syntax_eqWithInfo", 2, self._on_equal)
        self._equal.release()
        if self._program:
            self._path = _Hook(self._lean, "lean_io_app_path", 0, self._on_app_path)
        for number in (_SIGINT, _SIGXFSZ):  # as in the launcher of plain Lean
            self._lean.signal(number, None)
        # A pipe may take less than a header at once, and nothing of it is read by now.
        text = os.memfd_create("header")
        with open(text, "wb", closefd=False) as file:
            file.write(self._header)
        os.lseek(text, 0, os.SEEK_SET)
        os.dup2(text, 0)
        os.close(text)
        self._streams = os.dup(1), os.dup(2)
        self._said = os.memfd_create("said")
        for number in (1, 2):
            os.dup2(self._said, number)
        argv = (ctypes.c_char_p * (len(self._arguments) + 1))(*self._arguments, None)
        self._lean.lean_main(len(self._arguments), argv)
        os._exit(98)

    def _on_shell_main(self, args: int, options: int) -> int:
        self._shell.release()
        self._main_arguments = self._kept(args), self._kept(options)
        return self._shell.call(args, options)

    def _on_process(self, setup: int, old: int, context: int) -> int:
        self._process.release()
        if self._prefix_state:
            self._parse.hold()
        if self._is_ready:
            if self._header_is_silent:
                self._equal.hold()
            snapshot = self._process.call(setup, self._some(self._snapshot), context)
            self._equal.release()  # Lean compares nothing where it cannot read the header
            if not self._prefix_bytes or self._prefix_state:
                return snapshot
            self._prefix_snapshot = snapshot
            return self._kept(snapshot)
        self._snapshot = self._process.call(setup, old, context)
        return self._kept(self._snapshot)

    def _on_equal(self, one: int, other: int) -> int:
        self._equal.release()
        # It takes what it is given, which is kept for it.
        return int(self._lean.l_Lean_Syntax_structEq(self._kept(one), self._kept(other)))

    def _on_app_path(self) -> int:
        """`EStateM.Result.ok` with a path."""
        return self._constructed(0, 16, self._lean.lean_mk_string(self._program))

    def _on_empty(self, trust_level: int | None, world: int) -> int:
        self._empty.release()
        if (trust_level or 0) & 0xFFFFFFFF:  # asked for by another than the parser of headers
            return self._empty.call(trust_level, world)
        return self._empty_environment

    def _on_exit(self, code: int | None) -> int:
        self._exit.release()
        lean = self._lean
        assert self._main_arguments is not None
        if self._prefix_bytes:
            self._stop_behind_prefix((code or 0) & 0xFF)
        self._snapshot = lean.l_Lean_Language_Lean_truncateToHeader(self._snapshot)
        # What the snapshot holds is for good, and references to it are not counted in children:
        # pages that are only read stay shared.
        for each in (self._snapshot, *self._main_arguments):
            if not each & 1:
                lean.lean_mark_persistent(_P(each))
        lean.lean_finalize_task_manager()  # ends and joins its threads, which a fork would lose
        lean.fflush(None)  # or each child would print again what this run has printed
        self._header_is_silent = os.fstat(self._said).st_size == 0
        for number, stream in zip((1, 2), self._streams, strict=True):
            os.dup2(stream, number)
        for each in (self._said, *self._streams):
            os.close(each)
        if hasattr(lean, _EMPTY):
            self._empty = _Hook(lean, _EMPTY, 2, self._on_empty)
            self._empty.release()
            self._empty_environment = self._empty.call(0, 0)
            lean.lean_mark_persistent(_P(self._empty_environment))
        # What was freed by now would be copied page by page in each fork that uses it again.
        if hasattr(lean, "mi_collect"):
            lean.mi_collect(True)
        self._is_ready = True
        self._when_ready((code or 0) & 0xFF)
        os._exit(99)

    def go_on(self) -> NoReturn:
        """In a child, which has not forked others: Lean's command line once more, as the rest of
        the process's life. It has the descriptors 0 to 2 and variables that Lean is to see."""
        assert self._main_arguments is not None
        self._process.hold()
        if self._empty_environment:
            self._empty.hold()
        self._lean.lean_init_task_manager_using(self._threads)
        self._lean.lean_enable_initializer_execution()  # for another header, which it imports
        self._lean.clearerr(_P.in_dll(self._lean, "stdin"))
        self._shell.call(*self._main_arguments)
        os._exit(99)

    def stop_behind(self, prefix_bytes: int, when_ready: Callable[[int], NoReturn]) -> NoReturn:
        """In a child: has Lean elaborate a prefix, which is all of standard input and has this
        size, and calls ``when_ready`` with the exit code, which must not return. Where the code is
        0, processes forked from there ``go_on`` behind the prefix, with texts that begin with it.

        PreloadError: this Lean cannot do it.
        """
        if missing := [name for name in _NEEDED_FOR_PREFIXES if not hasattr(self._lean, name)]:
            raise PreloadError(f"this Lean has no symbol {', '.join(missing)}")
        self._parse = _Hook(self._lean, _PARSE, _PARSE_ARITY, self._on_parse)
        self._parse.release()
        self._prefix_bytes = prefix_bytes
        self._when_ready = when_ready
        self._exit.hold()
        self.go_on()

    def _stop_behind_prefix(self, code: int) -> NoReturn:
        lean = self._lean
        if code == 0:
            tree, final = lean[_TREE], lean[_FINAL_STATE]
            tree.argtypes, tree.restype = [_P, _P], _P
            final.argtypes, final.restype = [_P], _P
            instance = _P.in_dll(lean, _TREE_OF)
            lean[_RESOLVE](_P(tree(instance, self._kept(self._prefix_snapshot))))
            found = final(self._kept(self._prefix_snapshot))
            if found & 1:
                os._exit(97)  # no state: the prefix has not come to its end
            self._prefix_state = ctypes.c_uint64.from_address(found + 8).value
            lean.lean_mark_persistent(_P(self._prefix_state))
            lean.lean_finalize_task_manager()
        lean.fflush(None)
        self._when_ready(code)
        os._exit(99)

    def _on_parse(self, old: int, parser: int, state: int, *others: int) -> int:
        self._parse.release()
        # ModuleParserState: a position, as a boxed number, and a scalar, `recovering`.
        behind = self._constructed(0, 24, 2 * self._prefix_bytes + 1)
        return self._parse.call(old, behind, self._prefix_state, *others)

    def _kept(self, value: int) -> int:
        """Adds a reference to an object. Counts are negative for objects that threads share, and 0
        for those that are never freed (lean.h)."""
        if not value & 1:
            self._lean.lean_mark_mt(_P(value))
            count = ctypes.c_int32.from_address(value)
            count.value -= bool(count.value)
        return value

    def _some(self, value: int) -> int:
        """`Option.some value`."""
        return self._constructed(1, 16, value)

    def _constructed(self, tag: int, size: int, field: int) -> int:
        """A constructor with count 1 and one field; the scalars behind are 0 (lean.h)."""
        found: int = self._lean.lean_alloc_object(size)
        ctypes.memset(found, 0, size)
        ctypes.c_int32.from_address(found).value = 1
        ctypes.c_uint16.from_address(found + 6).value = tag << 8 | 1
        ctypes.c_uint64.from_address(found + 8).value = field
        return found


class _Hook:
    """A C function of Lean's that calls Python instead, until it is let go."""

    def __init__(
        self, lean: ctypes.CDLL, name: str, arity: int, catch: Callable[..., int | None]
    ) -> None:
        self._original = lean[name]
        self._original.argtypes, self._original.restype = [_P] * arity, _P
        address = ctypes.cast(self._original, _P).value
        self._callback = ctypes.CFUNCTYPE(_P, *[_P] * arity)(catch)
        target = ctypes.cast(self._callback, _P).value
        assert address is not None
        assert target is not None
        self._address = address
        self._jump = b"\x48\xb8" + target.to_bytes(8, "little") + b"\xff\xe0"  # mov rax; jmp rax
        self._saved = ctypes.string_at(address, len(self._jump))
        first = address & -_PAGE_BYTES
        size = address + len(self._jump) - first
        if lean.mprotect(_P(first), ctypes.c_size_t(size), _READ_WRITE_EXECUTE):
            raise PreloadError("this machine does not let Lean's code be written to")
        self.hold()

    def hold(self) -> None:
        """Calls of it go to Python from now on."""
        ctypes.memmove(self._address, self._jump, len(self._jump))

    def release(self) -> None:
        """Calls of it go to Lean from now on."""
        ctypes.memmove(self._address, self._saved, len(self._saved))

    def call(self, *arguments: Any) -> int:
        """What Lean makes of the arguments; it must have been released."""
        result: int = self._original(*arguments)
        return result
