"""Requests and replies as msgpack: versioned, bounded, without extension types.

A request is a map; a reply is an array ``[token, version, map]``. The lease token comes first, so
that the settling scripts recognise their own reply by a prefix and answer a repeated settle with
success.

Both sides check every field on the way in: a peer that sends nonsense gets an error, never a crash.
They ignore unknown fields, so that two releases can run side by side.

msgspec writes and reads these records by their declarations. Workers' descriptions of themselves
have no declaration, so msgpack handles them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, get_args

import msgpack
import msgspec
from msgspec.structs import asdict, force_setattr, replace

from leanq.errors import (
    InvalidRequestError,
    NewerMessageError,
    TooLargeError,
    UsageError,
    WireError,
)
from leanq.queue.requests import VERSION, Message, Operation, Reply, Request
from leanq.queue.settings import MAX_REQUEST_BYTES

MAX_REPLY_BYTES = 32 << 20

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(tuple[str, Literal[1], Reply])


class _RequestHead(msgspec.Struct):
    """The fields that tell why a request is refused."""

    v: int | float | str | None = None
    op: str = ""


class _ReplyHead(msgspec.Struct, array_like=True):
    token: str
    v: int | float | str | None = None


def pack_request(request: Request) -> bytes:
    """Returns the request's bytes: only the fields that differ from their defaults.

    Equal requests have equal bytes, which identify them.

    Raises:
        TooLargeError: more than ``MAX_REQUEST_BYTES``.
        InvalidRequestError: text with lone surrogates, which has no bytes.
    """
    try:
        data = _encode(request)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the text is not Unicode: {error.reason}") from None
    if len(data) > MAX_REQUEST_BYTES:
        raise TooLargeError(
            f"the request has {len(data)} bytes, more than the {MAX_REQUEST_BYTES} that are allowed"
        )
    return data


def unpack_request(data: bytes) -> Request:
    """Returns the request in ``data``.

    Raises:
        WireError: not a request, one of a later version, or one with impossible fields.
    """
    _check_size(data, MAX_REQUEST_BYTES)
    try:
        return _requests.decode(data)
    except UsageError as error:
        raise WireError(str(error)) from None
    except _UNREADABLE as error:
        with suppress(*_UNREADABLE):
            head = msgspec.msgpack.decode(data, type=_RequestHead)
            if head.v != VERSION:
                raise _other_version("request", head.v) from None
            if head.op not in get_args(Operation):
                # Each release knows the operations of those before it.
                text = f"a request for the unknown operation {head.op!r:.40}"
                raise NewerMessageError(text) from None
        raise _malformed("request", error) from None


def pack_reply(token: str, reply: Reply) -> bytes:
    """Returns the reply's bytes; cuts texts short if it is too large, but keeps its verdict."""
    if reply.warm or reply.way:
        # A driver tells these to its own worker alone.
        reply = replace(reply, warm=False, way=None)
    data = _packed_reply(token, reply)
    if len(data) > MAX_REPLY_BYTES:
        data = _packed_reply(token, _cut_short(reply, len(data)))
    return data


def unpack_reply(request_id: str, data: bytes) -> Reply:
    """Returns the reply to request ``request_id`` in ``data``.

    Raises:
        WireError: not a reply, or one of a later version.
    """
    _check_size(data, MAX_REPLY_BYTES)
    try:
        _, _, reply = _replies.decode(data)
    except _UNREADABLE as error:
        with suppress(*_UNREADABLE):
            head = msgspec.msgpack.decode(data, type=_ReplyHead)
            if head.v != VERSION:
                raise _other_version("reply", head.v) from None
        raise _malformed("reply", error) from None
    # The reply was made just now, so it needs no copy.
    force_setattr(reply, "request_id", request_id)
    return reply


def pack_info(info: Mapping[str, object]) -> bytes:
    """Returns a worker's description of itself or of an environment, for people to read."""
    data: bytes = msgpack.packb(dict(info), unicode_errors="replace")
    return data


def unpack_info(data: bytes) -> dict[str, Any]:
    """Reverses ``pack_info``; raises WireError."""
    _check_size(data, 1 << 16)
    try:
        value: object = msgpack.unpackb(data, ext_hook=_no_extension, timestamp=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise _malformed("description", error) from None
    if not isinstance(value, dict):
        raise WireError("a description that is no map")
    return value


def info_of(data: bytes) -> dict[str, Any]:
    """Returns what a worker or an environment says of itself; empty if it cannot be read."""
    # Any client may have written this; a look must survive it.
    try:
        return unpack_info(data)
    except WireError:
        return {}


def environments_in(info: Mapping[str, Any]) -> list[str]:
    offered = info.get("environments")
    return [str(name) for name in offered] if isinstance(offered, list) else []


def _packed_reply(token: str, reply: Reply) -> bytes:
    try:
        return _encode((token, VERSION, reply))
    except UnicodeEncodeError:
        # A candidate can make Lean print invalid Unicode, and must not lose its reply by that.
        plain = msgspec.to_builtins(reply, builtin_types=(bytes,))
        data: bytes = msgpack.packb([token, VERSION, plain], unicode_errors="replace")
        return data


def _cut_short(reply: Reply, size_bytes: int) -> Reply:
    note = Message("warning", 1, 0, f"leanq: a reply of {size_bytes} bytes was cut short")
    short: Reply = _clipped(replace(reply, tactics=()))
    return replace(short, messages=(note, *short.messages))


def _clipped(value: Any) -> Any:
    """Returns a value with at most 2,000 characters of each text, and 1,000 of each list."""
    if isinstance(value, str):
        return value[:2000]
    if isinstance(value, tuple):
        return tuple(map(_clipped, value[:1000]))
    if isinstance(value, msgspec.Struct):
        return replace(value, **{name: _clipped(each) for name, each in asdict(value).items()})
    return value


def _check_size(data: bytes, limit_bytes: int) -> None:
    if len(data) > limit_bytes:
        raise WireError(f"a message of {len(data)} bytes; at most {limit_bytes} are read")


def _other_version(what: str, version: object) -> WireError:
    text = f"a {what} of version {version!r:.40}; this release reads {VERSION}"
    return (NewerMessageError if type(version) is int and version > VERSION else WireError)(text)


def _malformed(what: str, error: Exception) -> WireError:
    # The error's text may quote the message.
    said = " ".join(str(error).split())
    return WireError(f"a {what} that is malformed: {said:.200}")


def _no_extension(code: int, _data: bytes) -> object:
    raise ValueError(f"extension type {code}")
