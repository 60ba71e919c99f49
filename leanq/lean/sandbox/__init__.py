"""Runs untrusted programs, one at a time in each sandbox, under limits.

::

    sandbox.py        the worker's side: a run, its limits and its end
    process.py        a process with pipes, from an event loop
    supervisor.py     the processes around a program
    monitor.py        one program, from its fork to its end
    walls.py          the walls around it, and what an operator can do about missing ones
    isolation.py      the kernel's means for them, and the filter of system calls
    first_process.py  pid 1 of a namespace, and what a fork does to be a program
    scratch.py        its scratch folder
    cgroup.py         what it uses, and its cgroup
"""
