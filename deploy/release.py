"""``make release``: builds sdist and wheel, and tries both where there is no checkout.

With ``VERSION=X.Y.Z`` the changelog's "Unreleased" becomes that version's section, and files that
name the image name the new tag. The commit, the tag and the upload are left to you; the last lines
say how. Without it nothing is written but ``dist/``: a trial, or the build of a tag.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"
# They name the image that the project itself builds, by its tag.
NAMES_THE_IMAGE = ("compose.yaml", "Dockerfile", "deploy", "docs", "k8s")
_IMAGE = r"(?P<before>\bleanq(?:-mathlib)?:|\bnewTag: |\"LEANQ_VERSION\": \{\"default\": \")"
_UNRELEASED = "## Unreleased\n"
_BUILD_S = 300.0
_INSTALL_S = 600.0
_DEMO_S = 300.0


class Refused(Exception):  # noqa: N818
    """The release cannot go on; says why, and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a release; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--version", default="", help="X.Y.Z; by default what Git's tag says")
    options = parser.parse_args(arguments)
    try:
        release(options.version)
    except Refused as why:
        print(f"release: {why}", file=sys.stderr)
        return 1
    return 0


def release(version: str) -> None:
    """Builds and tries a release; raises Refused, and then no file of the checkout is changed."""
    if not version:
        version = build(os.environ)
        try_everywhere(version)
        print(f"dist/ has leanq {version}; it works.")
        return
    refuse_what_is_not_next(version)
    before = {path: path.read_text() for path in (CHANGELOG, *files_that_name_the_image())}
    try:
        CHANGELOG.write_text(with_section(before[CHANGELOG], version, datetime.date.today()))
        for path in files_that_name_the_image():
            path.write_text(with_image(path.read_text(), version))
        # The tag comes last, so the build cannot read it yet.
        build(os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_LEANQ": version})
        try_everywhere(version)
    except BaseException:
        for path, text in before.items():
            path.write_text(text)
        raise
    print(
        f"dist/ has leanq {version}; it works. Look at `git diff`, then:\n"
        f"  git commit -am 'Release {version}' && git tag -a v{version} -m 'leanq {version}'\n"
        "  git push --follow-tags && twine upload dist/*"
    )


# What is written


def refuse_what_is_not_next(version: str) -> None:
    """Raises Refused unless ``version`` can be released from this checkout as it stands."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise Refused(f"VERSION is X.Y.Z, with rcN behind it at most, got '{version}'")
    if run("git", "status", "--porcelain", cwd=ROOT):
        raise Refused("the checkout has changes; commit them or put them aside")
    if run("git", "tag", "--list", f"v{version}", cwd=ROOT):
        raise Refused(f"there is a tag v{version}; check it out and run `make release` as it is")


def with_section(changelog: str, version: str, day: datetime.date) -> str:
    """Returns the changelog with what is unreleased as a version's section."""
    before, found, rest = changelog.partition(_UNRELEASED)
    unreleased = rest.partition("\n## ")[0].strip()
    if not found or not unreleased:
        raise Refused(f"CHANGELOG.md has nothing below '{_UNRELEASED.strip()}' to release")
    return f"{before}{_UNRELEASED}\n## {version} ({day.isoformat()})\n{rest}"


def files_that_name_the_image() -> list[Path]:
    """Returns each file that names the image by a tag of ours."""
    listed = run("git", "ls-files", *NAMES_THE_IMAGE, cwd=ROOT).splitlines()
    return [
        path for name in listed if image_tags((path := ROOT / name).read_text("utf-8", "replace"))
    ]


def image_tags(text: str) -> set[str]:
    """Returns the tags of ours that a text names."""
    return {match["tag"] for match in re.finditer(rf"{_IMAGE}(?P<tag>\d+\.\d+\.\d+\w*)", text)}


def with_image(text: str, version: str) -> str:
    """Returns a text that names the image with a version's tag instead."""
    return re.sub(rf"{_IMAGE}\d+\.\d+\.\d+\w*", rf"\g<before>{version}", text)


# What is built and tried


def build(environ: Mapping[str, str]) -> str:
    """Builds both files into an empty ``dist/``, the wheel from the sdist; returns the version."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", dist, ROOT, environ=environ, timeout_s=_BUILD_S)
    built = sorted(dist.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    [wheel] = dist.glob("*.whl")
    print(f"built {', '.join(path.name for path in built)}; twine has no complaint", flush=True)
    return wheel.name.split("-")[1]


def try_everywhere(version: str) -> None:
    """Tries both files on each Python of the project's that this machine has."""
    tried = 0
    for minor in supported():
        python = interpreter(minor)
        if python is None:
            print(f"Python {minor}: not tried, since this machine has none", flush=True)
            continue
        for requirement, hint in requirements(version):
            with tempfile.TemporaryDirectory(prefix="leanq-release-") as folder:
                try_one(python, requirement, hint, version, Path(folder))
        said = run(python, "--version").strip()
        print(f"{said}: wheel and sdist, each in an environment of its own", flush=True)
        tried += 1
    if not tried:
        raise Refused(f"there is no Python of {', '.join(supported())} on PATH or below pyenv")


def requirements(version: str) -> Iterator[tuple[list[str | Path], str]]:
    """Yields what pip is asked for, as from an index and as a file, each with leanq's own hint."""
    dist = ROOT / "dist"
    as_from_an_index = ["--only-binary=leanq", f"--find-links={dist}", f"leanq[local]=={version}"]
    yield [*as_from_an_index], "pip install 'leanq[server]'"
    [sdist] = dist.glob("*.tar.gz")
    yield [f"leanq[local] @ {sdist.as_uri()}"], f"pip install 'leanq[server] @ {sdist.as_uri()}'"


def try_one(
    python: Path, requirement: Sequence[str | Path], hint: str, version: str, folder: Path
) -> None:
    """Installs into a new environment and runs the demo there; AssertionError or Refused."""
    # Neither this checkout nor a queue of the caller's.
    environ = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("PYTHON", "LEANQ", "VIRTUAL_ENV"))
    }
    environ |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    made = folder / "venv" / "bin" / "python"
    run(python, "-m", "venv", "--without-pip", folder / "venv", environ=environ)
    pip = (sys.executable, "-m", "pip", "--python", made, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", *requirement, timeout_s=_INSTALL_S)
    leanq = made.with_name("leanq")
    said = run(leanq, "--version", environ=environ, cwd=folder)
    expect(f"leanq, version {version}\n", said)
    program = "import leanq.errors; print(leanq.__file__); print(leanq.errors.to_install('server'))"
    place, hinted = run(made, "-c", program, environ=environ, cwd=folder).splitlines()
    expect(hint, hinted)
    if not Path(place).is_relative_to(folder):
        raise Refused(f"leanq was imported from {place}, not from {folder}")
    demo(leanq, environ, folder)


def demo(leanq: Path, environ: Mapping[str, str], folder: Path) -> None:
    """Submits the sdist's examples; each first line says which verdict it comes to."""
    [sdist] = (ROOT / "dist").glob("*.tar.gz")
    wanted = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = Path(member.name)
            if path.match("leanq-*/examples/*.lean") and (content := archive.extractfile(member)):
                text = content.read().decode()
                (folder / path.name).write_text(text)
                wanted[path.name] = text.split()[1].rstrip(":").lower()
    command = (leanq, "submit", "--json", *sorted(wanted))
    said = run(*command, environ=environ, cwd=folder, timeout_s=_DEMO_S, codes=(1,))
    got = {each["file"]: each["verdict"] for each in map(json.loads, said.splitlines())}
    expect(wanted, got)


def supported() -> list[str]:
    """Returns the versions of Python that the metadata names, as ``3.11``."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    return re.findall(r"Python :: (3\.\d+)\b", "\n".join(classifiers))


def interpreter(minor: str) -> Path | None:
    """Returns a Python of this version on PATH or below pyenv, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{minor}")
    for python in [*([Path(on_path)] if on_path else []), *pyenv.glob(f"{minor}.*/bin/python")]:
        # pyenv puts programs on PATH that find no Python.
        done = subprocess.run([python, "-c", "import venv"], capture_output=True, check=False)
        if done.returncode == 0:
            return python
    return None


def expect(wanted: object, got: object) -> None:
    """Raises Refused unless both are equal."""
    if got != wanted:
        raise Refused(f"expected {wanted!r}, got {got!r}")


def run(
    *command: str | Path,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 60.0,
    codes: Sequence[int] = (0,),
) -> str:
    """Returns what a program prints; raises Refused with all of it after another exit code."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            env=environ,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{' '.join(words)}: not within {timeout_s:g} s") from None
    if done.returncode not in codes:
        raise Refused(f"{' '.join(words)}: code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
