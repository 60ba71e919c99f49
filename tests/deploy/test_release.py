"""``make release``: what it writes, and what it refuses. ``test_package.py`` has what is built."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

import pytest
from support.fleet.manifests import RELEASE
from support.paths import ROOT

from deploy import release

DAY = datetime.date(2027, 1, 31)
CHANGES = "# Changelog\n\n## Unreleased\n\n- A change.\n\n## 0.1.0 (2026-12-01)\n\n- The first.\n"


def test_what_is_unreleased_becomes_the_versions_section() -> None:
    changed = release.with_section(CHANGES, "0.2.0", DAY)
    assert changed.startswith(
        "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2027-01-31)\n\n- A change.\n"
    )
    assert changed.endswith("- A change.\n\n## 0.1.0 (2026-12-01)\n\n- The first.\n")


@pytest.mark.parametrize("changelog", ["# Changelog\n", CHANGES.replace("- A change.\n", "")])
def test_a_release_without_a_change_is_refused(changelog: str) -> None:
    with pytest.raises(release.Refused, match="nothing below '## Unreleased'"):
        release.with_section(changelog, "0.2.0", DAY)


def test_the_changelog_can_be_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "\n## 9.9.9 (2027-01-31)\n" in release.with_section(text, "9.9.9", DAY)


def test_all_files_name_the_image_of_one_release() -> None:
    files = [
        path
        for name in release.NAMES_THE_IMAGE
        for path in (ROOT / name, *(ROOT / name).rglob("*"))
        if path.suffix in {".yaml", ".json", ".md", ""} and path.is_file()
    ]
    named = {path: tags for path in files if (tags := release.image_tags(path.read_text()))}
    assert {"compose.yaml", "Dockerfile", "docker-bake.json", "mathlib.md"} <= {
        path.name for path in named
    }
    for path, tags in named.items():
        assert tags == {RELEASE}, path
        moved = release.with_image(path.read_text(), "9.9.9")
        assert release.image_tags(moved) == {"9.9.9"}
        assert f"leanq:{RELEASE}" not in moved


@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "1.2.3.dev1", ""])
def test_a_version_that_is_none_is_refused(version: str) -> None:
    with pytest.raises(release.Refused, match=r"VERSION is X\.Y\.Z"):
        release.refuse_what_is_not_next(version)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a changelog, and nothing that could be built."""
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    (tmp_path / "compose.yaml").write_text("image: leanq:0.1.0\n")
    (tmp_path / ".gitignore").write_text("dist/\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "a change")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "CHANGELOG", tmp_path / "CHANGELOG.md")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    command = ["git", "-C", str(folder), *who, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_changes_and_a_tag_that_exists_are_refused(checkout: Path) -> None:
    release.refuse_what_is_not_next("0.2.0")
    git(checkout, "tag", "v0.2.0")
    with pytest.raises(release.Refused, match=r"there is a tag v0\.2\.0"):
        release.refuse_what_is_not_next("0.2.0")
    (checkout / "compose.yaml").write_text("image: leanq:0.1.1\n")
    with pytest.raises(release.Refused, match="the checkout has changes"):
        release.refuse_what_is_not_next("0.3.0")


def test_a_release_that_cannot_be_built_changes_nothing(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main(["--version", "0.2.0"]) == 1
    assert "-m build" in capsys.readouterr().err
    assert git(checkout, "status", "--porcelain") == ""
    assert (checkout / "CHANGELOG.md").read_text() == CHANGES
