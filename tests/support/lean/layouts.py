"""Writes a small module as each version of Lean lays it out, by a writer of the tests' own."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from leanq.lean.run.image import Image as Reader
from support.lean.images import Image

PART_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Layout:
    """What one version of Lean writes.

    Attributes:
        lean: the version.
        magic: the header without the base address.
        has_mark: whether the root says if the file is of the module system.
        counts_nested: whether an inductive type has a number for its nested types, and no flag.
        has_parts: whether the file is of the module system, and comes in three parts.
        shares_root: whether the last part's root lies in the first part.
    """

    lean: str
    magic: bytes
    has_mark: bool = False
    counts_nested: bool = False
    has_parts: bool = False
    shares_root: bool = False


def _v2(lean: str) -> bytes:
    return b"olean\x02\x01" + lean.encode().ljust(33, b"\0") + b"f" * 40


LAYOUTS = (
    Layout("4.9.0", Image.V1),
    Layout("4.12.0", Image.V1, counts_nested=True),
    Layout("4.15.0", _v2("4.15.0"), counts_nested=True),
    Layout("4.20.0", _v2("4.20.0"), has_mark=True, counts_nested=True),
    Layout("4.27.0", _v2("4.27.0"), has_mark=True, counts_nested=True, has_parts=True),
    Layout(
        "4.31.0", _v2("4.31.0"), has_mark=True, counts_nested=True, has_parts=True, shares_root=True
    ),
    Layout("4.35.0", _v2("4.35.0"), has_mark=True, counts_nested=True),
)


def write_module(
    path: Path,
    layout: Layout,
    *,
    imports: tuple[str, ...] = (),
    axioms: tuple[str, ...] = (),
    inductives: tuple[tuple[str, int], ...] = (),
) -> list[Path]:
    """Writes a module, and returns its files.

    Args:
        inductives: types of sort 1, with the number of types that are nested in them.
    """
    image = Image(layout.magic)
    constants: dict[int, int] = {}
    sort = image.object(3, image.object(1, 1, scalars=bytes(8)), scalars=bytes(8))
    for each in axioms:
        name = image.name(each)
        constants[name] = image.axiom(name, sort)
    for each, nested in inductives:
        name = image.name(each)
        constants[name] = _inductive(image, layout, name, sort, nested)
        recursor = image.name(each, "rec")
        constants[recursor] = _recursor(image, recursor, name, sort, nested)
    scalars = bytes([layout.has_parts, *bytes(7)]) if layout.has_mark else b""
    image.write(path, constants, imports=imports, scalars=scalars)
    if not layout.has_parts:
        return [path]
    files = [path]
    start = image.data.index(struct.pack("<Q", image.BASE))
    [root] = struct.unpack_from("<Q", image.data, start + 8)
    end = image.BASE + len(image.data)
    for suffix in (".server", ".private"):
        base = -(-end // PART_BYTES) * PART_BYTES
        part = bytearray(layout.magic + struct.pack("<QQ", base, root))
        if not layout.shares_root:
            # The same arrays behind a root of this part's own.
            at = root - image.BASE
            part += image.data[at : at + 56]
            struct.pack_into("<Q", part, start + 8, base + start + 16)
        file = path.with_name(path.name + suffix)
        file.write_bytes(part)
        files.append(file)
        end = base + len(part)
    return files


def _inductive(image: Image, layout: Layout, name: int, type_: int, nested: int) -> int:
    head = image.object(0, name, 1, type_)
    block = image.object(1, name, 1)
    flags = [0, 0, 0]  # recursive, unsafe, reflexive
    if layout.counts_nested:
        value = image.object(
            0, head, 1, 1, block, 1, nested << 1 | 1, scalars=bytes([*flags, *bytes(5)])
        )
    else:
        value = image.object(
            0, head, 1, 1, block, 1, scalars=bytes([*flags, nested > 0, *bytes(4)])
        )
    return image.object(5, value)


def _recursor(image: Image, name: int, of: int, type_: int, nested: int) -> int:
    head = image.object(0, name, 1, type_)
    block = image.object(1, of, 1)
    motives = (1 + nested) << 1 | 1
    value = image.object(0, head, block, 1, 1, motives, 1, 1, scalars=bytes(8))
    return image.object(7, value)


def as_of_4_9(data: bytes) -> bytes:
    """Returns a compiled file of one part as Lean 4.9 would have laid it out."""
    image = Reader([data])
    changed = bytearray(data)

    def put(index: int, word: int) -> None:
        struct.pack_into("<Q", changed, 8 * index, word)

    def narrowed(index: int, fields: int) -> None:
        word = image.words[index]
        put(
            index,
            word & ~(0xFF << 48 | 0xFFFF << 32) | fields << 48 | (word >> 32 & 0xFFFF) - 8 << 32,
        )

    for raw in image.constants().values():
        if raw.kind == "inductive":
            nested, flags = image.words[raw.value + 6 : raw.value + 8]
            narrowed(raw.value, 5)
            put(raw.value + 6, flags & 0xFFFFFF | (nested > 1) << 24)
    [root] = struct.unpack_from("<Q", data, 88)
    narrowed((root - image.base) >> 3, 5)
    # The base address lies 32 bytes later, since the header is so much shorter.
    return Image.V1 + struct.pack("<Q", image.base + 32) + bytes(changed[88:])
