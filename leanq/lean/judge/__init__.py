"""Accepted means proved: checks of compiled files that do not rest on Lean's word.

::

    check.py          a text compiled, and judged
    examples.py       the examples of a text, and the sorries that it names
    declarations.py   what a text declares, what that rests on, and its end
    judge_client.py   the worker's side of the judge
    judge_lean.py     which Lean judges, and the files that test it
    kernel_images.py  libraries of other Leans, as this kernel imports them
    transcriber.py    the program that writes them
    known_names.py    the names that a kernel computes with
    judge_process.py  the judge's process
    judge_forks.py    its forks, one for some files of a tenant
    judge.py          each constant rebuilt, and added by the kernel
    rebuild.py        a compiled file's expressions as Lean's own objects
    kernel.py         Lean's kernel by ctypes
    statement.py      a candidate's statement against its target's
    closing.py        a term that closes a hole, found in a compiled file
    marked.py         which constants stand around a marked term
    printing.py       a statement printed by Lean
"""
