"""The lean driver with real Lean: its verdicts, its audit, and what it leaves behind."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.lean.sandboxes import busy, needs, running
from support.lean.sites import Site, check, sample
from support.waiting import eventually

from leanq.errors import SandboxError, ToolchainError
from leanq.lean import driver as lean_module
from leanq.lean.environment import Environment, Watch, open_environment
from leanq.lean.judge import check as check_module
from leanq.lean.run import process as program_module
from leanq.lean.run.toolchain import ask
from leanq.queue.requests import Message, Reply, Request
from leanq.queue.wire import pack_reply

# Verdicts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict", "axioms", "places"),
    [
        ("and_swap", "accepted", (), []),
        ("or_swap", "accepted", (), []),
        ("standalone", "accepted", (), []),
        ("incomplete", "incomplete", None, [("warning", 4, 8)]),
        ("wrong", "rejected", None, [("error", 7, 2)]),
        ("syntax_error", "rejected", None, [("error", 4, 37)]),
        ("heartbeats", "exhausted", None, [("error", 10, 76)]),
        ("silent_sorry", "incomplete", ("sorryAx",), [("warning", 1, 0)]),
    ],
)
async def test_samples(
    either: Site,
    name: str,
    verdict: str,
    axioms: tuple[str, ...] | None,
    places: Sequence[tuple[str, int, int]],
) -> None:
    reply = await either.check(sample(name))
    assert (reply.verdict, reply.axioms, reply.error) == (verdict, axioms, None)
    assert [(m.severity, m.line, m.column) for m in reply.messages] == places
    assert reply.fingerprint == either.core.fingerprint
    assert reply.cpu_s > 0
    assert reply.wall_s > reply.audit_s >= 0
    assert (reply.audit_s > 0) == (axioms is not None)


@pytest.mark.slow
async def test_a_message_of_leans_is_whole(either: Site) -> None:
    (message,) = (await either.check(sample("wrong"))).messages
    text = "Type mismatch\n  h.left\nhas type\n  p\nbut is expected to have type\n  q"
    assert message == Message("error", 7, 2, text, end_line=7, end_column=14)


@pytest.mark.slow
async def test_columns_count_characters(either: Site) -> None:
    code = "prelude\ntheorem «𝔸é→» (p : Prop) : p := nowhere\n"
    message, *_ = (await either.check(code)).messages
    assert (message.line, message.column, message.end_column) == (2, 32, 39)


@pytest.mark.slow
async def test_the_cpu_budget_ends_it(either: Site) -> None:
    reply = await either.check(sample("stack_overflow"), timeout_s=1.0)
    assert (reply.verdict, reply.axioms) == ("timeout", None)
    assert reply.cpu_s > 1.0


@pytest.mark.slow
async def test_the_wall_budget_ends_it(either: Site) -> None:
    reply = await either.check(sample("stack_overflow"), wall_s=0.3)
    assert reply.verdict == "timeout"


@pytest.mark.slow
async def test_the_memory_limit_ends_it(either: Site) -> None:
    reply = await either.check(sample("stack_overflow"), memory_mb=48)
    assert reply.verdict == "memory"
    assert ["memory" in m.text for m in reply.messages] == [True]


@pytest.mark.slow
async def test_a_crash(either: Site) -> None:
    # With Lean's own stack it takes 22 s of CPU.
    either.core = replace(either.core, options=(*either.core.options, "--tstack=1024"))
    reply = await either.check(sample("stack_overflow"))
    assert reply.verdict == "crashed"
    (message,) = reply.messages
    assert "SIGABRT" in message.text
    assert "Stack overflow" in message.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "verdict", "said"),
    [
        ("kill -ABRT $$", "crashed", "SIGABRT"),
        ("kill -40 $$", "crashed", "signal 40"),
        ("echo oops >&2; exit 3", "crashed", "exit code 3"),
        ("exit 0", "crashed", "exit code 0"),
        ("yes", "crashed", "too much"),
        ("echo out of memory >&2; exit 1", "memory", "out of memory"),
    ],
)
async def test_other_ends(site: Site, script: str, verdict: str, said: str) -> None:
    driver = await site.driver(site.shell())
    reply = await driver.run(check(script))
    assert reply.verdict == verdict
    assert said in reply.messages[-1].text


@pytest.mark.slow
@pytest.mark.parametrize("line", ["y", '{"severity":"error","data":"x"}', '{"severity"'])
async def test_a_flood_of_output(site: Site, line: str) -> None:
    driver = await site.driver(site.shell())
    reply = await driver.run(check(f"yes '{line}' | head -c 3000000; exit 1"))
    assert reply.verdict == ("rejected" if line.endswith("}") else "crashed")
    assert len(pack_reply("token", reply)) < 1 << 20


@pytest.mark.slow
async def test_what_takes_long_with_large_input_holds_no_other_request_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def watched(module: object, name: str) -> Callable[..., Any]:
        real = getattr(module, name)

        def call(*args: Any) -> Any:
            seen.append(name)
            assert threading.current_thread() is not threading.main_thread()
            return real(*args)

        return call

    driver = await site.driver()
    for module, name in (
        (program_module, "Printed"),
        (check_module.Examples, "of"),
        (check_module, "read_parts"),
    ):
        monkeypatch.setattr(module, name, watched(module, name))
    monkeypatch.setattr(program_module, "_PRINTED_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(check_module, "_AT_ONCE_BYTES", 0)
    code = "prelude\nimport Core\n-- an example\ntheorem t : True := True.intro\n"
    assert (await driver.run(check(code))).verdict == "accepted"
    assert seen == ["Printed", "read_parts", "of"]


@pytest.mark.slow
async def test_a_missing_import_is_leans_to_reject(either: Site) -> None:
    reply = await either.check("prelude\nimport Nowhere.To.Be.Found\n")
    assert reply.verdict == "rejected"
    assert "Nowhere" in reply.messages[0].text


@pytest.mark.slow
@pytest.mark.parametrize(
    "header", ["\tprelude\n", "prelude\timport Core\n", "prelude\rimport Core\n"]
)
async def test_blanks_that_lean_does_not_take(either: Site, header: str) -> None:
    reply = await either.check(f"{header}theorem t : True := sorry\n", audit=False)
    assert (reply.verdict, reply.sorries) == ("rejected", ())


@pytest.mark.slow
async def test_many_at_a_time_give_the_verdicts_of_one(either: Site) -> None:
    expected = {
        "and_swap": ("accepted", ()),
        "wrong": ("rejected", None),
        "silent_sorry": ("incomplete", ("sorryAx",)),
        "standalone": ("accepted", ()),
    }
    driver = await either.one(slots=3)
    free = asyncio.Semaphore(3)

    async def run(name: str) -> tuple[str, Reply]:
        async with free:
            return name, await driver.run(check(sample(name)))

    replies = await asyncio.gather(*(run(name) for name in list(expected) * 20))
    assert len(replies) == 80
    for name, reply in replies:
        assert (reply.verdict, reply.axioms) == expected[name]


# Processes and files


async def test_a_candidate_finds_nothing_of_the_one_before(site: Site) -> None:
    driver = await site.driver(site.shell())
    leave = """
        mkdir -p deep/er; echo left > deep/er/file; ln -s / root; mkfifo pipe; chmod 0 deep
        echo left > ../outside; echo left > "$HOME/at-home"; echo left > "$TMPDIR/temporary"
        (setsid sleep 1000 &)
        exit 1
    """
    await driver.run(check(leave))
    reply = await driver.run(
        check("""
        for name in * .[!.]* ..?*; do
            test -e "$name" -o -L "$name" && printf '{"severity":"error","data":"%s"}\\n' "$name"
        done
        exit 1
    """)
    )
    assert [m.text for m in reply.messages] == ["script.sh"]


async def test_a_candidate_cannot_write_beside_its_folder(site: Site, tmp_path: Path) -> None:
    driver = await site.driver(site.shell())
    script = f"echo x > {tmp_path}/outside; echo x > {site.core.search_path[0]}/Evil.olean; exit 1"
    await driver.run(check(script))
    assert not (tmp_path / "outside").exists()
    assert not (site.core.search_path[0] / "Evil.olean").exists()


@pytest.mark.slow
async def test_cancelling_a_check_ends_lean(either: Site) -> None:
    driver = await either.one()
    task = asyncio.create_task(driver.run(check(sample("stack_overflow"))))
    await eventually(lambda: busy(either.marker) != [], deadline_s=200.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert busy(either.marker) == []
    assert (await driver.run(check(sample("and_swap")))).verdict == "accepted"


async def test_two_checks_at_once_do_not_meet(site: Site) -> None:
    driver = await site.driver(site.shell(), slots=2)
    script = (
        # It has said something, and so it does not run once more.
        """echo '{"severity":"information","data":"x"}'; """
        "test -e mine && exit 9; : > mine; sleep 1; exit"
    )
    for reply in await asyncio.gather(*(driver.run(check(script)) for _ in range(2))):
        assert "exit code 0" in reply.messages[-1].text


@pytest.mark.slow
async def test_a_dead_supervisor_costs_one_request(site: Site, tmp_path: Path) -> None:
    driver = await site.driver()
    (sandbox,) = driver.opened.lean.idle
    task = asyncio.create_task(driver.run(check(sample("stack_overflow"))))
    await eventually(lambda: busy(site.marker) != [], deadline_s=200.0)
    of_the_request = busy(site.marker)
    sandbox.supervisor.kill()
    with pytest.raises(SandboxError):
        await task
    await eventually(lambda: not any(map(running, of_the_request)))
    assert (await driver.run(check(sample("and_swap")))).verdict == "accepted"


@pytest.mark.slow
async def test_a_supervisor_that_died_idle_costs_no_check(site: Site) -> None:
    driver = await site.driver()
    (sandbox,) = driver.opened.lean.idle
    sandbox.supervisor.kill()
    await eventually(lambda: not sandbox.alive)
    assert (await driver.run(check(sample("and_swap")))).verdict == "accepted"


@pytest.mark.slow
@pytest.mark.parametrize("audit", [True, False])
async def test_a_check_after_another_command_line_is_served(site: Site, audit: bool) -> None:
    driver = await site.driver()
    example = "prelude\nimport Core\nexample (p : Prop) : p → p := id\n"
    hole = "prelude\nimport Core\ntheorem t (p : Prop) : p → p := sorry\n"
    for _ in range(2):
        reply = await driver.run(check(example, audit=audit))
        taken = "accepted" if audit else "unjudged"
        assert (reply.verdict, reply.axioms) == (taken, () if audit else None)
        (sorry,) = (await driver.run(check(hole, audit=audit))).sorries
        for tactic, verdict in (("intro h", "incomplete"), ("exact id", taken)):
            request = Request(op="step", state=sorry.state or "", tactic=tactic, audit=audit)
            assert (await driver.run(request)).verdict == verdict


@pytest.mark.slow
async def test_other_operations_are_refused(either: Site) -> None:
    driver = await either.one()
    assert "echo" in ((await driver.run(Request(op="echo"))).error or "")


async def test_about(site: Site) -> None:
    about = (await site.driver()).about
    assert about["driver"] == "lean"
    assert about["lean"] == site.core.toolchain.version
    assert about["fingerprint"] == site.core.fingerprint


@pytest.mark.slow
async def test_text_goes_to_lean_as_utf_8_in_any_locale(
    either: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ascii")
    reply = await either.check(
        "prelude\r\nimport Core\r\ntheorem «𝔸∀» (p : Prop) : p → p := id\r\n"
    )
    assert reply.verdict == "accepted"


# An environment that changes


class Library:
    """A folder of compiled modules that can be compiled anew."""

    def __init__(self, core: Environment, folder: Path, cache: Path) -> None:
        self.core, self.folder, self.cache = core, folder, cache
        folder.mkdir()

    def compile(self, statement: str, name: str = "Library", imports: str = "Core") -> None:
        source = self.folder / f"{name}.lean"
        source.write_text(f"prelude\nimport {imports}\n{statement}\n")
        command = (*self.core.toolchain.command, "-o", f"{name}.olean", f"{name}.lean")
        environ = {"LEAN_PATH": f"{self.core.search_path[0]}:{self.folder}"}
        run = lean_variables_kept(command, environ)
        assert ask(run, {}, self.folder).returncode == 0

    def open(self) -> Environment:
        return open_environment("library", self.folder, cache=self.cache, environ={})


def lean_variables_kept(command: Sequence[str], environ: dict[str, str]) -> tuple[str, ...]:
    """``ask`` takes nothing of Lean's own variables over; ``env`` gives them all the same."""
    return ("/usr/bin/env", *(f"{name}={text}" for name, text in environ.items()), *command)


