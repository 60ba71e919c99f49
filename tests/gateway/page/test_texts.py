"""Texts of anybody's on the page: always whole, never markup, with nothing in them unseen."""

from __future__ import annotations

import html
import re
import unicodedata
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateway.pages import HOSTILE

from leanq.gateway.page.requests import listing
from leanq.gateway.page.texts import LONGEST_LINE, marked_line, visible
from leanq.queue.requests import Message, Reply

ODD = "\u202e\u2066\u200b\ufeff\u2028\x00\x1b\r\x85\ud800\U000e0041<>&\"'é∀\t"


class Reader(HTMLParser):
    """Reads HTML as a browser does: its tags, and its text as it is shown."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.shown: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {name for name, _ in attrs}
        assert names <= {"class", "title"}, names
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.shown.append(data)

    @property
    def text(self) -> str:
        """The text, with what was marked as unseen in its place again."""
        parts = (re.sub(r"^U\+([0-9A-F]+)$", lambda m: chr(int(m[1], 16)), s) for s in self.shown)
        return "".join(parts)


@given(st.text(alphabet=st.one_of(st.sampled_from(ODD), st.characters(codec=None))))
def test_a_text_is_whole_and_nothing_in_it_is_markup_or_unseen(text: str) -> None:
    made = str(visible(text))
    reader = Reader(made)
    assert set(reader.tags) <= {"span"}
    # A text that looks like a mark of ours is the one thing that reading back would change.
    if "U+" not in text:
        assert reader.text == text
    unseen = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert not [c for c in made if unicodedata.category(c) in unseen and c not in "\n\t"]


@given(
    st.text(alphabet=st.sampled_from(ODD + "abc")),
    st.lists(
        st.tuples(st.integers(-3, 20), st.one_of(st.none(), st.integers(-3, 20)), st.just("error")),
        max_size=5,
    ),
)
def test_marks_change_nothing_of_a_line(
    line: str, spans: list[tuple[int, int | None, str]]
) -> None:
    reader = Reader(str(marked_line(line, spans)))
    assert reader.text == line
    assert set(reader.tags) <= {"span", "mark"}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts(text: str) -> None:
    made = str(visible(text))
    assert Reader(made).text == text
    assert "<script" not in made
    assert "<img" not in made
    assert not set(made) & set("\u202e\u2066\u200b\ufeff\u2028\x1b\x7f\r")


def test_a_mark_is_where_the_message_is() -> None:
    line = "∀ x, <b> y"
    assert str(marked_line(line, [(5, 8, "error")])) == (
        '∀ x, <mark class="error">&lt;b&gt;</mark> y'
    )
    # The graver one comes first in the list.
    both = marked_line("abc", [(1, 2, "error"), (0, None, "warning")])
    assert html.unescape(re.sub(r' class="(\w)\w*"', r":\1", str(both))) == (
        "<mark:w>a</mark><mark:e>b</mark><mark:w>c</mark>"
    )


def test_what_is_too_much_is_cut_and_told() -> None:
    line = "x" * 1_000_000
    made = marked_line(line, [(0, None, "error")])
    assert len(made) < LONGEST_LINE + 500
    assert "… 998,000 more characters" in made
    assert "… 5 more characters" in visible("abcdefgh", 3)


def test_of_ten_thousand_messages_the_gravest_are_shown() -> None:
    messages = [Message("information", n % 50 + 1, 0, f"note {n}") for n in range(9_000)]
    messages += [Message("error", 40, 2, f"fault {n}", 40, 5) for n in range(150)]
    messages += [Message("warning", 99, 0, "beyond the text")] * 10
    made = listing("line\n" * 50, Reply("rejected", tuple(messages)))
    assert len(made.lines) == 51
    assert len(made.lines[39].messages) >= 150
    assert len(made.elsewhere) == 10
    assert made.cut_messages == 9_160 - 200
    assert "<mark" in made.lines[39].text
    assert listing("a\n" * 100_000, None).cut_lines == 98_001
