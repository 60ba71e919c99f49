"""Lean in this process, stopped behind an import header and ready to be forked.

Lean's `lean_main` runs here once on a header alone. Instead of exiting, this process stops with
everything imported in its memory. A forked child goes on from there (:meth:`Preloaded.go_on`): it
calls `lean_shell_main` again, with the same arguments and its own behind them. It then reads its
own text from standard input, elaborates it, prints, writes the compiled file and exits, all by
Lean's own code. One thing differs from plain `lean`: `Lean.importModules` returns at once with what
the first run imported, if it is to import the same. Lean reads the header of each text itself, and
an import of anything else is Lean's.

A child may go on with further texts, one after another, where it would exit: it calls
`lean_shell_main` once more from there. In between it has one thread, and what it has open is what
it had open before its first text; otherwise it exits.

A child can stop in the same way behind a whole prefix of texts to come
(:meth:`Preloaded.stop_behind`). Its own children elaborate nothing but the rest of theirs. Lean
parses the first command behind the prefix instead of the header, in the state after the prefix.

A jump written over a function's first bytes catches it, and is removed again:

- ``lean_shell_main(args, options)``: Lean.Shell.shellMain.
- ``l_Lean_Language_Lean_process(setup, old?, context)``: gives an `InitialSnapshot`; for prefixes.
- ``lean_io_exit(code)``: IO.Process.exit, which ends a run of the command line.
- ``l_Lean_mkEmptyEnvironment(trustLevel)``: the environment for parsing the header, made once.
- ``l_Lean_importModules(imports, opts, trustLevel, plugins, leakEnv, loadExts, level, arts)``.
- ``lean_io_app_path()``: the place of Lean's program, beside which it looks for its library.
- ``…process_parseCmd(old?, parserState, cmdState, …)``: for prefixes alone, as it is private.

Symbols are looked up in everything that is loaded, since official toolchains split Lean into
several libraries. It works on x86-64 alone, and raises :class:`PreloadError` elsewhere.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from leanq.lean.run.evaluations import Evaluations, UnwatchedError
from leanq.lean.sandbox.monitor import ENDED, MESSAGE_BYTES, WAITS

_P = ctypes.c_void_p
_SIGINT, _SIGXFSZ = 2, 25
_PAGE_BYTES = mmap.PAGESIZE
_READ_EXECUTE, _READ_WRITE_EXECUTE = 5, 7
_NEEDED = (
    "lean_main",
    "lean_shell_main",
    "lean_shell_options_process",
    "lean_io_exit",
    "l_Lean_importModules",
    "l_Lean_instBEqImport_beq",
    "lean_alloc_object",
    "lean_mark_mt",
    "lean_mark_persistent",
    "lean_init_task_manager_using",
    "lean_finalize_task_manager",
    "lean_enable_initializer_execution",
    "lean_io_app_path",
    "lean_mk_string",
)
# The environment for parsing headers does not depend on the text, and takes as much time as a small
# text.
_EMPTY = "l_Lean_mkEmptyEnvironment"
_PARSE = "l___private_Lean_Language_Lean_0__Lean_Language_Lean_process_parseCmd"
# The most that it may have: arguments that a caller leaves out are passed on unread.
_PARSE_ARITY = 10
# Unresolved tasks behind a text keep the task manager from ending: `lean --incr-save` does the same
# before it saves.
_RESOLVE = "l___private_Lean_Elab_Frontend_0__Lean_Elab_resolveCancelTokensForSave"
_TREE, _TREE_OF = (
    "l_Lean_Language_toSnapshotTree___redArg",
    "l_Lean_Language_Lean_instToSnapshotTreeHeaderParsedSnapshot",
)
_FINAL_STATE = "l_Lean_Language_Lean_waitForFinalCmdState_x3f"
_PROCESS = "l_Lean_Language_Lean_process"
_NEEDED_FOR_PREFIXES = (_PROCESS, _PARSE, _RESOLVE, _TREE, _TREE_OF, _FINAL_STATE)
# The numbers of `Lean.importModules`' scalars among its arguments, and their bits.
_SCALARS = (2, 0xFFFFFFFF), (4, 0xFF), (5, 0xFF), (6, 0xFF)
_LETTERS = frozenset("oiD")
# The time for the threads of a text that has ended to be gone, and between two looks.
_THREADS_GONE_S, _LOOK_S = 0.1, 0.0002


class PreloadError(Exception):
    """This Lean, or this machine, cannot be preloaded."""


class Preloaded:
    """Lean with a header imported, a text with imports alone. ``program``: Lean's, beside which its
    library stands; empty if it has none. ``libraries``: in the order in which they are loaded. The
    arguments must have Lean read its text from standard input. ``when_ready`` gets the exit code of
    the header's run, and must not return."""

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
        self._text = share_text({os.path.realpath(each) for each in libraries})
        self._lean = ctypes.CDLL(None)
        if missing := [name for name in _NEEDED if not hasattr(self._lean, name)]:
            raise PreloadError(f"this Lean has no symbol {', '.join(missing)}")
        self._lean.lean_alloc_object.argtypes = [ctypes.c_size_t]
        self._lean.lean_alloc_object.restype = _P
        self._lean.l_Lean_instBEqImport_beq.argtypes = [_P, _P]
        self._lean.l_Lean_instBEqImport_beq.restype = ctypes.c_uint8
        self._lean.lean_mk_string.restype = _P
        self._lean.lean_shell_options_process.argtypes = [_P, ctypes.c_uint32, _P]
        self._lean.lean_shell_options_process.restype = _P
        self._main_arguments: tuple[int, int] | None = None
        self._imports: tuple[int, tuple[int, ...]] | None = None
        self._imported = 0
        self._empty_environment = 0
        self.unwatched = ""
        """Why nobody sees what a text evaluates; empty if somebody does."""
        # Of a child that may go on with further texts: its socket, and what it had open at first.
        self._orders = -1
        self._open: frozenset[str] = frozenset()
        self._has_imported = False
        # Of a prefix: its length, Lean's result for it, and the state after it.
        self._prefix_bytes = 0
        self._prefix_snapshot = 0
        self._prefix_state = 0

    def run(self) -> None:
        """Runs the header and calls ``when_ready``; never returns. May raise PreloadError."""
        self._shell = _Hook(self._lean, "lean_shell_main", 2, self._on_shell_main)
        self._exit = _Hook(self._lean, "lean_io_exit", 1, self._on_exit)
        self._import = _Hook(self._lean, "l_Lean_importModules", 8, self._on_import)
        if self._program:
            self._path = _Hook(self._lean, "lean_io_app_path", 0, self._on_app_path)
        for number in (_SIGINT, _SIGXFSZ):  # as in the launcher of plain Lean
            self._lean.signal(number, None)
        # A pipe may take less than a header at once, and nothing reads it yet.
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
        self._prefix_snapshot = self._process.call(setup, old, context)
        return self._kept(self._prefix_snapshot)

    def _on_import(self, *arguments: int | None) -> int:
        self._import.release()
        imports = arguments[0] or 0
        # trustLevel, leakEnv, loadExts, level: the registers' other bits are anything.
        how = tuple((arguments[n] or 0) & mask for n, mask in _SCALARS)
        if self._imports is None:
            self._imports = self._kept(imports), how
            self._imported = self._import.call(*arguments)
            return self._kept(self._imported)
        known, known_how = self._imports
        if how == known_how and self._are_equal(known, imports):
            return self._imported
        self._has_imported = True
        return self._import.call(*arguments)

    def _are_equal(self, known: int, others: int) -> bool:
        """Returns whether two arrays of `Lean.Import` are the same."""
        one, other = _elements(known), _elements(others)
        equal = self._lean.l_Lean_instBEqImport_beq
        return len(one) == len(other) and all(map(equal, one, other))

    def _on_app_path(self) -> int:
        """`EStateM.Result.ok` with a path."""
        return self._constructed(0, 16, self._lean.lean_mk_string(self._program))

    def _on_empty(self, trust_level: int | None, world: int) -> int:
        self._empty.release()
        if (
            trust_level or 0
        ) & 0xFFFFFFFF:  # asked for by another caller than the parser of headers
            return self._empty.call(trust_level, world)
        return self._empty_environment

    def _on_exit(self, code: int | None) -> int:
        if self._orders >= 0:
            try:
                self._end_text((code or 0) & 0xFF)
            finally:  # or Lean would go on behind its exit
                os._exit(95)
        self._exit.release()
        lean = self._lean
        assert self._main_arguments is not None
        if self._prefix_bytes:
            self._stop_behind_prefix((code or 0) & 0xFF)
        if self._imports is None:  # it could not even be read
            self._when_ready((code or 0) & 0xFF or 1)
        # These objects stay for good. Children count no references to them, so pages that are only
        # read stay shared.
        for each in (self._imported, self._imports[0], *self._main_arguments):
            if not each & 1:
                lean.lean_mark_persistent(_P(each))
        lean.lean_finalize_task_manager()  # ends and joins its threads, which a fork would lose
        lean.fflush(None)  # or each child would print this run's messages again
        for number, stream in zip((1, 2), self._streams, strict=True):
            os.dup2(stream, number)
        for each in (self._said, *self._streams):
            os.close(each)
        if hasattr(lean, _EMPTY):
            self._empty = _Hook(lean, _EMPTY, 2, self._on_empty)
            self._empty.release()
            self._empty_environment = self._empty.call(0, 0)
            lean.lean_mark_persistent(_P(self._empty_environment))
        # Freed memory would be copied page by page in each fork that uses it again.
        if hasattr(lean, "mi_collect"):
            lean.mi_collect(True)
        self._watch()
        rejoin_text(self._text)
        self._when_ready((code or 0) & 0xFF)
        os._exit(99)

    def _watch(self) -> None:
        try:
            self._evaluations = Evaluations(self._lean)
            if not self._empty_environment:
                raise UnwatchedError("there is no environment to try it with")
            # It is in an `EStateM.Result.ok`.
            made = ctypes.c_uint64.from_address(self._empty_environment + 8).value
            self._evaluations.prove(self._lean, self._kept(made))
        except UnwatchedError as error:
            self.unwatched = str(error)

    def go_on(
        self, arguments: Sequence[str], reports: int | None = None, *, stays: bool = False
    ) -> NoReturn:
        """In a child that has not forked others: runs Lean's command line once more, for good, with
        the descriptors 0 to 2 and the variables that Lean is to see.

        Args:
            arguments: those behind the ones of the header, each a letter with a value; see
                :func:`letters`.
            reports: the socket for what the text evaluates.
            stays: whether further texts may come by that socket, if nobody's text evaluates
                anything.
        """
        self._lean.lean_enable_initializer_execution()  # for another header, which it imports
        if reports is not None and not self.unwatched:
            self._evaluations.report_to(reports)
            if stays:
                self._orders, self._open = reports, _open_here()
                self._exit.hold()
        self._begin_text(arguments)

    def _begin_text(self, arguments: Sequence[str]) -> NoReturn:
        assert self._main_arguments is not None
        words, options = self._main_arguments
        for letter, value in letters(arguments) or ():
            options = self._with_option(options, letter, value)
        self._import.hold()
        if self._empty_environment:
            self._empty.hold()
        if self._prefix_state:
            self._parse.hold()
        self._lean.lean_init_task_manager_using(self._threads)
        self._lean.clearerr(_P.in_dll(self._lean, "stdin"))
        self._shell.call(words, options)
        os._exit(99)

    def _end_text(self, code: int) -> NoReturn:
        """Tells how a text has ended, and goes on with a further one if this left nothing behind.

        A text that has evaluated something may have changed anything here: its process exits.
        """
        self._lean.fflush(None)
        if self._evaluations.has_reported:
            self._exit.release()
            self._exit.call(code)
        os.write(self._orders, ENDED + b"%d" % code)
        # Joins Lean's threads once they have nothing more to do. If they always have, the
        # supervisor ends this process.
        self._lean.lean_finalize_task_manager()
        is_changed = self._has_imported or self._evaluations.has_reported
        if is_changed or not _is_alone() or _open_here() != self._open:
            os._exit(code)
        os.write(self._orders, WAITS)
        if not (order := os.read(self._orders, MESSAGE_BYTES)):
            os._exit(code)
        command, text = json.loads(order)
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        if os.write(writes, text.encode()) < len(text.encode()):  # this user's pipes are small
            os._exit(94)
        os.close(writes)
        os.dup2(reads, 0)
        os.close(reads)
        self._begin_text(own_arguments(command))

    def _with_option(self, options: int, letter: str, value: str) -> int:
        """Returns Lean's options with one more of its command line."""
        text = self._lean.lean_mk_string(os.fsencode(value))
        some = self._constructed(1, 16, text)
        result = self._lean.lean_shell_options_process(options, ord(letter), some)
        if ctypes.c_uint8.from_address(result + 7).value:  # `EStateM.Result.error`
            os._exit(96)
        return ctypes.c_uint64.from_address(result + 8).value

    def stop_behind(
        self, arguments: Sequence[str], prefix_bytes: int, when_ready: Callable[[int], NoReturn]
    ) -> NoReturn:
        """In a child: has Lean elaborate a prefix of this size, which is all of standard input. It
        calls ``when_ready`` with the exit code, which must not return. If the code is 0, processes
        forked from there ``go_on`` behind the prefix, with texts that begin with it. Raises
        PreloadError if this Lean cannot do it."""
        if missing := [name for name in _NEEDED_FOR_PREFIXES if not hasattr(self._lean, name)]:
            raise PreloadError(f"this Lean has no symbol {', '.join(missing)}")
        self._parse = _Hook(self._lean, _PARSE, _PARSE_ARITY, self._on_parse)
        self._parse.release()
        self._prefix_bytes = prefix_bytes
        self._when_ready = when_ready
        self._exit.hold()
        self._process = _Hook(self._lean, _PROCESS, 3, self._on_process)
        self.go_on(arguments)

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
                os._exit(97)  # no state: the prefix did not come to its end
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
            if count.value:  # or it may stand where nothing can be written
                count.value -= 1
        return value

    def _constructed(self, tag: int, size: int, field: int) -> int:
        """Returns a constructor with count 1 and one field; the scalars behind are 0 (lean.h)."""
        found: int = self._lean.lean_alloc_object(size)
        ctypes.memset(found, 0, size)
        ctypes.c_int32.from_address(found).value = 1
        ctypes.c_uint16.from_address(found + 6).value = tag << 8 | 1
        ctypes.c_uint64.from_address(found + 8).value = field
        return found


