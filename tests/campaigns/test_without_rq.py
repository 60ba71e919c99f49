"""A plain installation has no RQ: what does without it works, and the rest says what to install."""

from __future__ import annotations

import json
import sys

import pytest
from support.campaigns.records import done
from support.terminals import Terminal, ended

from leanq.errors import to_install

WITHOUT_RQ = (
    sys.executable,
    "-c",
    """
import sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rq":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusal())
import leanq
from leanq.cli import main
main()
""",
)


@pytest.mark.slow
def test_a_campaign_runs_and_is_reported(terminal: Terminal) -> None:
    code = "prelude\nimport Core\ntheorem t (p : Prop) (h : p) : p := h\n"
    terminal.file("data.jsonl", json.dumps({"id": 1, "code": code}))
    run = ("campaign", "run", "data.jsonl", "--out", "out.jsonl")
    ran = ended(terminal.start(*run, program=WITHOUT_RQ))
    assert ran.code == 0, ran.err
    assert ran.out.startswith("out.jsonl: 1 accepted in ")
    told = ended(terminal.start("campaign", "report", "out.jsonl", program=WITHOUT_RQ))
    assert told.code == 0, told.err
    assert "solved: 1 of 1 problem" in told.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("submit", "data.jsonl", "--out", "out.jsonl"),
        ("worker",),
        ("list",),
        ("show", "x"),
        ("retry", "x"),
    ],
)
def test_jobs_say_what_to_install(terminal: Terminal, arguments: tuple[str, ...]) -> None:
    terminal.file("data.jsonl", json.dumps(done("a1", "accepted")))
    terminal.environ["LEANQ_URL"] = "unix:///nowhere"
    said = ended(terminal.start("campaign", *arguments, program=WITHOUT_RQ))
    assert (said.code, said.out) == (2, "")
    expected = (
        f"leanq: campaigns as jobs need RQ, which is not installed: {to_install('campaigns')}"
    )
    assert said.err.splitlines() == [expected]
