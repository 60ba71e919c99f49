"""Python in Lean's place, for ``support.lean.python_zygote``, whose zygote alone reads it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

KEPT = b"what the zygote has imported"
ENDLESS = "a library that takes for ever to import"


def own_arguments(command: Sequence[str]) -> list[str]:
    return [*command[1:]]


class Preloaded:
    """What :class:`leanq.lean.run.preloaded.Preloaded` is, of Python."""

    def __init__(
        self,
        _program: str,
        _libraries: Sequence[str],
        _arguments: Sequence[str],
        header: bytes,
        when_ready: Callable[[int], NoReturn],
    ) -> None:
        self.unwatched = ""
        self._header = header
        self._when_ready = when_ready
        self._kept = ctypes.create_string_buffer(KEPT)
        self._pipe = os.pipe()
        os.register_at_fork(after_in_child=self._renew_pipe)

    def run(self) -> None:
        if self._header == ENDLESS.encode():
            signal.pause()
        self._when_ready(0)

    def _renew_pipe(self) -> None:
        """Does in each fork what libuv does there."""
        for fd in self._pipe:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._pipe = os.pipe()

    def go_on(
        self, _arguments: Sequence[str], reports: int | None = None, *, stays: bool = False
    ) -> NoReturn:
        """Runs the program, which finds as ``kept`` the address of what the zygote has, and as
        ``reports`` the number of the socket for its reports."""
        with open(0, "rb", closefd=False) as stdin:
            program = stdin.read().decode()
        names = {"kept": ctypes.addressof(self._kept), "size": len(KEPT), "pipe": self._pipe}
        names["reports"] = reports
        status = 0
        try:
            exec(compile(program, "<stdin>", "exec"), names)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException as error:
            os.write(2, repr(error).encode())
            status = 1
        sys.stdout.flush()
        os._exit(status)
