"""Lean's options of an environment: arguments ``-DNAME=VALUE`` for each of its texts.

A text's own ``set_option`` wins. As for Lake, ``weak.NAME`` counts where a library declares NAME,
and is passed over elsewhere.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from leanq.errors import ToolchainError
from leanq.lean.toolchain import Toolchain, ask

_SORRIES = "a sorry has to be a warning, or no target and no goal is left"
_TIMES = "messages would differ from run to run; use leanq profile"
# With one of these values leanq could not tell what Lean says of a text.
_UNSERVED = {
    ("warningAsError", "true"): _SORRIES,
    ("warn.sorry", "false"): _SORRIES,
    ("profiler", "true"): _TIMES,
    ("trace.profiler", "true"): _TIMES,
}


def ordered(options: Iterable[str]) -> tuple[str, ...]:
    """Returns options in the order of their names, of several for a name the last. Raises
    ToolchainError if one is none."""
    found = {}
    for option in options:
        name, equals, _ = option.partition("=")
        if not (equals and name.startswith("-D") and name[2:]):
            raise ToolchainError(f"{option!r} is no option of Lean; write -Dname=value")
        found[name] = option
    return tuple(found[name] for name in sorted(found))


def shown(options: Sequence[str]) -> list[str]:
    """Returns options for people, as ``NAME=VALUE``."""
    return [option.removeprefix("-D") for option in options]


def of_project(name: str, project: Path | None) -> list[str]:
    """Returns the ``leanOptions`` of a Lake project's ``lakefile.toml``. Raises ToolchainError if
    they cannot be read; ``name`` is the environment's."""
    instead = f"name each option with --env-option {name}:OPTION=VALUE instead"
    if project is None:
        raise ToolchainError(
            f"environment {name}: --env-options-of-project reads the lakefile.toml of a Lake "
            f"project, and this is none; {instead}"
        )
    file = project / "lakefile.toml"
    # Lake prefers it where a project has both.
    if (project / "lakefile.lean").exists():
        raise ToolchainError(
            f"environment {name}: --env-options-of-project reads a lakefile.toml, and {project} "
            f"has a lakefile.lean, which is a program; {instead}"
        )
    try:
        declared = tomllib.loads(file.read_text()).get("leanOptions", {})
        return [f"-D{option}={value}" for option, value in _flat(declared)]
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, TypeError) as error:
        why = str(error)
    raise ToolchainError(
        f"environment {name}: the leanOptions of {file} cannot be read: {why}; {instead}"
    )


def _flat(declared: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yields options and values of a table, in which a dotted name is a table in a table; or of
    an array of tables with ``name`` and ``value``, as Lake takes them, too. Raises TypeError."""
    if isinstance(declared, list) and not above:
        for each in declared:
            if not isinstance(each, Mapping) or not isinstance(each.get("name"), str):
                raise TypeError(f"expected a name and a value, got {each!r:.100}")
            yield from _flat(each.get("value"), each["name"])
    elif isinstance(declared, Mapping):
        for name, value in declared.items():
            yield from _flat(value, f"{above}.{name}" if above else name)
    elif above and isinstance(declared, bool):
        yield above, str(declared).lower()
    elif above and (isinstance(declared, str) or (isinstance(declared, int) and declared >= 0)):
        yield above, str(declared)
    else:
        wanted = f"{above} = true, false, a natural number or a text" if above else "a table"
        raise TypeError(f"expected {wanted}, got {declared!r:.100}")


def check(
    name: str, toolchain: Toolchain, options: Sequence[str], environ: Mapping[str, str]
) -> None:
    """Raises ToolchainError unless an environment can have these options: Lean knows each, and
    its value. Each text would else be wrong."""
    for option in shown(options):
        key, _, value = option.partition("=")
        if why := _UNSERVED.get((key.removeprefix("weak."), value)):
            raise ToolchainError(f"environment {name}: leanq cannot serve {option}: {why}")
    with tempfile.TemporaryDirectory(prefix="leanq-") as scratch:
        Path(scratch, "T.lean").write_text("prelude\n")
        done = ask([*toolchain.command, *options, "T.lean"], environ, Path(scratch))
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).decode(errors="replace").split())
        _, _, why = said.rpartition("error: ")
        raise ToolchainError(
            f"environment {name}: {toolchain} does not take its options {', '.join(shown(options))}"
            f": {why[:500]}. Lean has to know each option itself; write weak.OPTION for one that "
            "a library declares"
        )
