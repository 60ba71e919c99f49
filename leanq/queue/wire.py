"""Requests and replies as msgpack: versioned, bounded, without extension types.

A request is a map; a reply is an array ``[token, version, map]``. The lease token comes
first so that the ``settle`` script can recognise its own reply by a prefix and answer a
repeated settle with success. Every field is checked on the way in, on both sides: a peer
that sends nonsense gets an error, never a crash, and unknown fields are ignored so that
two releases can run side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeVar, get_args

import msgpack

from leanq.errors import InvalidRequestError, NewerMessageError, TooLargeError, WireError
from leanq.queue.requests import (
    Failure,
    Message,
    Operation,
    Reason,
    Reply,
    Request,
    Severity,
    Sorry,
    Theorem,
    Verdict,
)
from leanq.queue.settings import MAX_REQUEST_BYTES

VERSION = 1
MAX_REPLY_BYTES = 32 << 20

_OPERATIONS, _VERDICTS, _REASONS = get_args(Operation), get_args(Verdict), get_args(Reason)

_T = TypeVar("_T")


def pack_request(request: Request) -> bytes:
    """The request's bytes: only the fields that differ from their defaults.

    Raises:
        TooLargeError: more than ``MAX_REQUEST_BYTES``.
        InvalidRequestError: text with lone surrogates, which has no bytes.
    """
    body = {"v": VERSION, "op": request.op, **_REQUEST.changed(request)}
    try:
        data: bytes = msgpack.packb(body)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the text is not Unicode: {error.reason}") from None
    if len(data) > MAX_REQUEST_BYTES:
        raise TooLargeError(
            f"the request has {len(data)} bytes, more than the {MAX_REQUEST_BYTES} that are allowed"
        )
    return data


def unpack_request(data: bytes) -> Request:
    """The request in ``data``.

    Raises:
        WireError: not a request, one of a later version, or one with impossible fields.
    """
    body = _map(_unpack(data, MAX_REQUEST_BYTES))
    if body.get("v") != VERSION:
        raise _other_version("request", body.get("v"))
    if body.get("op") not in _OPERATIONS:
        # Each release knows the operations of those before it.
        raise NewerMessageError(f"a request for the unknown operation {body.get('op')!r:.40}")
    try:
        return Request(body["op"], **_REQUEST.read(body))
    except InvalidRequestError as error:
        raise WireError(str(error)) from None


def pack_reply(token: str, reply: Reply, **said: str | float) -> bytes:
    """The reply's bytes. One that is too large keeps its verdict and loses its texts' ends.

    ``said``: fields that the worker knows better than the reply.
    """
    data = _packed_reply(token, reply, said)
    if len(data) > MAX_REPLY_BYTES:
        data = _packed_reply(token, _cut_short(reply, len(data)), said)
    return data


def unpack_reply(request_id: str, data: bytes) -> Reply:
    """The reply to request ``request_id`` in ``data``.

    Raises:
        WireError: not a reply, or one of a later version.
    """
    parts = _unpack(data, MAX_REPLY_BYTES)
    if not isinstance(parts, list) or len(parts) != 3:
        raise WireError("a reply that is no array of three")
    if parts[1] != VERSION:
        raise _other_version("reply", parts[1])
    return Reply(request_id=request_id, **_REPLY.read(_map(parts[2])))


def pack_info(info: Mapping[str, object]) -> bytes:
    """What a worker tells of itself or of an environment, for people to read."""
    data: bytes = msgpack.packb(dict(info), unicode_errors="replace")
    return data


def unpack_info(data: bytes) -> dict[str, Any]:
    """The inverse of :func:`pack_info`; raises WireError."""
    return _map(_unpack(data, 1 << 16))


def _packed_reply(token: str, reply: Reply, said: Mapping[str, str | float]) -> bytes:
    body = {**_REPLY.changed(reply), **said}
    for name, items in _PARTS.items():
        if name in body:
            body[name] = [items(item) for item in body[name]]
    # A candidate can make Lean print what is no Unicode, and must not lose its reply by it.
    data: bytes = msgpack.packb([token, VERSION, body], unicode_errors="replace")
    return data


def _cut_short(reply: Reply, size_bytes: int) -> Reply:
    note = Message("warning", 1, 0, f"leanq: a reply of {size_bytes} bytes was cut short")
    messages = (dataclasses.replace(m, text=m.text[:2000]) for m in reply.messages[:1000])
    sorries = (dataclasses.replace(s, goal=s.goal and s.goal[:2000]) for s in reply.sorries[:1000])
    return dataclasses.replace(
        reply,
        messages=(note, *messages),
        sorries=tuple(sorries),
        theorems=tuple(Theorem(t.name[:2000], t.statement[:2000]) for t in reply.theorems[:1000]),
        failed=tuple(Failure(f.name[:2000], f.rule, f.text[:2000]) for f in reply.failed[:1000]),
        goals=tuple(goal[:2000] for goal in reply.goals[:1000]),
        axioms=reply.axioms and tuple(name[:2000] for name in reply.axioms[:1000]),
        error=reply.error and reply.error[:2000],
    )


def _unpack(data: bytes, limit_bytes: int) -> object:
    if len(data) > limit_bytes:
        raise WireError(f"a message of {len(data)} bytes; at most {limit_bytes} are read")
    try:
        value: object = msgpack.unpackb(
            data, raw=False, strict_map_key=True, ext_hook=_no_extension, timestamp=0
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"a message that is no msgpack: {type(error).__name__}") from None
    return value


def _other_version(what: str, version: object) -> WireError:
    text = f"a {what} of version {version!r:.40}; this release reads {VERSION}"
    return (NewerMessageError if type(version) is int and version > VERSION else WireError)(text)


def _no_extension(code: int, _data: bytes) -> object:
    raise ValueError(f"extension type {code}")


def _map(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError("a message that is no map")
    return value


def _is(kind: type[_T]) -> Callable[[str, object], _T]:
    def read(name: str, value: object) -> _T:
        # bool is an int in Python, but never on the wire.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise WireError(f"the field {name} is no {kind.__name__}")
        return value

    return read


def _optional(read: Callable[[str, object], _T]) -> Callable[[str, object], _T | None]:
    return lambda name, value: None if value is None else read(name, value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise WireError(f"the field {name} is no number")
    return float(value)


def _each(read: Callable[[object], _T]) -> Callable[[str, object], tuple[_T, ...]]:
    whole: Callable[[str, object], list[object]] = _is(list)
    return lambda name, value: tuple(map(read, whole(name, value)))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise WireError("a list of texts has an element that is no text")
    return value


def _message(value: object) -> Message:
    if not (isinstance(value, list) and len(value) >= 6):
        raise WireError("a message of Lean's that is no array of six")
    severity, line, column, text, end_line, end_column = value[:6]
    if severity not in get_args(Severity) or not isinstance(text, str):
        raise WireError("a message of Lean's without severity or text")
    return Message(severity, _at(line), _at(column), text, _end(end_line), _end(end_column))


def _sorry(value: object) -> Sorry:
    if not (isinstance(value, list) and len(value) >= 4):
        raise WireError("a sorry that is no array of four")
    line, column, goal, state, end_line, end_column = (*value[:6], None, None)[:6]
    if not all(item is None or isinstance(item, str) for item in (goal, state)):
        raise WireError("a sorry whose goal or state is no text")
    return Sorry(_at(line), _at(column), goal, state, _end(end_line), _end(end_column))


def _theorem(value: object) -> Theorem:
    return Theorem(*_texts(value, 2))


def _failure(value: object) -> Failure:
    return Failure(*_texts(value, 3))


def _texts(value: object, count: int) -> list[str]:
    if not (isinstance(value, list) and len(value) >= count):
        raise WireError(f"a theorem or failure that is no array of {count}")
    return [_text(item) for item in value[:count]]


def _at(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WireError("a position that is no number")
    return value


def _end(value: object) -> int | None:
    return None if value is None else _at(value)


class _Shape:
    """The fields of a record that travel where they differ from their defaults, and how each of
    them is read. What a peer of another release sends beside them is ignored."""

    def __init__(
        self, kind: type[Request | Reply], readers: Mapping[str, Callable[[str, Any], Any]]
    ) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
        self._readers = readers
        self._defaults = tuple((name, defaults[name]) for name in readers)
        self._values = attrgetter(*readers)

    def changed(self, record: Request | Reply) -> dict[str, Any]:
        values = zip(self._defaults, self._values(record), strict=True)
        return {
            name: value
            for (name, default), value in values
            if value is not default and value != default
        }

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        readers = self._readers
        return {name: readers[name](name, body[name]) for name in body if name in readers}


def _array_of(kind: type[Message | Sorry | Theorem | Failure]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(field.name for field in dataclasses.fields(kind)))


def _verdict(_: str, value: object) -> object:
    if value is not None and value not in _VERDICTS:
        raise WireError(f"a reply with the unknown verdict {value!r:.40}")
    return value


def _reason(_: str, value: object) -> object:
    if value is not None and value not in _REASONS:
        raise WireError(f"a reply with the unknown reason {value!r:.40}")
    return value


_REQUEST = _Shape(
    Request,
    {
        **dict.fromkeys(("code", "target", "state", "tactic", "traceparent"), _is(str)),
        "payload": _is(bytes),
        **dict.fromkeys(("delay_s", "timeout_s", "wall_s"), _number),
        **dict.fromkeys(("memory_mb", "scratch_mb"), _is(int)),
        **dict.fromkeys(("allow_axioms", "theorems", "holes"), _each(_text)),
        **dict.fromkeys(("audit", "trust_programs"), _is(bool)),
    },
)
_REPLY = _Shape(
    Reply,
    {
        "verdict": _verdict,
        "reason": _reason,
        "messages": _each(_message),
        "sorries": _each(_sorry),
        "theorems": _each(_theorem),
        "failed": _each(_failure),
        "axioms": _optional(_each(_text)),
        **dict.fromkeys(("fingerprint", "state", "error"), _optional(_is(str))),
        "goals": _each(_text),
        "payload": _optional(_is(bytes)),
        "worker": _is(str),
        "attempts": _is(int),
        **dict.fromkeys(("queued_s", "cpu_s", "wall_s", "audit_s"), _number),
    },
)
# The records in a reply travel as arrays of their fields in the order of their declarations.
_PARTS = {
    "messages": _array_of(Message),
    "sorries": _array_of(Sorry),
    "theorems": _array_of(Theorem),
    "failed": _array_of(Failure),
}
