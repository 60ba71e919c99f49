"""The texts of tests/cheats as requests, and what their table says of each."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from typing import Any

from leanq.lean.environment import Environment, open_environment
from leanq.queue.requests import Request
from support.paths import TESTS

CHEATS = TESTS / "cheats"
TABLE: dict[str, dict[str, Any]] = tomllib.loads((CHEATS / "table.toml").read_text())


def text(name: str) -> str:
    # With the carriage returns that some have.
    return (CHEATS / f"{name}.lean").read_bytes().decode()


def target(name: str) -> str:
    row = TABLE[name]
    return f"prelude\nimport {row.get('library', 'Core')}\n{row['target']}"


def request(operation: str, name: str) -> Request:
    row = TABLE[name]
    allowed = tuple(row.get("allow", ()))
    if operation == "check":
        return Request(op="check", code=text(name), allow_axioms=allowed)
    holes = tuple(row.get("holes", ()))
    return Request(
        op="verify", code=text(name), target=target(name), holes=holes, allow_axioms=allowed
    )


def open_libraries(
    core: Environment, cache: Path, folder: Path, lean: str | None = None
) -> Environment:
    """An environment with what the texts import: Core, and what is compiled into ``folder``.

    ``lean`` is the value of ``--lean``, if it is not the wheel's.
    """
    variables = core.process_env()
    variables["LEAN_PATH"] += f":{folder}"
    for source in sorted((CHEATS / "library").glob("*.lean")):
        copy = folder / source.name
        copy.write_text(source.read_text())
        command = (*core.toolchain.command, "-o", f"{source.stem}.olean", source.name)
        subprocess.run(command, env=variables, cwd=folder, check=True, timeout=60)
        copy.unlink()
    return open_environment("cheats", folder, lean=lean, cache=cache, environ={})
