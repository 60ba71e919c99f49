"""The layout of the package: which rooms there are, and which of them may import which."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT, TESTS

PACKAGE = ROOT / "leanq"
# From left to right: a room imports from those before its own group, and from itself.
ORDER = (
    {"errors"},
    {"queue", "scale"},
    {"states", "fleet"},
    {"lean"},
    {"producer", "consumer"},
    {"client", "worker"},
    {"local", "trainers"},
    {"campaigns"},
    {"gateway"},
    {"commands"},
    {"cli"},
)
PLACE = {room: place for place, group in enumerate(ORDER) for room in group}
# The same within lean/. An environment is opened by what run/ knows of files and toolchains.
ORDER_IN_LEAN = (
    {"text", "sandbox"},
    {"outcome"},
    {"environment", "run"},
    {"judge"},
    {"goals"},
    {"driver"},
)
# What imports against the order, and why it may.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("client.py", "campaigns"): "`client.campaigns` is made where it is first asked for",
    ("trainers/testing.py", "local"): "the queue of a user's tests is an embedded one",
}
MODULES = {"client", "worker", "states", "scale", "local", "errors", "cli"}
LONGEST_WITHOUT_A_WORD = 600
MODULES_MOST, ROOMS_MOST, LAYERS_BELOW_CLI_MOST = 7, 9, 10
METHODS_MOST = 26


def imports(path: Path) -> Iterator[str]:
    """The modules of leanq's that a file imports, at its top or within functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("leanq"):
            # `from leanq import x` names a room or what the package exports.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("leanq"))


def edges() -> Iterator[tuple[str, str]]:
    """Each import from one room into another: the importing file, the room."""
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE)
        room = file.parts[0].removesuffix(".py")
        if room not in ("__init__", "__main__"):
            rooms = {name.split(".")[1] for name in imports(path) if "." in name}
            yield from ((str(file), other) for other in rooms & PLACE.keys() if other != room)


def test_imports_go_in_one_direction() -> None:
    against = {
        (file, room)
        for file, room in edges()
        if PLACE[file.split("/")[0].removesuffix(".py")] <= PLACE[room]
    }
    assert against == set(EXCEPTIONS)
    assert all(EXCEPTIONS.values())


def test_the_rooms_of_lean_import_in_one_direction() -> None:
    place = {room: floor for floor, group in enumerate(ORDER_IN_LEAN) for room in group}
    against = [
        (str(path), name)
        for path in (PACKAGE / "lean").rglob("*.py")
        for name in imports(path)
        if name.startswith("leanq.lean.")
        and place[name.split(".")[2]]
        > place[path.relative_to(PACKAGE / "lean").parts[0].removesuffix(".py")]
    ]
    assert against == []


def test_few_layers_stand_below_the_command_line() -> None:
    assert PLACE["cli"] <= LAYERS_BELOW_CLI_MOST


def test_no_class_has_many_methods() -> None:
    methods = {
        f"{path.relative_to(PACKAGE)}: {node.name}": sum(
            isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body
        )
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: count for name, count in methods.items() if count > METHODS_MOST} == {}


def test_the_top_has_few_modules_and_rooms_that_all_have_a_place() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert modules == MODULES
    assert len(modules) <= MODULES_MOST
    assert len(rooms) <= ROOMS_MOST
    assert modules | rooms <= PLACE.keys()


def test_a_long_file_says_at_its_top_why() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if text.count("\n") > LONGEST_WITHOUT_A_WORD:
            assert "one file" in (ast.get_docstring(ast.parse(text)) or ""), path


def test_a_map_of_a_room_names_all_that_is_in_it() -> None:
    mapped = []
    for face in (*PACKAGE.glob("*/__init__.py"), *PACKAGE.glob("lean/*/__init__.py")):
        named = set(re.findall(r"(?m)^    ([a-z0-9_]+(?:\.py|/))  *\S", face.read_text()))
        if named:
            mapped.append(face.parent.name)
            there = {
                f"{path.name}/" if path.is_dir() else path.name
                for path in face.parent.iterdir()
                if (path.suffix == ".py" or any(path.glob("*.*"))) and path.name[:2] != "__"
            }
            assert named == there, face
    assert {"queue", "lean", "run", "judge", "goals", "producer", "gateway"} <= set(mapped)


def test_test_modules_import_nothing_from_one_another() -> None:
    for path in TESTS.rglob("test_*.py"):
        for module in re.findall(r"(?m)^\s*(?:from|import) ([\w.]+)", path.read_text()):
            parts = module.split(".")
            assert parts[0] != "tests", f"{path}: {module}; move it to tests/support"
            assert not any(part.startswith("test_") for part in parts), path


def test_no_pattern_has_groups_that_some_pythons_misread() -> None:
    """Before Python 3.11.5, such as in Debian 12, a possessive group matches wrongly."""
    group = re.compile(r"\)(?:[*+?]|\{[0-9,]+\})\+|\(\?>")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / "leanq").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if group.search(line)
    ]
    assert found == []
