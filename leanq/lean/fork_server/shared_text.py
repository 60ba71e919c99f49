"""Puts Lean's code into huge pages of a process's own memory, before it is forked.

A fork copies no page tables of mapped files, so each would fault for every 64 KB of code that it
runs. Huge pages are shared by a few dozen entries. They are laid over the mapping in one step, at
the same addresses and with the same rights; where the machine gives none, the mapping stays.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection, Iterable, Iterator

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
