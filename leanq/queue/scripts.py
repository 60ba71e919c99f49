"""The queue's scripts: what each is called with and answers, and how its text is put together.

A script's arguments are declared here, once and by name. From the declaration come both the list
of values that a call sends and the lines of Lua that bind them to locals of the same names, so that
neither side counts positions. ``lua/NAME.lua`` is the script; it names in its second line the parts
in ``lua/parts/`` that it needs, and is sent these, what they need themselves, and no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib import resources
from typing import Any

import msgpack

# How Lua reads a value: as it was sent, or by its kind.
_KINDS = {
    "": "{}",
    "int": "tonumber({})",
    "flag": "{} == '1'",
    "packed": "cmsgpack.unpack({})",
}
_HEADER = re.compile(r"-- (parts|arguments): (.*)")


@dataclass(frozen=True)
class Script:
    """A script as it is called.

    Attributes:
        scalars: its single arguments, as ``NAME`` or ``NAME:KIND``. Kinds: ``int``, ``flag``,
            ``packed`` (sent as msgpack); without one the value is text or bytes.
        rows: its lists, and the fields of each row; a list without fields has plain values.
        answer: the names of what it answers; empty where it answers one value, which is then
            returned as it is.
    """

    scalars: str = ""
    rows: Mapping[str, str] | None = None
    answer: str = ""

    @property
    def names(self) -> set[str]:
        """The names of all arguments."""
        return {name for name, _ in _fields(self.scalars)} | set(self.rows or ())

    def values(self, arguments: Mapping[str, Any]) -> list[Any]:
        """The arguments in the order in which they are sent; raises TypeError for others."""
        if arguments.keys() != self.names:
            raise TypeError(f"expected {sorted(self.names)}, got {sorted(arguments)}")
        sent = [_sent(arguments[name], kind) for name, kind in _fields(self.scalars)]
        for name, text in (self.rows or {}).items():
            rows, width = arguments[name], len(_fields(text))
            sent.append(len(rows))
            for row in rows if width else ():
                if len(row) != width:
                    raise TypeError(f"expected {width} fields in each of {name}, got {len(row)}")
                sent += row
            if not width:
                sent += rows
        return sent

    def prologue(self) -> str:
        """The lines of Lua that bind the arguments, and the function that makes the answer."""
        lines = ["local tag = KEYS[1]"]
        scalars = _fields(self.scalars)
        if scalars:
            values = (_read(f"ARGV[{i}]", kind) for i, (_, kind) in enumerate(scalars, 1))
            lines.append(f"local {', '.join(name for name, _ in scalars)} = {', '.join(values)}")
        if self.rows:
            lines.append(f"local next_arg = {len(scalars) + 1}")
        for name, text in (self.rows or {}).items():
            lines += _rows_prologue(name, _fields(text))
        if self.answer:
            named = ", ".join(f"named.{name}" for name in self.answer.split())
            lines.append(f"local function answer(named) return {{{named}}} end")
        return "\n".join(lines)

    def named(self, answer: Any) -> Any:
        """What the script answered, by name where it has names."""
        return dict(zip(self.answer.split(), answer, strict=True)) if self.answer else answer


def _fields(text: str) -> list[tuple[str, str]]:
    pairs = (word.partition(":") for word in text.split())
    return [(name, kind) for name, _, kind in pairs]


def _read(expression: str, kind: str) -> str:
    return _KINDS[kind].format(expression)


def _sent(value: Any, kind: str) -> Any:
    return msgpack.packb(value) if kind == "packed" else int(value) if kind == "flag" else value


def _rows_prologue(name: str, fields: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(1, len(fields))
    parts = (
        f"{field} = {_read(f'ARGV[i + {n}]' if n else 'ARGV[i]', kind)}"
        for n, (field, kind) in enumerate(fields)
    )
    row = f"{{{', '.join(parts)}}}" if fields else "ARGV[i]"
    yield f"local {name} = {{}}"
    yield f"for i = next_arg + 1, next_arg + {width} * ARGV[next_arg], {width} do"
    yield f"  {name}[#{name} + 1] = {row}"
    yield "end"
    yield f"next_arg = next_arg + 1 + {width} * ARGV[next_arg]"


SCRIPTS: Mapping[str, Script] = {
    "submit": Script(
        "client max_waiting:int remember_ms:int kinds:packed",
        {"requests": "request_id kind:int tenant digest body"},
    ),
    "claim": Script(
        "worker lease_ms:int reply_ttl_ms token want:int busy:int max_attempts:int remember_ms:int"
        " ends:packed",
        {"settlements": "request_id token reply how:int cpu_ms:int", "environments": ""},
        "accepted jobs held must_empty again_ms now_ms has_affinity",
    ),
    "reconcile": Script("worker max_attempts:int", {"request_ids": ""}, "jobs lost now_ms"),
    "renew": Script(
        "worker lease_ms:int idle_lease_ms:int max_attempts:int reply_ttl_ms",
        {"environments": ""},
        "held expired timed_out known workers waiting",
    ),
    "release": Script(
        "worker max_attempts:int reply_ttl_ms how leave:flag", {"leases": "request_id token"}
    ),
    "cancel": Script("reply_ttl_ms", {"request_ids": ""}),
    "lookup": Script("client reply_ttl_ms max_attempts:int", {"request_ids": ""}),
    "reap": Script(
        "max_attempts:int reply_ttl_ms lease_ms:int",
        answer="queued poisoned more expiry_grace_ms",
    ),
    "register": Script("worker lease_ms:int info", {"environments": "name about fingerprint"}),
    "notify": Script("environment"),
    "notify_worker": Script("worker"),
    "pause": Script("kind name set:flag"),
    "status": Script(
        answer="stats environments workers priorities quarantined dead paused decisions weights"
    ),
    "state_keep": Script(rows={"records": "bucket field record"}),
    "state_recall": Script("id shards:int max_records:int"),
    "state_collect": Script("unused_hours:int buckets:int max_records", answer="removed ended"),
    "snapshot_find": Script("key ttl_ms"),
    "snapshot_keep": Script("key manifest ttl_ms", {"chunks": ""}),
    "snapshot_cold": Script("bytes:int budget:int"),
    "snapshot_move": Script("key", {"chunks": ""}),
    "snapshot_room": Script(
        "key bytes:int budget:int max_snapshots:int coming_ms:int away:flag", {"chunks": ""}
    ),
}
"""The scripts by name; their first lines in ``lua/`` say what each does."""


@cache
def script_text(name: str) -> str:
    """The script as it is sent: its flags, its arguments, the parts that it needs, its own text."""
    text = _read_file(f"{name}.lua")
    flags, _, body = text.partition("\n")
    parts: dict[str, str] = {}
    for part in needed(text):
        _add_part(part, parts, SCRIPTS[name].names, ())
    return "\n".join((flags, SCRIPTS[name].prologue(), *parts.values(), body))


@cache
def digest_of(text: str) -> str:
    """The name that a server knows a script by, once it has seen it."""
    return sha1(text.encode(), usedforsecurity=False).hexdigest()


def _read_file(name: str) -> str:
    return resources.files("leanq.queue").joinpath("lua", name).read_text()


def needed(text: str, what: str = "parts") -> list[str]:
    """The parts, or the arguments, that a text says it needs, in its first lines."""
    head = (_HEADER.fullmatch(line) for line in text.splitlines()[:3])
    return next((found[2].split() for found in head if found and found[1] == what), [])


def _add_part(name: str, parts: dict[str, str], names: set[str], above: tuple[str, ...]) -> None:
    """Adds a part behind those that it needs itself."""
    if name in above:
        raise ValueError(f"parts need each other: {' → '.join((*above, name))}")
    if name in parts:
        return
    text = _read_file(f"parts/{name}.lua")
    for other in needed(text):
        _add_part(other, parts, names, (*above, name))
    if missing := set(needed(text, "arguments")) - names:
        raise ValueError(f"the part {name} needs the arguments {sorted(missing)}")
    parts[name] = text
