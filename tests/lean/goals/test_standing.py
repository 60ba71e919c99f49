"""Processes behind a prefix: the same bytes, nothing from one fork to the next, and an end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lean.sandboxes import PYTHON, children
from support.lean.sites import Site
from support.waiting import eventually

from leanq.errors import SandboxError
from leanq.lean.goals.prefixes import (
    StandingPrefix,
    StandingPrefixes,
    _Prefix,
    first_difference,
    prefix_end,
)
from leanq.lean.goals.recipes import text_hash
from leanq.lean.run.fork_server import ForkRules, ForkServer
from leanq.lean.run.process import Lean
from leanq.lean.sandbox.sandbox import PACKAGE as LEANQ
from leanq.lean.sandbox.sandbox import Finished, Limits, Sandbox

HEADER = "prelude\nimport Core\n"
LIMITS = Limits(cpu_s=60.0, wall_s=100.0, memory_bytes=2 << 30, scratch_bytes=64 << 20)
OPTIONS = ("-Dweak.maxErrors=1000000",)
BEFORE = "theorem first (p : Prop) (h : p) : p := h\n"
GOAL = "theorem goal (p q : Prop) (h : And p q) : And q p := by\n  "
CLOSED = "exact And.intro h.right h.left"


class Behind:
    """Prefixes of one environment, and what Lean says of the same texts by itself."""

    def __init__(self, lean: Lean, forks: ForkServer) -> None:
        self.lean = lean
        self.forks = forks
        self.standing = StandingPrefixes(lean.environment, forks, slots=1)

    async def plain(self, code: str) -> Finished:
        async with self.lean.slot() as slot:
            run = await self.lean.run(slot, code, LIMITS, options=OPTIONS, compile_=False)
            return run.done

    async def expect(self, source: str, code: str, done: Finished, name: str = "source") -> None:
        command = self.lean.command(OPTIONS)
        await self.standing.expect(name, source, code, command, done, LIMITS)

    async def run(self, source: str, code: str, name: str = "source") -> Finished | None:
        return await self.standing.run(name, source, code, LIMITS)

    async def stand(self, source: str, code: str) -> None:
        await self.expect(source, code, await self.plain(code))
        await eventually(lambda: self.standing.holds("source"), deadline_s=100.0)


@pytest.fixture
async def behind(site: Site) -> AsyncIterator[Behind]:
    forks = ForkServer(site.core, ForkRules(preload_after=1, compare_every=0))
    lean = Lean(site.core, slots=1, forks=forks)
    found = Behind(lean, forks)
    try:
        await lean.open()
        yield found
    finally:
        await found.standing.close()
        await lean.close()


SOURCES = {
    "one theorem before": f"{HEADER}{BEFORE}{GOAL}sorry\n",
    "a warning before": f"{HEADER}theorem open_ (p : Prop) (h : p) : p := sorry\n{GOAL}sorry\n",
    "more behind": f"{HEADER}{BEFORE}{GOAL}sorry\n\ntheorem late (p : Prop) (h : p) : p := sorry\n",
    "a section around": f"{HEADER}{BEFORE}section\nvariable (r : Prop)\n{GOAL}sorry\nend\n",
    "a namespace around": f"{HEADER}{BEFORE}namespace A\n{BEFORE}{GOAL}sorry\nend A\n",
    "a comment": f"{HEADER}{BEFORE}/-- What it says: theorem.\n\ntheorem -/\n{GOAL}sorry\n",
    "an attribute": f"{HEADER}{BEFORE}@[reducible]\ntheorem\n goal (p q : Prop) (h : And p q)\n"
    " : And q p := by\n  sorry\n",
    "an option": f"{HEADER}{BEFORE}set_option linter.all false in\n{GOAL}sorry\n",
    "a syntax error behind": f"{HEADER}{BEFORE}{GOAL}sorry\ntheorem (\n{BEFORE}",
}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
async def test_lean_says_the_same_behind_a_prefix(behind: Behind, source: str) -> None:
    first = source.index("sorry", source.rindex("by\n"))
    codes = [source[:first] + text + source[first + 5 :] for text in (CLOSED, "skip", "exact h")]
    await behind.stand(source, codes[0])
    for code in [*codes, source]:
        done = await behind.run(source, code)
        if done is None:  # the source itself differs from itself nowhere
            assert code == source
            continue
        plain = await behind.plain(code)
        assert (done.stdout, done.exit.code) == (plain.stdout, plain.exit.code)


@pytest.mark.slow
async def test_a_prefix_with_an_error_gets_no_process(behind: Behind) -> None:
    source = f"{HEADER}theorem wrong (p : Prop) : p := p\n{GOAL}sorry\n"
    code = source.replace("sorry", CLOSED)
    await behind.expect(source, code, await behind.plain(code))
    await behind.standing.settled()
    assert not behind.standing.holds("source")
    await behind.expect(source, code, await behind.plain(code))
    assert await behind.run(source, code) is None


@pytest.mark.slow
async def test_sources_with_a_prefix_in_common_have_one_process(behind: Behind) -> None:
    source = f"{HEADER}{BEFORE}{GOAL}sorry\n"
    await behind.stand(source, source.replace("sorry", CLOSED))
    other = source.replace("goal", "another").replace("And q p", "And p q")
    code = other.replace("sorry", "exact h")
    assert not behind.standing.holds("other")
    done = await behind.run(other, code, "other")
    plain = await behind.plain(code)
    assert done
    assert (done.stdout, done.exit.code) == (plain.stdout, plain.exit.code)
    assert behind.standing.holds("other")
    # Here the prefix ends in the middle of a command.
    longer = source.replace(f"h\n{GOAL}", f"h\n -- {GOAL}").replace(" -- t", "\n-- t")
    assert longer.startswith(f"{HEADER}{BEFORE}")
    assert await behind.run(longer, longer.replace("sorry", CLOSED), "longer") is None


@pytest.mark.slow
async def test_one_process_is_made_at_a_time(behind: Behind) -> None:
    first = f"{HEADER}{BEFORE}{GOAL}sorry\n"
    second = first.replace("first", "second")
    sources = {"first": first, "second": second}
    codes = {name: source.replace("sorry", CLOSED) for name, source in sources.items()}
    plain = {name: await behind.plain(code) for name, code in codes.items()}
    for name in ("first", "second"):
        await behind.expect(sources[name], codes[name], plain[name], name)
    await behind.standing.settled()
    assert [behind.standing.holds(name) for name in sources] == [True, False]
    await behind.expect(second, codes["second"], plain["second"], "second")
    await behind.standing.settled()
    assert behind.standing.holds("second")


@pytest.mark.slow
async def test_a_process_that_says_anything_else_does_not_serve(behind: Behind) -> None:
    source = f"{HEADER}{BEFORE}{GOAL}sorry\n"
    code = source.replace("sorry", CLOSED)
    other = await behind.plain(source.replace("sorry", "skip"))
    await behind.expect(source, code, other)
    await behind.standing.settled()
    assert await behind.run(source, code) is None


@pytest.mark.slow
async def test_a_large_source_holds_up_nothing_else(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = StandingPrefixes(site.core, ForkServer(site.core, ForkRules()), slots=1)
    source = HEADER + "(\n" * 200_000
    stands = _Prefix("", (), HEADER)
    monkeypatch.setattr(prefixes, "_prefixes", OrderedDict({text_hash(HEADER): stands}))
    late = 0.0

    async def beat() -> None:
        nonlocal late
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(0.01)
            late = max(late, time.monotonic() - began_s)

    beats = asyncio.create_task(beat())
    began_s = time.monotonic()
    assert await prefixes.run("source", source, source + "x", LIMITS) is None
    took_s = time.monotonic() - began_s
    beats.cancel()
    assert late < max(0.1, took_s / 3)


@pytest.mark.slow
async def test_a_source_is_read_once_for_a_hole(
    behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(code: str, offset: int) -> int:
        read.append(offset)
        return prefix_end(code, offset)

    monkeypatch.setattr("leanq.lean.goals.prefixes.prefix_end", counted)
    source = f"{HEADER}{BEFORE}{GOAL}sorry\n"
    first, *others = (
        source.replace("sorry", f"{{{each}}}") for each in (CLOSED, "exact h", "skip")
    )
    await behind.stand(source, first)
    for code in others:
        assert await behind.run(source, code)
    assert read == [source.index("sorry")]


@pytest.mark.slow
async def test_no_process_is_left_when_the_prefixes_are_closed(behind: Behind) -> None:
    source = f"{HEADER}{BEFORE}{GOAL}sorry\n"
    await behind.stand(source, source.replace("sorry", CLOSED))
    await behind.standing.close()
    assert not behind.standing.holds("source")


@pytest.mark.slow
async def test_a_process_that_is_killed_is_replaced(behind: Behind) -> None:
    source = f"{HEADER}{BEFORE}{GOAL}sorry\n"
    code = source.replace("sorry", CLOSED)
    await behind.stand(source, code)
    for pid in forks_of(behind):
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not behind.standing.holds("source"))
    assert await behind.run(source, code) is None
    await behind.stand(source, code)
    assert await behind.run(source, code)


@pytest.mark.slow
async def test_nothing_is_kept_of_a_prefix_whose_process_is_lost(behind: Behind) -> None:
    source = f"{HEADER}{BEFORE}{GOAL}sorry\n"
    code = source.replace("sorry", CLOSED)
    await behind.stand(source, code)
    assert prefixes_kept()
    for pid in forks_of(behind):
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not behind.standing.holds("source"))
    assert await behind.run(source, code) is None
    assert not prefixes_kept()


def forks_of(behind: Behind) -> list[int]:
    """The supervisors of all that was forked from zygotes: of what stands behind prefixes, too."""
    zygotes = [children(pid)[0] for pid in behind.forks.pids()]
    return [fork for zygote in zygotes for fork in children(zygote)]


def prefixes_kept() -> list[str]:
    gc.collect()
    return [each.text for each in gc.get_objects() if isinstance(each, _Prefix)]


@pytest.mark.slow
async def test_a_process_whose_zygote_is_killed_serves_no_more(behind: Behind) -> None:
    source = f"{HEADER}{BEFORE}{GOAL}sorry\n"
    code = source.replace("sorry", CLOSED)
    await behind.stand(source, code)
    for pid in behind.forks.pids():
        os.kill(pid, 9)
    await eventually(lambda: not behind.standing.holds("source"))
    assert await behind.run(source, code) is None


def test_a_prefix_ends_where_the_command_of_an_offset_begins() -> None:
    text = (
        "theorem a : b := c\n/-- about -/\n@[simp]\ntheorem d : e := by\n  sorry\n"
        "set_option x true in\ndef f := g\nsection\n  theorem h : i := j"
    )
    beginnings = {
        "theorem a": "theorem a",
        "sorry": "/-- about",
        "def f": "set_option",
        "section": "section",
        "theorem h": "section",
    }
    for word, begins in beginnings.items():
        assert text[prefix_end(text, text.index(word)) :].startswith(begins), word
    assert prefix_end("", 0) == prefix_end("  sorry", 3) == 0


@given(st.text("ab\nλ", max_size=40), st.text("ab\nλ", max_size=40))
def test_texts_agree_up_to_their_first_difference(one: str, other: str) -> None:
    at = first_difference(one, other)
    assert one[:at] == other[:at]
    assert at in (len(one), len(other)) or one[at] != other[at]


# A program in Lean's place, behind the real server and the real walls: it takes the rest of a text
# for a Python script.
_STANDIN = """
import fcntl, os, stat, sys
from leanq.lean.run import zygote as prefix_process
def held(mode):
    # Its requests are open to read, its answers to write, its files for both. Python has others.
    for fd in range(3, 100):
        try:
            about, opened = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        except OSError:
            continue
        ours = stat.S_ISFIFO(about.st_mode) or about.st_dev == os.stat(".").st_dev
        if ours and opened == mode:
            return fd
    raise LookupError(mode)
