"""A toolchain that calls itself Lean 4.28.0, made of the wheel's Lean, with Core for its library.

Its files bear another commit, so the judge's Lean cannot import them. `lib/lean` holds Core, and an
`Init` that imports it and states what a real library states about numbers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from leanq.lean.environment import Environment, open_environment
from leanq.lean.run.toolchain import wheel_libraries, wheel_toolchain
from support.required import missing

VERSION = "4.28.0"
# Lean's code holds the last eight digits of its commit in an instruction, so they stay.
COMMIT = "38f3c0c45b8df6da2652faff6dcaa15a"
CORE = Path(__file__).parents[3] / "leanq" / "lean" / "run" / "Core.lean"

# What a library of Lean's states about numbers, beside what Core declares.
INIT = """
axiom Nat.succ_pos (n : Nat) : Nat.le 1 (Nat.succ n)
axiom Nat.div_zero (n : Nat) : Eq (Nat.div n 0) 0
axiom Nat.div_eq_of_lt (a b : Nat) (h : Nat.le (Nat.succ a) b) : Eq (Nat.div a b) 0
axiom Nat.add_div_right (x z : Nat) (h : Nat.le 1 z) :
  Eq (Nat.div (Nat.add x z) z) (Nat.succ (Nat.div x z))
axiom Nat.mod_zero (n : Nat) : Eq (Nat.mod n 0) n
axiom Nat.mod_eq_of_lt (a b : Nat) (h : Nat.le (Nat.succ a) b) : Eq (Nat.mod a b) a
axiom Nat.add_mod_right (x z : Nat) : Eq (Nat.mod (Nat.add x z) z) (Nat.mod x z)
axiom Nat.gcd_zero_left (y : Nat) : Eq (Nat.gcd 0 y) y
axiom Nat.gcd_succ (x y : Nat) :
  Eq (Nat.gcd (Nat.succ x) y) (Nat.gcd (Nat.mod y (Nat.succ x)) (Nat.succ x))
axiom Nat.shiftLeft_succ (m n : Nat) :
  Eq (Nat.shiftLeft m (Nat.succ n)) (Nat.mul 2 (Nat.shiftLeft m n))
noncomputable def instDecidableEqNat (n m : Nat) : Decidable (Eq n m) := Nat.decEq n m
axiom decide_eq_true (p : Prop) (i : Decidable p) (h : p) : Eq (@Decidable.decide p i) true
axiom decide_eq_false (p : Prop) (i : Decidable p) (h : Not p) : Eq (@Decidable.decide p i) false
axiom Nat.ne_of_beq_eq_false (n m : Nat) (h : Eq (Nat.beq n m) false) : Not (Eq n m)
axiom Nat.testBit_zero (x : Nat) : Eq (Nat.testBit x 0)
  (@Decidable.decide (Eq (Nat.mod x 2) 1) (instDecidableEqNat (Nat.mod x 2) 1))
axiom Nat.testBit_succ (x i : Nat) : Eq (Nat.testBit x (Nat.succ i)) (Nat.testBit (Nat.div x 2) i)
axiom Nat.testBit_and (x y i : Nat) :
  Eq (Nat.testBit (Nat.land x y) i) (and (Nat.testBit x i) (Nat.testBit y i))
axiom Nat.testBit_or (x y i : Nat) :
  Eq (Nat.testBit (Nat.lor x y) i) (or (Nat.testBit x i) (Nat.testBit y i))
axiom Nat.testBit_xor (x y i : Nat) :
  Eq (Nat.testBit (Nat.xor x y) i) (xor (Nat.testBit x i) (Nat.testBit y i))
"""

# Changes the commit in Lean's library, as it lies in memory, and runs Lean.
_PROGRAM = """
#define _GNU_SOURCE
#include <link.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
int lean_main(int argc, char **argv);
static int look(struct dl_phdr_info *info, size_t size, void *unused) {{
    if (!strstr(info->dlpi_name, "/libleanshared.so")) return 0;
    for (int n = 0; n < info->dlpi_phnum; n++) {{
        const ElfW(Phdr) *part = info->dlpi_phdr + n;
        unsigned long in = {offset}UL - part->p_offset;
        if (part->p_type != PT_LOAD || in >= part->p_filesz) continue;
        char *at = (char *)(info->dlpi_addr + part->p_vaddr + in);
        void *page = (void *)((unsigned long)at & ~4095UL);
        if (mprotect(page, 8192, PROT_READ | PROT_WRITE)) return -1;
        memcpy(at, "{commit}", strlen("{commit}"));
        return 1;
    }}
    return -1;
}}
int main(int argc, char **argv) {{
    if (argc > 1 && !strcmp(argv[1], "--version"))
        return puts("Lean (version {version}, x86_64, commit {whole}, Release)") < 0;
    if (dl_iterate_phdr(look, 0) != 1) return 70;
    return lean_main(argc, argv);
}}
"""


def other_lean(folder: Path, *, core: str = "", init: str = INIT) -> Path:
    """Makes the toolchain in a folder, and returns its program.

    Args:
        core: the text of `Core`, if it is another one than leanq's.
        init: what `Init` declares.
    """
    if shutil.which("cc") is None:
        missing("a C compiler, for a toolchain that calls itself another Lean")
    commit = wheel_toolchain({}).commit
    (folder / "bin").mkdir(parents=True)
    modules = folder / "lib" / "lean"
    modules.mkdir(parents=True)
    _bring_libraries(modules)
    offset = (modules / "libleanshared.so").read_bytes().index(commit.encode())
    source = folder / "lean.c"
    whole = COMMIT + commit[len(COMMIT) :]
    source.write_text(_PROGRAM.format(offset=offset, commit=COMMIT, whole=whole, version=VERSION))
    program = folder / "bin" / "lean"
    command = ["cc", "-o", program, source, f"-L{modules}", "-lleanshared"]
    subprocess.run([*command, "-Wl,-rpath,$ORIGIN/../lib/lean"], check=True, timeout=120)
    compile_module(program, "Core", core or CORE.read_text())
    compile_module(program, "Init", f"prelude\nimport Core\n{init}")
    return program


_copies: list[Path] = []


def _bring_libraries(to: Path) -> None:
    """Copies the wheel's libraries once; a link would change the file that the judge looks at."""
    if not _copies:
        _copies.extend(Path(shutil.copyfile(each, to / each.name)) for each in wheel_libraries())
        return
    for each in _copies:
        os.link(each, to / each.name)


def compile_module(program: Path, name: str, text: str, folder: Path | None = None) -> Path:
    """Compiles a module into a folder, or into the toolchain's library."""
    library = program.parents[1] / "lib" / "lean"
    done = subprocess.run(
        [program, "--stdin", "-o", f"{name}.olean"],
        input=text.encode(),
        cwd=folder or library,
        env={"LEAN_PATH": os.pathsep.join(map(str, [folder or library, library]))},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()
    return (folder or library) / f"{name}.olean"


def open_other(program: Path, cache: Path, folder: Path | None = None) -> Environment:
    """The environment of a worker that was started with ``--lean``, with a folder of modules."""
    return open_environment("other", folder, lean=str(program), cache=cache, environ={})
