"""The walls that a program should stand behind, and the remedy if the machine gives fewer."""

from __future__ import annotations

from collections.abc import Sequence

from leanq.errors import SandboxError

_NAMESPACES = (
    "allow user namespaces: sysctl user.max_user_namespaces above 0, on Debian "
    "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; "
    "in a container the seccomp profile deploy/seccomp.json"
)
_OWN_PROC = (
    "in a container unmask /proc: systempaths=unconfined in Docker, procMount: Unmasked with "
    "hostUsers: false in Kubernetes"
)
_LANDLOCK = "Linux 5.13 or later with landlock among its LSMs (/sys/kernel/security/lsm)"
_SECCOMP = "Linux with seccomp filters (CONFIG_SECCOMP_FILTER), on x86-64 or aarch64"

_WANTED = {
    "user-ns": _NAMESPACES,
    "mount-ns": _NAMESPACES,
    "net-ns": _NAMESPACES,
    "ipc-ns": _NAMESPACES,
    "pid-ns": _OWN_PROC,
    "landlock": _LANDLOCK,
    "seccomp": _SECCOMP,
}


def missing_walls(isolation: Sequence[str]) -> list[str]:
    """Returns the wanted walls that a ``Sandbox.isolation`` lacks."""
    there = {each.split("-")[0] if each.startswith("landlock-") else each for each in isolation}
    return [wall for wall in _WANTED if wall not in there]


def advice(missing: Sequence[str]) -> str:
    """Returns what an operator can do to have them."""
    # User namespaces bring most of them, so a single sentence names that step.
    wanted = [wall for wall in missing if wall != "pid-ns" or "user-ns" not in missing]
    return "; ".join(dict.fromkeys(_WANTED[wall] for wall in wanted))


def require_walls(isolation: Sequence[str]) -> None:
    """Raises SandboxError with the missing walls, and the remedy."""
    if missing := missing_walls(isolation):
        raise SandboxError(
            f"--require-walls: this machine's sandbox lacks {', '.join(missing)}: {advice(missing)}"
        )
