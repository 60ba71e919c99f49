"""The queue's scripts: their arguments and answers, and how their texts are put together.

A script's arguments are declared here, once and by name. The declaration yields the list of values
that a call sends, and the lines of Lua that bind them to locals of the same names. So neither side
counts positions. ``lua/NAME.lua`` is the script. Its second line names the parts in ``lua/parts/``
that it needs; only these, and the parts that they need, are sent with it.

A script is one Lua function, preceded by the functions that it calls. With EVALSHA a server defines
all of them anew for each call, which costs as much as fifteen commands. So the same text is also a
library with one function (``library_of``), which a server defines once. A script must therefore
keep nothing from one call to the next: the first lines of a part say how ``each call`` begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from hashlib import sha1
from importlib import resources
from itertools import chain
from typing import Any

import msgspec

LARGE_BYTES = 16384
"""Larger bodies and replies stay out of scripts and inboxes: Lua hashes every byte of each text.

For smaller ones, one command more would cost as much as the hash."""

LARGE_BATCH_BYTES = 2 << 20
"""How many bytes of large bodies and replies travel with one call.

Scripts see none of them. With fewer bytes, the cost of the call itself would count."""

_HEADER = re.compile(r"-- (parts|arguments|each call): (.*)")
_HEADER_LINES = 5
# Scripts unpack these values with cmsgpack, which knows no msgpack type of bytes.
_pack = msgspec.msgpack.Encoder().encode
_MAIN, _RETURN = "local function main(KEYS, ARGV)", "return main(KEYS, ARGV)"


@dataclass(frozen=True)
class Script:
    """A script's arguments and answer.

    All values but those of kind ``bytes`` travel as one, packed: each value costs the server as
    much as five packed ones. Texts, numbers, booleans, lists and maps keep their types.

    Attributes:
        plain: its arguments without rows, as ``NAME``, or ``NAME:bytes`` for values that may not be
            text.
        rows: its lists of rows, and the fields of each row, likewise. Lua reads rows by columns:
            ``NAME.FIELD[i]`` is of the i-th row.
        lasting: whether its keys are those that outlast requests, see ``keys.py``.
        answer: the names of the values in its answer; empty if it answers one value, which is
            returned as it is.
    """

    plain: str = ""
    rows: Mapping[str, str] = field(default_factory=dict)
    answer: str = ""
    lasting: bool = False

    @cached_property
    def names(self) -> set[str]:
        return {*self._plain, *self.rows}

    @cached_property
    def _plain(self) -> dict[str, str]:
        return _fields(self.plain)

    @cached_property
    def _rows(self) -> dict[str, dict[str, str]]:
        return {name: _fields(text) for name, text in self.rows.items()}

    def values(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Returns the arguments in the order of sending; raises TypeError if any differ."""
        if arguments.keys() != self.names:
            raise TypeError(f"expected {sorted(self.names)}, got {sorted(arguments)}")
        packed: list[Any] = []
        apart: list[Any] = []
        for name, kind in self._plain.items():
            (apart if kind else packed).append(arguments[name])
        for name, fields in self._rows.items():
            rows = arguments[name]
            try:
                columns = [*zip(*rows, strict=True)] or [()] * len(fields)
                sent = [*zip(columns, fields.values(), strict=True)]
            except ValueError:
                raise TypeError(f"expected {len(fields)} fields in each of {name}") from None
            packed.append([column for column, kind in sent if not kind])
            apart += chain.from_iterable(column for column, kind in sent if kind)
        return [_pack(packed), *apart]

    def declarations(self) -> str:
        """Returns the lines of Lua that declare the arguments and the function ``answer``."""
        lines = [f"local {', '.join(('tag', *self._plain, *self.rows))}"]
        if self.answer:
            named = ", ".join(f"named.{name}" for name in self.answer.split())
            lines.append(f"local function answer(named) return {{{named}}} end")
        return "\n".join(lines)

    def prologue(self) -> str:
        """Returns the lines of Lua that bind the arguments of one call."""
        lines = ["tag = KEYS[1]"]
        packed = [*(name for name, kind in self._plain.items() if not kind), *self.rows]
        if packed:
            values = f"unpack(cmsgpack.unpack(ARGV[1]), 1, {len(packed)})"
            lines.append(f"{', '.join(packed)} = {values}")
        apart = [name for name, kind in self._plain.items() if kind]
        lines += (f"{name} = ARGV[{number}]" for number, name in enumerate(apart, 2))
        lines.append(f"local last_arg = {1 + len(apart)}")
        for name, fields in self._rows.items():
            own = [each for each, kind in fields.items() if not kind]
            columns = (f"{each} = {name}[{number}]" for number, each in enumerate(own, 1))
            lines.append(f"{name} = {{{', '.join(columns)}}}")
            for each in (each for each, kind in fields.items() if kind):
                column, count = f"{name}.{each}", f"#{name}.{own[0]}"
                lines += (
                    f"{column} = {{}}",
                    f"for i = 1, {count} do {column}[i] = ARGV[last_arg + i] end",
                    f"last_arg = last_arg + {count}",
                )
        return "\n".join(lines)

    def named(self, answer: Any) -> Any:
        """Returns the answer by name if it has names and is a list, or else as it is."""
        if not self.answer or not isinstance(answer, list):
            return answer
        return dict(zip(self.answer.split(), answer, strict=True))


