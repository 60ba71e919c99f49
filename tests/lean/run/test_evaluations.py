"""What Lean evaluates of a text is told before it runs, and nothing takes that back."""

from __future__ import annotations

import ctypes
import textwrap

import pytest
from support.lean.python_zygote import forked, python_zygote
from support.lean.sandboxes import GENEROUS
from support.lean.sites import Site, check

from leanq.lean.run.evaluations import Evaluations, UnwatchedError
from leanq.lean.run.fork_server import ForkRules, ForkServer
from leanq.lean.run.process import Evaluated, Lean

HEADER = "prelude\nimport Core\n"
NOTHING = Evaluated()
SYNTAX = """
inductive Lean.SourceInfo where
  | original (a : Nat) : SourceInfo | synthetic (a : Nat) : SourceInfo | none : SourceInfo
inductive Lean.Syntax where
  | missing : Lean.Syntax | node (a : SourceInfo) : Lean.Syntax
  | atom (a : SourceInfo) (b : String) : Lean.Syntax
def autoParam.{u} (α : Sort u) (tactic : Lean.Syntax) : Sort u := α
"""
# Of a value that Lean asks for, as for a missing argument.
ASKED = "\ntheorem helper (p : Prop) (h : autoParam True mine) : True := h\n#check (helper True)\n"
TEXTS = {
    "theorem t (p : Prop) (h : p) : p := by exact h": NOTHING,
    "structure A where\n  a : Nat\n  deriving Inhabited\ndef f (a : A) := a.a": NOTHING,
    "def fast (_ : Nat) : Nat := 1\n@[implemented_by fast] def slow (_ : Nat) : Nat := 2": NOTHING,
    "unsafe def forever : Nat := forever": NOTHING,
    '@[extern "lean_io_exit"] opaque IO.Process.exit : Lean.Macro := fun _ _ _ => .none': NOTHING,
    'syntax "another" : term': Evaluated("termAnother"),
    'syntax (name := mine) "another" : term\n'
    '@[macro mine, extern "x"] opaque f : Lean.Macro := fun _ _ _ => .none': Evaluated("mine", "f"),
    'syntax (name := mine) "another" : term\n'
    "@[macro mine] def f : Lean.Macro := fun _ _ _ => .none": Evaluated("mine", "f"),
    'syntax (name := mine) "another" : term\n'
    "@[macro mine] def _aux_f : Lean.Macro := fun _ _ _ => .none": Evaluated("mine"),
    f"{SYNTAX}def mine : Lean.Syntax := .missing{ASKED}": Evaluated("mine", "mine"),
    f'{SYNTAX}def other : Lean.Syntax := .atom .none "x"\ndef mine := other{ASKED}': Evaluated(
        "mine", "other"
    ),
    f"{SYNTAX}def make (_ : Nat) : Lean.Syntax := .missing\ndef mine := make 1{ASKED}": Evaluated(
        "mine", "mine"
    ),
    f"{SYNTAX}@[noinline] def Lean.Name.mkNum (_ : Nat) : Lean.Syntax := .missing\n"
    f"def mine := Lean.Name.mkNum 1{ASKED}": Evaluated("mine", "Lean.Name.mkNum"),
    # By its name it is the tactic of a field, which words look for.
    f"{SYNTAX}def mine._autoParam : Lean.Syntax := .missing"
    f"{ASKED.replace('mine', 'mine._autoParam')}": Evaluated("mine._autoParam"),
    f'{SYNTAX}@[extern "x"] opaque mine : Lean.Syntax := .missing{ASKED}': Evaluated(
        "mine", "mine"
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_what_lean_evaluates_is_told(site: Site) -> None:
    lean = Lean(site.core, 1, ForkServer(site.core, ForkRules()))
    await lean.open()
    try:
        for text, evaluated in TEXTS.items():
            async with lean.slot() as slot:
                run = await lean.watch(slot, HEADER + text, GENEROUS)
            assert run is not None
            assert (text, run.evaluated) == (text, evaluated), run.printed.messages
    finally:
        await lean.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_text_that_ran_nothing_is_accepted_whatever_its_words(site: Site) -> None:
    driver = await site.driver()
    for text, said in (
        ("unsafe def forever : Nat := forever", ("accepted", None)),
        ('syntax "another" : term', ("unverified", "runs_programs")),
        ('set_option sat.solver "/bin/sh"', ("unverified", "runs_programs")),
        ("-- sat.solver\ndef f := 1", ("accepted", None)),
    ):
        reply = await driver.run(check(f"{HEADER}{text}\ntheorem t : True := True.intro\n"))
        assert (reply.verdict, reply.reason) == said, (text, reply.messages)
    assert reply.messages == ()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_message_says_what_ran_and_where(site: Site) -> None:
    driver = await site.driver()
    reply = await driver.run(check(f'{HEADER}-- macro\n\nsyntax "another" : term\n'))
    assert reply.reason == "runs_programs"
    where = '(line 5, column 0: syntax "another" : term)'
    said = f"but 'syntax' {where} lets it run programs while it is compiled, and it ran"
    assert f"{said} `termAnother` {where}, so" in reply.messages[-1].text


# After its report, each tries to take it back.
SILENCERS = [
    "os.close(reports)",
    "os.dup2(os.open('/dev/null', os.O_RDWR), reports)",
    "os.read(os.open(f'/proc/self/fd/{reports}', os.O_RDONLY), 99)",
    "os.read(os.open(f'/proc/1/fd/{reports - 1}', os.O_RDONLY), 99)",
    "os.set_blocking(reports, False); os.read(reports, 99)",
    "socket.socket(fileno=reports).shutdown(socket.SHUT_RDWR)",
    "socket.socket(fileno=reports).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)",
    "os.write(reports, b''); os.write(reports, b'f' * 4000)",
    "os.set_blocking(reports, False)\nwhile True: os.write(reports, b'x')",
    "os.fork() or os.close(reports)",
    "os.kill(os.getpid(), 9)",
    "os.kill(-1, 9)",
    "os._exit(0)",
    "os.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
]


@pytest.mark.parametrize("program", SILENCERS)
async def test_no_program_takes_a_report_back(program: str) -> None:
    code = f"""
import os, socket
os.write(reports, b"ethe first")
try:
{textwrap.indent(program, "    ")}
except OSError:
    pass
"""
    async with python_zygote() as zygote, forked(zygote) as sandbox:
        done = await sandbox.run(["python"], env={}, limits=GENEROUS, stdin=code.encode())
        assert done.exit.reports[0] == "ethe first"
        assert len(done.exit.reports) <= 8
        # Nor does it reach the next program's reports.
        done = await sandbox.run(["python"], env={}, limits=GENEROUS, stdin=b"")
        assert list(done.exit.reports) == []


def test_another_lean_is_not_watched() -> None:
    with pytest.raises(UnwatchedError, match="this Lean has no symbol lean_ir_find_env_decl"):
        Evaluations(ctypes.CDLL(None))