def own_arguments(command: Sequence[str]) -> list[str]:
    """Returns what stands behind `--stdin` in a command: the arguments of a text alone, which are
    none of its zygote's."""
    return [*command[command.index("--stdin") + 1 :]]


def letters(arguments: Sequence[str]) -> list[tuple[str, str]] | None:
    """Returns the letters and values of arguments that a fork can have beside its zygote's: those
    of `-o FILE`, `-i FILE` and `-DNAME=VALUE`. None if there are others."""
    found, words = [], iter(arguments)
    for word in words:
        letter = word[1:2]
        if word[:1] != "-" or letter not in _LETTERS:
            return None
        value = word[2:] or next(words, "")
        found.append((letter, value))
    return found


def _open_here() -> frozenset[str]:
    """Returns the descriptors of this process; the list's own one is the first free number."""
    return frozenset(os.listdir("/proc/self/fd"))


def _is_alone() -> bool:
    """Returns whether this process has one thread: those that have ended may take a moment."""
    end_s = time.monotonic() + _THREADS_GONE_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > end_s:
            return False
        time.sleep(_LOOK_S)
    return True


def _elements(array: int) -> list[int]:
    """Returns the objects in an array (lean.h)."""
    size = ctypes.c_size_t.from_address(array + 8).value
    return list((ctypes.c_uint64 * size).from_address(array + 24))


