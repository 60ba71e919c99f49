"""The first process of a pid namespace, which reaps orphans and does nothing else: x86-64 alone.

A fork of the supervisor would copy its page tables, and lose them again at its end. This process
shares the supervisor's memory and descriptors instead, so that it costs some ten microseconds. It
runs a dozen instructions on a stack of its own, blocks every signal, and calls the kernel to wait
for a child's end and to reap it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import stat
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

_CLONE_VM, _CLONE_FILES = 0x100, 0x400
_CODE = bytes.fromhex(
    "4989fc"  #         mov r12, rdi         the set of signals, SIGCHLD alone
    "4c89e7"  #   wait: mov rdi, r12
    "31f6"  #           xor esi, esi
    "31d2"  #           xor edx, edx
    "41ba08000000"  #   mov r10d, 8
    "b880000000"  #     mov eax, 128         rt_sigtimedwait(set, NULL, NULL, 8)
    "0f05"  #           syscall
    "48c7c7ffffffff"  # reap: mov rdi, -1
    "31f6"  #           xor esi, esi
    "ba01000000"  #     mov edx, 1           WNOHANG
    "4531d2"  #         xor r10d, r10d
    "b83d000000"  #     mov eax, 61          wait4(-1, NULL, WNOHANG, NULL)
    "0f05"  #           syscall
    "85c0"  #           test eax, eax
    "7fe4"  #           jg reap
    "ebce"  #           jmp wait
)
_SIGNALS = (1 << signal.SIGCHLD - 1).to_bytes(8, "little")
_ALL_SIGNALS = b"\xff" * len(_SIGNALS)
_SYS_RT_SIGPROCMASK, _SIG_SETMASK = 14, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class FirstProcess:
    def __init__(self) -> None:
        """OSError: this machine does not let code be made."""
        size = mmap.PAGESIZE
        self._memory = mmap.mmap(-1, 2 * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory[: len(_SIGNALS)] = _SIGNALS
        self._memory[len(_SIGNALS) : len(_SIGNALS) + len(_CODE)] = _CODE
        self._signals = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._code = self._signals + len(_SIGNALS)
        self._stack = self._signals + 2 * size
        if _libc.mprotect(self._signals, size, mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "no code can be made here")

    def start(self) -> int:
        """Returns its pid; raises OSError if there can be none now."""
        # It inherits this mask, so no handler of this process ever runs in it. Python's own
        # function leaves out the signals of the C library.
        before = ctypes.create_string_buffer(len(_ALL_SIGNALS))
        _set_mask(_ALL_SIGNALS, before)
        flags = _CLONE_VM | _CLONE_FILES | signal.SIGCHLD
        pid: int = _libc.clone(self._code, self._stack, flags, self._signals)
        number = ctypes.get_errno()
        _set_mask(before, None)
        if pid < 0:
            raise OSError(number, os.strerror(number), "clone")
        return pid


def _set_mask(signals: bytes | ctypes.Array[ctypes.c_char], before: object) -> None:
    size = ctypes.c_size_t(len(_ALL_SIGNALS))
    how = ctypes.c_long(_SIG_SETMASK)
    _libc.syscall(ctypes.c_long(_SYS_RT_SIGPROCMASK), how, signals, before, size)


# What a fork of a process does to be a program: its descriptors, signals and variables.

_DESCRIPTORS = (1 << 31) - 1
DEFAULT = (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)
"""For programs. SIGTERM stays ignored: Slurm sends it to every process of a job, and what runs may
end within the worker's grace."""


def keep_only(fds: Sequence[int], report: int, tells: int) -> None:
    """Makes these the standard streams, and closes all other descriptors, also those of Lean.

    The one that ``tells`` stays, and one pipe. libuv makes it in each fork, and the next fork
    closes its two numbers, even if a program that Lean has started holds them by then. No other
    pipe has both its ends here.
    """
    others = {os.fstat(fd).st_ino for fd in (*fds, report)}
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    pipes = defaultdict[int, list[int]](list)
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):  # the list's own one
            found = os.fstat(fd)
            if stat.S_ISFIFO(found.st_mode) and found.st_ino not in others:
                pipes[found.st_ino].append(fd)
    begin = len(fds)
    pipe = chain.from_iterable(both for both in pipes.values() if len(both) == 2)
    for fd in sorted([*pipe, tells]):
        os.closerange(begin, fd)
        begin = fd + 1
    os.closerange(begin, _DESCRIPTORS)


def be_program(env: dict[str, str]) -> None:
    """Makes this process what a program finds itself as when it is started here."""
    os.setsid()
    for signum in DEFAULT:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # Most are the same already, and each that is set costs a page.
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
