"""Recipes: they define a state, and its id.

A state is an open goal, known by the way that leads to it: a source with holes (``sorry``) in an
environment, the number of the open hole, and the tactics so far. A recipe is a chain of records.
Each has its parent's id and what it adds to the parent, so that a search tree costs the memory of
its edges:

| first byte | then | then as msgpack | what the record stands for |
| --- | --- | --- | --- |
| ``R`` | | ``[fingerprint, code, holes]`` | a source, which is no state |
| ``S`` | id of a source | ``number`` | the goal in that hole of the source |
| ``S`` | id of a state | ``[tactic, holes, null]`` | the goals that the tactic leaves |
| ``S`` | id of a state | ``[tactic, holes, number]`` | the goal in that hole of the tactic |

An id is the 32 bytes of the BLAKE2b-256 hash of the record. The record holds its parent's id, so
the id is a hash of the whole recipe, and no recipe can pass for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
import zstandard

from leanq.errors import RecipeError
from leanq.queue.settings import MAX_REQUEST_BYTES

Form = Literal["term", "tactic", "caught", "unknown"]
"""The place of a ``sorry``. Caught: a tactic stands there, and the text catches its errors.
Unknown: Lean shows no goal there, so it is never opened."""

MAX_STEPS = 10_000
"""The longest chain of tactics."""

MAX_LEVELS = 50
"""How deep a hole of a tactic may lie in holes of tactics."""

_MOST_EXPORTED_BYTES = 4 * MAX_REQUEST_BYTES
_MAGIC = b"leanq-state-1\n"
_T = TypeVar("_T")


class Hole(msgspec.Struct, frozen=True, array_like=True):
    """A ``sorry``: its offset in characters, and its form."""

    offset: int
    form: Form


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A Lean source as it was checked, in the environment of this fingerprint."""

    fingerprint: str
    code: str
    holes: tuple[Hole, ...]

    def record(self) -> bytes:
        return b"R" + msgspec.msgpack.encode(self)


class Tactic(msgspec.Struct, frozen=True, array_like=True):
    """A tactic that worked, and the number of its own open hole, if it has one."""

    text: str
    holes: tuple[Hole, ...] = ()
    opened: int | None = None


_SOURCES = msgspec.msgpack.Decoder(Source)
_NUMBERS, _TACTICS = msgspec.msgpack.Decoder(int), msgspec.msgpack.Decoder(Tactic)
_EXPORTS = msgspec.msgpack.Decoder(tuple[str, list[bytes]])


class Recipe(msgspec.Struct, frozen=True):
    """A source, the number of its open hole, and the tactics so far."""

    source: Source
    opened: int
    tactics: tuple[Tactic, ...] = ()

    @property
    def snapshot_key(self) -> str:
        """The name of the snapshot for all states of this source."""
        return snapshot_key(self.source.fingerprint, text_hash(self.source.code))

    def records(self) -> list[tuple[str, bytes]]:
        """Returns the ids and records from the source's to the state's own."""
        record = self.source.record()
        chain = [(record_id(record), record)]
        differences: list[int | Tactic] = [self.opened, *self.tactics]
        for difference in differences:
            chain.append(record_after(chain[-1][0], difference))
        return chain

    @property
    def levels(self) -> int:
        return sum(tactic.opened is not None for tactic in self.tactics)

    @property
    def id(self) -> str:
        """The state's id: 64 hexadecimal digits."""
        return self.records()[-1][0]


def record_id(record: bytes) -> str:
    return hashlib.blake2b(record, digest_size=32).hexdigest()


def record_after(parent: str, difference: int | Tactic) -> tuple[str, bytes]:
    """Returns the id and the record behind the record ``parent``: the number of an opened hole
    behind a source, or a tactic behind a state."""
    record = b"S" + bytes.fromhex(parent) + msgspec.msgpack.encode(difference)
    return record_id(record), record


def text_hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=32).digest()


