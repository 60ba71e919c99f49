"""The repl driver: leanprover-community/repl, which holds environments and proof states in memory.

Its answers come in milliseconds where a Lean of one's own takes as long as its imports. But its
processes are shared by candidates, its tactic mode is known to accept wrong proofs, and what it
prints can be forged by whoever runs in it. So it says no, and how to go on; yes is said by Lean::

    protocol.py   commands and answers, and how an answer is found in what was printed
    session.py    one process: limits, the header it has elaborated, the states it holds
    sessions.py   the processes of a worker: whom a request gets, spares, recycling
    live.py       a state's way back into a process: replayed, or loaded from a pickle
    steps.py      a tactic on a live state
    driver.py     the operations
"""
