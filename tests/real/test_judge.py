"""The judge reads a full library's own modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.lean.judged_modules import Modules, judge_modules
from support.lean.libraries import Library, judged_folder

from leanq.lean.environment import Environment

# `make bench-library` judges all of them.
EVERY = 100
# What they declare the kernel knows by its name.
HOMES = [
    "Init.Prelude",
    "Init.Core",
    "Init.Data.Nat.Gcd",
    "Init.Data.Nat.Log2",
    "Init.Data.Nat.Bitwise.Basic",
    "Init.Data.String.Bootstrap",
]


async def test_modules_are_proved_but_for_those_that_lack_parts(
    library: Library, real: Environment
) -> None:
    if library.has_hidden_proofs:
        pytest.skip("its modules are public parts alone, which no judge takes")
    folder = judged_folder() or library.folder
    modules = Modules(replace(real, search_path=(folder,)), folder)
    sample = modules.names[::EVERY]
    judged = await judge_modules(modules, sample)
    refused = {each.name: each.found for each in judged if not each.found.proved and not each.lacks}
    assert refused == {}
    assert sum(each.found.proved for each in judged) * 10 >= len(sample) * 8


async def test_modules_that_declare_what_the_kernel_knows_are_the_librarys(
    library: Library, real: Environment
) -> None:
    folder = judged_folder() or library.folder
    if library.layout == "modular":
        pytest.skip("its modules are public parts alone, which no judge takes")
    judged = await judge_modules(Modules(replace(real, search_path=(folder,)), folder), HOMES)
    refused = {each.name: each.found for each in judged if not each.found.proved and not each.lacks}
    assert refused == {}
    assert "reserved_name" not in {each.found.rule for each in judged}