@pytest.fixture
def library(
    core: Environment, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Library:
    """A library with a theorem, whose changes are noticed at once."""
    monkeypatch.setattr(lean_module, "_CHECK_CHANGES_EVERY_S", 0.0)
    made = Library(core, tmp_path / "library", cache)
    made.compile("theorem given (p : Prop) (h : p) : p := h")
    return made


@pytest.mark.slow
async def test_a_changed_environment_is_noticed(either: Site, library: Library) -> None:
    driver = await either.one(library.open)
    code = "prelude\nimport Core\nimport Library\ntheorem t (p : Prop) : p → p := given p"
    first = await driver.run(check(code))
    assert (first.verdict, first.axioms) == ("accepted", ())

    library.compile("axiom given (p : Prop) (h : p) : p")
    second = await driver.run(check(code))
    assert (second.verdict, second.axioms) == ("rejected", ("given",))
    assert (
        first.fingerprint
        != second.fingerprint
        == driver.about["fingerprint"]
        == library.open().fingerprint
    )

    library.compile("theorem given (p : Prop) (h : p) : p := h")
    third = await driver.run(check(code))
    assert (third.verdict, third.fingerprint) == ("accepted", first.fingerprint)


@pytest.mark.slow
async def test_no_verdict_is_about_other_files_than_its_fingerprint(
    either: Site, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts may be remembered under the fingerprint, and another worker may still serve it."""
    library.compile("axiom given (p : Prop) (h : p) : p")
    driver = await either.one(library.open)
    monkeypatch.setattr(lean_module, "_CHECK_CHANGES_EVERY_S", 3600.0)
    before = library.open().fingerprint
    library.compile("theorem given (p : Prop) (h : p) : p := h")
    code = "prelude\nimport Core\nimport Library\ntheorem t (p : Prop) : p → p := given p"
    reply = await driver.run(check(code))
    assert (reply.verdict, reply.axioms) == ("accepted", ())
    assert before != reply.fingerprint == library.open().fingerprint
    # As while it is built.
    monkeypatch.setattr(Environment, "changed", lambda _: True)
    monkeypatch.setattr(Watch, "is_quiet", lambda _: False)
    reply = await driver.run(check(code))
    assert (reply.verdict, reply.reason) == ("unjudged", "judge_unavailable")
    assert "the library's files change while the text is read" in reply.messages[-1].text


@pytest.mark.slow
async def test_no_verdict_is_about_a_replaced_library_behind_another(
    either: Site, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.compile("theorem given (p : Prop) (h : p) : p := h", "Basis")
    library.compile("theorem taken (p : Prop) (h : p) : p := given p h", imports="Basis")
    driver = await either.one(library.open)
    monkeypatch.setattr(lean_module, "_CHECK_CHANGES_EVERY_S", 3600.0)
    before = library.open().fingerprint
    # The library that the header names stays as it is.
    library.compile("axiom given (p : Prop) (h : p) : p", "Basis")
    code = "prelude\nimport Core\nimport Library\ntheorem t (p : Prop) : p → p := taken p"
    reply = await driver.run(check(code))
    assert before != reply.fingerprint == library.open().fingerprint


@pytest.mark.slow
async def test_no_step_and_no_named_target_is_of_other_files_than_the_fingerprint(
    either: Site, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    goal = "prelude\nimport Core\n"
    driver = await either.one(library.open)
    first = await driver.run(
        check(f"{goal}import Library\ntheorem t (p : Prop) : p → p := by sorry")
    )
    [sorry] = first.sorries
    proof = f"{goal}theorem given (p : Prop) (h : p) : p := h"
    named = Request(op="verify", code=proof, theorems=("given",))
    told = await driver.run(named)
    assert (told.verdict, told.fingerprint) == ("accepted", first.fingerprint), told.messages
    monkeypatch.setattr(lean_module, "_CHECK_CHANGES_EVERY_S", 3600.0)

    library.compile("axiom given (p : Prop) (h : p) : p")
    step = Request(op="step", state=sorry.state or "", tactic="exact given p")
    assert "check its source again" in ((await driver.run(step)).error or "")
    library.compile("theorem given (p q : Prop) (h : q) : q := h")
    told = await driver.run(named)
    assert (told.verdict, told.reason) == ("rejected", "statement_differs")
    assert told.fingerprint == library.open().fingerprint


@pytest.mark.slow
async def test_no_verdict_is_about_a_file_that_the_fingerprint_lacks(
    either: Site, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await either.one(library.open)
    monkeypatch.setattr(lean_module, "_CHECK_CHANGES_EVERY_S", 3600.0)
    before = library.open().fingerprint
    (library.folder / "Fresh.olean").write_bytes((library.folder / "Library.olean").read_bytes())
    code = "prelude\nimport Core\nimport Fresh\ntheorem t (p : Prop) : p → p := given p"
    reply = await driver.run(check(code))
    assert (reply.verdict, reply.axioms) == ("accepted", ())
    assert before != reply.fingerprint == library.open().fingerprint


@pytest.mark.slow
async def test_an_environment_that_went_away_is_the_workers_trouble(
    site: Site, library: Library, tmp_path: Path
) -> None:
    driver = await site.open(library.open)
    library.folder.rename(tmp_path / "away")
    with pytest.raises(ToolchainError):
        await driver.run(check(sample("and_swap")))
    (tmp_path / "away").rename(library.folder)
    assert (await driver.run(check(sample("and_swap")))).verdict == "accepted"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["Basis", "Library"])
async def test_a_module_that_is_lost_is_the_workers_trouble(
    either: Site, library: Library, tmp_path: Path, module: str
) -> None:
    library.compile("theorem given (p : Prop) (h : p) : p := h", "Basis")
    library.compile("theorem taken (p : Prop) (h : p) : p := given p h", imports="Basis")
    driver = await either.one(library.open)
    header = "prelude\nimport Core\nimport Library\n"
    right = f"{header}theorem t (p : Prop) : p → p := taken p"
    assert (await driver.run(check(right))).verdict == "accepted"
    file = library.folder / f"{module}.olean"
    file.rename(tmp_path / "lost")
    for _ in range(2):
        with pytest.raises(ToolchainError, match=f"has lost {module} on this machine"):
            await driver.run(check(f"{right} -- again"))
    with pytest.raises(ToolchainError, match=f"has lost {module}"):
        await driver.prove()
    # Nobody is to wait for what was never there.
    reply = await driver.run(check("prelude\nimport Core\nimport Elsewhere"))
    assert (reply.verdict, reply.reason) == ("rejected", "unknown_import")
    (tmp_path / "lost").rename(file)
    await driver.prove()
    assert (await driver.run(check(f"{right} -- mended"))).verdict == "accepted"


@pytest.mark.slow
async def test_a_library_that_came_with_a_hole_makes_no_text_wrong(
    either: Site, library: Library
) -> None:
    library.compile("theorem given (p : Prop) (h : p) : p := h", "Basis")
    library.compile("theorem taken (p : Prop) (h : p) : p := given p h", imports="Basis")
    (library.folder / "Basis.olean").unlink()
    driver = await either.one(library.open)
    for imports in ("Library", "Library.Part"):
        reply = await driver.run(check(f"prelude\nimport Core\nimport {imports}"))
        assert (reply.verdict, reply.reason) == ("unjudged", "judge_unavailable")
        assert "lacks a module that its other modules import" in reply.messages[-1].text


@pytest.mark.slow
async def test_theorems_beyond_the_first_thousand_are_counted(site: Site) -> None:
    text = "prelude\nimport Core\n"
    text += "".join(f"theorem t{n} (p : Prop) (h : p) : p := h\n" for n in range(1003))
    reply = await site.check(text, statements=False)
    assert reply.verdict == "accepted"
    assert (len(reply.theorems), reply.more_theorems) == (1000, 3)
    assert reply.theorems[-1].name == "t999"


async def test_theorems_have_the_names_that_a_text_of_the_module_system_gives_them(
    site: Site,
) -> None:
    text = "module\nprelude\nnamespace A\ntheorem t (p : Prop) (h : p) : p := h\nend A\n"
    reply = await site.check(f"{text}public theorem u (p : Prop) (h : p) : p := h\n")
    assert [theorem.name for theorem in reply.theorems] == ["A.t", "u"]


async def test_many_forbidden_axioms_are_counted_and_who_leads_there_is_named(
    site: Site, library: Library
) -> None:
    library.compile("".join(f"axiom x{n} (p : Prop) : p\n" for n in range(12)), "Basis")
    text = "prelude\nimport Core\nimport Basis\ntheorem fine (p : Prop) (h : p) : p := h\n"
    all_ = " ".join(f"have _ := x{n} p;" for n in range(12))
    text += f"theorem first (p : Prop) : p := by {all_} exact x11 p\n"
    reply = await (await site.one(library.open)).run(check(f"{text}theorem last : True := first _"))
    assert reply.reason == "forbidden_axiom"
    assert reply.messages[-1].text == (
        "leanq: it declares or rests on axioms not allowed: x0, x1, x10 and 9 more; "
        "first rests on x0"
    )
    assert reply.axioms is not None
    assert len(reply.axioms) == 12


async def test_an_unknown_import_is_told_the_nearest_modules(
    either: Site, library: Library
) -> None:
    (library.folder / "Library").mkdir()
    for name in ("Library/Bar", "Library/Other"):
        library.compile("theorem bar (p : Prop) (h : p) : p := h", name)
    driver = await either.one(library.open)
    head = "prelude\nimport Core\nimport Library\n"
    reply = await driver.run(check(f"{head}import Library.Br\n"))
    assert (reply.verdict, reply.reason) == ("rejected", "unknown_import")
    said = "lacks Library.Br; it has Core, Library"
    near = "Nearest to Library.Br: Library.Bar"
    assert said in reply.messages[-1].text
    assert near in reply.messages[-1].text
    asked = Request("verify", code=head, target=f"{head}import Library.Br\ntheorem t : x := sorry")
    error = (await driver.run(asked)).error or ""
    assert said in error
    assert near in error


async def test_a_byte_order_mark_is_named(site: Site) -> None:
    reply = await site.check("\ufefftheorem t (p : Prop) (h : p) : p := h")
    assert reply.verdict == "rejected"
    assert "begins with a byte order mark" in reply.messages[-1].text


async def test_a_text_that_says_itself_that_an_import_is_missing(either: Site) -> None:
    text = "prelude\nimport Core\ntheorem t (p : Prop) : p := by fail \"unknown package 'Core'\""
    reply = await either.check(text)
    assert (reply.verdict, reply.reason) == ("rejected", "lean_error")


async def test_a_lean_that_does_not_run_in_the_sandbox_is_the_workers_trouble(site: Site) -> None:
    needs((await site.driver()).opened.lean.idle[0], landlock=1)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        wrapper, hidden = Path(folder, "wrapper"), Path(folder, "hidden")
        wrapper.write_text(f". {hidden}")
        hidden.write_text("echo Lean")
        toolchain = replace(
            site.core.toolchain,
            command=("/bin/sh", str(wrapper)),
            source="PATH",
            prefix=Path("/usr"),
        )
        with pytest.raises(ToolchainError, match=r"(?s)does not work in the sandbox.*hidden"):
            await site.driver(replace(site.core, toolchain=toolchain, options=()))
