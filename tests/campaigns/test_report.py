"""``leanq campaign report``: what it prints, and what it writes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.campaigns.records import Record, bad, done, said

from leanq.commands.campaign import report as command
from leanq.errors import UsageError

report: Any = command.callback


def write(path: Path, records: Iterable[Record]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


FIXTURE = [
    done("a1", "accepted", cpu_s=1.0, sample=0, kernel="4.35.0"),
    done(
        "a1",
        "rejected",
        cpu_s=3.0,
        sample=1,
        reason="lean_error",
        messages=said("unsolved goals\n⊢ False"),
    ),
    done("a2", "timeout", reason="cpu_time", cpu_s=60.0, sample=0, attempts=2),
    bad("a2", 2, "sample 1 is empty", sample=1),
]

PRINTED = """\
{path}

verdicts
  4 records of 2 rows; 2 problems, 4 samples
  environments: abababababababab (3)
  judged by the kernel of: Lean 4.35.0 (1)
  verdict   records   share  CPU p50
  accepted        1  25.0 %   1.00 s
  rejected        1  25.0 %   3.00 s
  timeout         1  25.0 %  60.00 s
  error           1  25.0 %        –

solved and pass@k
  solved: 1 of 2 problems
  counted as failures, though Lean gave no verdict: 1 outcome of leanq's, 1 error
  k  pass@k  95% interval  problems
  1  25.0 %  4.2 – 71.6 %         2
  2  50.0 %  9.5 – 90.5 %         2

by problem
  the hardest first
  problem  samples  accepted
  line 2         2         0
  line 1         2         1

times
  0.02 hours of CPU in Lean
                    p50       p90       p99       max
  on the worker  3.50 s   60.50 s   60.50 s   60.50 s
  CPU in Lean    3.00 s   60.00 s   60.00 s   60.00 s
  in the queue   6.00 s  120.00 s  120.00 s  120.00 s

slowest, by CPU time
  record  verdict       CPU     wall  leases  line
  a2 [0]  timeout   60.00 s  60.50 s       2     2
  a1 [1]  rejected   3.00 s   3.50 s       1     1
  a1 [0]  accepted   1.00 s   1.50 s       1     1

flaky
  0 texts with different verdicts, 1 record with more than one lease, \
1 outcome of leanq's

reasons
  records  reason
        1  lean_error
        1  cpu_time

first errors of Lean
  records  text, its names and numbers left out
        1  unsolved goals

errors
  records  text, its names and numbers left out
        1  sample # is empty

written: {page}
"""


def test_what_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "run.jsonl", FIXTURE)
    assert report(path, None, as_json=False) == 0
    page = tmp_path / "run.report.html"
    assert capsys.readouterr() == (PRINTED.format(path=path, page=page), "")
    assert sorted(tmp_path.iterdir()) == [Path(path), page]
    written = page.read_text()
    assert '<td class="">timeout</td><td class="n">1</td><td class="n">25.0 %</td>' in written
    assert "<h2>Flaky</h2>" in written


def test_the_figures_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "run.jsonl", [done("a1", "accepted"), done("a2", "crashed")])
    page = tmp_path / "deep.er.html"
    assert report(path, str(page), as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["results"] == path
    assert record["ends"] == {"accepted": 1, "crashed": 1}
    assert record["passes"][0]["share"]["estimate"] == 0.5
    assert record["written"] == str(page)


def test_long_lists_say_what_they_leave_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tags = [f"t{n}" for n in range(40)]
    path = write(tmp_path / "run.jsonl", [done("a1", "accepted", tags=tags)])
    report(path, None, as_json=False)
    assert "the first 30 of 40" in capsys.readouterr().out
    written = (tmp_path / "run.report.html").read_text()
    assert "the first" not in written
    assert all(f'<td class="">{tag}</td>' in written for tag in tags)


@pytest.mark.slow
def test_no_record_marks_up_the_page_or_moves_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a|b\n# <b>\x1b[2J`*_x_\ud800"
    path = write(tmp_path / "run.jsonl", [done(None, "accepted") | {"id": name}])
    report(path, None, as_json=False)
    shown = "a|b # <b> [2J`*_x_ "
    assert f"  {shown}  accepted" in capsys.readouterr().out
    written = (tmp_path / "run.report.html").read_text()
    assert '<td class="">a|b # &lt;b&gt; [2J`*_x_ </td>' in written


def test_an_empty_file_is_a_report_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "run.jsonl", [])
    assert report(path, None, as_json=False) == 0
    assert "no records\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "records",
    [
        [bad("a1", 1, "no code")],
        [done("a1", None)],
        [done("a1", "cancelled")],
        [done("a1", "accepted", cpu_s=0.0)],
        [done("a1", "accepted", cpu_s=1e7)],
    ],
)
def test_a_page_of_hardly_anything(tmp_path: Path, records: list[Record]) -> None:
    path = write(tmp_path / "run.jsonl", records)
    page = tmp_path / "page.html"
    assert report(path, str(page), as_json=False) == 0
    assert "</html>" in page.read_text()


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (done("a1", "great"), r"'great' - at `\$.verdict`"),
        (done("a1", "\ud800"), r"'\\ud800'"),
        (done("a1", "accepted") | {"\ud800": 1}, r"'\\ud800'"),
        (done("a1", "accepted", line=1.5), r"got `float` - at `\$.line`"),
        (done("a1", "accepted", cpu_s=math.nan), r"at `\$.queued_s`"),
        (done("a1", "accepted", id=["a"]), r"got `array` - at `\$.id`"),
        (done("a1", "accepted", code_hash="xyz"), r"at `\$.code_hash`"),
        (done("a1", "rejected", messages=[3]), r"got `int` - at `\$.messages\[0\]`"),
    ],
)
def test_what_is_no_result_is_named(tmp_path: Path, record: Record, why: str) -> None:
    path = write(tmp_path / "run.jsonl", [done("a1", "accepted"), record])
    with pytest.raises(UsageError, match=f"record 2 is no result of a campaign: .*{why}"):
        report(path, None, as_json=False)
    assert [each.name for each in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_folder_is_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        report(name, None, as_json=False)
    with pytest.raises(UsageError, match="is a folder"):
        report(write(tmp_path / "run.jsonl", FIXTURE), name or ".", as_json=False)


@pytest.mark.slow
def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / os.fsdecode(b"\xff.jsonl"), FIXTURE)
    assert report(path, None, as_json=False) == 0
    assert "<title>Report on" in Path(path).with_suffix(".report.html").read_text()


@pytest.mark.slow
def test_nothing_that_is_read_is_written_over(tmp_path: Path) -> None:
    path = write(tmp_path / "run.html", FIXTURE)
    with pytest.raises(UsageError, match="would overwrite"):
        report(path, path, as_json=False)
    with pytest.raises(UsageError, match=r"cannot write .*nowhere"):
        report(path, str(tmp_path / "nowhere" / "page.html"), as_json=False)
    with pytest.raises(UsageError, match=r"missing\.jsonl"):
        report(str(tmp_path / "missing.jsonl"), None, as_json=False)