class _Hook:
    """A C function of Lean's that calls Python until it is released."""

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
        self._first = address & -_PAGE_BYTES
        self._size = address + len(self._jump) - self._first
        self._mprotect = lean.mprotect
        self._is_held = False
        self.hold()

    def hold(self) -> None:
        """Sends calls of it to Python. Its page can be written to until it is released."""
        self._protect(_READ_WRITE_EXECUTE)
        ctypes.memmove(self._address, self._jump, len(self._jump))
        self._is_held = True

    def release(self) -> None:
        if self._is_held:
            self._protect(_READ_WRITE_EXECUTE)  # another one may have its page
            ctypes.memmove(self._address, self._saved, len(self._saved))
            self._protect(_READ_EXECUTE)
            self._is_held = False

    def _protect(self, rights: int) -> None:
        if self._mprotect(_P(self._first), ctypes.c_size_t(self._size), rights):
            raise PreloadError("this machine does not let Lean's code be written to")

    def call(self, *arguments: Any) -> int:
        result: int = self._original(*arguments)
        return result


# Puts Lean's code into huge pages of a process's own memory, before it is forked.
#
# A fork copies no page tables of mapped files, so each would fault for every 64 KB of code that it
# runs. Huge pages are shared by a few dozen entries. They are laid over the mapping in one step,
# at the same addresses and with the same rights; where the machine gives none, the mapping stays.

