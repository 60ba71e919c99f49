"""Reads the forms that browsers send, up to any size that a key allows."""

from __future__ import annotations

import asyncio
from binascii import a2b_qp
from collections.abc import Callable

from fastapi import HTTPException, Request

from leanq.errors import TooLargeError

_MOST_FIELDS = 20
# Starting a thread takes as long as reading so many bytes.
_LARGE_BYTES = 65_536
# The interpreter switches threads only between pieces.
_PIECE_BYTES = 131_072
_AS_QUOTED_PRINTABLE = bytes.maketrans(b"+%", b" =")


async def read_form(
    request: Request, longest: int, note: Callable[[int], None] = lambda _: None
) -> dict[str, str]:
    """Returns the fields of a form of at most ``longest`` bytes; of equal names, the first.

    ``note`` is called with the size of each part of the body, before the next one is read. Raises
    TooLargeError, and HTTPException (422) if the form is malformed.
    """
    body = bytearray()
    async for part in request.stream():
        note(len(part))
        body += part
        if len(body) > longest:
            raise TooLargeError(f"the form has more than the {longest} bytes allowed")
    try:
        if len(body) > _LARGE_BYTES:
            return await asyncio.to_thread(fields_of, body)
        return fields_of(body)
    except ValueError:
        raise HTTPException(422, "the form cannot be read") from None


def fields_of(body: bytes | bytearray) -> dict[str, str]:
    """Returns the fields in an encoded form; raises ValueError if it is malformed."""
    if body.count(b"&") >= _MOST_FIELDS:
        raise ValueError("a form has fewer fields")
    fields: dict[str, str] = {}
    begin = 0
    while begin < len(body):
        end = _found(body, b"&", begin, len(body))
        equals = _found(body, b"=", begin, end)
        if begin < end:
            name = _decoded(body, begin, equals)
            fields.setdefault(name, _decoded(body, equals + 1, end))
        begin = end + 1
    return fields


def _found(body: bytes | bytearray, sign: bytes, begin: int, end: int) -> int:
    found = body.find(sign, begin, end)
    return end if found < 0 else found


def _decoded(body: bytes | bytearray, begin: int, end: int) -> str:
    pieces = []
    while begin < end:
        after = min(begin + _PIECE_BYTES, end)
        # Do not split an escape.
        cut = after if after == end else _found(body, b"%", after - 2, after)
        pieces.append(_unescaped(body[begin:cut]))
        begin = cut
    return b"".join(pieces).decode()


def _unescaped(data: bytes | bytearray) -> bytes:
    # The standard library takes a second for some four megabytes of escapes. Quoted-printable is
    # the same code with another sign, and its reader is a hundred times as fast.
    escaped = data.replace(b"=", b"%3D").translate(_AS_QUOTED_PRINTABLE)
    decoded = a2b_qp(escaped)
    # The reader keeps malformed escapes, and drops escaped ends of lines.
    is_whole = len(escaped) - len(decoded) == 2 * escaped.count(b"=")
    if not is_whole or b"=\n" in escaped or b"=\r" in escaped:
        raise ValueError("a sign of percent without two digits")
    return decoded
