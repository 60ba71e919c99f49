"""What the documents name exists, their links lead somewhere, and their Python runs."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.paths import ROOT, TESTS
from support.servers import Server

import leanq
import leanq.campaigns
import leanq.errors
import leanq.trainers
from leanq.cli import cli
from leanq.queue.settings import Settings, variables

DOCUMENTS = [ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md"]
DOCUMENTS += [ROOT / "tests" / "README.md", ROOT / "bench" / "README.md"]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
OF_A_SHELL = ("sh", "bash", "console")


def blocks(document: Path, *languages: str) -> Iterator[str]:
    """The fenced blocks of a document in one of these languages."""
    for match in re.finditer(r"(?ms)^```(\w*)\n(.*?)^```$", document.read_text()):
        if match[1] in languages:
            yield match[2]


def spoken(document: Path) -> Iterator[str]:
    """The command lines of leanq that a document names, in blocks and in sentences."""
    for block in blocks(document, *OF_A_SHELL):
        joined = block.replace("\\\n", " ")
        for line in joined.splitlines():
            line = re.sub(r"\s+#.*", "", line)
            yield from re.findall(r"(?:^|[|(]\s*|\$\()(leanq [^|)]*)", line.strip())
    prose = re.sub(r"(?ms)^```.*?^```$", "", document.read_text())
    yield from (" ".join(code.split()) for code in re.findall(r"`(leanq [^`]*)`", prose))


def fault(line: str) -> str | None:
    """What of a command line does not exist."""
    words = shlex.split(line.replace("'", ""), posix=True)[1:]
    command: click.Command = cli
    context = click.Context(command, info_name="leanq")
    while isinstance(command, click.Group):
        if not words or words[0].startswith("-") or words[0].isupper():
            return None
        names, *rest = words[0].split("|"), *words[1:]
        found = [command.get_command(context, name) for name in names]
        if not all(found):
            return f"{line!r}: no command {words[0]!r}"
        command, words = found[0] or command, list(rest)
    known = {name for parameter in command.params for name in parameter.opts}
    known |= {name for parameter in command.params for name in parameter.secondary_opts} | {
        "--help"
    }
    for word in words:
        name = word.partition("=")[0]
        if re.fullmatch(r"--[a-z-]+", name) and name not in known:
            return f"{line!r}: no option {name!r}"
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_and_option_exists(document: Path) -> None:
    faults = [found for line in spoken(document) if (found := fault(line))]
    assert faults == []


def test_a_command_that_does_not_exist_is_found() -> None:
    assert fault("leanq submit --env mathlib x.lean") is None
    assert fault("leanq dead list|show|retry|drop") is None
    assert fault("leanq submit --enviroment mathlib") is not None
    assert fault("leanq submitt x.lean") is not None


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_of_the_package_exists(document: Path) -> None:
    for path in re.findall(r"`(?:leanq|tests|deploy|bench|sim)/[\w/.-]+`", document.read_text()):
        assert (ROOT / path.strip("`")).exists(), path


@pytest.mark.parametrize(
    ("document", "most"),
    [
        ("DESIGN.md", 200),
        ("CHANGELOG.md", 120),
        ("bench/README.md", 300),
        *((f"docs/internals/{page.name}", 150) for page in (ROOT / "docs/internals").iterdir()),
    ],
)
def test_what_maintainers_read_stays_short(document: str, most: int) -> None:
    assert len((ROOT / document).read_text().splitlines()) <= most


def test_every_file_that_pages_of_internals_name_exists() -> None:
    files = [
        f"/{path}" for room in ("leanq", "tests", "deploy") for path in (ROOT / room).rglob("*.*")
    ]
    for page in (ROOT / "docs" / "internals").iterdir():
        for name in re.findall(r"`([\w/]+\.(?:lua|py))`", page.read_text()):
            assert any(file.endswith(f"/{name}") for file in files), f"{page.name}: {name}"


def homes() -> Iterator[tuple[str, list[str]]]:
    """Yields the rows of "to change X, go to Y": what is changed, and the paths to go to."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## To change X, go to Y")[2]
    for row in re.findall(r"(?m)^\| (.*) \| (.*) \|$", text.partition("\n## ")[0])[2:]:
        yield row[0], re.findall(r"`([^`]+)`", row[1])


