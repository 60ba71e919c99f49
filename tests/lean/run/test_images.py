"""Images that no Lean has written: whatever stands in one, its readers come to an end in order."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lean.images import Image as Writer

from leanq.lean.judge.statement import compare
from leanq.lean.run.image import Image
from leanq.lean.run.layouts import Damaged
from leanq.lean.run.olean import survey

FIELDS = st.integers(0, 2**64 - 1)


def honest(folder: Path) -> bytes:
    """A file with a few constants that refer to each other."""
    writer = Writer()
    a, b, c = (writer.name(each) for each in ("a", "b", "c"))
    of_a = writer.const(a)
    term = writer.app(of_a, writer.app(writer.const(b), of_a))
    path = folder / "x.olean"
    writer.write(
        path, {a: writer.axiom(a, of_a), b: writer.axiom(b, term), c: writer.axiom(c, term)}
    )
    return path.read_bytes()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return honest(tmp_path_factory.mktemp("images"))


def read_all(data: bytes, other: bytes) -> None:
    image = Image([data])
    constants = image.constants()
    image.imports()
    image.entries()
    survey(image, constants, {})
    known = Image([other])
    compare(image, known, is_whole=True)
    compare(known, Image([data]), theorems=[("a",)], holes=("b",))


@pytest.mark.slow
@settings(max_examples=1500)
@given(
    words=st.lists(st.tuples(st.integers(0, 200), FIELDS | st.integers(0, 400)), max_size=6),
    cut=st.integers(0, 40),
    near=st.booleans(),
)
def test_readers_of_damaged_images_end_in_order(
    written: bytes, words: list[tuple[int, int]], cut: int, near: bool
) -> None:
    data = bytearray(written)
    for index, value in words:
        at = 8 * (7 + index % (len(data) // 8 - 7))
        # Half of the pointers lead into the file, where there is most to be misread.
        word = Writer.BASE + 8 * (value % (len(data) // 8)) if near else value
        data[at : at + 8] = struct.pack("<Q", word)
    damaged = bytes(data[: len(data) - 8 * cut] if cut < 5 else data)
    with contextlib.suppress(Damaged, IndexError):
        read_all(damaged, written)


@settings(max_examples=300)
@given(st.binary(max_size=400), st.sampled_from([Writer.V1, Writer.V2]))
def test_readers_of_anything_end_in_order(body: bytes, magic: bytes) -> None:
    data = magic + struct.pack("<Q", Writer.BASE) + body + bytes(-len(body) % 8)
    with contextlib.suppress(Damaged, IndexError):
        read_all(data, data)
