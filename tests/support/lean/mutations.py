"""Damaged and forged compiled files, made from honest ones by chance."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

from leanq.lean.run.image import Image
from support.lean.second_reader import SecondReader, Trees

_CONSTRUCTORS, _STRING, _NUMBER = range(244), 249, 250


@dataclass(frozen=True)
class Sample:
    """An honest file and where its objects lie.

    Attributes:
        header: the lines of its text that say what it imports.
        ending: the last parts of the name of the declaration behind its text.
        objects: offset, tag and size of each.
    """

    name: str
    header: str
    ending: tuple[str, str]
    data: bytes
    objects: tuple[tuple[int, int, int], ...]
    base: int

    @classmethod
    def of(cls, name: str, header: str, ending: tuple[str, str], data: bytes) -> Sample:
        """One of a file."""
        objects = tuple(SecondReader(data, Trees()).objects())
        return cls(name, header, ending, data, objects, Image([data]).base)

    def some(self, rng: random.Random, *tags: int) -> tuple[int, int, int]:
        """An object, of these tags if any has them."""
        found = [each for each in self.objects if each[1] in tags]
        return rng.choice(found or self.objects)


def _put(data: bytearray, at: int, value: int) -> None:
    struct.pack_into("<Q", data, at, value % (1 << 64))


def _get(data: bytes | bytearray, at: int) -> int:
    found: int = struct.unpack_from("<Q", data, at)[0]
    return found


def _bytes(data: bytearray, sample: Sample, rng: random.Random) -> None:
    at = rng.randrange(0 if rng.random() < 0.05 else 56, len(data))
    data[at] = rng.choice([rng.randrange(256), data[at] ^ 1 << rng.randrange(8)])


def _words(data: bytearray, sample: Sample, rng: random.Random) -> None:
    at = 8 * rng.randrange(7, len(data) // 8)
    word = _get(data, at)
    odd = [0, 1, 3, 5, 2**64 - 1, 2**63, 2**63 - 1, 2**32, word + 8, word - 8, word ^ 1, len(data)]
    _put(data, at, rng.choice([*odd, rng.getrandbits(64), rng.getrandbits(20)]))


def _pointers(data: bytearray, sample: Sample, rng: random.Random) -> None:
    offset = sample.some(rng, *_CONSTRUCTORS)[0]
    fields = data[offset + 6]
    if not fields:
        return
    field = offset + 8 + 8 * rng.randrange(fields)
    word = _get(data, field)
    if not word & 1 and rng.random() < 0.7 and sample.base <= word < sample.base + len(data):
        # Of the same kind as what it leads to, and mostly in front of the object.
        wanted = data[word - sample.base + 6 : word - sample.base + 8]
        like = [o for o, _, _ in sample.objects if data[o + 6 : o + 8] == wanted]
        earlier = [o for o in like if o < offset]
        _put(data, field, sample.base + rng.choice(earlier or like or [offset]))
    else:
        _put(data, field, sample.base + sample.some(rng)[0])


def _headers(data: bytearray, sample: Sample, rng: random.Random) -> None:
    at = sample.some(rng)[0]
    match rng.randrange(4):
        case 0:
            data[at + 7] = rng.choice([rng.randrange(13), 245, 246, 248, 249, 250, 255])
        case 1:
            data[at + 6] = rng.randrange(9)
        case 2:
            struct.pack_into("<H", data, at + 4, rng.choice([0, 1, 8, 16, 24, 4096, 65535]))
        case _:
            struct.pack_into("<i", data, at, rng.choice([0, 1, 2, -1, 2**31 - 1]))


def _scalars(data: bytearray, sample: Sample, rng: random.Random) -> None:
    """Flags, safety, binder kinds, hints and what Lean keeps beside an expression's parts."""
    offset, _, size = sample.some(rng, *_CONSTRUCTORS)
    start = offset + 8 + 8 * data[offset + 6]
    if start < offset + size:
        data[rng.randrange(start, offset + size)] = rng.choice([0, 1, 2, 3, 4, 255])


def _strings(data: bytearray, sample: Sample, rng: random.Random) -> None:
    at = sample.some(rng, _STRING)[0]
    size = _get(data, at + 8)
    odd = [0, 1, size - 1, size + 1, size + 8, len(data), 2**63, 2**64 - 1]
    match rng.randrange(3):
        case 0:
            _put(data, at + 8 * rng.randrange(1, 4), rng.choice(odd))
        case 1:
            data[at + 32 + rng.randrange(max(size, 1))] = rng.choice([0, 10, 0x41, 0x80, 0xC0, 255])
        case _:
            other = sample.some(rng, _STRING)[0]
            length = min(size, _get(data, other + 8))
            data[at + 32 : at + 32 + length] = data[other + 32 : other + 32 + length]


