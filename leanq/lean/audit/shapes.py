"""The shapes of Lean's expressions and levels: an object's tag and its number of fields."""

from __future__ import annotations


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
