"""The files of the page: nothing from elsewhere, nothing inline, libraries unchanged."""

from __future__ import annotations

import hashlib
import re

from support.paths import ROOT

PAGE = ROOT / "leanq" / "gateway" / "page"
VENDOR = PAGE / "static" / "vendor"


def test_vendored_libraries_are_what_their_note_says_and_have_their_licences() -> None:
    note = (VENDOR / "VERSIONS.md").read_text()
    rows = re.findall(r"\| `([^`]+)` \| (\S+) ([\d.]+), .* \| (\w+) \| `([0-9a-f]{64})` \|", note)
    files = {path.name for path in VENDOR.iterdir() if path.suffix in (".js", ".css")}
    assert {row[0] for row in rows} == files
    for name, _, _, licence, digest in rows:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
        text = VENDOR / f"LICENSE-{name.split('.')[0].removesuffix('-ext')}.txt"
        assert text.is_file() or (VENDOR / f"LICENSE-{name.split('.')[0]}.txt").is_file(), name
        assert licence in ("0BSD", "MIT")


def test_templates_have_no_inline_script_or_style_and_name_no_other_host() -> None:
    for path in (PAGE / "templates").rglob("*.html"):
        text = path.read_text()
        assert "http:" not in text.replace("http://www.w3.org", "")
        assert "https:" not in text
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text), path
        assert not re.findall(r"<script(?![^>]*\bsrc=)", text), path
        # What is not escaped has been rendered by another template of ours.
        for escaped_by_hand in re.findall(r"\{\{([^}]*)\|safe", text):
            assert escaped_by_hand.strip().startswith("parts"), path


def test_our_own_script_makes_no_code_and_no_markup_from_texts() -> None:
    for name in ("leanq.js", "theme.js"):
        text = (PAGE / "static" / name).read_text()
        for word in ("innerHTML", "outerHTML", "eval(", "insertAdjacent", "document.write", "://"):
            assert word not in text, (name, word)
