"""The first process of a pid namespace, which reaps orphans and does nothing else: x86-64 alone.

A fork of the supervisor would copy its page tables, and lose them again at its end. This process
shares the supervisor's memory and descriptors instead, so that it costs some ten microseconds. It
runs a dozen instructions on a stack of its own, blocks every signal, and calls the kernel to wait
for a child's end and to reap it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal

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