def _fields(text: str) -> dict[str, str]:
    """Returns the names in a text, each with its kind."""
    return {name: kind for name, _, kind in (word.partition(":") for word in text.split())}


_Lasting = partial(Script, lasting=True)
SCRIPTS: Mapping[str, Script] = {
    "submit": Script(
        "client max_waiting remember_ms upload kinds",
        {"requests": "request_id kind tenant digest body:bytes"},
    ),
    "claim": Script(
        "worker lease_ms reply_ttl_ms token want busy max_attempts remember_ms ends environments",
        {"settlements": "request_id token how cpu_ms reply:bytes"},
        "fenced missing request_ids records isolated held must_empty now_ms",
    ),
    "exchange": Script(
        "worker lease_ms reply_ttl_ms token remember_ms environment request_id "
        "settled_token reply:bytes cpu_ms outcome reason warm way fingerprint uploaded",
        answer="request_id record held now_ms",
    ),
    "reconcile": Script(
        "worker max_attempts request_ids",
        answer="request_ids records tokens isolated lost now_ms",
    ),
    "renew": Script(
        "worker lease_ms idle_lease_ms max_attempts reply_ttl_ms environments",
        {
            "tallies": "name n",
            "used": "environment tenant campaign what n",
            "headers": "fingerprint tenant header n",
        },
        "held expired timed_out known workers waiting",
    ),
    "release": Script("worker max_attempts reply_ttl_ms how leave", {"leases": "request_id token"}),
    "cancel": Script("reply_ttl_ms request_ids"),
    "lookup": Script("client reply_ttl_ms max_attempts request_ids"),
    "reap": Script(
        "max_attempts reply_ttl_ms lease_ms",
        answer="queued poisoned more expiry_grace_ms",
    ),
    "register": Script(
        "worker lease_ms info:bytes", {"environments": "name fingerprint about:bytes"}
    ),
    "notify": Script("environment"),
    "notify_worker": Script("worker"),
    "pause": Script("kind name set"),
    "status": Script(
        answer="stats environments workers priorities quarantined dead paused decisions weights "
        "memories left early_workers early"
    ),
    "others": Script(answer="left workers early"),
    "hot_headers": Script("fingerprint most least"),
    "state_keep": _Lasting(rows={"records": "bucket field:bytes record:bytes"}),
    "state_recall": _Lasting("id:bytes shards max_records"),
    "state_collect": _Lasting("unused_hours buckets max_records", answer="removed ended"),
    "snapshot_find": Script("key ttl_ms"),
    "snapshot_keep": Script("key manifest:bytes ttl_ms chunks"),
    "snapshot_room": Script("key bytes budget max_snapshots coming_ms chunks"),
    "replay_open": _Lasting(
        "name entries max_bytes reservoir weighted",
        answer="entries max_bytes reservoir weighted base",
    ),
    "replay_write": _Lasting(
        "name writer serial writer_ms randoms:bytes", {"items": "weight entry:bytes"}
    ),
    "replay_drop": _Lasting("name"),
    "replay_refuse": _Lasting("name refused evict"),
    "replay_publish": _Lasting("name expected value:bytes"),
    "replay_sample": _Lasting("name count max_bytes by_weight randoms:bytes"),
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
