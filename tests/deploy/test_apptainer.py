"""Apptainer's definition file, as data: no engine is needed."""

from __future__ import annotations

import re
import shlex
import subprocess

from support.fleet.manifests import ROOT, parse

DEFINITION = (ROOT / "deploy" / "apptainer" / "worker.def").read_text()
PAGE = (ROOT / "docs" / "apptainer.md").read_text()


def section(name: str) -> str:
    """The lines of a section, without its comments."""
    body = re.split(r"(?m)^%", DEFINITION.partition(f"\n%{name}\n")[2])[0]
    return "\n".join(line for line in body.splitlines() if not line.lstrip().startswith("#"))


def test_each_argument_has_a_default_and_is_used() -> None:
    defaults = dict(line.split("=", 1) for line in section("arguments").split())
    assert set(re.findall(r"\{\{ (\w+) \}\}", DEFINITION)) == set(defaults)
    # The base is the Dockerfile's.
    assert f"\nFROM {defaults['BASE']}\n" in (ROOT / "Dockerfile").read_text()
    assert set(re.findall(r"--build-arg (\w+)=", PAGE)) == set(defaults) - {"BASE"}


def test_the_shell_understands_each_script() -> None:
    for name in ("post", "environment", "runscript", "test"):
        script = section(name)
        assert script.strip()
        done = subprocess.run(
            ["sh", "-n"], input=script, capture_output=True, text=True, timeout=10, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), name


def test_what_runs_is_a_command_with_the_pages_options() -> None:
    words = shlex.split(section("runscript"))
    assert words[:3] == ["exec", "leanq", "worker"]
    assert words[-1] == "$@"
    [line] = re.findall(r"(?m)^exec apptainer run .* worker\.sif ((?:.*\\\n)*.*)$", PAGE)
    command, options = parse([*words[2:-1], *shlex.split(line.replace("\\\n", " "))])
    assert command == "worker"
    assert options["--env"] == "{{ NAME }}=/srv/lean"
    assert options["--grace"] == "20"


def test_the_compiler_is_removed_as_from_the_other_image() -> None:
    [removed] = re.findall(r"rm -rf bin/clang.*", section("post"))
    assert removed.removesuffix(" \\") in (ROOT / "Dockerfile").read_text()
