"""The queue's scripts: their arguments and answers, and how their texts are put together.

A script's arguments are declared here, once and by name. The declaration yields the list of values
that a call sends, and the lines of Lua that bind them to locals of the same names. So neither side
counts positions. ``lua/NAME.lua`` is the script. Its second line names the parts in ``lua/parts/``
that it needs; only these, and the parts that they need, are sent with it.

A script is one Lua function, preceded by the functions that it calls. With EVALSHA a server defines
all of them anew for each call, which costs as much as fifteen commands. So the same text is also a
library with one function (:func:`library_of`), which a server defines once. A script must therefore
keep nothing from one call to the next: the first lines of a part say how ``each call`` begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha1
from importlib import resources
from typing import Any

import msgspec

LARGE_BYTES = 16384
"""Larger bodies and replies stay out of scripts and inboxes: Lua hashes every byte of each text.

For smaller ones, one command more would cost as much as the hash."""

LARGE_BATCH_BYTES = 2 << 20
"""How many bytes of large bodies and replies travel with one call.

Scripts see none of them. With fewer bytes, the cost of the call itself would count."""

# How Lua reads a value of each kind; a value without a kind is read as it was sent.
_KINDS = {
    "": "{}",
    "int": "tonumber({})",
    "flag": "{} == '1'",
    "packed": "cmsgpack.unpack({})",
}
_HEADER = re.compile(r"-- (parts|arguments|each call): (.*)")
_HEADER_LINES = 5
# Scripts unpack these values with cmsgpack, which knows no msgpack type of bytes.
_pack = msgspec.msgpack.Encoder().encode
_MAIN, _RETURN = "local function main(KEYS, ARGV)", "return main(KEYS, ARGV)"


@dataclass(frozen=True)
class Script:
    """A script's arguments and answer.

    Attributes:
        scalars: its single arguments, as ``NAME`` or ``NAME:KIND``. Kinds: ``int``, ``flag``,
            ``packed`` (sent as msgpack). Without a kind the value is text or bytes.
        rows: its lists, and the fields of each row; a list without fields has plain values. Rows
            are sent by columns, and Lua reads them so: ``NAME.FIELD[i]`` is of the i-th row. All
            columns of a list travel as one value, since each value costs the server as much as five
            packed ones. Columns of kind ``bytes`` are sent as they are. Numbers and flags in rows
            keep their types, so they need no kind.
        answer: the names of the values in its answer; empty if it answers one value, which is
            returned as it is.
    """

    scalars: str = ""
    rows: Mapping[str, str] | None = None
    answer: str = ""

    @cached_property
    def names(self) -> set[str]:
        return {name for name, _ in _fields(self.scalars)} | set(self.rows or ())

    def values(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Returns the arguments in the order of sending; raises TypeError if any differ."""
        if arguments.keys() != self.names:
            raise TypeError(f"expected {sorted(self.names)}, got {sorted(arguments)}")
        sent = [_sent(arguments[name], kind) for name, kind in _fields(self.scalars)]
        for name, text in (self.rows or {}).items():
            if fields := _fields(text):
                sent += _columns(name, fields, arguments[name])
            else:
                sent += (len(arguments[name]), *arguments[name])
        return sent

    def declarations(self) -> str:
        """Returns the lines of Lua that declare the arguments and the function ``answer``."""
        names = [name for name, _ in _fields(self.scalars)]
        lines = [f"local {', '.join(('tag', *names, *(self.rows or ())))}"]
        if self.answer:
            named = ", ".join(f"named.{name}" for name in self.answer.split())
            lines.append(f"local function answer(named) return {{{named}}} end")
        return "\n".join(lines)

    def prologue(self) -> str:
        """Returns the lines of Lua that bind the arguments of one call."""
        lines = ["tag = KEYS[1]"]
        scalars = _fields(self.scalars)
        if scalars:
            values = (_read(f"ARGV[{i}]", kind) for i, (_, kind) in enumerate(scalars, 1))
            lines.append(f"{', '.join(name for name, _ in scalars)} = {', '.join(values)}")
        if self.rows:
            lines.append(f"local next_arg, columns, list = {len(scalars) + 1}")
        for name, text in (self.rows or {}).items():
            lines += _rows_prologue(name, _fields(text))
        return "\n".join(lines)

    def named(self, answer: Any) -> Any:
        """Returns the answer by name if it has names and is a list, or else as it is."""
        if not self.answer or not isinstance(answer, list):
            return answer
        return dict(zip(self.answer.split(), answer, strict=True))


def _fields(text: str) -> list[tuple[str, str]]:
    pairs = (word.partition(":") for word in text.split())
    return [(name, kind) for name, _, kind in pairs]


def _read(expression: str, kind: str) -> str:
    return _KINDS[kind].format(expression)


def _sent(value: Any, kind: str) -> Any:
    return _pack(value) if kind == "packed" else int(value) if kind == "flag" else value


def _columns(
    name: str, fields: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]
) -> Iterator[Any]:
    columns: Sequence[Sequence[Any]] = [()] * len(fields)
    if rows:
        try:
            columns = [column for column, _ in zip(zip(*rows, strict=True), fields, strict=True)]
        except ValueError:
            raise TypeError(f"expected {len(fields)} fields in each of {name}") from None
    kinds = [kind for _, kind in fields]
    yield _pack([column for column, kind in zip(columns, kinds, strict=True) if kind != "bytes"])
    for column, kind in zip(columns, kinds, strict=True):
        if kind == "bytes":
            yield from column