class Standin:
    def stop_behind(self, arguments, size, when_ready):
        code = os.read(0, size)
        exec(code)
        when_ready(len(code) % 256 if b"FAIL" in code else 0)
    def go_on(self, arguments):
        text = b""
        while chunk := os.read(0, 1 << 16):
            text += chunk
        try:
            exec(text.split(b"#\\n", 1)[1], {"held": held})
        except BaseException as error:
            os.write(1, repr(error).encode())
        os._exit(0)
prefix_process.serve(Standin(), [])
"""
PREFIX = "pass #\n"


@contextlib.asynccontextmanager
async def standin(prefix: str = PREFIX) -> AsyncIterator[StandingPrefix]:
    sandbox = await Sandbox.open(readable=(*PYTHON, LEANQ))
    try:
        if not {"pid-ns", "mount-ns"} <= set(sandbox.isolation):
            pytest.skip("no process or mount namespace here, so no fork server")
        script = f"import sys\nsys.path.insert(0, {str(LEANQ.parent)!r})\n{_STANDIN}"
        argv = [sys.executable, "-I", "-c", script]
        yield await StandingPrefix.open(sandbox, argv, {"PATH": "/usr/bin:/bin"}, prefix, LIMITS)
    finally:
        await sandbox.close()


async def said(standing: StandingPrefix, script: str, limits: Limits = LIMITS) -> str:
    return (await standing.run(PREFIX + script, limits)).stdout.decode()


HOSTILE = {
    "memory of the process": "open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "memory of the process, to read": "open(f'/proc/{os.getppid()}/mem', 'rb')",
    "its descriptors": "open(f'/proc/{os.getppid()}/fd/3')",
    "its environment": "open(f'/proc/{os.getppid()}/environ').read()",
    "a file of the prefix": "os.write(held(os.O_RDWR), b'x')",
    "a request": "os.read(held(os.O_RDONLY), 10)",
    "an answer": "os.write(held(os.O_WRONLY), b'x' * 100)",
}


@pytest.mark.parametrize("action", HOSTILE.values(), ids=HOSTILE)
async def test_a_fork_cannot_reach_the_process(action: str) -> None:
    async with standin() as standing:
        assert "Error" in await said(standing, f"import os\n{action}\nos.write(1, b'done')")
        assert await said(standing, "import os\nos.write(1, b'fine')") == "fine"


async def test_nothing_of_a_fork_is_left_for_the_next() -> None:
    leave = """
