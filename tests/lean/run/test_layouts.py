"""Every layout of compiled files since Lean 4.9, and those that no reader knows."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lean.layouts import LAYOUTS, Layout, write_module

from leanq.errors import AuditError
from leanq.lean.run.image import Import
from leanq.lean.run.layouts import Damaged, UnknownLayout
from leanq.lean.run.olean import open_image, read_module, read_parts

each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.lean)
NAMES = st.lists(st.text("abcαλ'_", min_size=1, max_size=4), unique=True, max_size=5)


@each_layout
@settings(max_examples=40)
@given(imports=NAMES, names=NAMES, nested=st.integers(0, 3))
def test_every_layout_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    layout: Layout,
    imports: list[str],
    names: list[str],
    nested: int,
) -> None:
    path = tmp_path_factory.mktemp("layouts") / "M.olean"
    inductives = (("T", nested),)
    write_module(path, layout, imports=tuple(imports), axioms=tuple(names), inductives=inductives)
    module = read_module(path)
    expected = [*(((each,), "axiom") for each in names), (("T",), "inductive")]
    assert [(each.name, each.kind) for each in module.constants] == [
        *expected,
        (("T", "rec"), "recursor"),
    ]
    assert [each.module for each in module.imports] == [(each,) for each in imports]
    if not layout.has_parts:
        assert module.imports == tuple(Import((each,)) for each in imports)


@pytest.mark.slow
@each_layout
@settings(max_examples=100)
@given(data=st.data())
def test_damage_is_damage_in_every_layout(
    tmp_path_factory: pytest.TempPathFactory, layout: Layout, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("layouts") / "M.olean"
    files = write_module(path, layout, imports=("I",), axioms=("a",), inductives=(("T", 1),))
    parts = [bytearray(each.read_bytes()) for each in files]
    damaged = data.draw(st.sampled_from(parts))
    words = st.tuples(st.integers(0, len(damaged) // 8 - 1), st.integers(0, 2**64 - 1))
    for index, word in data.draw(st.lists(words, max_size=4)):
        damaged[8 * index : 8 * index + 8] = struct.pack("<Q", word)
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    with contextlib.suppress(Damaged, IndexError):
        image = open_image([bytes(each) for each in parts])
        for raw in image.constants().values():
            image.references(raw)


@pytest.mark.parametrize(
    ("lean", "at", "byte", "why"),
    [
        ("4.35.0", 5, 3, "version 3 of the format"),
        ("4.35.0", 6, 0, "the flags 0"),
        ("4.35.0", 6, 3, "the flags 3"),
    ],
)
def test_an_unknown_header_is_no_damage(
    tmp_path: Path, lean: str, at: int, byte: int, why: str
) -> None:
    [layout] = [each for each in LAYOUTS if each.lean == lean]
    [path] = write_module(tmp_path / "M.olean", layout)
    data = bytearray(path.read_bytes())
    data[at] = byte
    with pytest.raises(UnknownLayout, match=why):
        open_image([bytes(data)])
    path.write_bytes(data)
    with pytest.raises(AuditError, match=why):
        read_module(path)


@pytest.mark.parametrize("fields", [4, 6, 7])
def test_a_root_with_other_fields_is_unknown(tmp_path: Path, fields: int) -> None:
    """A later Lean may add fields; nothing is guessed from the ones that are known."""
    [path] = write_module(tmp_path / "M.olean", LAYOUTS[-1])
    [data] = read_parts(path)
    start = len(LAYOUTS[-1].magic) + 8
    [root] = struct.unpack_from("<Q", data, start)
    at = root - struct.unpack_from("<Q", data, start - 8)[0]
    changed = bytearray(data)
    changed[at + 6] = fields
    with pytest.raises(UnknownLayout, match=f"has {fields} fields"):
        open_image([bytes(changed)])


@pytest.mark.parametrize(("fields", "tag"), [(7, 5), (4, 5), (1, 8), (1, 243)])
def test_a_constant_with_other_fields_is_unknown(tmp_path: Path, fields: int, tag: int) -> None:
    [path] = write_module(tmp_path / "M.olean", LAYOUTS[-1], inductives=(("T", 0),))
    [data] = read_parts(path)
    image = open_image([data])
    raw = image.constants()[("T",)]
    info = next(
        index
        for index, word in enumerate(image.words)
        if word >> 48 == 5 << 8 | 1 and image.words[index + 1] == image.base + 8 * raw.value
    )
    changed = bytearray(data)
    if tag == 5:
        changed[8 * raw.value + 6] = fields
    else:
        changed[8 * info + 7] = tag
    with pytest.raises(UnknownLayout, match="unknown"):
        open_image([bytes(changed)]).constants()
