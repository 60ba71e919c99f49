"""The tree of errors: one text each, and none is lost on its way to another process."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

import leanq
from leanq import errors
from leanq.errors import DataError, LeanQError, QueueFullError, WorkerError

VALUES: dict[str, object] = {"text": "what came", "retry_after_s": 1.5}


def subclasses(kind: type[LeanQError]) -> Iterator[type[LeanQError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from subclasses(each)


def every_kind() -> list[type[LeanQError]]:
    """Those that only one module uses, too."""
    for module in pkgutil.walk_packages(leanq.__path__, "leanq."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return [kind for kind in subclasses(LeanQError) if kind.__module__.startswith("leanq.")]


def an_error(kind: type[LeanQError]) -> LeanQError:
    takes = inspect.signature(kind.__init__).parameters
    names = [name for name in takes if name != "self" and name in VALUES]
    return kind(*(VALUES[name] for name in names or ["text"]))


@pytest.mark.parametrize("kind", every_kind())
def test_each_error_survives_pickle_and_copy_with_its_attributes(kind: type[LeanQError]) -> None:
    error = an_error(kind)
    error.add_note("a note")
    for back in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(back) is kind
        assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))
    assert str(error) == "what came"


def _full() -> None:
    raise QueueFullError("the queue is full", 2.0)


def test_an_error_in_another_process_arrives() -> None:
    with ProcessPoolExecutor(1) as pool, pytest.raises(QueueFullError, match="is full") as caught:
        pool.submit(_full).result(20)
    assert caught.value.retry_after_s == 2.0


@pytest.mark.parametrize(
    "kind",
    [each for each in vars(errors).values() if inspect.isclass(each)],
    ids=lambda k: k.__name__,
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