import os, time
os.makedirs("a/b"); open("a/b/c", "w").write("x"); open("d", "w").write("x")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(1000)
"""
    look = """
import os
import signal
others = [pid for pid in os.listdir("/proc") if pid.isdigit()]
os.write(1, repr((os.listdir("."), len(others))).encode())
"""
    async with standin() as standing:
        before = await said(standing, look)
        await said(standing, leave)
        assert await said(standing, look) == before


UNREMOVABLE = {
    "a folder that cannot be listed": "os.umask(0); os.mkdir('a', 0o300); open('a/b', 'w').close()",
    "folders too deep": "for _ in range(3000): os.mkdir('a'); os.chdir('a')",
}


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(leave, id=name, marks=pytest.mark.slow if "deep" in name else ())
        for name, leave in UNREMOVABLE.items()
    ],
)
async def test_files_that_cannot_be_removed_end_the_process(leave: str) -> None:
    async with standin() as standing:
        with pytest.raises(SandboxError, match="has ended"):
            await said(standing, f"import os\n{leave}")


async def test_what_a_fork_leaves_to_be_removed_is_in_its_own_cost() -> None:
    many = "import os\nfor n in range(8000): os.close(os.open(f'{n}', os.O_CREAT | os.O_WRONLY))"
    async with standin() as standing:
        await standing.run(PREFIX + many, LIMITS)
        assert (await standing.run(PREFIX + "pass", LIMITS)).exit.cpu_s <= 0.04


async def test_a_process_does_not_grow_from_request_to_request() -> None:
    """A prefix is a candidate's text: it may have taken the process over."""
    grows = (
        "import os; kept = []\nfor n in range(9):\n"
        "    n and os.read(held(os.O_RDONLY), 1 << 16)\n"
        "    kept.append(b'x' * (50 << 20)); os.write(held(os.O_WRONLY), bytes(21))\n#\n"
    )
    async with standin(grows) as standing:
        for _ in range(2):
            await standing.run(grows, LIMITS)
        with pytest.raises(SandboxError, match="more memory"):
            await standing.run(grows, LIMITS)
        assert not standing.alive


