"""Writes a library of Mathlib's size: the modules of another, several times, under other names.

    python bench/copies.py FOLDER TO --copies 3

FOLDER holds compiled modules, and TO gets `Copy1`, `Copy2`, … with all of them. The module `All`
there imports whatever no other module does, except programs. Names begin with the copy's. An axiom
that stands for a hidden proof becomes a theorem with a proof of a likely size. It proves nothing,
and nothing here checks it. Only constants are written, without notation or code.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from leanq.lean.judge.kernel import Kernel
from leanq.lean.judge.rebuild import Infos, Rebuilder
from leanq.lean.run.image import Image, Name, Raw
from leanq.lean.run.olean import open_image, read_parts
from leanq.lean.run.toolchain import wheel_libraries

_MODULES_OF_A_CHILD = 64
_PROCESSES = 2
# Proofs have some 150 parts, a few have thousands.
_LEAST_PARTS, _MOST_PARTS, _TAIL = 30, 20_000, 1.2


class _Copied(Rebuilder):
    """The objects of an image, with a word before every name."""

    def __init__(self, kernel: Kernel, image: Image, word: str) -> None:
        super().__init__(kernel, image)
        self.by_parts[()] = kernel.name([word])


def _copy(kernel: Kernel, file: Path, module: Name, word: str, to: Path) -> set[Name]:
    """Writes a copy of a module; returns the imports of the module, and itself if it is a program,
    since two of these cannot be imported together."""
    image = open_image(read_parts(file.resolve()))
    constants = image.constants()
    build = _Copied(kernel, image, word)
    infos = Infos(kernel, image, constants, build)
    infos.prepare()
    rng = random.Random(f"{word} {module}")
    roots = (part for raw in constants.values() for part in raw.parts)
    parts = [build.expression(each) for each in image.walk(*roots).addresses]

    def info(raw: Raw) -> int:
        if raw.kind != "axiom" or raw.unsafe:
            return infos.info(raw)
        name, none = build.name_of(raw.name), kernel.list([])
        levels = build.names(image.words[raw.head + 2])
        proof = _proof(kernel, rng, parts)
        all_ = kernel.list([name])
        value = kernel.theorem_val(name, levels or none, build.expression(raw.type_), proof, all_)
        return kernel.construct(2, value)

    imports = {each.module for each in image.imports()}
    path = to.joinpath(word, *map(str, module)).with_suffix(".olean")
    path.parent.mkdir(parents=True, exist_ok=True)
    kernel.save_module(
        str(path),
        (word, *module),
        [(word, *each) for each in imports],
        {build.name_of(name): info(raw) for name, raw in constants.items()},
    )
    return imports | ({module} if ("main",) in constants else set())


def _proof(kernel: Kernel, rng: random.Random, parts: Sequence[int]) -> int:
    """Returns a tree of applications whose leaves stand in the module."""
    size = min(int(_LEAST_PARTS * rng.paretovariate(_TAIL)), _MOST_PARTS)
    made = rng.choices(parts, k=size)
    while len(made) > 1:
        odd = made[:1] if len(made) % 2 else []
        rest = made[len(odd) :]
        made = odd + [kernel.app(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)]
    return made[0]


def _share(folder: Path, jobs: Sequence[tuple[str, Name]], to: Path, answers: int) -> None:
    """Writes some copies, and tells which modules they import."""
    kernel = Kernel([str(path) for path in wheel_libraries()])
    for start in range(0, len(jobs), _MODULES_OF_A_CHILD):
        pid = os.fork()  # nothing that Lean makes is freed
        if pid:
            if os.waitpid(pid, 0)[1]:
                sys.exit("a child that copies modules has failed")
            continue
        lines = []
        for word, module in jobs[start : start + _MODULES_OF_A_CHILD]:
            file = folder.joinpath(*map(str, module)).with_suffix(".olean")
            imports = _copy(kernel, file, module, word, to)
            lines += [json.dumps([word, *each]) for each in imports]
        os.write(answers, "".join(line + "\n" for line in lines).encode())
        os._exit(0)


def main() -> None:
    """Writes the copies in two processes, and then the module that imports them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("to", type=Path)
    parser.add_argument("--copies", type=int, default=3)
    given = parser.parse_args()
    files = sorted(given.folder.rglob("*.olean"))
    names = [file.relative_to(given.folder).with_suffix("").parts for file in files]
    jobs = [(f"Copy{n + 1}", name) for n in range(given.copies) for name in names]
    with tempfile.TemporaryFile("w+") as answers:
        children = []
        for number in range(_PROCESSES):
            pid = os.fork()
            if pid == 0:
                _share(given.folder, jobs[number::_PROCESSES], given.to, answers.fileno())
                os._exit(0)
            children.append(pid)
        ends = [os.waitpid(pid, 0)[1] for pid in children]
        if any(ends):
            sys.exit("the copies are not complete")
        answers.seek(0)
        imported = {tuple(json.loads(line)) for line in answers}
    whole = {(word, *name) for word, name in jobs}
    kernel = Kernel([str(path) for path in wheel_libraries()])
    kernel.save_module(str(given.to / "All.olean"), ("All",), sorted(whole - imported), {})


if __name__ == "__main__":
    main()
