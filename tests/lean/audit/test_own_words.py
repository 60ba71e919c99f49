"""The words by which an environment's own libraries let a text run programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.images import Lean
from support.sites import Site, check

from leanq.lean.audit.own_words import own_words
from leanq.lean.environment import open_environment

LIBRARY = """prelude
import Core
namespace Lean.Meta
opaque {function} : Nat
end Lean.Meta
syntax (name := mine) "run_mine " term " at " term : term
syntax (name := sign) "⊞" term : term
theorem own : True := True.intro
"""


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(tmp_path_factory.mktemp("lean"))


def test_words_are_those_of_modules_that_evaluate(lean: Lean, tmp_path: Path) -> None:
    assert own_words((tmp_path / "nowhere", tmp_path)) == frozenset()
    lean.compile(LIBRARY.format(function="harmless"), name="Own", folder=tmp_path)
    assert own_words((tmp_path,)) == frozenset()
    lean.compile(LIBRARY.format(function="evalExpr"), name="Own", folder=tmp_path)
    assert own_words((tmp_path,)) == {"run_mine"}
    # Another library's words may be known already, and a file may be damaged.
    (tmp_path / "Own.olean").rename(tmp_path / "Mathlib.olean")
    (tmp_path / "Other.olean").write_bytes(b"olean\x02 \0evalExpr\0")
    assert own_words((tmp_path,)) == frozenset()


@pytest.mark.slow
async def test_a_text_with_such_a_word_is_unverified(
    lean: Lean, site: Site, tmp_path: Path
) -> None:
    lean.compile(LIBRARY.format(function="evalExpr"), name="Own", folder=tmp_path)
    (tmp_path / "Own.lean").unlink()
    cache = lean.folder / "cache"
    driver = await site.driver(open_environment("own", tmp_path, cache=cache, environ={}))
    for comment, verdict in (("run_mine x at y", "unverified"), ("run_mined", "accepted")):
        code = f"prelude\nimport Own\n-- {comment}\ntheorem t : True := own\n"
        assert (await driver.run(check(code))).verdict == verdict
