"""The filter of system calls that is shipped: what it says of each call, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
from collections.abc import AsyncIterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lean import bpf
from support.lean.sandboxes import MODES, needs, opened, output, run
from support.paths import ROOT

from leanq.lean.sandbox.sandbox import Sandbox

NAMES = ("x86_64", "aarch64")
AUDIT = {"x86_64": bpf.X86_64, "aarch64": bpf.AARCH64}
EPERM, ENOSYS = bpf.ERRNO | 1, bpf.ERRNO | 38
# What Linux's headers, which are a package of every distribution, have the numbers of.
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
# What these headers may be too old for; new calls have the same number everywhere.
NEWER = {449: "futex_waitv", 450: "set_mempolicy_home_node", 452: "fchmodat2"}
ARGUMENTS = st.lists(
    st.integers(0, 2**64 - 1) | st.integers(0, 64) | st.sampled_from([0x21, 0x22, 0x5412, 1 << 28]),
    max_size=6,
)


def load_policy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("policy", ROOT / "deploy/seccomp/policy.py")
    assert spec is not None
    assert spec.loader is not None
    policy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(policy)
    return policy


POLICY = load_policy()


@cache
def program(architecture: str) -> list[bpf.Instruction]:
    file = ROOT / "leanq" / "lean" / "sandbox" / f"seccomp.{architecture}.bpf"
    return bpf.disassemble(file.read_bytes())


@cache
def numbers(architecture: str) -> Mapping[int, str]:
    """The calls of an architecture, by number."""
    header = HEADERS[architecture]
    if not header.exists():
        pytest.skip(f"no {header}: it comes with the headers of Linux")
    found = re.findall(r"#define (__NR(?:3264)?_\w+)\s+(\d+|__NR3264_\w+)", header.read_text())
    plain = {name: int(value) for name, value in found if value.isdigit()}
    # Calls of 64 bits that have a name of their own where there are two kinds.
    renamed = {"fstatat": "newfstatat", "statfs": "statfs", "fadvise64": "fadvise64"}
    calls = dict(NEWER)
    for name, value in plain.items():
        short = name.removeprefix("__NR_").removeprefix("__NR3264_")
        calls[value] = renamed.get(short, short)
    return calls


def expected(name: str | None, arguments: list[int]) -> int:
    """What the policy says of a call."""
    padded = [*arguments, *[0] * 6]
    if name in POLICY.ALLOWED:
        return bpf.ALLOW
    if name in POLICY.REFUSED:
        return EPERM
    for argument, mask, value in POLICY.CONDITIONAL.get(name, ()):
        if padded[argument] & mask == value:
            return bpf.ALLOW
    return ENOSYS


def test_no_call_is_named_twice() -> None:
    kinds = [POLICY.ALLOWED, POLICY.REFUSED, POLICY.UNKNOWN, POLICY.CONDITIONAL]
    named = [name for kind in kinds for name in kind]
    assert len(named) == len(set(named))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", NAMES)
@settings(max_examples=25, deadline=None)
@given(arguments=ARGUMENTS)
def test_the_filter_says_what_the_policy_says(architecture: str, arguments: list[int]) -> None:
    calls = numbers(architecture)
    for number in range(600):
        said = bpf.verdict(program(architecture), AUDIT[architecture], number, arguments)
        name = calls.get(number)
        assert said == expected(name, arguments), (number, name)


@pytest.mark.parametrize("architecture", NAMES)
@given(
    other=st.sampled_from([bpf.X86_64, bpf.AARCH64, bpf.I386]) | st.integers(0, 2**32 - 1),
    number=st.integers(0, 2**32 - 1),
    arguments=ARGUMENTS,
)
def test_other_architectures_end_the_process(
    architecture: str, other: int, number: int, arguments: list[int]
) -> None:
    if other != AUDIT[architecture]:
        said = bpf.verdict(program(architecture), other, number, arguments)
        assert said == bpf.KILL_PROCESS


@given(number=st.integers(0, 500), arguments=ARGUMENTS)
def test_x32_ends_the_process(number: int, arguments: list[int]) -> None:
    number |= bpf.X32_BIT
    assert bpf.verdict(program("x86_64"), bpf.X86_64, number, arguments) == bpf.KILL_PROCESS


def test_the_profile_of_containers_is_that_of_the_policy() -> None:
    profile = json.loads((ROOT / "deploy" / "seccomp.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW"
        for name in rule["names"]
    }
    assert allowed == POLICY.CONTAINER
    # All that the sandbox is made with, and all that its programs may do.
    assert {"unshare", "setns", "mount", "pivot_root", "seccomp"} < allowed
    assert allowed > POLICY.ALLOWED | (set(POLICY.CONDITIONAL))
    assert not allowed & {"bpf", "ptrace", "keyctl", "perf_event_open", "init_module", "kexec_load"}


shares_it = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODES)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """One for all tests of the module, since each run in it begins clean."""
    async with opened(request.param) as sandbox:
        needs(sandbox, "seccomp")
        yield sandbox


@shares_it
async def test_refused_calls_are_refused_in_a_sandbox(sandbox: Sandbox) -> None:
    calls = numbers("x86_64") if Path("/lib64/ld-linux-x86-64.so.2").exists() else {}
    if not calls:
        pytest.skip("the numbers here are those of x86-64")
    wanted = {number: name for number, name in calls.items() if name in POLICY.REFUSED}
    code = """
        import ctypes, sys
        libc = ctypes.CDLL(None, use_errno=True)
        for number in map(int, sys.argv[1:]):
            ctypes.set_errno(0)
            # Arguments at which the kernel itself would say EFAULT, EINVAL or EBADF.
            if libc.syscall(number, *[ctypes.c_long(-1)] * 6) != -1 or ctypes.get_errno() != 1:
                print(number, ctypes.get_errno())
    """
    assert await output(sandbox, code, *map(str, wanted)) == ""


@shares_it
@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        ("libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)", 38),  # clone with CLONE_NEWUSER
        ("libc.syscall(56, 0x50b00, 0, 0, 0, 0)", 38),  # a thread with open files of its own
        ("libc.syscall(13, 17, bytes(64), 0, 8)", 38),  # rt_sigaction of SIGCHLD
        ("libc.syscall(13, ctypes.c_long(1 << 32 | 17), bytes(64), 0, 8)", 38),
        ("libc.syscall(13, 16, bytes(64), 0, 7)", 22),  # of another signal
        ("libc.syscall(13, 17, 0, 0, 7)", 22),  # and to ask
        ("libc.syscall(435, 0, 0)", 38),  # clone3
        ("libc.syscall(425, 8, 0)", 38),  # io_uring_setup
        ("libc.syscall(9, 0, 4096, 3, 0x21, -1, 0)", 38),  # shared anonymous memory
        ("libc.syscall(16, 0, 0x5412, b'x')", 38),  # TIOCSTI
        # A kernel takes this for TCGETS.
        ("libc.syscall(16, 0, ctypes.c_long(0x100005401), 0)", 38),
        ("libc.syscall(157, 36, 1, 0, 0, 0)", 38),  # to become a subreaper
        ("libc.syscall(72, 0, 6, 0)", 38),  # fcntl, F_SETLK
        ("libc.syscall(302, 1, 7, 0, 0)", 38),  # prlimit64 of process 1
        ("libc.syscall(468, 0)", 38),  # a call of kernels to come
    ],
)
async def test_conditions_hold_in_a_sandbox(sandbox: Sandbox, attempt: str, error: int) -> None:
    if not Path("/lib64/ld-linux-x86-64.so.2").exists():
        pytest.skip("the numbers here are those of x86-64")
    code = f"""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        print({attempt}, ctypes.get_errno())
    """
    assert await output(sandbox, code) == f"-1 {error}"


@shares_it
@pytest.mark.parametrize("number", [0x40000000 | 39, "int80"])
async def test_calls_of_other_kinds_end_the_process(sandbox: Sandbox, number: int | str) -> None:
    if not Path("/lib64/ld-linux-x86-64.so.2").exists():
        pytest.skip("of x86-64")
    code = f"""
        import ctypes, mmap
        number = {number!r}
        if number == "int80":  # mov eax, 20; int 0x80; ret: getpid of 32 bits
            page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
            page.write(bytes.fromhex("b814000000cd80c3"))
            place = ctypes.addressof(ctypes.c_char.from_buffer(page))
            ctypes.CFUNCTYPE(ctypes.c_int)(place)()
        else:
            ctypes.CDLL(None).syscall(number)
        print("alive")
    """
    finished = await run(sandbox, code)
    assert (finished.exit.signal, finished.stdout) == (signal.SIGSYS, b"")
