"""The judge's self-test before it is relied on: an honest file and forged ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from leanq.lean.audit.image import Image

HONEST = """prelude
inductive LeanqFalse : Prop
inductive LeanqTrue : Prop where | intro : LeanqTrue
axiom leanqAssumed : LeanqFalse
theorem leanqTrue : LeanqTrue := LeanqTrue.intro
theorem leanqSame (p : Prop) (h : p) : p := h
"""
"""A text whose compiled file the judge has to accept."""


def forged(honest: bytes) -> Sequence[bytes]:
    """Returns forged files, each wrong in one place, from the compiled `HONEST`."""
    image = Image([honest])
    constants = image.constants()
    false, true, same = (constants[name,] for name in ("leanqAssumed", "leanqTrue", "leanqSame"))
    recursor = constants["LeanqTrue", "rec"]
    assert true.body is not None
    patches = [
        (true.head + 3, false.type_),  # a proof of something else
        (same.value + 2, true.body),  # another proof
        (same.value + 2, image.words[true.head + 1]),  # no expression at all
        (recursor.value + 6, 2 << 1 | 1),  # two minor premises instead of one
    ]
    return [
        honest[: 8 * index] + struct.pack("<Q", word) + honest[8 * index + 8 :]
        for index, word in patches
    ]
