"""How scripts are put together, and how their arguments are bound by name."""

from __future__ import annotations

import re
from importlib import resources

import msgpack
import pytest
from support.queue.shards import Shard

from leanq.queue import scripts
from leanq.queue.scripts import SCRIPTS, Script, library_of, script_text

LUA = resources.files("leanq.queue") / "lua"


def test_each_script_is_declared_and_each_declaration_has_a_script() -> None:
    assert {file.name for file in LUA.iterdir()} == {"parts", *(f"{name}.lua" for name in SCRIPTS)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_counts_no_positions(name: str) -> None:
    assert "ARGV" not in (LUA / f"{name}.lua").read_text()


def test_a_script_is_sent_the_parts_that_it_needs_and_no_others() -> None:
    assert "local counters = {" not in script_text("notify")
    assert "local function notify(" in script_text("notify")
    claim = script_text("claim")
    # Each once, behind what it needs.
    assert claim.count("local bulk = {}") == 1
    assert claim.index("local bulk = {}") < claim.index("local counters = {")


def test_every_part_is_used() -> None:
    every = "\n".join(map(script_text, SCRIPTS))
    for part in (LUA / "parts").iterdir():
        assert part.read_text() in every, part.name


def test_a_part_names_all_that_it_uses() -> None:
    """Of the tables and functions that other parts define."""
    texts = {part.name.removesuffix(".lua"): part.read_text() for part in (LUA / "parts").iterdir()}
    texts |= {name: (LUA / f"{name}.lua").read_text() for name in SCRIPTS}
    for name, text in texts.items():
        code = re.sub(r"--.*", "", text)
        for part in set(texts) - set(SCRIPTS) - {name}:
            if re.search(rf"(?<![\w.:']){part}\.\w+\(", code):
                assert part in scripts.needed(text), f"{name} uses {part}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_is_a_library_that_a_server_takes(shard: Shard, name: str) -> None:
    library, taken = library_of(script_text(name)), f"taken_{name}"
    # Other tests call the library itself.
    shard.server.function_load(library.text.replace(library.function, taken))
    ((_, functions),) = [(found[1], found[5]) for found in shard.server.function_list(taken)]
    shard.server.function_delete(taken)
    ((_, function, _, _, _, flags),) = functions
    assert function.decode() == taken
    head = script_text(name).partition("\n")[0]
    assert {flag.decode() for flag in flags} == {*head.partition("flags=")[2].split(",")} - {""}


def test_what_parts_keep_for_a_call_begins_anew_with_each() -> None:
    """A library's locals outlive a call."""
    for part in (LUA / "parts").iterdir():
        text = part.read_text()
        begun = " ".join(scripts.needed(text, "each call"))
        name = part.name.removesuffix(".lua")
        code = re.sub(r"--.*", "", text)
        assigned = set(re.findall(rf"^\s+({name}\.\w+)(?:\[.*?\])* = ", code, re.MULTILINE))
        assert {field for field in assigned if field not in begun} == set(), name


def test_a_call_must_name_all_arguments_and_no_others() -> None:
    script = Script("worker data:bytes count names", {"pairs": "a b:bytes c"})
    good = {"worker": "w", "data": b"d", "count": 2, "pairs": [("1", b"2", 3), ("4", b"5", 6)]}
    good["names"] = ["x"]
    packed = msgpack.packb(["w", 2, ["x"], [["1", "4"], [3, 6]]])
    assert script.values(good) == [packed, b"d", b"2", b"5"]
    ragged = [("1", b"2", 3), ("1", b"2")]
    short = {"worker": "w"}
    for bad in ({**good, "more": 1}, short, {**good, "pairs": [("1",)]}, {**good, "pairs": ragged}):
        with pytest.raises(TypeError, match="expected"):
            script.values(bad)


async def test_lua_sees_arguments_by_the_same_names(shard: Shard) -> None:
    script = Script(
        "text:bytes number yes no map more:bytes none plain",
        {"rows": "name data:bytes size", "no_rows": "a b:bytes"},
        "text more sum yes no names data plain",
    )
    long = "x" * 300
    values = [("a", b"\xff", 1), (long, b"", 2)]
    sent = script.values(
        {
            "text": b"\xff",
            "number": 7,
            "yes": True,
            "no": False,
            "map": {"list": [1, 2]},
            "more": b"\x00",
            "rows": values,
            "no_rows": [],
            "none": [],
            "plain": ["x", "y"],
        }
    )
    body = """return answer({
      text = text, more = more,
      sum = number + map.list[2] + rows.size[1] + #no_rows.a + #no_rows.b + #none,
      yes = yes and 1 or 0, no = no and 1 or 0, names = rows.name, data = rows.data,
      plain = plain})"""
    text = "\n".join(("#!lua", script.declarations(), script.prologue(), body))
    answer = shard.server.execute_command("EVAL", text, 1, shard.tag, *sent)
    assert script.named(answer) == {
        "text": b"\xff",
        "more": b"\x00",
        "sum": 10,
        "yes": 1,
        "no": 0,
        "names": [b"a", long.encode()],
        "data": [b"\xff", b""],
        "plain": [b"x", b"y"],
    }


async def test_withdrawn_requests_do_not_count_as_waiting(shard: Shard) -> None:
    await shard.submit(*(f"r{n}" for n in range(10)))
    shard.advance(5000)
    # In any order: those in the middle stay in their list until they come to its front.
    await shard.queue.cancel(["r3", "r9", "r0"])
    (row,) = (await shard.queue.status()).priorities
    assert (row.waiting, row.oldest_s) == (7, 5.0)
    await shard.queue.cancel([f"r{n}" for n in range(10)])
    status = await shard.queue.status()
    assert (status.priorities, status.counters["waiting:a"]) == ((), 0)
    found = shard.dump()
    assert not found.lists["wait"]
    assert not found.lists["ring"]
    assert "withdrawn" not in found.hashes
