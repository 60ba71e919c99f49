"""How programs inside Ray find the queue, beside a stand-in for Ray; see ``make ray-test``, too."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.fleet.rays import Ray

from leanq import AsyncLeanQClient
from leanq.errors import UnavailableError, UsageError
from leanq.queue.ray_cluster import publish, published
from leanq.queue.settings import Settings
from leanq.queue.up_file import find_queue
from leanq.trainers import ReplayMemory

QUEUE = Settings(url="redis://:secret@head:6379", shards=3, lease_s=4.5)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mapping[str, str]:
    """An environment without a queue."""
    for name in ("LEANQ_URL", "LEANQ_PREFIX", "LEANQ_SHARDS", "LEANQ_LEASE_S"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    made.install(monkeypatch)
    return made


def test_a_client_within_ray_has_the_settings_of_the_scaler(
    ray: Ray, nowhere: Mapping[str, str]
) -> None:
    publish(QUEUE.variables())
    assert AsyncLeanQClient().settings == QUEUE
    assert Settings.load(QUEUE.url, published({})) == QUEUE
    # It opens nothing before it is entered.
    ReplayMemory("within")


def test_what_a_process_has_set_itself_comes_first(ray: Ray, nowhere: Mapping[str, str]) -> None:
    publish(QUEUE.variables())
    own = {**nowhere, "LEANQ_URL": "redis://mine"}
    assert find_queue(own) == own
    found = find_queue({**nowhere, "LEANQ_SHARDS": "2"})
    assert (found["LEANQ_SHARDS"], found["LEANQ_LEASE_S"]) == ("2", "4.5")


def test_queues_of_several_prefixes_stand_side_by_side(
    ray: Ray, nowhere: Mapping[str, str]
) -> None:
    publish(Settings(url="redis://other", prefix="other").variables())
    with pytest.raises(UsageError, match="no queue"):
        find_queue(nowhere)
    assert find_queue({**nowhere, "LEANQ_PREFIX": "other"})["LEANQ_URL"] == "redis://other"


def test_a_head_that_does_not_answer_is_said(ray: Ray, nowhere: Mapping[str, str]) -> None:
    ray.away = True
    with pytest.raises(UnavailableError, match="Ray's head does not answer: no answer"):
        AsyncLeanQClient()


def test_without_ray_initialised_it_is_not_asked(
    ray: Ray, nowhere: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(QUEUE.variables())
    with monkeypatch.context() as patch:
        # A fork would break its parent's connection.
        patch.setattr(multiprocessing, "parent_process", lambda: object())
        assert published({}) == {}
    ray.initialised = False
    assert published({}) == {}


def test_leanq_never_imports_ray(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise SystemExit('imported')")
    program = "import leanq\ntry: leanq.LeanQClient()\nexcept leanq.UsageError: print('none')"
    environ = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("none\n", "")
