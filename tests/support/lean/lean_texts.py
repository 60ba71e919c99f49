"""Every Lean text of the repository: files, blocks of documents, and strings of the tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT, TESTS

_BLOCK = re.compile(r"^```lean\n(.*?)^```", re.MULTILINE | re.DOTALL)
_IS_LEAN = re.compile(
    r"^\s*(?:@\[.*\]\s*)?(?:private |noncomputable |unsafe |partial )*"
    r"(?:prelude|import|theorem|example|axiom|def|inductive|structure|instance|opaque|set_option)\b",
    re.MULTILINE,
)


def lean_texts() -> list[str]:
    """Each text once, in an order that does not change; none that UTF-8 cannot write, or of which
    Lean prints times."""
    found = dict.fromkeys(
        text for text in _found() if _IS_LEAN.search(text) and "profiler true" not in text
    )
    return [text for text in found if text.encode(errors="ignore").decode() == text]


def _found() -> Iterator[str]:
    for folder in (ROOT / "examples", ROOT / "bench", ROOT / "leanq", TESTS):
        for path in sorted(folder.rglob("*.lean")):
            yield path.read_text()
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))):
        yield from _BLOCK.findall(path.read_text())
    for folder in (TESTS, ROOT / "bench"):
        for path in sorted(folder.rglob("*.py")):
            yield from _strings(path)


def _strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
