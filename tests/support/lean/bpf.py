"""What the kernel makes of a seccomp filter: an interpreter of classic BPF, and a disassembler."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

KILL_PROCESS, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003  # AUDIT_ARCH_*
X32_BIT = 1 << 30

_LOAD, _AND, _RETURN, _JUMP = 0x20, 0x54, 0x06, 0x05
_BRANCHES = {0x15: "jeq", 0x25: "jgt", 0x35: "jge", 0x45: "jset"}


class Instruction(NamedTuple):
    code: int
    if_true: int
    if_false: int
    k: int


def disassemble(program: bytes) -> list[Instruction]:
    """The instructions; an error for any that a seccomp filter has no use for, and for a jump that
    leads out of the program."""
    found = [Instruction(*fields) for fields in struct.iter_unpack("=HBBI", program)]
    for at, each in enumerate(found):
        assert each.code in (_LOAD, _AND, _RETURN, _JUMP, *_BRANCHES), (at, each)
        if each.code == _LOAD:
            assert each.k % 4 == 0
            assert each.k < 64
        if each.code in _BRANCHES:
            assert at + 1 + max(each.if_true, each.if_false) < len(found), (at, each)
        if each.code == _JUMP:
            assert at + 1 + each.k < len(found), (at, each)
    assert found[-1].code == _RETURN
    return found


def verdict(
    program: Sequence[Instruction], architecture: int, number: int, arguments: Sequence[int] = ()
) -> int:
    """What the filter returns for a call with these (unsigned, 64 bits each) arguments."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *padded)
    at = accumulator = 0
    while True:
        code, if_true, if_false, k = program[at]
        at += 1
        if code == _RETURN:
            return k
        if code == _LOAD:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif code == _AND:
            accumulator &= k
        elif code == _JUMP:
            at += k
        else:
            holds = {
                "jeq": accumulator == k,
                "jgt": accumulator > k,
                "jge": accumulator >= k,
                "jset": bool(accumulator & k),
            }[_BRANCHES[code]]
            at += if_true if holds else if_false
