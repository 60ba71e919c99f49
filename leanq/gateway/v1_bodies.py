"""The bodies and results of leanq's own interface, made of the client's options and the queue's
records. Their docstrings describe the fields."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from types import GenericAlias, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct, defstruct
from msgspec.structs import fields

from leanq.gateway.bodies import NAMES, Body, attributes_of
from leanq.producer import request_builder as builder
from leanq.queue.requests import OVER_HTTP, Reply, Request, reply_to_json

THEOREM = "theorem t (p : Prop) (h : p) : p := "

_Label = Annotated[str, Meta(max_length=1000)] | int | None

_ABOUT = attributes_of(Request, builder.SubmitOptions, builder.InEnvironment, builder.Check) | {
    "environment": "by name; the first that the key allows unless given",
    "request_id": "a name of the caller's: the same again gives the same reply. A request with a "
    "name is not withdrawn where the connection closes",
    "code": "Lean source, its header included",
}
_DEFAULTS: Mapping[str, Any] = {
    **{field.name: field.default for field in fields(Request)},
    **dict.fromkeys(("environment", "request_id", "traceparent", "deadline_s", "target")),
    **{name: [] for name in NAMES},
    "priority": 1,
}
_TYPES: Mapping[str, Any] = {
    **get_type_hints(builder.Check),
    **dict.fromkeys(("environment", "target"), str | None),
    **dict.fromkeys(NAMES, Annotated[list[str], Meta(max_length=10_000)]),
}

OF_CHECKS = ("goals", "profile")
"""Options of checks that steps lack."""

_NOT_HERE = {"tenant", "labels", "env", "request_id"}
OPTIONS = tuple(
    name for name in get_type_hints(builder.Check) if name not in {*_NOT_HERE, *OF_CHECKS}
)
"""Options of each operation, as the client has them."""


def _body(name: str, about: str, required: tuple[str, ...], *optional: str) -> Any:
    optional = ("environment", *OPTIONS, "request_id", *optional)
    made: list[Any] = [(each, _described(each, str)) for each in required]
    made += [(each, _described(each, _TYPES[each]), _DEFAULTS[each]) for each in optional]
    how: Any = {"kw_only": True, "forbid_unknown_fields": True, "namespace": {"__doc__": about}}
    return defstruct(name, made, **how)


def _described(name: str, kind: Any) -> Any:
    return Annotated[kind, Meta(description=_ABOUT[name])] if name in _ABOUT else kind


# Their fields are made of other declarations, so that a checker of types does not know them.
Check: Any = _body("Check", "Lean's verdict on a text.", ("code",), *OF_CHECKS)
Verify: Any = _body(
    "Verify",
    "A candidate that has to prove a target.",
    ("code",),
    *("target", "theorems", "holes", "goals"),
)
Step: Any = _body("Step", "A tactic, tried on a state.", ("state", "tactic"))

EXAMPLES: Mapping[str, Any] = {
    "Check": {"code": f"{THEOREM}h", "timeout_s": 20},
    "Verify": {"target": f"{THEOREM}sorry", "code": f"{THEOREM}h"},
    "Step": {"state": "0" * 64, "tactic": "exact h"},
}


def _item(op: str, kind: Any) -> Any:
    own = ("id", Annotated[_Label, Meta(description="what the result is to be known by")], None)
    return defstruct(f"{op}Item", [own], bases=(kind,), kw_only=True, tag_field="op", tag=op)


_OPERATIONS = {"check": Check, "verify": Verify, "step": Step}
ITEM = Body(reduce(or_, (_item(op, kind) for op, kind in _OPERATIONS.items())))
"""One line of a batch."""


def _as_object(
    kind: type[Struct], name: str = "", names: tuple[str, ...] = (), **defaults: Any
) -> Any:
    """Returns the type of a record as JSON shows it: an object, where the wire has a list.

    Args:
        names: its fields, all unless given. Those with ``defaults`` may be missing.
    """
    about, types = attributes_of(kind), {each.name: each.type for each in fields(kind)}
    made: list[Any] = [
        (each, Annotated[_as_json(types[each]), Meta(description=about.get(each))], *default)
        for each, *default in (*((each,) for each in names or types), *defaults.items())
    ]
    summary = (kind.__doc__ or "").partition("\n")[0]
    return defstruct(name or kind.__name__, made, namespace={"__doc__": summary})


def _as_json(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Struct):
        return _as_object(kind)
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        # Pairs are shown as an object.
        is_paired = get_origin(parts[0]) is tuple
        kinds: Any = get_args(parts[0]) if is_paired else _as_json(parts[0])
        return GenericAlias(dict if is_paired else list, kinds)
    if isinstance(kind, UnionType):
        return reduce(or_, map(_as_json, parts))
    return kind


Result: Any = _as_object(Reply, "Result", OVER_HTTP, more_theorems=0, tactics=[])
"""How a request ended."""


def result_of(reply: Reply, request_id: str) -> dict[str, Any]:
    """Returns a reply as a ``Result``, in values that JSON has."""
    asked = ("tactics",) if reply.tactics else ()
    return {**reply_to_json(reply, (*OVER_HTTP, *asked)), "request_id": request_id}


class Pending(Struct):
    """A request that has not ended."""

    request_id: str
    status: Literal["pending"] = "pending"


class Imported(Struct):
    """A state that is known now."""

    state: str


class EnvironmentStatus(Struct):
    """One environment, at this moment."""

    name: str
    lean: Annotated[str | None, Meta(description="the version of Lean")]
    fingerprint: str | None
    waiting: int
    running: int
    workers: int
    slots: int


class Status(Struct):
    """The part of the fleet that a key may see."""

    environments: list[EnvironmentStatus]
    tenant: str
    outstanding: Annotated[int, Meta(description="the tenant's requests at this gateway")]


DESCRIBED = (Check, Verify, Step, Result, Pending, Imported, Status)
"""The types in the interface's description."""
