"""Runs untrusted programs, one at a time in each sandbox, under limits.

A :class:`Sandbox` is a slot's place to run Lean: a scratch folder, and a *supervisor* process
(``leanq.lean.sandbox.supervisor``). The supervisor starts a program and measures it with all its
descendants. It ends them all when the program ends, breaks a limit, is no longer wanted, or when
the worker dies, even by SIGKILL. The machine decides how the program is isolated, see
:attr:`Sandbox.isolation`:

- ``pid-ns``: no process outlives its end, whatever it does. Without it, see
  ``leanq.lean.sandbox.supervisor``.
- ``net-ns``: no network, not even this machine's own. Without it UDP is open, and TCP as well
  below ``landlock-4``.
- ``ipc-ns``: System V's shared memory and its kin end with each run.
- ``mount-ns``, ``root``, ``read-only``: it sees the system's programs and libraries, the
  ``readable`` paths, and a scratch folder in memory that is new with each run; ``hidden`` folders
  are empty. Nothing but the scratch folder can be changed, its permissions included.
- ``landlock-N``: it reads only the system's folders and the ``readable`` paths, writes only to its
  scratch folder, and cannot look into other processes. From 6 on it cannot signal them either.
- ``seccomp``: of system calls, it makes only those of ``deploy/seccomp/policy.py``: no sockets, no
  shared memory, no memory that no process shows, nothing done to other processes.
- ``cgroup``: the kernel counts its memory as well; see :mod:`leanq.lean.sandbox.cgroup`.

It never has privileges or capabilities. Its environment and descriptors are exactly the given ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leanq.errors import SandboxError
from leanq.lean.sandbox import cgroup
from leanq.lean.sandbox.monitor import MESSAGE_BYTES
from leanq.lean.sandbox.process import Exit, Finished, Limits, Process, Usage
from leanq.lean.sandbox.scratch import empty
from leanq.queue.metrics import count
from leanq.queue.tasks import to_its_end

__all__ = ["Exit", "Finished", "Limits", "Process", "Sandbox", "Usage", "probe"]

_SUPERVISOR = "leanq.lean.sandbox.supervisor"
_SUPERVISOR_TIMEOUT_S = 30.0  # for a supervisor to answer, before it is given up
# To let go of a folder in memory takes the kernel 5 µs and more for each file in it.
_FILES_AT_ONCE = 1000
# A further text is part of a message, and then in a pipe before it is read.
_MOST_FURTHER_BYTES = 1 << 15
_UNASKED_BYTES = 1 << 16  # the most output of a prepared program before its input

PACKAGE = Path(__file__).resolve().parents[2]
_BOOT = """
import sys, types
leanq = sys.modules["leanq"] = types.ModuleType("leanq")
leanq.__path__ = [sys.argv[1]]
__import__(sys.argv[2], fromlist=["main"]).main()
"""


_Program = tuple[list[str], dict[str, str]]
"""The arguments and the variables of a program."""


@dataclass(eq=False)
class Sandbox:
    """A place for one program at a time, in the event loop of its :meth:`open`."""

    scratch: Path
    """Where a program finds its private folder, the only place that it may write to."""
    inbox: Path | None
    """A private folder that a program may read and not write to. ``close`` removes it."""
    _channel: socket.socket
    supervisor: Supervisor
    _group: Path | None
    isolation: tuple[str, ...] = ()
    """The walls of a program here, such as ``("user-ns", "pid-ns", ..., "landlock-7")``."""
    alive: bool = True
    """False once the supervisor has died or the sandbox was closed: open another."""
    counts: bool = True
    """Whether the metrics count its programs that die; those of a trial may be meant to."""
    watches: bool = False
    """Whether its programs report which constants of a text Lean evaluates."""
    shares: bool = False
    """Whether a fork may go on with further texts of one tenant."""
    left: Path = field(init=False)
    """The same folder for the worker: the files of the last program that ended, or of the one that
    :meth:`start` started. They stay until the next program or ``clear``."""
    _left_fd: int = -1
    _process: Process | None = None
    _prepared: _Program | None = None
    # Whose text the process that waits for a further one has had, and its outputs.
    _tenant: str | None = None
    _outputs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._disk = self.left = self.scratch
        self._loop = asyncio.get_running_loop()
        self._greeting: asyncio.Future[tuple[tuple[str, ...], Path]] = self._loop.create_future()
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel, self._listen)

    @classmethod
    async def open(
        cls,
        *,
        readable: Sequence[Path] = (),
        hidden: Sequence[Path] = (),
        nice: int = 0,
        namespaces: bool = True,
        scratch_root: Path | None = None,
        inbox_root: Path | None = None,
        start: Starter | None = None,
    ) -> Sandbox:
        """Starts a supervisor, in some 100 ms.

        ``readable`` are files and folders that programs may read and run besides the system's own,
        by links as well; each must exist. ``hidden`` are folders that are covered if there is a
        mount namespace, and only if they exist by now. ``namespaces=False`` stands for a machine
        that refuses them. The scratch folder is made in ``scratch_root``, or in the folder for
        temporary files. With an ``inbox_root``, which must exist, there is an inbox in it.
        ``start`` starts the supervisor, if it is not to be a process of its own.
        """
        if sys.platform != "linux":
            raise SandboxError("the sandbox needs Linux")
        root = Path(scratch_root or tempfile.gettempdir()).resolve()
        for folder in hidden:
            for path in (root, *readable):
                if path.resolve().is_relative_to(folder.resolve()):
                    raise SandboxError(f"cannot hide {folder}: programs need {path}")
        for path in readable:
            if not path.exists():
                raise SandboxError(f"{path} does not exist, and programs need it")
        folders: list[Path] = []
        group = None
        try:
            places = [root, *([inbox_root] if inbox_root else [])]
            folders.extend(Path(tempfile.mkdtemp(prefix="leanq-", dir=place)) for place in places)
            group = cgroup.make()
            hello = {
                "folders": [str(folder) for folder in folders],
                # Both ends of a link: programs name the link, and the kernel opens its target.
                "readable": _both_ends((*readable, *folders[1:])),
                "hidden": _both_ends(hidden),
                "nice": nice,
                "namespaces": namespaces,
                "cgroup": group and str(group),
            }
            channel, supervisor = await _started(hello, start)
        except BaseException as error:
            for folder in folders:
                with contextlib.suppress(FileNotFoundError):
                    folder.rmdir()
            cgroup.remove(group)
            if isinstance(error, OSError):
                raise SandboxError(f"no scratch folder or no supervisor: {error}") from error
            raise
        sandbox = cls(folders[0], folders[1] if inbox_root else None, channel, supervisor, group)
        try:
            async with asyncio.timeout(_SUPERVISOR_TIMEOUT_S):
                sandbox.isolation, sandbox.scratch = await sandbox._greeting
        except TimeoutError:
            await sandbox.close()
            raise SandboxError("the supervisor does not answer") from None
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], limits: Limits
    ) -> Process:
        """Starts a program that is spoken to while it runs. ``argv[0]`` is a path. Raises
        SandboxError if it cannot be started, another one still runs, or the supervisor has died."""
        await self._dismiss()
        process = self._launch((list(argv), dict(env)), limits, dialogue=True)
        try:
            await process.started()
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await process.kill()
            raise
        return process

    def prepare(self, argv: Sequence[str], *, env: Mapping[str, str]) -> None:
        """Starts a program ahead of its input, for a :meth:`run` of just this one. Trust it until
        it has read its input: it waits without limits, and its start does not count. Raises
        SandboxError as :meth:`start`."""
        program = list(argv), dict(env)
        self._launch(program, None, stays=self.shares)
        self._prepared = program

    def is_prepared(self, argv: Sequence[str]) -> bool:
        """Returns whether this program waits for its input."""
        return self._prepared is not None and self._prepared[0] == list(argv)

    def waits_for(self, tenant: str | None) -> bool:
        """Returns whether a fork that had this tenant's texts, and no other's, can go on with a
        further one."""
        return tenant is not None and bool(self._outputs) and self._tenant == tenant

    @property
    def waits(self) -> bool:
        return bool(self._outputs)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        limits: Limits,
        stdin: bytes = b"",
        tenant: str | None = None,
    ) -> Finished:
        """Starts a program, feeds it, and waits for its end. Errors as in :meth:`start`. A
        cancellation waits until the program has ended; the sandbox can be used again. ``tenant``:
        whose further texts the same fork may serve; None for a fork of its own."""
        if self.waits_for(tenant) and len(stdin) <= _MOST_FURTHER_BYTES:
            return await self._finished(self._go_further(argv, limits, stdin))
        program, stays = (list(argv), dict(env)), self.shares and tenant is not None
        self._tenant = tenant
        spare = self._process
        if self._prepared == program and spare is not None and not spare.ended:
            self._prepared = None
            spare.feed(stdin, limits, stays=stays)
            finished = await self._finished(spare)
            if spare.was_limited:
                return finished
            # It died before, of whatever cause, which tells nothing of the input.
        await self._dismiss()
        process = self._launch(program, limits, stays=stays)
        process.feed(stdin)
        return await self._finished(process)

    def clear(self) -> None:
        """Empties its folders. No program may be running, except a prepared one."""
        self._leave(-1)
        for folder in self._folders:
            # Its supervisor removes it at its end, and this loop may not have heard of that yet.
            with contextlib.suppress(FileNotFoundError):
                empty(str(folder))

    async def close(self) -> None:
        """Ends the program, the supervisor and the folders. A cancellation waits until then."""
        await to_its_end(self._close())

    async def _close(self) -> None:
        self._leave(-1)
        self._let_go()
        if self._process is not None:
            self._process.counts = False
        self._give_up("the sandbox was closed")
        try:
            await self.supervisor.end()
        finally:
            cgroup.remove(self._group)
            for folder in self._folders:
                # It is still there if the supervisor was killed before it could remove it.
                with contextlib.suppress(FileNotFoundError):
                    empty(str(folder))
                    folder.rmdir()

    @property
    def _folders(self) -> list[Path]:
        return [self._disk, *([self.inbox] if self.inbox else [])]

    def _leave(self, fd: int) -> None:
        """Takes over a scratch folder in memory, and lets go of the one before."""
        if self._left_fd >= 0:
            held = os.fstatvfs(self._left_fd)
            if held.f_files - held.f_ffree < _FILES_AT_ONCE:
                os.close(self._left_fd)
            else:
                self._loop.run_in_executor(None, os.close, self._left_fd)
        self._left_fd = fd
        # Without one, this is empty.
        self.left = Path(f"/proc/self/fd/{fd}") if fd >= 0 else self._disk

    def _let_go(self) -> None:
        """Closes the outputs of a process that waits for a further text, which is to have none."""
        for fd in self._outputs:
            os.close(fd)
        self._outputs = ()

    def _go_further(self, argv: Sequence[str], limits: Limits, text: bytes) -> Process:
        """Has the process that waits go on with another text."""
        self._demand_idle()
        stdout, stderr = self._outputs
        self._outputs = ()
        process = self._process = Process(
            (-1, stdout, stderr),
            limits.output_bytes,
            tail=False,
            tell=self._tell,
            give_up=self._give_up,
        )
        process.counts = self.counts
        order = {"argv": list(argv), "text": text.decode(), "limits": limits.measured()}
        try:
            self._tell({"further": order})
        except OSError as error:  # as in _launch
            process.on_end(SandboxError(f"a text cannot be sent: {error.strerror}"))
        return process

    def _demand_idle(self) -> None:
        if not self.alive:
            raise SandboxError("the supervisor of this sandbox has died")
        if self._process is not None and not self._process.ended:
            raise SandboxError("the sandbox runs a program already")

    def _launch(
        self,
        program: _Program,
        limits: Limits | None,
        *,
        dialogue: bool = False,
        stays: bool = False,
    ) -> Process:
        """Has the supervisor start a program; without limits, it has none until they are set."""
        self._demand_idle()
        self._let_go()
        argv, env = program
        order = {
            "argv": argv,
            "env": env,
            "limits": limits and limits.measured(),
            "report": dialogue,
            "stays": stays,
        }
        ours, theirs = _pipes()
        most_bytes = limits.output_bytes if limits else _UNASKED_BYTES
        process = Process(ours, most_bytes, tail=dialogue, tell=self._tell, give_up=self._give_up)
        self._process = process
        process.counts = self.counts
        count("leanq_lean_starts_total", "server" if dialogue else "lean")
        try:
            self._tell({"start": order}, theirs)
        except OSError as error:  # larger than a packet may be
            process.on_end(SandboxError(f"cannot start {argv[0]}: {error.strerror}"))
        finally:
            for fd in theirs:
                os.close(fd)
        return process

    async def _dismiss(self) -> None:
        if self._prepared is not None and self._process is not None:
            self._prepared = None
            with contextlib.suppress(SandboxError):
                await self._process.kill()

    async def _finished(self, process: Process) -> Finished:
        """Returns its end; a cancellation brings it about."""
        try:
            return await process.finished()
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await process.kill()
            raise

    def _tell(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        if self.alive:
            with contextlib.suppress(ConnectionError):  # _listen will see the end of the socket
                socket.send_fds(self._channel, [json.dumps(message).encode()], fds)

    def _listen(self) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            packet, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)
            self._leave(fd)
        message = json.loads(packet) if packet else {}
        match message, self._process:
            case {"isolation": names, "scratch": scratch}, _:
                if not self._greeting.done():
                    self._greeting.set_result((tuple(names), Path(scratch)))
            case {"started": _}, Process() as process:
                process.on_started()
            case {"renewed": fields}, Process() as process:
                process.on_renewed(Usage(**fields))
            case {"exit": fields, "limited": limited, "waits": waits}, Process() as process:
                process.on_end(Exit.of(**fields), limited=limited, waits=waits)
                self._outputs = process.outputs
            case {"refused": text}, Process(ended=False) as process:
                process.on_end(SandboxError(text))
            case {"refused": text}, _:
                self._give_up(text)
            case _:
                self._give_up("the supervisor of this sandbox has died")

    def _give_up(self, reason: str) -> None:
        """Closes the socket, upon which the supervisor ends everything."""
        if not self.alive:
            return
        self.alive = False
        self._loop.remove_reader(self._channel)
        self._channel.close()
        error = SandboxError(reason)
        if not self._greeting.done():
            self._greeting.set_exception(error)
            self._greeting.exception()  # whether or not a task waits for it
        if self._process is not None and not self._process.ended:
            self._process.on_end(error)


class Supervisor:
    """The process behind a sandbox, which ends once its socket is closed."""

    def __init__(self, pidfd: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self._pidfd = pidfd
        self._process = process
        self._over: asyncio.Event | None = None

    @property
    def pid(self) -> int:
        """Its process id here; raises ProcessLookupError once it has ended."""
        try:
            with open(f"/proc/self/fdinfo/{self._pidfd}") as file:
                found = int(next(line for line in file if line.startswith("Pid:")).split()[1])
        except FileNotFoundError:
            found = -1
        # To a signal, -1 means every process of this machine.
        if found <= 0:
            raise ProcessLookupError("the supervisor has ended")
        return found

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self) -> None:
        """Waits for its end, for 30 s at most; then kills it."""
        if self._pidfd < 0:
            return
        if self._over is not None:  # another task ends it: a number has one reader
            await self._over.wait()
            return
        self._over = asyncio.Event()
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SUPERVISOR_TIMEOUT_S):
                    await ended.wait()
        finally:
            loop.remove_reader(self._pidfd)
            self.kill()
            if self._process is not None:
                self._process.wait()
            os.close(self._pidfd)
            self._pidfd = -1
            self._over.set()


# Gives a supervisor the other end of a socket that holds its first message.
Starter = Callable[[socket.socket], Awaitable[Supervisor]]


def spawn(channel: socket.socket, module: str) -> Supervisor:
    """Starts a supervisor as a process of its own, which is a module's ``main``."""
    process = subprocess.Popen(
        bare_python(module),
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        # Some Pythons cannot start without it; the programs do not get it.
        env={k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"},
        start_new_session=True,
    )
    return Supervisor(os.pidfd_open(process.pid), process)


def _both_ends(paths: Sequence[Path]) -> list[str]:
    return [str(each) for path in paths for each in (path.absolute(), path.resolve())]


async def _started(
    hello: Mapping[str, Any], start: Starter | None
) -> tuple[socket.socket, Supervisor]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            ours.send(json.dumps(hello).encode())
            return ours, await start(theirs) if start else spawn(theirs, _SUPERVISOR)
        except BaseException:
            ours.close()
            raise


def bare_python(module: str) -> list[str]:
    """Returns the command of a Python that calls a module's ``main``. Its package ``leanq`` is
    empty at first, without the worker's own modules."""
    return [python_program(), "-I", "-S", "-c", _BOOT, str(PACKAGE), module]


def python_program() -> str:
    """Returns this Python at a path without ``..``, which a sandbox's root may lack. The name
    itself may be a link, by which a virtual environment is told."""
    program = Path(sys.executable)
    return str(program.parent.resolve() / program.name)


def _pipes() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns pipes for standard input, output and error: our ends, and the program's."""
    pipes: list[tuple[int, int]] = []
    try:
        while len(pipes) < 3:
            pipes.append(os.pipe2(os.O_CLOEXEC))
    except OSError as error:
        for fd in (fd for pipe in pipes for fd in pipe):
            os.close(fd)
        raise SandboxError(f"no pipe: {error.strerror}") from error
    (their_in, our_in), (our_out, their_out), (our_err, their_err) = pipes
    return (our_in, our_out, our_err), (their_in, their_out, their_err)


def probe() -> tuple[str, ...]:
    """Returns the walls of a program here, in some 100 ms, outside of any event loop. Raises
    SandboxError if there can be no sandbox here."""

    async def ask() -> tuple[str, ...]:
        sandbox = await Sandbox.open()
        await sandbox.close()
        return sandbox.isolation

    return asyncio.run(ask())
