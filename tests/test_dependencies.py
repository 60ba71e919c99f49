"""What leanq imports: all of it declared, and by the extra that the importing part belongs to."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from support.paths import ROOT
from support.required import missing

from leanq.errors import to_install

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Only these may import at their top what an extra brings; all others work without any extra.
PARTS = {
    "campaigns/rq_job.py": "campaigns",
    "campaigns/rq_queue.py": "campaigns",
    "campaigns/rq_worker.py": "campaigns",
    "fleet/scaler/kubernetes.py": "k8s",
    "gateway/access.py": "server",
    "gateway/app.py": "server",
    "gateway/batches.py": "server",
    "gateway/bodies.py": "server",
    "gateway/connections.py": "server",
    "gateway/interface.py": "server",
    "gateway/kimina.py": "server",
    "gateway/limits.py": "server",
    "gateway/logs.py": "server",
    "gateway/metrics.py": "server",
    "gateway/operation_routes.py": "server",
    "gateway/operations.py": "server",
    "gateway/page/actions.py": "server",
    "gateway/page/forms.py": "server",
    "gateway/page/looks.py": "server",
    "gateway/page/reads.py": "server",
    "gateway/page/requests.py": "server",
    "gateway/page/routes.py": "server",
    "gateway/page/sections.py": "server",
    "gateway/page/sessions.py": "server",
    "gateway/page/texts.py": "server",
    "gateway/problems.py": "server",
    "gateway/server.py": "server",
    "gateway/v1.py": "server",
    "gateway/v1_bodies.py": "server",
    "trainers/mcp_server.py": "server",
    "trainers/openenv_server.py": "openenv",
    "trainers/reward_server.py": "server",
    "trainers/verifiers_taskset.py": "verifiers",
}
# These import it only where a command needs it.
LATE = {
    "campaigns/rq_connection.py": "campaigns",
    "fleet/tracing.py": "otel",
    "producer/traced_route.py": "otel",
}

# These belong to what the user has anyway: a cluster's Ray, a project's pytest.
USERS = {
    "fleet/scaler/ray.py": "ray",
    "queue/ray_cluster.py": "ray",
    "trainers/testing.py": "pytest",
}


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """What distributes each package that is installed."""
    return packages_distributions()


def names(requirements: list[str]) -> set[str]:
    """The distributions that are required, in the spelling of their metadata made plain."""
    found = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {match[0].lower().replace("_", "-") for match in found if match}


def imported(path: Path) -> Iterator[set[str]]:
    """For each package that a file imports from, at its top or within: what distributes it."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        for top in {module.partition(".")[0] for module in modules}:
            if top not in sys.stdlib_module_names and top != "leanq":
                # What is not installed here is taken to be distributed under its own name.
                found = distributions().get(top, [top])
                yield {name.lower().replace("_", "-") for name in found}


def test_every_import_is_declared_and_every_dependency_imported() -> None:
    if importlib.util.find_spec("deptry") is None:
        missing("deptry")
    command = (sys.executable, "-m", "deptry", "--no-ansi", "leanq")
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_every_import_is_declared_by_the_extra_that_its_part_belongs_to() -> None:
    folder = ROOT / "leanq"
    base, extras = names(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    assert all((folder / part).is_file() for part in PARTS | LATE | USERS)
    for path in folder.rglob("*.py"):
        part = str(path.relative_to(folder))
        extra = (PARTS | LATE).get(part)
        allowed = base | (names(extras[extra]) if extra else {USERS.get(part, "")})
        assert [found for found in imported(path) if not found & allowed] == [], part


def without_extras(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of Python's in which nothing can be imported that only an extra brings."""
    extras = PROJECT["optional-dependencies"]
    brought = set().union(
        *(names(extras[extra]) for extra in ("local", "k8s", "campaigns", "server"))
    )
    blocked = {
        module
        for module, found in distributions().items()
        if {name.lower().replace("_", "-") for name in found} & brought
    }
    assert {"rq", "pyarrow", "lightkube", "fastapi"} <= blocked
    head = f"import sys\nsys.modules.update(dict.fromkeys({sorted(blocked)!r}))\n"
    command = (sys.executable, "-c", head + program)
    # Variables of the tests' own would be warned of.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LEANQ_")}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env=environ
    )


@pytest.mark.slow
def test_all_other_parts_are_imported_without_any_extra() -> None:
    files = (path.relative_to(ROOT) for path in (ROOT / "leanq").rglob("*.py"))
    parts = [str(path) for path in files if str(path.relative_to("leanq")) not in PARTS | USERS]
    modules = sorted(
        part.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for part in parts
        if not part.endswith(("__main__.py", "lean_launcher.py"))
    )
    program = f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"
    done = without_extras(program)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("campaign list --url redis://127.0.0.1:1", "campaigns"),
        ("campaign worker --url redis://127.0.0.1:1", "campaigns"),
        ("scale --url redis://127.0.0.1:1 --target k8s --deployment x", "k8s"),
        ("serve --url redis://127.0.0.1:1", "server"),
    ],
)
def test_a_command_whose_extra_is_missing_names_it(command: str, extra: str) -> None:
    done = without_extras(f"from leanq.cli import main\nsys.argv[1:] = {command.split()!r}\nmain()")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("leanq: ")
    assert done.stderr.count("\n") == 1
    assert to_install(extra) in done.stderr
