"""What a state is: ids that follow from recipes, and exports that are signed against damage."""

from __future__ import annotations

import hashlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from leanq.errors import RecipeError
from leanq.lean.goals.recipes import (
    Hole,
    Recipe,
    Source,
    Tactic,
    pack_export,
    read_recipe,
    record_id,
    unpack_export,
)

FORMS = st.sampled_from(["term", "tactic"])


@st.composite
def texts(draw: st.DrawFn, least: int) -> tuple[str, tuple[Hole, ...]]:
    """A text with holes."""
    text, holes = "", []
    for _ in range(draw(st.integers(least, 3))):
        text += draw(st.text("ab \n⊢", max_size=5))
        holes.append(Hole(len(text), draw(FORMS)))
        text += "sorry "
    return text + draw(st.text("ab\n", max_size=5)), tuple(holes)


@st.composite
def tactics(draw: st.DrawFn) -> Tactic:
    text, holes = draw(texts(0))
    opened = draw(st.none() | st.integers(0, len(holes) - 1)) if holes else None
    return Tactic(text, holes, opened)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    code, holes = draw(texts(1))
    source = Source(draw(st.text("0123456789abcdef", min_size=4, max_size=4)), code, holes)
    opened = draw(st.integers(0, len(holes) - 1))
    return Recipe(source, opened, tuple(draw(st.lists(tactics(), max_size=4))))


def back(recipe: Recipe) -> list[bytes]:
    """The records as a store gives them: from the state's to the source's."""
    return [record for _, record in reversed(recipe.records())]


@pytest.mark.slow
@given(recipes())
def test_a_recipe_is_what_its_records_say(recipe: Recipe) -> None:
    assert read_recipe(recipe.id, back(recipe)) == recipe
    assert unpack_export(pack_export(recipe)) == recipe
    assert len(recipe.id) == 64
    for state, record in recipe.records():
        assert state == record_id(record)


@pytest.mark.slow
@given(recipes(), recipes())
def test_ids_are_equal_exactly_where_recipes_are(one: Recipe, other: Recipe) -> None:
    assert (one.id == other.id) == (one == other)


@pytest.mark.slow
@given(recipes(), tactics())
def test_every_part_of_a_recipe_counts(recipe: Recipe, tactic: Tactic) -> None:
    source = recipe.source
    others = [
        replace(recipe, tactics=(*recipe.tactics, tactic)),
        replace(recipe, source=replace(source, fingerprint=source.fingerprint + "0")),
        replace(recipe, source=replace(source, code=source.code + " ")),
    ]
    assert len({recipe.id, *(other.id for other in others)}) == 4


@pytest.mark.slow
@given(recipes(), tactics())
def test_a_step_costs_its_edge(recipe: Recipe, tactic: Tactic) -> None:
    following = replace(recipe, tactics=(*recipe.tactics, tactic))
    *before, (_, record) = following.records()
    assert before == recipe.records()
    assert len(record) <= 33 + 5 + len(tactic.text.encode()) + 16 * len(tactic.holes) + 8


@pytest.mark.slow
@given(recipes(), st.data())
def test_damage_is_noticed(recipe: Recipe, data: st.DataObject) -> None:
    exported = bytearray(pack_export(recipe))
    place = data.draw(st.integers(0, len(exported) - 1))
    exported[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecipeError):
        unpack_export(bytes(exported))
    with pytest.raises(RecipeError):
        unpack_export(pack_export(recipe)[: place + (place == len(exported))])
    records = back(recipe)
    number = data.draw(st.integers(0, len(records) - 1))
    records[number] += b"\0"
    with pytest.raises(RecipeError, match="damaged"):
        read_recipe(recipe.id, records)


SOURCE = Source("f", "theorem t : a := sorry", (Hole(17, "term"),))


def test_what_no_store_holds_is_refused() -> None:
    recipe = Recipe(SOURCE, 0)
    ids = dict(recipe.records())
    root = SOURCE.record()
    with pytest.raises(RecipeError, match="source, not of a state"):
        read_recipe(record_id(root), [root])
    with pytest.raises(RecipeError, match="does not lead to a source"):
        read_recipe(recipe.id, back(recipe)[:1])
    with pytest.raises(RecipeError, match="damaged"):
        read_recipe("0" * 64, list(ids.values())[::-1])


@pytest.mark.parametrize(
    ("holes", "opened", "said"),
    [
        ((Hole(3, "term"),), 0, "no sorry"),
        ((Hole(17, "term"), Hole(17, "term")), 0, "overlap"),
        ((Hole(17, "term"),), 1, "not there"),
        ((Hole(17, "unknown"),), 0, "unknown form"),
    ],
)
def test_impossible_recipes_are_refused(holes: tuple[Hole, ...], opened: int, said: str) -> None:
    """A client that makes them itself gets ids that fit, and no more."""
    recipe = Recipe(replace(SOURCE, holes=holes), opened)
    with pytest.raises(RecipeError, match=said):
        read_recipe(recipe.id, back(recipe))
    with pytest.raises(RecipeError, match=said):
        unpack_export(pack_export(recipe))


def test_an_export_that_grows_without_bounds_is_refused() -> None:
    for body in (
        zstandard.compress(bytes(80 << 20)),
        # A frame that claims 64 GiB.
        bytes.fromhex("28b52ffde0") + (64 << 30).to_bytes(8, "little") + b"\1\0\0",
    ):
        checksum = hashlib.blake2b(body, digest_size=32).digest()
        with pytest.raises(RecipeError):
            unpack_export(b"leanq-state-1\n" + checksum + body)


@pytest.mark.parametrize("data", [b"", b"x", b"leanq-state-1\n", b"leanq-state-2\n" + bytes(60)])
def test_what_is_no_export_is_refused(data: bytes) -> None:
    with pytest.raises(RecipeError):
        unpack_export(data)


def test_a_recipe_has_one_way_to_be_written() -> None:
    """Or it would have several ids."""
    root = SOURCE.record()
    for body in (b"\xcc\x00", b"\xd0\x00"):  # 0, longer than need be
        record = b"S" + bytes.fromhex(record_id(root)) + body
        with pytest.raises(RecipeError, match="another way"):
            read_recipe(record_id(record), [record, root])
