"""The real kimina-client of the package index, unmodified, against real Lean."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fleets import working
from support.gateway.gateways import Scripted, new_gateway
from support.gateway.kimina_reading import documented
from support.paths import ROOT, SAMPLES, SUPPORT
from support.queue.counted import leave_out
from support.required import missing

from leanq.queue.settings import Settings

pytestmark = pytest.mark.slow

PROGRAM = SUPPORT / "gateway" / "kimina_program.py"
OLDEST, NEWEST = "0.1.3", "0.2.1"


@pytest.fixture(scope="module", params=[OLDEST, NEWEST])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one version of the client, whose dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp(f"kimina-{request.param}")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    wanted = ("--no-deps", "--target", str(folder), f"kimina-client=={request.param}")
    done = subprocess.run(
        [*pip, "install", "--timeout=10", "--retries=1", *wanted],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    if done.returncode:
        missing("kimina-client from a package index")
    # Only its benchmark uses this library, which is large; 0.1.3 imports it at once.
    if importlib.util.find_spec("datasets") is None:
        (folder / "datasets.py").write_text("load_dataset = load_dataset_builder = None\n")
    return folder


async def ask(
    client: Path, kind: str, url: str, snippets: list[tuple[str, str]], **options: Any
) -> list[dict[str, Any]]:
    """What the client got for the snippets."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAM), kind, url),
        env={**os.environ, "PYTHONPATH": str(client)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(200):
        sent = json.dumps([snippets, options]).encode()
        out, err = await process.communicate(sent)
    assert process.returncode == 0, err.decode()
    results: list[dict[str, Any]] = json.loads(out)
    return results


def test_the_page_names_what_the_client_imports_and_does_not_ask_for(client: Path) -> None:
    sources = "".join(file.read_text() for file in (client / "kimina_client").rglob("*.py"))
    [about] = client.glob("kimina_client-*.dist-info/METADATA")
    asks = "requires-dist: pygments" in about.read_text().lower()
    assert "import pygments" in sources or "from pygments" in sources
    assert not asks
    assert "pip install kimina-client pygments" in (ROOT / "docs" / "http.md").read_text()


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_samples_get_what_the_table_says(
    client: Path, kind: str, fleet: Settings
) -> None:
    names = ("and_swap", "heartbeats", "incomplete", "silent_sorry", "syntax_error", "wrong")
    codes = {name: (SAMPLES / f"{name}.lean").read_text() for name in names}
    snippets = list(codes.items())
    says = documented()
    async with new_gateway(fleet) as gateway:
        ends = {name: await gateway.lean.check(code) for name, code in snippets}
        assert {"accepted", "incomplete", "rejected"} <= {end.verdict for end in ends.values()}
        results = await ask(client, kind, gateway.url, snippets, test=True)
        assert {result["id"]: result["status"] for result in results} == {
            name: says[str(end.verdict)] for name, end in ends.items()
        }
        # Lean reads the first one in less than the least budget, 10 ms.
        [late] = await ask(client, kind, gateway.url, snippets[1:2], timeout=0)
        assert late["status"] == "timeout_error"
        blank = [("empty", ""), ("blank", " \n\n")]
        results = await ask(client, kind, gateway.url, blank)
        assert [result["status"] for result in results] == ["valid", "valid"], results


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_thousand_texts_with_failures_between_them_have_their_own_ends(
    client: Path, kind: str, settings: Settings
) -> None:
    says = documented()
    words = [list(says)[number % len(says)] for number in range(1000)]
    snippets = [(str(number), f"-- {word} {number}") for number, word in enumerate(words)]
    leave_out(settings.prefix)
    async with working(settings, Scripted(), slots=16), new_gateway(settings) as gateway:
        results = await ask(
            client, kind, gateway.url, snippets, batch_size=100, max_workers=4, timeout=5
        )
    # The client that is not asynchronous gives batches in the order in which they ended.
    assert {result["id"]: result["status"] for result in results} == {
        name: says[word] for (name, _), word in zip(snippets, words, strict=True)
    }
