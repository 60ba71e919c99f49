"""Problem sets in the shapes that teams have; the fixtures are ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.terminals import Terminal, ended

from leanq.campaigns.dataset import (
    SHAPES,
    BadRow,
    Fields,
    Row,
    RowsDataset,
    fields_of,
    open_dataset,
)
from leanq.commands.campaign import run as campaign_run
from leanq.errors import UsageError
from leanq.lean.goals.completions import (
    open_definitions,
    with_header,
    with_proof,
    with_sorry,
)
from leanq.queue.settings import MAX_REQUEST_BYTES

HEADER = "import Mathlib\nopen Nat"
STATEMENT = "theorem t (p q : Prop) (h : p ∧ q) : And q p"
PROOF = "And.intro h.right h.left"
OPEN = "abbrev answer : Prop := sorry\ntheorem t (h : answer) : answer := sorry"

SETS: dict[str, dict[str, Any]] = {
    "minif2f": {
        "name": "t",
        "split": "test",
        "informal_prefix": "/-- Swap. -/\n",
        "formal_statement": f"{STATEMENT} := by\n",
        "goal": "⊢ q ∧ p",
        "header": HEADER,
        "completion": f"  exact {PROOF}",
    },
    "putnambench": {
        "name": "putnam_1",
        "lean4_statement": f"{HEADER}\n\n{STATEMENT} :=\nsorry",
        "informal_statement": "Swap.",
        "tags": ["algebra", "logic"],
        "completions": [f"```lean\n{STATEMENT} := {PROOF}\n```", "by\n  sorry"],
    },
    "proofnet": {
        "id": "t",
        "nl_statement": "Swap.",
        "nl_proof": "Swap them.",
        "lean4_src_header": HEADER,
        "lean4_formalization": f"{STATEMENT} := sorry",
        "lean4_code": f"{HEADER}\n{STATEMENT} := {PROOF}",
    },
    "lean-workbook": {
        "id": "t",
        "natural_language_statement": "Swap.",
        "answer": "",
        "tags": ["logic"],
        "formal_statement": f"{STATEMENT}  :=  by sorry",
        "status": "solved",
        "proof": [f"by\n  exact {PROOF}"],
    },
    "kimina": {
        "uuid": "t",
        "formal_statement": f"{HEADER}\n{STATEMENT} := by\n  sorry",
        "full_proof": f"{HEADER}\n{STATEMENT} := {PROOF}",
    },
}


def written(folder: Path, kind: str, row: dict[str, Any]) -> str:
    path = folder / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", SETS)
def test_a_problem_set_is_recognised_and_made_into_whole_texts(
    name: str, kind: str, tmp_path: Path
) -> None:
    path = written(tmp_path, kind, SETS[name])
    found, fields = fields_of(path, {})
    assert found == name
    [row] = open_dataset(path, fields).rows()
    assert isinstance(row, Row)
    assert row.target is not None
    for text in (row.target, *row.codes[0]):
        assert text.count("theorem t") == 1
        assert text.count("import Mathlib") == (name != "lean-workbook")
    assert row.target.count("sorry") == 1
    assert PROOF in row.codes[0][0]
    assert "sorry" not in row.codes[0][0]
    # What was a proof alone stands behind the statement as it was.
    assert STATEMENT in row.codes[0][0]
    [plain] = open_dataset(path, fields_of(path, {}, target=False)[1]).rows()
    assert isinstance(plain, Row)
    assert (plain.target, plain.codes) == (None, row.codes)


def test_statements_alone_are_checked(tmp_path: Path) -> None:
    row = {name: each for name, each in SETS["minif2f"].items() if name != "completion"}
    path = written(tmp_path, "jsonl", row)
    _, fields = fields_of(path, {})
    [found] = open_dataset(path, fields).rows()
    assert isinstance(found, Row)
    assert found.target is None
    assert found.codes == ((f"{HEADER}\n{STATEMENT} := by\n  sorry",),)
    assert found.tags == ("test",)


def test_what_the_caller_names_is_what_counts(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl", {**SETS["kimina"], "mine": PROOF})
    assert fields_of(path, {"code": "mine"}) == ("plain", Fields(code="mine"))
    name, fields = fields_of(path, {"code": "mine"}, "kimina")
    assert (name, fields.id, fields.code, fields.target) == (
        *("kimina", "uuid", "mine", "formal_statement"),
    )
    assert fields_of(path, {}, "plain") == ("plain", Fields())
    with pytest.raises(UsageError, match=r"not of the shape proofnet.*'formal_statement'"):
        fields_of(path, {}, "proofnet")


def test_the_command_knows_all_shapes() -> None:
    (option,) = [each for each in campaign_run.params if each.name == "shape"]
    assert isinstance(option.type, click.Choice)
    assert {*option.type.choices} == {*SHAPES, "auto", "plain"}


def test_a_plain_data_set_stays_one(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl", {"id": "a", "code": "b", "target": "c"})
    assert fields_of(path, {}) == ("plain", Fields())
    (tmp_path / "empty.jsonl").write_text("")
    assert fields_of(str(tmp_path / "empty.jsonl"), {})[0] == "plain"
    assert fields_of(str(tmp_path / "absent.jsonl"), {})[0] == "plain"
    assert fields_of(str(tmp_path), {})[0] == "plain"


@pytest.mark.parametrize("bad", [1, {"a": 1}, ["a", 2]])
def test_tags_that_are_no_texts_make_a_bad_row(bad: object, tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl", {**SETS["putnambench"], "tags": bad})
    [row] = open_dataset(path, fields_of(path, {})[1]).rows()
    assert isinstance(row, BadRow)
    assert "'tags'" in row.error


@pytest.mark.slow
def test_a_row_that_becomes_too_long_is_a_bad_row(tmp_path: Path) -> None:
    half = "-" * (MAX_REQUEST_BYTES // 2)
    path = written(
        tmp_path, "jsonl", {**SETS["minif2f"], "header": f"/{half}/", "completion": half}
    )
    [row] = open_dataset(path, fields_of(path, {})[1]).rows()
    assert isinstance(row, BadRow)
    assert "bytes" in row.error


def test_objects_of_python_are_data_sets() -> None:
    table = pa.Table.from_pylist([{**SETS["kimina"], "uuid": f"t{n}"} for n in range(600)])
    rows = table.to_pylist()
    read = [list(RowsDataset(each).rows()) for each in (table, rows)]
    assert len(read[0]) == 600
    assert read[0] == read[1]
    data = RowsDataset(table)
    data.check_fields()
    assert data.total() == 600
    assert list(data.rows(301)) == read[0][300:]
    assert RowsDataset(rows).fingerprint == data.fingerprint
    assert RowsDataset(rows[1:]).fingerprint != data.fingerprint
    with pytest.raises(UsageError, match="no field 'id'"):
        RowsDataset(rows, Fields()).check_fields()


def test_proofs_find_their_places() -> None:
    assert with_sorry("theorem t : p :=") == "theorem t : p := sorry"
    assert with_sorry("theorem t : p := h") == "theorem t : p := h"
    assert with_proof("theorem t : p := by\n  sorry", "  intro\n  rfl") == (
        "theorem t : p := by\n  intro\n  rfl"
    )
    assert with_proof("theorem t : p := sorry", ":= by rfl") == "theorem t : p := by rfl"
    assert with_proof("theorem t : p", " := h") == "theorem t : p := h"
    assert with_header(HEADER, f"{HEADER}\nx") == f"{HEADER}\nx"
    assert with_header("", "x") == with_header("\n", "x") == "x"
    assert with_header(HEADER, "import Init\nx") == "import Init\nx"


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("abbrev a : Nat := sorry\ntheorem t : a = 2 := sorry", ("a",)),
        (
            "noncomputable def «a b».c (n : Nat) : Nat :=\n  sorry\n-- abbrev d := sorry",
            ("«a b».c",),
        ),
        ("abbrev a : Nat := sorry\n@[simp] def b : Nat := sorry\nlemma c := sorry", ("a", "b")),
        ("def a : Nat := f sorry\nabbrev b : Nat := 2\ntheorem t : b = 2 := sorry", ()),
        ("def a : Nat := 2\ninstance : C := sorry\nexample : p := sorry", ()),
        (
            "namespace A.B\nsection\ndef a : Nat := sorry\nend\nend A.B\ndef b : Nat := sorry",
            ("A.B.a", "b"),
        ),
        (
            "namespace A\nsection S\ndef _root_.a : Nat := sorry\nend S\nabbrev b : Nat := sorry",
            ("a", "A.b"),
        ),
        ("namespace A\nmutual\ndef a : Nat := 1\nend\ndef b : Nat := sorry", ("A.b",)),
        ("abbrev", ()),
    ],
)
def test_definitions_that_a_statement_leaves_open(statement: str, names: tuple[str, ...]) -> None:
    assert open_definitions(statement) == names


def test_open_definitions_are_the_codes_to_fill(tmp_path: Path) -> None:
    statement = f"abbrev answer : Prop := sorry\n{STATEMENT} := sorry"
    path = written(tmp_path, "jsonl", {**SETS["putnambench"], "lean4_statement": statement})
    [row] = open_dataset(path, fields_of(path, {})[1]).rows()
    assert isinstance(row, Row)
    assert row.holes == ("answer",)
    [plain] = open_dataset(path, fields_of(path, {}, target=False)[1]).rows()
    assert isinstance(plain, Row)
    assert plain.holes == ()


@pytest.mark.slow
def test_a_campaign_shows_the_shape_and_verifies(terminal: Terminal) -> None:
    rows = [
        {"uuid": "right", "statement": f"{STATEMENT} := sorry", "proof": PROOF, "tags": ["a", "b"]},
        {"uuid": "other", "statement": f"{STATEMENT} := sorry", "proof": "theorem t : True := ⟨⟩"},
        {"uuid": "cheat", "statement": f"{STATEMENT} := sorry", "proof": "sorry", "tags": ["a"]},
        {"uuid": "filled", "statement": OPEN, "proof": OPEN.replace("sorry", "True", 1)[:-5] + "h"},
        {"uuid": "unfilled", "statement": OPEN, "proof": OPEN[:-5] + "h"},
    ]
    data = terminal.file("data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    out = str(terminal.folder / "out.jsonl")
    done = ended(terminal.start("campaign", "run", data, "--out", out))
    assert done.code == 1, done
    assert "has the shape kimina: id is 'uuid', code is 'proof', target is 'statement'" in done.err
    records = [json.loads(line) for line in Path(out).read_text().splitlines()]
    assert [record["verdict"] for record in records] == [
        *("accepted", "rejected", "incomplete", "accepted", "incomplete"),
    ]
    assert [record.get("tags") for record in records] == [["a", "b"], None, ["a"], None, None]
    assert [record.get("holes") for record in records][2:] == [None, ["answer"], ["answer"]]
    done = ended(terminal.start("campaign", "report", out))
    assert done.code == 0, done
    assert "by tag" in done.out
    page = Path(out).with_suffix(".report.html").read_text()
    assert "<h2>By tag</h2>" in page
    assert "pass@1: 40.0 %" in page