def test_every_place_to_go_to_exists() -> None:
    places = [path for _, paths in homes() for path in paths]
    assert places
    lost = [
        path for path in places if not ((ROOT / "leanq" / path).exists() or (ROOT / path).exists())
    ]
    assert lost == []


@pytest.mark.parametrize(
    "thing",
    """
    counter, pause, deadline, phase, limit, wire field, reply field, metric
    environment variable, command, verdict, reason, Lua script, tactic step, cheat
    fairness rule, key in Redis, scaler's target, check of the judge
    """.strip()
    .replace("\n    ", ", ")
    .split(", "),
)
def test_what_is_often_changed_has_a_place_to_go_to(thing: str) -> None:
    assert [paths for change, paths in homes() if thing in change and paths]


def test_the_map_of_the_tests_has_each_helper_and_each_room() -> None:
    text = (TESTS / "README.md").read_text()
    helpers = {path.name for path in (TESTS / "support").rglob("[!_]*.py")}
    rooms = {f"{path.name}/" for path in TESTS.iterdir() if path.is_dir()} - {"__pycache__/"}
    named = set(re.findall(r"`([\w./]+)`", text))
    assert sorted((helpers | rooms) - named) == []
    gone = {name for name in named if name.endswith(".py")} - helpers - {"tests/conftest.py"}
    assert sorted(gone) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if list(blocks(d, "python"))], ids=lambda path: path.name
)
def test_every_python_block_runs_and_prints_what_it_says(
    document: Path,
    fleet: Settings,
    other: Server,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LEANQ_URL", fleet.url)
    monkeypatch.setenv("LEANQ_PREFIX", fleet.prefix)
    monkeypatch.setenv("LEANQ_CACHE", str(cache))
    # Campaigns are submitted, and no worker runs them.
    monkeypatch.setenv("LEANQ_CAMPAIGNS", str(tmp_path))
    # Some write files beside them.
    monkeypatch.chdir(tmp_path)
    theorem = "theorem t (p : Prop) (h : p) : p := "
    given = {"candidates": [f"{theorem}h", "nonsense"], "target": f"{theorem}sorry"}
    for block in blocks(document, "python"):
        # The fleet of the tests has the wheel's small core alone.
        code = block.replace(', env="mathlib"', "")
        # Example addresses are never connected to.
        code = code.replace("redis://10.0.0.3", fleet.url).replace(
            "redis://10.8.0.3", other.settings.url
        )
        assert "://10." not in code
        exec(compile(code, document.name, "exec"), {**given, "code": f"{theorem}h"})
        printed = capsys.readouterr().out
        said = [line[2:] for line in block.splitlines() if line.startswith("# ")]
        assert not said or printed.splitlines() == said


def test_the_page_of_settings_is_made_from_their_declarations() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    table = page.split("<!-- settings -->\n")[1].split("<!-- /settings -->")[0]
    rows = (
        f"| `{name}` | {meaning} | {default or 'none'} |\n"
        for name, meaning, default in variables()
    )
    assert table == "| variable | meaning | default |\n| --- | --- | --- |\n" + "".join(rows)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_variable_that_a_document_names_is_read(document: Path) -> None:
    of_tests = {"LEANQ_CHEATS_ENV", "LEANQ_TEST_LIBRARY", "LEANQ_TEST_SERVER"}
    known = {name for name, _, _ in variables()} | of_tests
    assert set(re.findall(r"LEANQ_[A-Z_]+[A-Z]", document.read_text())) <= known


def test_the_api_page_has_everything_that_leanq_exports() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    described = re.findall(r"(?m)^::: (leanq[.\w]*)\.(\w+)$", page)
    assert len(described) == len(set(described))
    rooms = (leanq, leanq.campaigns, leanq.trainers)
    public = {(room.__name__, name) for room in rooms for name in room.__all__}
    kinds = {name for name, kind in vars(leanq.errors).items() if inspect.isclass(kind)}
    others = {("leanq.errors", name) for name in kinds - set(leanq.__all__)}
    assert set(described) == public | others
    cells = re.findall(r"(?m)^\| (`[^|]*) \|", page)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(leanq.__all__)
