"""The program that writes kernel images: an environment's modules as the judge's Lean imports them.

Each constant of a module is read as data and made anew by Lean's constructors, with the hashes and
the layout of this Lean, whose own `saveModuleData` writes the file. Nothing else of the module gets
into it: no notation, no compiled code. Metadata in expressions means nothing to the kernel and is
left out.

The first line of standard input names the libraries of the judge's Lean; each further line is a job
(see `main`). Each job is answered by a line on standard output, in any order. A child writes some
modules and ends, since nothing that Lean makes is freed.

Only an environment's own modules come here. No file of a candidate does.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leanq.errors import AuditError
from leanq.lean.judge.kernel import Kernel, KernelUnavailableError
from leanq.lean.judge.known_names import KERNEL_NAMES
from leanq.lean.judge.rebuild import Infos, Rebuilder
from leanq.lean.run.files import hash_bytes
from leanq.lean.run.layouts import Damaged
from leanq.lean.run.olean import display, open_image, read_parts

_MODULES_OF_A_CHILD = 64
OF_LIST, OF_CHARACTERS = ("String", "ofList"), ("String", "mk")
"""The function by which the kernel reads a text, and its name before Lean 4.26."""
_ABBREVIATION, _SAFE = 1 << 1 | 1, 1


def transcribe(kernel: Kernel, job: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the image of a module, and returns what is known of the module.

    Raises:
        Damaged, IndexError: the module cannot be read.
        AuditError, OSError: a file cannot be read or written.
    """
    parts = read_parts(Path(job["path"]), follows=True)
    if [hash_bytes(each).hex() for each in parts] != job["hashes"]:
        raise Damaged("its files have changed meanwhile")
    image = open_image(parts)
    constants = image.constants()
    build = Rebuilder(kernel, image)
    infos = Infos(kernel, image, constants, build)
    infos.prepare()
    written = {build.name_of(name): infos.info(raw) for name, raw in constants.items()}
    if job["adds_of_list"]:
        name, info = _of_list(kernel, build, written[build.name_of(OF_CHARACTERS)])
        written[name] = info
    imports = image.imports()
    new = f"{job['image']}.{os.getpid()}"
    modules = dict.fromkeys(each.module for each in imports)
    kernel.save_module(new, tuple(job["module"]), modules, written)
    os.chmod(new, 0o444)
    image_bytes = os.path.getsize(new)
    os.replace(new, job["image"])
    return {
        "image_bytes": image_bytes,
        "imports": [*modules],
        "constants": len(constants),
        "known": sorted(display(name) for name in constants.keys() & KERNEL_NAMES),
    }


def _of_list(kernel: Kernel, build: Rebuilder, of_characters: int) -> tuple[int, int]:
    """Returns `String.ofList` as another name for a constant, with its name."""
    name, none = build.name_of(OF_LIST), kernel.list([])
    value = kernel.const(build.name_of(OF_CHARACTERS), none)
    made = kernel.definition_val(
        name, none, kernel.type_in(of_characters), value, _ABBREVIATION, _SAFE, kernel.list([name])
    )
    return name, kernel.construct(1, made)


def _answer(kernel: Kernel, job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return transcribe(kernel, job)
    except IndexError:
        why = "a pointer leads nowhere"
    except (Damaged, AuditError, OSError) as error:
        why = str(error)
    except KeyError as error:
        why = f"it lacks {error}"
    except UnicodeEncodeError:
        why = "its name is not UTF-8"
    return {"fault": why}


def _say(job: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps({"module": job["module"], **answer}) + "\n")
    sys.stdout.flush()


def _in_a_child(kernel: Kernel, jobs: Sequence[Mapping[str, Any]]) -> int:
    """Has a child do some jobs, and returns how many are done: a child may die at one."""
    with mmap.mmap(-1, 1) as done:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for number, job in enumerate(jobs):
                    _say(job, _answer(kernel, job))
                    done[0] = number + 1
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        count = done[0]
    if count < len(jobs):
        why = f"its process died (exit code {os.waitstatus_to_exitcode(status)})"
        _say(jobs[count], {"fault": why})
        count += 1
    return count


def main() -> None:
    """Does the jobs: ``module`` and ``path`` name what to read, ``hashes`` are those of its parts,
    ``image`` is the file to write, and ``adds_of_list`` says if it gets a `String.ofList`."""
    sys.set_int_max_str_digits(0)
    os.umask(0o022)  # an image that is being written is for no other user to write to, either
    lines = sys.stdin.read().splitlines()
    try:
        kernel = Kernel(json.loads(lines[0])["libraries"])
    except KernelUnavailableError as error:
        sys.exit(str(error))
    jobs = [json.loads(line) for line in lines[1:]]
    start = 0
    while start < len(jobs):
        start += _in_a_child(kernel, jobs[start : start + _MODULES_OF_A_CHILD])
