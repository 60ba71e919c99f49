"""The repl driver: leanprover-community/repl, which holds environments and proof states in memory.

Its answers come in milliseconds where a Lean of one's own takes as long as its imports. But its
processes are shared by candidates, its tactic mode is known to accept wrong proofs, and what it
prints can be forged by a candidate that runs in it. So the REPL rejects and shows goals; a
Lean process of each candidate's own accepts::

    protocol.py   commands and answers, and how an answer is found in what was printed
    session.py    one process: limits, the header it has elaborated, the states it holds
    sessions.py   the processes of a worker: whom a request gets, spares, recycling
    checks.py     what a process says of a text: the verdict, and the goals in its holes
    pickles.py    the goal in a hole of a source, kept for other processes
    program.py    the command that starts the REPL
    steps.py      a tactic on a live state
    driver.py     the operations
"""
