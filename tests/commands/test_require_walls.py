"""``leanq worker --require-walls`` on machines that give fewer walls, made of this one."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from leanq.errors import SandboxError
from leanq.lean.sandbox.sandbox import probe
from leanq.lean.sandbox.walls import advice, missing_walls, require_walls

ALL = ("user-ns", "pid-ns", "mount-ns", "net-ns", "ipc-ns", "root", "landlock-7", "seccomp")
# No worker gets as far as to ask for a server here.
WORKER = [sys.executable, "-m", "leanq", "worker", "--url", "redis://127.0.0.1:1"]
# Inside of a user namespace that allows none within it, with and without privileges of its own.
INSIDE = ["unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"']
BARE = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def test_what_is_missing_is_found() -> None:
    assert missing_walls(ALL) == []
    require_walls(ALL)
    assert missing_walls(ALL[1:]) == ["user-ns"]
    assert missing_walls(["landlock-1"])[-1] == "seccomp"
    assert missing_walls([]) == [
        *("user-ns", "mount-ns", "net-ns", "ipc-ns", "pid-ns"),
        *("landlock", "seccomp"),
    ]


def test_the_advice_is_for_what_is_missing() -> None:
    assert "systempaths=unconfined" in advice(["pid-ns"])
    assert "systempaths" not in advice(["user-ns", "pid-ns"])
    assert "deploy/seccomp.json" in advice(["user-ns"])
    assert "CONFIG_SECCOMP_FILTER" in advice(["seccomp"])
    with pytest.raises(SandboxError, match="lacks pid-ns"):
        require_walls([each for each in ALL if each != "pid-ns"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bare", "missing"), [([], "user-ns:"), (BARE, "user-ns, mount-ns, net-ns, ipc-ns, pid-ns:")]
)
def test_a_worker_without_them_ends_with_the_list(bare: list[str], missing: str) -> None:
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        pytest.skip("util-linux is not here")
    if missing_walls(probe()):
        pytest.skip("this machine has fewer walls itself")
    command = [*INSIDE, "sh", *bare, *WORKER, "--require-walls"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 3
    assert f"lacks {missing}" in done.stderr
    assert "Traceback" not in done.stderr
