"""Pools for tests, and that they leave no process behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from leanq.local import Pool
from support.lean.sandboxes import children


@contextlib.contextmanager
def new_pool(cache: Path, slots: int = 2) -> Iterator[Pool]:
    before = set(children(os.getpid()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANQ_CACHE", str(cache))
        patch.setenv("PATH", "/usr/bin:/bin")
        with Pool(slots=slots) as made:
            yield made
    assert set(children(os.getpid())) <= before
