"""Another Lean over a full library of Lean 4.28: its kernel images, and proofs of the real 4.28.

`lean28/make` writes the compiled files. The real Lean 4.28 made them, as files of the module
system, so all names are private.
"""

from __future__ import annotations

import lzma
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.lean.libraries import Library, judged_folder
from support.lean.other_lean import other_lean

from leanq.lean.environment import open_environment
from leanq.lean.judge.judge_client import Judgement, Judges
from leanq.lean.run.image import Image
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.text import Header

LIMITS = Limits(cpu_s=120.0, wall_s=400.0, memory_bytes=4 << 30)
FILES = Path(__file__).parent / "lean28"
PARTS = (".olean", ".olean.server", ".olean.private")
HEADER = Header("", 0, (), is_module=True, is_prelude=False)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judges(
    library: Library, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Judges]:
    folder = judged_folder()
    if library.layout != "plain" or folder is None:
        pytest.skip("one library of Lean 4.28 is enough")
    program = other_lean(tmp_path_factory.mktemp("other") / "toolchain")
    cache = tmp_path_factory.mktemp("cache")
    environment = open_environment("lean28", folder, lean=str(program), cache=cache, environ={})
    made = Judges(environment, slots=1, prints=False)
    yield made
    await made.close()


def parts(name: str) -> list[bytes]:
    return [lzma.decompress((FILES / f"{name}{part}.xz").read_bytes()) for part in PARTS]


async def judged(judges: Judges, name: str) -> Judgement:
    return await judges.judge(HEADER, parts(name), ("", ""), LIMITS)


async def test_the_library_means_what_the_kernel_takes_for_granted(judges: Judges) -> None:
    assert await judges.unavailable() == ""


async def test_proofs_of_the_real_lean_are_proved(judges: Judges) -> None:
    found = await judged(judges, "ok")
    assert (found.proved, found.disagrees, found.kernel) == (True, "", "4.35.0"), found
    assert found.survey.axioms == frozenset()
    names = {each.rpartition(".")[2] for each in found.theorems}
    assert {"t_omega", "t_size", "t_usepriv", "t_decide"} <= names


async def test_what_a_proof_of_the_real_lean_rests_on_is_found(judges: Judges) -> None:
    found = await judged(judges, "axiom")
    assert (found.proved, found.survey.axioms) == (True, {("_private", "axiom", 0, "bad")})
    found = await judged(judges, "sorry")
    assert found.proved
    assert ("sorryAx",) in found.survey.behind_any


async def test_a_proof_of_another_statement_is_none(judges: Judges) -> None:
    """A word of the real file is changed: the proof of `t_size` stands for that of `t_log`."""
    file = parts("ok")
    image = Image(file)
    constants = image.constants()
    size, log = (constants["_private", "ok", 0, each] for each in ("t_size", "t_log"))
    start = int.from_bytes(file[2][80:88], "little") - image.base
    at = 8 * (log.value + 2) - start
    assert at > 0
    word = image.words[size.value + 2].to_bytes(8, "little")
    file[2] = file[2][:at] + word + file[2][at + 8 :]
    found = await judges.judge(HEADER, file, ("", ""), LIMITS)
    assert not found.proved
    assert "t_log" in found.disagrees + found.text
