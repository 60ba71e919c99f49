"""Lean's shared library as the program ``lean``: ``lean_launcher.py LIBRARY [ARGUMENT…]``.

Started once per request, so it imports no more than ctypes, and leaves through C's ``exit``,
which flushes what Lean has written and spares the interpreter's own shutdown.
"""

from __future__ import annotations

import ctypes
import os
import sys


def main() -> None:
    """Run Lean with this process's arguments and exit with Lean's exit code."""
    arguments = [b"lean", *map(os.fsencode, sys.argv[2:])]
    argv = (ctypes.c_char_p * (len(arguments) + 1))(*arguments, None)
    # Lean's interpreter looks compiled functions up among the process's global symbols.
    lean = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    libc = ctypes.CDLL(None)
    # SIGINT and SIGXFSZ: Python catches or ignores them; in `lean` they kill. By number, because
    # `signal` is slow to import. SIGPIPE may stay as it is: Lean ignores it as Python does.
    for number in (2, 25):
        libc.signal(number, None)
    libc.exit(lean.lean_main(len(arguments), argv))


if __name__ == "__main__":
    main()