async def test_prefixes_are_closed_while_one_serves(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanq.lean.goals.prefixes.prefix_end", lambda *_: len(PREFIX))
    forks = ForkServer(site.core, ForkRules())
    prefixes = StandingPrefixes(site.core, forks, slots=2)
    async with standin() as busy, standin() as idle:
        found = _Prefix("", (), PREFIX, [busy, idle])
        monkeypatch.setattr(prefixes, "_prefixes", OrderedDict({text_hash(PREFIX): found}))
        text = f"{PREFIX}import time; time.sleep(100)"
        serves = asyncio.create_task(prefixes.run("source", PREFIX, text, LIMITS))
        await eventually(lambda: busy.busy)
        async with asyncio.timeout(20):
            await prefixes.close()
        assert await serves is None
        assert not busy.sandbox.alive
        assert not idle.sandbox.alive


async def test_a_fork_ends_at_its_limits_and_the_process_stays() -> None:
    short = Limits(cpu_s=0.3, wall_s=60.0, memory_bytes=1 << 30, scratch_bytes=64 << 20)
    hasty = Limits(cpu_s=60.0, wall_s=0.3, memory_bytes=1 << 30, scratch_bytes=64 << 20)
    async with standin() as standing:
        done = await standing.run(PREFIX + "while True: pass", short)
        assert done.exit.stopped == "cpu"
        done = await standing.run(PREFIX + "import time; time.sleep(100)", hasty)
        assert done.exit.stopped == "wall"
        assert await said(standing, "import os\nos.write(1, b'fine')") == "fine"


@pytest.mark.slow
async def test_a_forks_children_spend_its_time() -> None:
    spin = "import os, time\nfor _ in range(3): os.fork()\nwhile True: pass"
    short = Limits(cpu_s=0.5, wall_s=60.0, memory_bytes=1 << 30, scratch_bytes=64 << 20)
    waited = "import os\nif os.fork():\n    os.wait()\nelse:\n    for n in range(10**8): pass"
    async with standin() as standing:
        for script in (spin, waited):
            done = await standing.run(PREFIX + script, short)
            assert done.exit.stopped == "cpu"
            assert done.exit.cpu_s < 4.0
        assert await said(standing, "import os\nos.write(1, b'fine')") == "fine"


async def test_a_fork_above_its_memory_ends_the_process() -> None:
    little = Limits(cpu_s=60.0, wall_s=60.0, memory_bytes=100 << 20, scratch_bytes=64 << 20)
    async with standin() as standing:
        with pytest.raises(SandboxError, match="memory"):
            await standing.run(
                PREFIX + "import time\nx = b'x' * (300 << 20)\ntime.sleep(50)", little
            )
        assert not standing.alive


@pytest.mark.parametrize("answer", ["b'x' * 100", "b''", "b'\\xff' * 21", "b'\\0' * 20 + b'\\x05'"])
async def test_a_process_that_answers_anything_is_ended(answer: str) -> None:
    """A prefix is a candidate's text: it may have taken the process over."""
    prefix = f"import os; os.write(held(os.O_WRONLY), {answer}); os._exit(0) #\n"
    with pytest.raises(SandboxError):
        async with standin(prefix):
            pass


async def test_a_prefix_that_fails_is_refused() -> None:
    with pytest.raises(SandboxError, match="ends with code"):
        async with standin("pass # FAIL #\n"):
            pass
