"""Which Lean judges an environment: its own, or the wheel's."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from leanq.errors import ToolchainError, to_install
from leanq.lean.judge.kernel import VERSIONS
from leanq.lean.run.image import Image
from leanq.lean.run.toolchain import Toolchain, wheel_libraries, wheel_toolchain


@dataclass(frozen=True, slots=True)
class JudgeLean:
    """The Lean whose kernel judges what an environment's Lean has compiled.

    Attributes:
        libraries: its shared libraries; none if there is no kernel here.
        version: the kernel's; "" if there is none here.
        is_foreign: whether it is another Lean than the environment's, so that it imports kernel
            images and not the environment's files.
        fault: why there is no kernel, or "".
    """

    libraries: tuple[Path, ...] = ()
    version: str = ""
    is_foreign: bool = False
    fault: str = ""


def judge_lean(toolchain: Toolchain) -> JudgeLean:
    """Returns the judge of what this Lean compiles: the wheel's, unless both are the same build.

    Without the wheel, a Lean that the judge knows judges its own environment.
    """
    own, wheel = toolchain.shared_libraries, wheel_libraries()
    known = VERSIONS.match(toolchain.version) is not None
    is_wheels = toolchain.source == "wheel"
    found = _wheels_lean() if wheel and not is_wheels else None
    is_same = found is None or found.commit == toolchain.commit
    if is_wheels or (known and own and is_same):
        return JudgeLean(own, toolchain.version if own else "")
    if wheel:
        return JudgeLean(wheel, found.version if found else "", is_foreign=True)
    return JudgeLean(
        fault=f"Lean {toolchain.version} is judged by the kernel of leanq's own Lean, which is "
        f"missing: {to_install('judge')}"
    )


@cache
def _wheels_lean() -> Toolchain | None:
    try:
        return wheel_toolchain({})
    except ToolchainError:
        return None


# The judge's self-test before it is relied on: an honest file and forged ones.

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