def snapshot_key(fingerprint: str, text: bytes) -> str:
    """Returns the name, of 32 characters, of Lean's work on the text with this hash."""
    return hashlib.blake2b(fingerprint.encode() + text, digest_size=16).hexdigest()


def read_recipe(state: str, records: Sequence[bytes]) -> Recipe:
    """Returns the recipe of ``state`` from its record, its parent's, and so on to the source's.
    Raises RecipeError if the records do not match their ids, or are of a later release."""
    expected = state
    differences: list[bytes] = []
    for record in records:
        if record_id(record) != expected:
            raise RecipeError(f"the recipe of state {state} is damaged")
        if record[:1] == b"R":
            break
        expected = record[1:33].hex()
        differences.append(record[33:])
    else:
        raise RecipeError(f"the recipe of state {state} does not lead to a source")
    source = _decoded(_SOURCES, record[1:])
    if not differences:
        raise RecipeError(f"{state} is the id of a source, not of a state")
    opened = _decoded(_NUMBERS, differences.pop())
    tactics = tuple(_decoded(_TACTICS, each) for each in reversed(differences))
    _check_holes(source.holes, source.code, opened)
    for tactic in tactics:
        _check_holes(tactic.holes, tactic.text, tactic.opened)
    recipe = Recipe(source, opened, tactics)
    if recipe.levels > MAX_LEVELS:
        raise RecipeError(f"a recipe with more than {MAX_LEVELS} holes one in another")
    return recipe


def pack_export(recipe: Recipe) -> bytes:
    """Returns bytes that mean the same state wherever the same environment is."""
    chain = recipe.records()
    records = [record for _, record in reversed(chain)]
    body = zstandard.compress(msgspec.msgpack.encode((chain[-1][0], records)))
    return _MAGIC + hashlib.blake2b(body, digest_size=32).digest() + body


def unpack_export(blob: bytes) -> Recipe:
    """Returns the recipe in the bytes of :func:`pack_export`. Raises RecipeError if they are
    something else, or damaged."""
    if not blob.startswith(_MAGIC):
        raise RecipeError("these bytes are no exported state, or one of a later release")
    checksum, body = blob[len(_MAGIC) :][:32], blob[len(_MAGIC) + 32 :]
    if hashlib.blake2b(body, digest_size=32).digest() != checksum:
        raise RecipeError("the exported state is damaged: its checksum is wrong")
    try:
        # As a stream: a frame can lie about its size.
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body)
        data = reader.read(_MOST_EXPORTED_BYTES + 1)
    except zstandard.ZstdError:
        raise RecipeError("the exported state is damaged: it cannot be decompressed") from None
    if len(data) > _MOST_EXPORTED_BYTES:
        raise RecipeError(f"the exported state has more than {_MOST_EXPORTED_BYTES} bytes")
    state, records = _decoded(_EXPORTS, data)
    if len(records) > MAX_STEPS:
        raise RecipeError(f"the exported state has more than {MAX_STEPS} steps")
    return read_recipe(state, records)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        value = decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"a recipe that cannot be read, or of a later release: {error}") from None
    # Or a recipe would have several ids.
    if msgspec.msgpack.encode(value) != data:
        raise RecipeError("a recipe that is written in another way than leanq's")
    return value


def _check_holes(holes: Sequence[Hole], text: str, opened: int | None) -> None:
    """Raises RecipeError unless the text has these holes, and the opened one is one of them."""
    ends = [0, *(hole.offset + len("sorry") for hole in holes)]
    if any(hole.offset < end for hole, end in zip(holes, ends, strict=False)):
        raise RecipeError("a recipe with holes that overlap")
    if any(not text.startswith(("sorry", "admit"), hole.offset) for hole in holes):
        raise RecipeError("a recipe with a hole where there is no sorry")
    if opened is None:
        return
    if not 0 <= opened < len(holes):
        raise RecipeError("a recipe that opens a hole which is not there")
    if holes[opened].form == "unknown":
        raise RecipeError("a recipe that opens a hole of unknown form")
