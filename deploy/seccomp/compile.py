"""Compiles ``policy.py``: ``python deploy/seccomp/compile.py``, after any change of it.

Writes the filters of programs in sandboxes, ``leanq/lean/sandbox/seccomp.ARCHITECTURE.bpf``, and
the profile of a worker's container, ``deploy/seccomp.json`` and its copy for nodes. For developers'
machines: it needs libseccomp (Debian's libseccomp2) and the package pyseccomp. Calls of another
architecture than the filter's, and of x32, end the process.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pyseccomp
from policy import ALLOWED, ARCHITECTURES, CONDITIONAL, CONTAINER, REFUSED, UNKNOWN

ROOT = Path(__file__).resolve().parents[2]
_UNKNOWN_NAME = -1  # __NR_SCMP_ERROR of <seccomp.h>


def program(architecture: str) -> pyseccomp.SyscallFilter:
    """The filter of a program in a sandbox."""
    made = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))
    native = pyseccomp.system_arch()
    wanted = getattr(pyseccomp.Arch, architecture.upper())
    if wanted != native:
        made.add_arch(wanted)
        made.remove_arch(native)
    made.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    made.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, 2)
    for name in sorted(ALLOWED):
        _add(made, pyseccomp.ALLOW, name)
    for name in sorted(REFUSED):
        _add(made, pyseccomp.ERRNO(errno.EPERM), name)
    for name, conditions in sorted(CONDITIONAL.items()):
        for argument, mask, value in conditions:
            compared = pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, mask, value)
            _add(made, pyseccomp.ALLOW, name, compared)
    return made


def _add(made: Any, action: int, name: str, *conditions: Any) -> None:
    number = pyseccomp.resolve_syscall(pyseccomp.system_arch(), name)
    if number == _UNKNOWN_NAME:
        raise SystemExit(f"this libseccomp does not know {name}: use a later one, or leave it out")
    made.add_rule(action, name, *conditions)


def profile() -> dict[str, Any]:
    """The profile of a worker's container, in the format that Docker and Kubernetes share."""
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": [
            {"names": sorted(CONTAINER), "action": "SCMP_ACT_ALLOW"},
            {"names": sorted(UNKNOWN - CONTAINER), "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
        ],
    }


def main() -> None:
    """Write all of it."""
    for architecture in ARCHITECTURES:
        with open(ROOT / f"leanq/lean/sandbox/seccomp.{architecture}.bpf", "wb") as file:
            program(architecture).export_bpf(file)
    text = json.dumps(profile(), indent=2)
    # kubectl reads no file outside of the folder that it is given.
    for place in ("deploy/seccomp.json", "k8s/nodes/seccomp.json"):
        (ROOT / place).write_text(f"{text}\n")


if __name__ == "__main__":
    main()
