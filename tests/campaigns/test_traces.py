"""Traces of campaigns: joined with their data, told apart by content, in shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.campaigns.traces import check_again, read_traces
from support.terminals import Terminal

from leanq.campaigns.campaign import Campaign
from leanq.campaigns.coordinator import Plan
from leanq.campaigns.dataset import Fields, Row, RowsDataset, open_dataset
from leanq.campaigns.results import of_error, of_reply, write_results
from leanq.campaigns.traces import Exported, export_traces, rows
from leanq.campaigns.traces.shards import Shards
from leanq.errors import UsageError
from leanq.local import Pool
from leanq.producer.request_builder import Check
from leanq.queue.requests import Failure, Message, Reply, Request, Sorry, Theorem

FIELDS = Fields(problem="task", target="goal", tags="tags", parts=True)
OPTIONS: Check = {"env": "mathlib", "timeout_s": 7.0, "allow_axioms": ["choice"], "priority": 0}
DATA = [
    {"id": "a", "task": "p", "goal": "theorem a : 1 = 1 := by", "code": ["rfl", "sorry", "rfl"]},
    {"id": 7, "task": "q", "goal": "def n : Nat := sorry\ntheorem b : n = n := by", "code": "rfl"},
    {"id": "bad", "task": "r", "goal": "theorem c : 1 = 1", "code": 5},
    {"id": "d", "task": "s", "goal": "theorem d : 1 = 2 := by", "code": "rfl", "tags": ["hard"]},
]
REPLIES = {
    "rfl": Reply(
        "accepted", axioms=(), fingerprint="f" * 64, cpu_s=0.25, request_id="r", worker="w"
    ),
    "sorry": Reply(
        "incomplete",
        sorries=(Sorry(1, 24, "⊢ 1 = 1", "5" * 64, 1, 29),),
        theorems=(Theorem("a", "1 = 1"),),
        fingerprint="f" * 64,
        reason="sorry",
    ),
    "d": Reply(
        "rejected",
        (Message("error", 1, 24, "no", 1, 27),),
        failed=(Failure("d", "missing", "no d"),),
        fingerprint="f" * 64,
        reason="lean_error",
    ),
}


def campaign(folder: Path, ending: str = "jsonl", data: Any = DATA) -> Campaign:
    """What a finished campaign leaves in a folder."""
    path = folder / "data.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in data))
    made = Campaign(str(path), str(folder / f"out.{ending}"), FIELDS, Plan(OPTIONS))
    records = []
    for row in open_dataset(made.data, made.fields).rows():
        if not isinstance(row, Row):
            records.append(of_error(row, None, row.error))
            continue
        for sample, (code,) in enumerate(row.codes):
            reply = REPLIES["d" if row.id == "d" else code.split()[-1]]
            records.append(of_reply(row, sample, code, reply))
    write_results(made.out, records)
    made.write_spec()
    return made


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_row_has_what_was_asked_and_what_was_answered(tmp_path: Path, ending: str) -> None:
    made = campaign(tmp_path, ending)
    done = export_traces([made.out], str(tmp_path / "traces"))
    # The same text in another sample of the problem is the same trace.
    assert done == Exported(written=4, shards=1, known=1, skipped={"without a verdict": 1})
    proved, left_open, filled, wrong = read_traces(tmp_path / "traces")
    assert {name: proved[name] for name in ("op", "problem", "id", "sample", "verdict")} == {
        "op": "verify",
        "problem": "p",
        "id": "a",
        "sample": 0,
        "verdict": "accepted",
    }
    assert proved["text"] == "theorem a : 1 = 1 := by\n  rfl"
    assert proved["target"] == "theorem a : 1 = 1 := by\n  sorry"
    asked = ("environment", "timeout_s", "memory_mb", "scratch_mb", "allow_axioms", "audit")
    assert [proved[name] for name in asked] == ["mathlib", 7.0, 4096, 256, ["choice"], True]
    assert (proved["axioms"], proved["cpu_s"], proved["parent"]) == ([], 0.25, None)
    assert (left_open["axioms"], left_open["sample"]) == (None, 1)
    assert left_open["sorries"] == [
        {
            "line": 1,
            "column": 24,
            "goal": "⊢ 1 = 1",
            "state": "5" * 64,
            "end_line": 1,
            "end_column": 29,
        }
    ]
    assert left_open["theorems"] == [{"name": "a", "statement": "1 = 1"}]
    assert (filled["id"], filled["sample"], filled["holes"]) == ("7", None, ["n"])
    assert (wrong["tags"], wrong["reason"], wrong["failed"][0]["rule"]) == (
        ["hard"],
        "lean_error",
        "missing",
    )
    (message,) = wrong["messages"]
    assert (message["line"], message["column"], message["text"]) == (1, 24, "no")


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    made, out = campaign(tmp_path), tmp_path / "traces"
    first = export_traces([made.out], str(out), rows_per_shard=3)
    assert (first.written, first.shards) == (4, 2)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = export_traces([made.out, made.out], str(out), rows_per_shard=3)
    assert (again.written, again.shards, again.known) == (0, 0, 10)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    more = campaign(tmp_path, data=[{**DATA[0], "code": ["exact rfl"]}])
    third = export_traces([more.out], str(out))
    assert (third.written, third.shards) == (1, 1)
    assert export_traces([made.out], str(out)).written == 0
    names = ["traces-00000.parquet", "traces-00001.parquet", "traces-00002.parquet"]
    assert sorted(path.name for path in out.iterdir() if path.name[0] != ".") == names


class _KilledError(Exception):
    pass


def _trace(number: int) -> rows.Row:
    request = Request("check", f"example : {number} = {number} := rfl")
    return rows.trace({"environment": "default"}, request, {"verdict": "accepted"})


@pytest.mark.slow
@given(
    numbers=st.lists(st.integers(0, 12), max_size=24),
    deaths=st.lists(st.integers(0, 24), max_size=3),
    rows_per_shard=st.integers(1, 5),
)
def test_wherever_an_export_ends_the_next_completes_it(
    numbers: list[int], deaths: list[int], rows_per_shard: int
) -> None:
    def until(death: int | None) -> Iterator[rows.Row]:
        for place, number in enumerate(numbers):
            if place == death:
                raise _KilledError
            yield _trace(number)

    with TemporaryDirectory() as folder:
        for death in (*deaths, None):
            try:
                with Shards(folder, rows_per_shard) as shards:
                    shards.add(until(death))
            except _KilledError:
                pass
            found = [row["trace"] for row in read_traces(Path(folder))]
            assert len(found) == len(set(found))
            assert not [name for name in os.listdir(folder) if name.endswith(".part")]
        assert set(found) == {_trace(number)["trace"] for number in numbers}
        assert all(
            pq.read_metadata(path).num_rows <= rows_per_shard
            for path in Path(folder).glob("*.parquet")
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"code": "theorem t : 1 = 1 := by rfl"},
        {"target": "theorem t : 2 = 2 := sorry"},
        {"holes": ("n",)},
        {"allow_axioms": ("a",)},
        {"audit": False},
        {"trust_programs": True},
    ],
)
def test_another_question_is_another_trace(changes: Mapping[str, Any]) -> None:
    asked = {"code": "theorem t : 1 = 1 := rfl", "target": "theorem t : 1 = 1 := sorry"}
    answer = {"verdict": "accepted", "fingerprint": "f"}
    one = rows.trace({"environment": "a"}, Request("verify", **asked), answer)
    other = rows.trace({"environment": "a"}, Request("verify", **{**asked, **changes}), answer)
    assert one["trace"] != other["trace"]


def test_an_answer_is_the_same_trace_whoever_gave_it_when() -> None:
    request, more = Request("check", "x"), Request("check", "x", timeout_s=9.0)
    verdict = {"verdict": "rejected", "reason": "lean_error", "fingerprint": "f"}
    origin, other = (
        {"environment": "a", "problem": "p", "id": "1"},
        {"environment": "b", "problem": "q", "id": "2", "sample": 3, "tags": ("tag",)},
    )
    one = rows.trace(origin, request, {**verdict, "cpu_s": 1.0, "worker": "v"})
    assert one["trace"] == rows.trace(other, more, {**verdict, "cpu_s": 2.0})["trace"]
    assert one["trace"] != rows.trace(origin, request, {**verdict, "fingerprint": "g"})["trace"]
    late = {"verdict": "timeout", "reason": "cpu_time"}
    assert rows.trace(origin, request, late)["trace"] != rows.trace(origin, more, late)["trace"]
    assert rows.trace(origin, request, late)["trace"] != rows.trace(other, request, late)["trace"]


def test_data_that_was_moved_or_changed(tmp_path: Path) -> None:
    made, out = campaign(tmp_path), str(tmp_path / "traces")
    moved = tmp_path / "moved.jsonl"
    os.rename(made.data, moved)
    with pytest.raises(UsageError, match="No such file"):
        export_traces([made.out], out)
    assert export_traces([made.out], out, data=str(moved)).written == 4
    moved.write_text(moved.read_text().replace("1 = 2", "1 = 3"))
    with pytest.raises(UsageError, match=r"moved\.jsonl:4: the data does not match .*--data"):
        export_traces([made.out], out, data=str(moved))
    moved.write_text(moved.read_text().splitlines()[0])
    with pytest.raises(UsageError, match=r"moved\.jsonl:2: the data does not match .*--data"):
        export_traces([made.out], out, data=str(moved))


def test_data_that_is_no_file(tmp_path: Path) -> None:
    made, out = campaign(tmp_path), tmp_path / "traces"
    os.remove(made.data)
    done = export_traces([made.out], str(out), data=RowsDataset(DATA, FIELDS))
    assert (done.written, done.known) == (4, 1)
    assert [row["id"] for row in read_traces(out)] == ["a", "a", "7", "d"]


@pytest.mark.parametrize("said", ["{", "[]", "{}", '{"data": 1}', "null", "\xff"])
def test_what_does_not_say_what_the_campaign_was(tmp_path: Path, said: str) -> None:
    made = campaign(tmp_path)
    Path(made.out + ".campaign").write_bytes(said.encode("latin-1"))
    with pytest.raises(UsageError, match=r"out\.jsonl\.campaign does not describe"):
        export_traces([made.out], str(tmp_path / "traces"))
    os.remove(made.out + ".campaign")
    with pytest.raises(UsageError, match="is missing: a campaign"):
        export_traces([made.out], str(tmp_path / "traces"))


def test_one_export_at_a_time(tmp_path: Path) -> None:
    with (
        Shards(str(tmp_path), 1),
        pytest.raises(UsageError, match="another export"),
        Shards(str(tmp_path), 1),
    ):
        pass
    with Shards(str(tmp_path), 1) as shards:
        shards.add([_trace(1)])
    assert len(read_traces(tmp_path)) == 1


@pytest.mark.parametrize("content", [b"", b"PAR1 and then nothing", None])
def test_what_is_no_shard_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "traces-00003.parquet"
    if content is not None:
        path.write_bytes(content)
    else:
        pq.write_table(pa.table({"other": ["x"]}), path)
    with (
        pytest.raises(UsageError, match=r"traces-00003\.parquet"),
        Shards(str(tmp_path), 1),
    ):
        pass


@pytest.mark.slow
def test_the_command_says_what_it_wrote(terminal: Terminal) -> None:
    made = campaign(terminal.folder)
    run = ("export-traces", made.out, "--out", "traces", "--rows-per-shard", "3")
    done = terminal.run(*run)
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        "traces: 4 traces written in 2 shards, 1 were there already, 1 without a verdict\n"
    )
    (told,) = terminal.run(*run, "--json").lines
    assert told == {
        "out": "traces",
        "written": 0,
        "shards": 0,
        "known": 5,
        "skipped": {"without a verdict": 1},
    }
    for wrong in (("absent.jsonl",), (made.out, "--data", "absent.jsonl")):
        done = terminal.run("export-traces", *wrong, "--out", "traces")
        assert (done.code, done.out) == (2, "")
        assert "absent.jsonl" in done.err


@pytest.mark.slow
def test_rows_are_checked_again_from_the_file_alone(terminal: Terminal, pool: Pool) -> None:
    target = "theorem t{n} (p q : Prop) (h : p) (k : q) : p ∧ q := by"
    attempts = ["exact ⟨h, k⟩", "sorry", "exact h", "exact ⟨h, k⟩", "constructor\n  exact h"]
    data = [
        {"id": f"t{n}", "formal_statement": target.format(n=n), "proof": attempts} for n in range(3)
    ]
    data.append({"id": "text", "formal_statement": "theorem u : True := by", "proof": ["trivial"]})
    terminal.file("data.jsonl", "".join(f"{json.dumps(row)}\n" for row in data))
    done = terminal.run("campaign", "run", "data.jsonl", "--out", "out.jsonl")
    assert done.code == 1, done
    done = terminal.run("export-traces", "out.jsonl", "--out", "traces")
    assert done.code == 0, done
    rows = read_traces(terminal.folder / "traces")
    assert len(rows) == 3 * 4 + 1
    assert {row["verdict"] for row in rows} == {"accepted", "incomplete", "rejected"}
    for name in ("data.jsonl", "out.jsonl", "out.jsonl.campaign"):
        os.remove(terminal.folder / name)
    check_again(pool, rows)