def _numbers(data: bytearray, sample: Sample, rng: random.Random) -> None:
    at = sample.some(rng, _NUMBER)[0]
    match rng.randrange(3):
        case 0:
            count = rng.choice([0, 1, 2, 3, -1, -2, 2**30, 2**31 - 1, -(2**31)])
            struct.pack_into("<i", data, at + rng.choice([8, 12]), count)
        case 1:
            _put(data, at + 16, sample.base + sample.some(rng)[0])
        case _:
            limb = _get(data, at + 16) - sample.base
            if 0 < limb < len(data) - 8:
                _put(data, limb, rng.choice([0, 1, 2**63 - 1, 2**63, 2**64 - 1]))


def _small_numbers(data: bytearray, sample: Sample, rng: random.Random) -> None:
    """Boxed values: bound variables, counts, literals, the ends of lists."""
    for _ in range(20):
        offset = sample.some(rng, *_CONSTRUCTORS)[0]
        fields = [offset + 8 + 8 * n for n in range(data[offset + 6])]
        boxed = [at for at in fields if _get(data, at) & 1]
        if boxed:
            number = rng.choice([0, 1, 2, 3, 7, 2**20 - 2, 2**20 - 1, 2**32, 2**63 - 1])
            _put(data, rng.choice(boxed), 2 * number + 1)
            return


def _forged(data: bytearray, sample: Sample, rng: random.Random) -> None:
    """Constants with parts of each other: types, values, levels, names, kinds, safety."""
    raws = list(Image([sample.data]).constants().values())
    one, other = rng.choice(raws), rng.choice(raws)
    bodies = [raw for raw in raws if raw.body is not None]
    match rng.randrange(7):
        case 0:
            _put(data, 8 * (one.head + 3), other.type_)
        case 1 if bodies:
            one, other = rng.choice(bodies), rng.choice(bodies)
            alike = [raw for raw in bodies if raw.type_ == one.type_]
            other = rng.choice(alike) if rng.random() < 0.3 else other
            _put(data, 8 * (one.value + 2), other.body or 0)
        case 2:
            _put(data, 8 * (one.head + 2), _get(data, 8 * (other.head + 2)))
        case 3:
            _put(data, 8 * (one.head + 1), _get(data, 8 * (other.head + 1)))
        case 4:
            # The constructor of `ConstantInfo`, which is the only one that points to its value.
            for offset, _, _ in sample.objects:
                if _get(data, offset + 8) == sample.base + 8 * one.value:
                    data[offset + 7] = rng.randrange(8)
        case 5:
            fields = data[8 * one.value + 6]
            data[8 * one.value + 8 + 8 * fields] = rng.randrange(3)
        case _:
            # A constant that refers to another one, or to itself, or to none that there is.
            at = sample.some(rng, 4)[0]
            _put(data, at + 8, _get(data, 8 * (other.head + 1)))


def _lists_of_constants(data: bytearray, sample: Sample, rng: random.Random) -> None:
    """Constants that are missing, double, or under another's name."""
    root = _get(sample.data, 80 + 8) - sample.base
    names, infos = (_get(sample.data, root + 8 + 8 * n) - sample.base for n in (1, 2))
    count = _get(sample.data, infos + 8)
    one, other = rng.randrange(count), rng.randrange(count)
    arrays = rng.choice([[names], [infos], [names, infos], [names, infos]])
    match rng.randrange(3):
        case 0:  # the last ones are left out
            left = rng.randrange(count)
            for at in arrays:
                _put(data, at + 8, left)
        case 1:  # one stands there twice, and another not at all
            for at in arrays:
                _put(data, at + 24 + 8 * one, _get(data, at + 24 + 8 * other))
        case _:  # in another order
            for at in arrays:
                a, b = (at + 24 + 8 * n for n in (one, other))
                data[a : a + 8], data[b : b + 8] = data[b : b + 8], data[a : a + 8]


def _ends(data: bytearray, sample: Sample, rng: random.Random) -> None:
    match rng.randrange(3):
        case 0:
            del data[rng.randrange(len(data)) :]
        case 1:
            del data[8 * rng.randrange(len(data) // 8) :]
        case _:
            data += rng.randbytes(8 * rng.randrange(1, 40))


MUTATIONS: dict[str, Callable[[bytearray, Sample, random.Random], None]] = {
    "bytes": _bytes,
    "words": _words,
    "pointers": _pointers,
    "headers": _headers,
    "scalars": _scalars,
    "strings": _strings,
    "numbers": _numbers,
    "boxed": _small_numbers,
    "forged": _forged,
    "constants": _lists_of_constants,
    "ends": _ends,
}


def mutated(sample: Sample, kind: str, rng: random.Random) -> bytes:
    """A file with one to three such changes."""
    data = bytearray(sample.data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if len(data) > 200:
            MUTATIONS[kind](data, sample, rng)
    return bytes(data)
