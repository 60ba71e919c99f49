"""Reads JSON bodies as records, and describes these for OpenAPI.

msgspec stops at the first fault and skips unknown values without building them. So a hostile body
costs no more than an ordinary one of its size, but for long lists of short names, which are counted
first.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from msgspec import Raw, Struct

NAMES = ("allow_axioms", "theorems", "holes")
"""The fields that hold lists of names."""

_LARGE_BYTES = 65_536
# The exact limit is the field's own; a name may hold commas.
_MOST_COMMAS = 100_000
_REFERENCE = "#/components/schemas/"

_ATTRIBUTE = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)

_lists = msgspec.json.Decoder(msgspec.defstruct("Lists", [(name, Raw, Raw(b"")) for name in NAMES]))


class Body:
    """A kind of body. ``kind`` is its type; numbers and flags may come as texts."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.json.Decoder(kind, strict=False)

    def read(self, data: bytes) -> Any:
        """Returns the record; raises RequestValidationError with the first fault."""
        try:
            if len(data) > _LARGE_BYTES:
                lists = _lists.decode(data)
                for name in NAMES:
                    if bytes(getattr(lists, name)).count(b",") > _MOST_COMMAS:
                        raise _malformed(f"the list has more than {_MOST_COMMAS} items", name)
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise malformed("body", error) from None


def malformed(where: str, error: Exception, *place: str) -> RequestValidationError:
    """Returns a fault that msgspec found at a place, without the input."""
    message, _, path = str(error).partition(" - at `$")
    missing = re.findall(r"missing required field `(\w+)`", message)
    places = [int(each) if each.isdigit() else each for each in re.findall(r"\w+", path)]
    return _malformed(message, *place, *places, *missing, inside=where)


def _malformed(message: str, *where: str | int, inside: str = "body") -> RequestValidationError:
    fault = {"type": "malformed", "loc": (inside, *where), "msg": message[:200]}
    return RequestValidationError([fault])


def attributes_of(*kinds: type) -> dict[str, str]:
    """Returns what the docstrings of ``kinds`` say of their attributes, in JSON's words."""
    found: dict[str, str] = {}
    for kind in kinds:
        _, _, listed = (inspect.getdoc(kind) or "").partition("Attributes:\n")
        for names, text in _ATTRIBUTE.findall(listed):
            said = " ".join(text.replace("``None``", "null").replace("``", "`").split())
            found |= dict.fromkeys(names.split(", "), said)
    return found


def reference(kind: type[Struct]) -> dict[str, Any]:
    """Returns the content of a request or an answer: JSON of this type."""
    return {"application/json": {"schema": {"$ref": _REFERENCE + kind.__name__}}}


def describe(app: FastAPI, kinds: Sequence[type[Struct]], examples: Mapping[str, Any]) -> None:
    """Adds the types that ``reference`` names to the description of ``app``.

    ``examples`` has an example of a type, by its name.
    """
    make = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, schemas = msgspec.json.schema_components(kinds, ref_template=f"{_REFERENCE}{{name}}")
            for name, example in examples.items():
                schemas[name]["examples"] = [example]
            make().setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return make()

    app.openapi = described  # type: ignore[method-assign]
