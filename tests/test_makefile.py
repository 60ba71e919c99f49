"""The targets that a newcomer calls first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

OLD = """#!/bin/sh
exec '{python}' -c 'import sys
sys.version_info, sys.version = (3, 10, 0), "3.10.0 (old)"
exec(sys.argv[1])' "$2"
"""


def test_an_old_python_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    old, made = tmp_path / "python3.10", tmp_path / "venv"
    old.write_text(OLD.format(python=sys.executable))
    old.chmod(0o755)
    command = ["make", "demo", f"VENV={made}", f"PYTHON={old}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"leanq needs Python 3.11 or newer, and {old} is 3.10.0" in done.stderr
    assert not made.exists()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("NoEngine('no podman')", 0),
        ("OutOfTime('the rest')", 0),
        ("Unavailable('no wheel')", 1),
    ],
)
def test_a_course_that_is_skipped_passes_only_without_an_engine(
    tmp_path: Path, end: str, code: int
) -> None:
    program = f"""
import sys
from engines.machine import NoEngine, OutOfTime, Unavailable, in_namespaces
def course(folder):
    raise {end}
sys.exit(in_namespaces("none", course))
"""
    inside = {"ENGINES_FOLDER": str(tmp_path), "ENGINES_WITHIN_S": "0"}
    inside["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=os.environ | inside, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.startswith("SKIPPED: ")) == (code, True), done.stderr
