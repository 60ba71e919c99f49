"""The repl driver: leanprover-community/repl, which holds environments and proof states in memory.

It answers in milliseconds, where a new Lean takes as long as its imports. But candidates share its
processes, its tactic mode is known to accept wrong proofs, and a candidate that runs in it can
forge its output. So the REPL rejects and shows goals, and each candidate's own Lean process
accepts::

    protocol.py   commands and answers, and how an answer is found in what was printed
    session.py    one process: limits, the header it has elaborated, the states it holds, and
                  what it says of a text: the verdict, and the goals in its holes
    sessions.py   the processes of a worker: whom a request gets, spares, recycling
    program.py    the command that starts the REPL
    steps.py      a tactic on a live state
    driver.py     the operations
"""