_HUGE_BYTES = 2 << 20
# Pieces at both ends, which fill no huge page.
_ENDS_BYTES = 2 * _HUGE_BYTES
# <sys/mman.h>: MADV_HUGEPAGE, and MADV_COLLAPSE since Linux 6.1.
_ADVISE_HUGE, _ADVISE_COLLAPSE = 14, 25
_MOVE_OVER = 3  # MREMAP_MAYMOVE and MREMAP_FIXED
_READ_AND_EXECUTE = mmap.PROT_READ | mmap.PROT_EXEC
_libc = ctypes.CDLL(None)


def share_text(libraries: Collection[str]) -> list[tuple[int, int]]:
    """Replaces the executable mappings of these files; returns the addresses and sizes of those
    that it could replace. No other thread may run."""
    return [
        (first, last - first)
        for first, last, rights, path, _ in list(_mappings())
        if path in libraries
        and rights == "r-xp"
        and last - first > 2 * _ENDS_BYTES
        and _replace(first, last - first)
    ]


def rejoin_text(texts: Iterable[tuple[int, int]]) -> None:
    """Makes huge pages again of those of which a part had other rights for a while, since 6.1."""
    for address, size in texts:
        _call("madvise", address, size, _ADVISE_COLLAPSE)


def _replace(address: int, size: int) -> bool:
    reserved_bytes = size + _HUGE_BYTES
    reserved = _call(
        "mmap",
        None,
        reserved_bytes,
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        -1,
        0,
    )
    if reserved is None:
        return False
    is_replaced = False
    # Only between places of the same alignment do huge pages move as they are.
    copy = reserved + (address - reserved) % _HUGE_BYTES
    _call("madvise", copy, size, _ADVISE_HUGE)
    ctypes.memmove(copy, address, size)
    if _call("mprotect", copy, size, _READ_AND_EXECUTE) == 0:
        huge_bytes = sum(huge for first, *_, huge in _mappings() if first == copy)
        # Small pages would cost each fork more than the mapping does.
        if huge_bytes > size - _ENDS_BYTES:
            is_replaced = _call("mremap", copy, size, size, _MOVE_OVER, address) is not None
    _call("munmap", reserved, reserved_bytes)
    return is_replaced


def _call(name: str, *arguments: int | None) -> int | None:
    """Returns a call's result; None if it fails."""
    function = _libc[name]
    function.restype = ctypes.c_ssize_t  # and arguments of so many bits, too, or they are cut
    found: int = function(*map(ctypes.c_void_p, arguments))
    return None if found == -1 else found


def _mappings() -> Iterator[tuple[int, int, str, str, int]]:
    """Yields each mapping's addresses, rights, file and bytes in huge pages."""
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in (fields := line.split(None, 5))[0]:
                first, last = (int(each, 16) for each in fields[0].split("-"))
                rights, path = fields[1], fields[5].rstrip("\n") if len(fields) > 5 else ""
            elif fields[0] == "AnonHugePages:":
                yield first, last, rights, path, int(fields[1]) << 10
