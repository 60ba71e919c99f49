"""Layouts of compiled files, and the shapes of the expressions in them.

A file says itself which layout it has: by its header's version and flags, and by the sizes of its
objects. The versions here are for people; no reader decides by one. A file with another layout is
unknown, and nothing is said about its contents.

=====================================  =============  ============================================
difference                             Lean           how the file says it
=====================================  =============  ============================================
header without flags or version        4.9 to 4.13    byte 5 is 1
header with flags and Lean's version   since 4.14     byte 5 is 2
large numbers of GMP                   all, on Linux  bit 0 of the flags; version 1 has no flags
no mark of the module system           4.9 to 4.19    `ModuleData` has 48 bytes
a mark of the module system            since 4.20     `ModuleData` has 56 bytes
an import's flags all, exported, meta  since 4.20     the module's mark stands
nested types are a flag                4.9, 4.10      `InductiveVal` has five fields
nested types are counted               since 4.11     `InductiveVal` has six fields
parts .server and .private             since 4.22     the module's mark stands
a root in an earlier part              since 4.31     the root's address
=====================================  =============  ============================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

# The shapes of Lean's expressions and levels: an object's tag and its number of fields.


def shape(tag: int, fields: int) -> int:
    """Returns the tag and the number of fields, which stand side by side in an object's word 0."""
    return tag << 8 | fields


# The constructors of `Lean.Expr`; no honest file has those of free and meta variables.
BVAR, SORT, CONST, APP = shape(0, 1), shape(3, 1), shape(4, 2), shape(5, 2)
LAM, FORALL, LET, LIT = shape(6, 3), shape(7, 3), shape(8, 4), shape(9, 1)
MDATA, PROJ = shape(10, 2), shape(11, 3)
BINDERS = (LAM, FORALL, LET)
NUMBER_LIT, STRING_LIT = shape(0, 1), shape(1, 1)
# The constructors of `Lean.Level`; zero is the boxed 0.
LEVEL_SUCC, LEVEL_MAX, LEVEL_IMAX, LEVEL_PARAM = shape(1, 1), shape(2, 2), shape(3, 2), shape(4, 1)
LEVELS = frozenset({LEVEL_SUCC, LEVEL_MAX, LEVEL_IMAX, LEVEL_PARAM})

# Which words of each expression point to expressions.
PARTS: dict[int, tuple[int, ...]] = {
    BVAR: (),
    SORT: (),
    CONST: (),  # name, levels
    APP: (1, 2),
    LAM: (2, 3),  # name, type, body
    FORALL: (2, 3),
    LET: (2, 3, 4),  # name, type, value, body
    LIT: (),
    MDATA: (2,),  # data, expression
    PROJ: (3,),  # name of the structure, index, expression
}


Kind = Literal[
    "axiom", "definition", "theorem", "opaque", "quotient", "inductive", "constructor", "recursor"
]


class Damaged(Exception):  # noqa: N818 - a finding about the bytes, no fault of the program
    """The bytes are not what Lean writes."""


class UnknownLayout(Damaged):
    """A version of Lean that leanq does not know may have written the bytes."""


class Header(NamedTuple):
    """The beginning of a file.

    Attributes:
        size_bytes: its length; the address of the file stands in its last eight bytes.
        lean: Lean's version in the file's own words; "" if it does not say.
    """

    size_bytes: int
    lean: str


_MAGIC = b"olean"
_USES_GMP = 1


def header(data: bytes) -> Header:
    """Reads the header of a file; raises `Damaged`."""
    if data[:5] != _MAGIC or len(data) < 6:
        raise Damaged("it does not begin like one")
    version = data[5]
    if version == 1:
        return Header(5 + 1 + 42 + 8, "")  # magic, version, commit, base
    if version != 2:
        # Lean 4.32 and later write version 3 for snapshots, and for no module.
        raise UnknownLayout(f"version {version} of the format is unknown")
    if len(data) < 7 + 33:
        raise Damaged("it is cut off")
    if data[6] != _USES_GMP:
        raise UnknownLayout(f"the flags {data[6]} of the format are unknown")
    lean = data[7 : 7 + 33].split(b"\0")[0].decode("ascii", "replace")
    return Header(5 + 1 + 1 + 33 + 40 + 8, lean)  # magic, version, flags, version, commit, base


MODULE_DATA_FIELDS = 5  # imports, names of constants, constants, extra names, entries
_WITHOUT_MARK_BYTES, _WITH_MARK_BYTES = 48, 56


def has_module_mark(word: int) -> bool:
    """Returns whether a `ModuleData` with this word 0 says if it belongs to the module system.

    Raises:
        UnknownLayout: it has other fields than leanq knows.
    """
    size_bytes = word >> 32 & 0xFFFF
    if word >> 48 != shape(0, MODULE_DATA_FIELDS) or size_bytes not in (
        _WITHOUT_MARK_BYTES,
        _WITH_MARK_BYTES,
    ):
        raise UnknownLayout(
            f"its `ModuleData` has {word >> 48 & 0xFF} fields in {size_bytes} bytes, "
            f"expected {MODULE_DATA_FIELDS} in {_WITHOUT_MARK_BYTES} or {_WITH_MARK_BYTES}"
        )
    return size_bytes == _WITH_MARK_BYTES


@dataclass(frozen=True, slots=True)
class ConstantLayout:
    """Where a `Lean.ConstantInfo` keeps the parts that are read.

    ``fields`` are the possible numbers of fields. ``body`` counts them from 0, the `ConstantVal`;
    ``unsafe_scalar`` counts the bytes behind the fields.
    """

    kind: Kind
    fields: tuple[int, ...]
    body: int | None = None
    unsafe_scalar: int | None = None
    unsafe_if: int = 1


INDUCTIVE_WITHOUT_NESTED = shape(0, 5)
"""An `InductiveVal` that has a flag, and no number, for its nested types."""

# The constructors of `Lean.ConstantInfo`, in their order.
CONSTANTS = (
    ConstantLayout("axiom", (1,), unsafe_scalar=0),
    ConstantLayout("definition", (4,), body=1, unsafe_scalar=0, unsafe_if=0),
    ConstantLayout("theorem", (3,), body=1),
    ConstantLayout("opaque", (3,), body=1, unsafe_scalar=0),
    ConstantLayout("quotient", (1,)),
    ConstantLayout("inductive", (5, 6), unsafe_scalar=1),
    ConstantLayout("constructor", (5,), unsafe_scalar=0),
    ConstantLayout("recursor", (7,), unsafe_scalar=1),
)


def constant_layout(tag: int, word: int) -> ConstantLayout:
    """Returns the layout of a constant's value, which begins with this word 0.

    Raises:
        UnknownLayout: leanq knows no such constant.
    """
    if tag >= len(CONSTANTS):
        raise UnknownLayout(f"it holds a constant of the unknown kind {tag}")
    layout = CONSTANTS[tag]
    if word >> 48 not in [shape(0, each) for each in layout.fields]:
        known = " or ".join(map(str, layout.fields))
        raise UnknownLayout(
            f"it holds a malformed {layout.kind}, or one of an unknown layout: it has "
            f"{word >> 48 & 0xFF} fields, expected {known}"
        )
    return layout
