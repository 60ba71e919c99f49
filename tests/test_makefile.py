"""The targets that a newcomer calls first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

OLD = """#!/bin/sh
exec {python} -c 'import sys
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