def _rows_prologue(name: str, fields: Sequence[tuple[str, str]]) -> Iterator[str]:
    if not fields:
        yield "list = {}"
        yield "for i = 1, ARGV[next_arg] do list[i] = ARGV[next_arg + i] end"
        yield f"{name}, next_arg = list, next_arg + 1 + ARGV[next_arg]"
        return
    packed = [field for field, kind in fields if kind != "bytes"]
    columns = (f"{field} = columns[{n}]" for n, field in enumerate(packed, 1))
    yield "columns = cmsgpack.unpack(ARGV[next_arg])"
    yield f"{name} = {{{', '.join(columns)}}}"
    for field in (field for field, kind in fields if kind == "bytes"):
        yield "list = {}"
        yield "for i = 1, #columns[1] do list[i] = ARGV[next_arg + i] end"
        yield f"{name}.{field}, next_arg = list, next_arg + #columns[1]"
    yield "next_arg = next_arg + 1"


SCRIPTS: Mapping[str, Script] = {
    "submit": Script(
        "client max_waiting:int remember_ms:int upload kinds:packed",
        {"requests": "request_id kind tenant digest body:bytes"},
    ),
    "claim": Script(
        "worker lease_ms:int reply_ttl_ms token want:int busy:int max_attempts:int remember_ms:int "
        "ends:packed",
        {"settlements": "request_id token how cpu_ms reply:bytes", "environments": ""},
        "fenced missing request_ids records isolated held must_empty now_ms",
    ),
    "exchange": Script(
        "worker lease_ms:int reply_ttl_ms token remember_ms:int environment request_id "
        "settled_token reply cpu_ms:int outcome reason warm:flag way fingerprint uploaded:flag",
        answer="request_id record held now_ms",
    ),
    "reconcile": Script(
        "worker max_attempts:int",
        {"request_ids": ""},
        "request_ids records tokens isolated lost now_ms",
    ),
    "renew": Script(
        "worker lease_ms:int idle_lease_ms:int max_attempts:int reply_ttl_ms",
        {
            "environments": "",
            "tallies": "name n",
            "used": "environment tenant campaign what n",
        },
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
    "register": Script(
        "worker lease_ms:int info", {"environments": "name fingerprint about:bytes"}
    ),
    "notify": Script("environment"),
    "notify_worker": Script("worker"),
    "pause": Script("kind name set:flag"),
    "alias": Script("kind name target check:flag set:flag"),
    "status": Script(
        answer="stats environments workers priorities quarantined dead paused decisions weights "
        "aliases memories"
    ),
    "state_keep": Script(rows={"records": "bucket field:bytes record:bytes"}),
    "state_recall": Script("id shards:int max_records:int"),
    "state_collect": Script("unused_hours:int buckets:int max_records", answer="removed ended"),
    "snapshot_find": Script("key ttl_ms"),
    "snapshot_keep": Script("key manifest ttl_ms", {"chunks": ""}),
    "snapshot_room": Script(
        "key bytes:int budget:int max_snapshots:int coming_ms:int", {"chunks": ""}
    ),
    "replay_open": Script(
        "name entries max_bytes reservoir weighted",
        answer="entries max_bytes reservoir weighted base",
    ),
    "replay_write": Script("name writer serial writer_ms randoms", {"items": "weight entry:bytes"}),
    "replay_drop": Script("name"),
    "replay_refuse": Script("name refused:int evict:int"),
    "replay_publish": Script("name expected value"),
    "replay_sample": Script("name count:int max_bytes:int by_weight:flag randoms"),
}
"""The scripts by name; the first lines of each file in ``lua/`` say what it does."""


@cache
def script_text(name: str) -> str:
    """Returns the script as EVAL takes it.

    It has the script's flags, the names of its arguments, the parts that it needs, and the function
    that one call runs.
    """
    text = _read_file(f"{name}.lua")
    flags, _, body = text.partition("\n")
    parts: dict[str, str] = {}
    for part in needed(text):
        _add_part(part, parts, SCRIPTS[name].names, ())
    begins = (" ".join(line) for part in parts.values() if (line := needed(part, "each call")))
    return "\n".join(
        (
            *(flags, f"local LARGE_BYTES = {LARGE_BYTES}"),
            *(SCRIPTS[name].declarations(), *parts.values()),
            *(_MAIN, SCRIPTS[name].prologue(), *begins, body + "end"),
            _RETURN,
        )
    )


@dataclass(frozen=True)
class Library:
    """A script as a server's library; ``function`` names the library and its function."""

    function: str
    text: str


@cache
def library_of(script: str) -> Library:
    """Returns the library that does what the script does.

    The script's digest names it, so that libraries of several releases stand side by side.
    """
    flags, _, rest = script.partition("\n")
    definitions, _, end = rest.rpartition(_RETURN)
    name = f"leanq_{digest_of(script)}"
    kinds = ", ".join(f"'{flag}'" for flag in flags.partition("flags=")[2].split(",") if flag)
    register = f"{{function_name = '{name}', callback = main, flags = {{{kinds}}}}}"
    text = f"#!lua name={name}\n{definitions}redis.register_function{register}{end}"
    return Library(name, text)


@cache
def digest_of(text: str) -> str:
    """Returns the name by which a server knows a script once it has seen it."""
    return sha1(text.encode(), usedforsecurity=False).hexdigest()


def _read_file(name: str) -> str:
    return resources.files("leanq.queue").joinpath("lua", name).read_text()


def needed(text: str, what: str = "parts") -> list[str]:
    """Returns the parts or arguments in a text's first lines, or the words of ``each call``."""
    head = (_HEADER.fullmatch(line) for line in text.splitlines()[:_HEADER_LINES])
    return [word for found in head if found and found[1] == what for word in found[2].split()]


def _add_part(name: str, parts: dict[str, str], names: set[str], above: tuple[str, ...]) -> None:
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
