"""The report as a page, and its figures by tag and by problem."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from leanq.campaigns.report.figures import summarise
from leanq.campaigns.report.outcomes import outcomes
from leanq.campaigns.report.page import page
from leanq.campaigns.report.sections import sections

HOSTILE = '<img src=x onerror="alert(1)">&</script>'


def record(name: str, verdict: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "line": 1, "verdict": verdict, "attempts": 1, **more}


def made(records: list[dict[str, Any]]) -> str:
    found = summarise(outcomes(records, "x"))
    return page(HOSTILE, HOSTILE, found, sections(found, 100))


class Reader(HTMLParser):
    """Whether the tags nest, and which there are."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_nothing_in_a_record_marks_the_page_up_and_nothing_is_fetched() -> None:
    names = [f"{HOSTILE}{n}" for n in range(3)]
    text = made(
        [
            record(name, "accepted" if n else "rejected", sample=n, problem=names[0], tags=names)
            for n, name in enumerate(names)
        ]
    )
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert "img" not in reader.seen
    assert reader.seen.count("script") == 0
    assert not re.search(r"https?:|src=[^x]|url\(", text)
    assert "default-src 'none'" in text
    assert text.count('<g class="point"') == 2


def test_an_empty_file_has_a_page() -> None:
    reader = Reader()
    reader.feed(made([]))
    assert reader.open == []
    assert "svg" not in reader.seen


def test_tags_and_problems_are_counted() -> None:
    records = [
        record("a", "accepted", sample=0, problem="a", tags=["x", "y"]),
        record("a", "rejected", sample=1, problem="a", tags=["x", "y"]),
        record("b", "rejected", tags=["x"]),
        record("c", "accepted"),
    ]
    found = summarise(outcomes(records, "x"))
    assert [(t.tag, t.problems, t.samples, t.solved) for t in found.tags] == [
        *(("x", 2, 3, 1), ("y", 1, 2, 1)),
    ]
    assert found.tags[0].pass_1
    assert found.tags[0].pass_1.estimate == pytest.approx(0.25)
    assert [(t.name, t.samples, t.accepted) for t in found.tried] == [("a", 2, 1)]
