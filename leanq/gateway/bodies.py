"""Bounds the content of a JSON body before Pydantic reads it.

Pydantic builds every value in a body before it validates any, even in unknown fields. Eight
megabytes of zeros take it most of a second and hundreds of megabytes. So this module first looks at
large bodies with msgspec, which skips a value without building it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

_SMALL_BYTES = 65_536
# The most bytes of a value that is neither a Lean text nor a list.
_LONGEST_VALUE = 65_536
# The most items of a list. Pydantic knows the exact limits; a name may hold commas.
_MOST_COMMAS = 100_000

_names = msgspec.json.Decoder(list[str])


class Bounds:
    """The fields that a body may have, and how much each may hold.

    Args:
        fields: the names of all fields.
        texts: the fields with texts of Lean, whose length only the body's size limits.
        names: the fields with lists of strings.
        items: the fields with lists of objects, and the type of those objects.
        is_closed: True if a body with any other field is refused.
    """

    def __init__(
        self,
        fields: Iterable[str],
        *,
        texts: Collection[str] = (),
        names: Collection[str] = (),
        items: Mapping[str, type[BaseModel]] | None = None,
        is_closed: bool = False,
    ) -> None:
        self._texts = frozenset(texts)
        self._names = frozenset(names)
        self._items = {name: _struct_of(model) for name, model in (items or {}).items()}
        self._is_closed = is_closed
        struct = msgspec.defstruct(
            "Fields",
            [self._field(name) for name in dict.fromkeys(fields)],
            forbid_unknown_fields=is_closed,
        )
        self._decoder = msgspec.json.Decoder(struct)

    def _field(self, name: str) -> tuple[str, Any, Any]:
        if item := self._items.get(name):
            return name, list[item] | None, None  # type: ignore[valid-type]
        return name, msgspec.Raw, msgspec.Raw()

    def bounded(self, data: bytes, check_number: Callable[[int], None] = lambda _: None) -> bytes:
        """Returns a body with the same known fields that is cheap for Pydantic to read.

        ``check_number`` is called with the number of items in a large body; it may raise. Raises
        RequestValidationError for a body beyond the bounds. Other faults of small bodies are left
        to Pydantic.
        """
        is_small = len(data) <= _SMALL_BYTES
        if is_small and not self._is_closed:
            return data
        try:
            found = self._decoder.decode(data)
            if is_small:
                return data
            for name in self._items:
                check_number(len(getattr(found, name) or ()))
            values = {name: getattr(found, name) for name in found.__struct_fields__}
            return msgspec.json.encode(
                {name: self._within(name, value) for name, value in values.items() if value}
            )
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not is_small or "unknown field" in str(error):
                raise _malformed(str(error)) from None
            return data

    def _within(self, name: str, value: Any) -> Any:
        if name in self._items:
            return value
        raw = memoryview(value)
        if name in self._names:
            if bytes(raw).count(b",") > _MOST_COMMAS:
                raise _malformed(f"the list has more than {_MOST_COMMAS} items", name)
            return _names.decode(raw)
        if raw[0] in b"[{":
            raise _malformed("expected a single value, got a list or an object", name)
        # A number cannot be a text, and Pydantic would read all its digits.
        if len(raw) > _LONGEST_VALUE and (name not in self._texts or raw[0] != ord('"')):
            raise _malformed(f"the value has more than {_LONGEST_VALUE} bytes", name)
        return value


def _struct_of(model: type[BaseModel]) -> type[msgspec.Struct]:
    fields = [
        (name, field.annotation, msgspec.NODEFAULT if field.is_required() else field.default)
        for name, field in model.model_fields.items()
    ]
    return msgspec.defstruct(model.__name__, fields, gc=False, omit_defaults=True)


def _malformed(message: str, *where: str) -> RequestValidationError:
    fault = {"type": "malformed", "loc": ("body", *where), "msg": message[:200]}
    return RequestValidationError([fault])
