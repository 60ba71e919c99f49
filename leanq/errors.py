"""Every exception of leanq.

::

    LeanQError
    ├── UsageError                the caller's input is wrong; nothing was sent
    │   ├── InvalidRequestError       a field is malformed, empty or out of range
    │   ├── TooLargeError             the request is larger than the queue takes
    │   ├── ConflictError             something else was submitted by this name
    │   ├── RecipeError               bytes that are not an exported state, or a damaged one
    │   ├── UnknownStateError         the queue does not know the state
    │   └── UnknownEnvironmentError   no worker has ever offered the environment
    ├── QueueError                the queue could not take or answer the request
    │   ├── UnavailableError          no Redis at the URL, or it refuses to serve
    │   │   ├── RefusedError              it answers a call with an error of its own
    │   │   └── NotPermittedError         its rules do not let this user do what was asked
    │   │       └── LoginError                it asks for a password, or refuses the one it got
    │   ├── NoWorkerError             no worker is alive for the environment
    │   ├── QueueFullError            back-pressure; carries ``retry_after_s``
    │   ├── StalledError              a batch is with the fleet, and none of it ends
    │   └── LostError                 the server forgot the request
    ├── ClosedError               the client was closed while the request was outstanding
    ├── RequestError              a worker answered that it cannot carry the request out
    ├── NoRewardError             a verdict that says nothing about the proof has no reward
    ├── TargetError               a fleet's platform could not be asked, or refused an order
    ├── DataError                 bytes from outside that cannot be read; they may be hostile
    │   ├── WireError                 from the queue: not a message of leanq's
    │   │   └── NewerMessageError         one of a later release than this one
    │   ├── AuditError                from Lean: not a compiled file that can be audited
    │   └── LanguageServerError       from Lean's language server: no answer about the text
    └── WorkerError               trouble on a worker's machine, never a candidate's fault
        ├── ToolchainError            no usable Lean, or an environment that cannot be read
        └── SandboxError              a Lean process could not be started or watched

A verdict is never an exception: ``timeout``, ``memory``, ``crashed``, ``cancelled``,
``poisoned`` and ``expired`` arrive as replies. Every error can be pickled.
"""

from __future__ import annotations

import json
from urllib.parse import unquote, urlsplit


class LeanQError(Exception):
    """The root of the tree. Its text is one line, made for people.

    Further arguments are attributes too; pickle rebuilds an error from its arguments.
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UsageError(LeanQError):
    """The caller's input is wrong. Nothing was sent, and the same call will fail again."""


class InvalidRequestError(UsageError):
    """A field of the request is malformed, empty or out of range."""


class TooLargeError(UsageError):
    """The request is larger than the queue takes (16 MiB once it is packed)."""


class ConflictError(UsageError):
    """Something else was submitted with this request id: another text, other rows or options."""


class RecipeError(UsageError):
    """The bytes are not an exported state: they are damaged, or something else."""


class UnknownStateError(UsageError):
    """The queue does not know the state, or no worker offers its environment.

    States that are not used for ``LEANQ_STATE_TTL_S`` are deleted; export those that have to last
    longer.
    """


class UnknownEnvironmentError(UsageError):
    """No worker has ever registered this environment, though others are registered."""


class QueueError(LeanQError):
    """The queue could not take or answer the request. The same call may succeed later."""


class UnavailableError(QueueError):
    """No Redis answers at the URL, or it refuses to serve. The request may have been sent."""


class RefusedError(UnavailableError):
    """The server answers a call with an error of its own, as when it runs a script differently
    from the servers that leanq knows.

    The text names the script, and the server with its version.
    """


class NotPermittedError(UnavailableError):
    """The server's rules do not let the client's user do what leanq asks for. The operator can mend
    that; waiting cannot.

    Attributes:
        right: which user lacks which right, without the server's address.
    """

    def __init__(self, text: str, right: str) -> None:
        super().__init__(text, right)
        self.right = right


class LoginError(NotPermittedError):
    """The server asks for a password and got none, or refuses the one it got."""


class NoWorkerError(QueueError):
    """No worker is alive for the environment, and the client was told not to wait for one."""


class QueueFullError(QueueError):
    """The environment is full for this tenant, or the server is out of memory.

    Nothing was sent.

    Attributes:
        retry_after_s: how long to wait before the next attempt, in seconds.
    """

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text, retry_after_s)
        self.retry_after_s = retry_after_s


class StalledError(QueueError):
    """A batch of requests is with the fleet, and none of them ends."""


class LostError(QueueError):
    """The server no longer knows the request, and the client could not send it again."""


class ClosedError(LeanQError):
    """The client was closed while the request was outstanding."""


class RequestError(LeanQError):
    """A worker answered that it could not carry the request out, and why."""


class NoRewardError(LeanQError):
    """The verdict says nothing about the proof, so it has no reward."""


class TargetError(LeanQError):
    """The platform that a fleet runs on could not be asked, or refused an order."""


class DataError(LeanQError):
    """Bytes from outside that are not what they should be. They may be hostile."""


class WireError(DataError):
    """Bytes from the queue that are not a message of leanq's."""


class NewerMessageError(WireError):
    """A message of a later release than this one, which a newer peer can read."""


class AuditError(DataError):
    """A compiled file, or Lean's account of one, that cannot be audited."""


class LanguageServerError(DataError):
    """A process of Lean's language server died, or what it printed cannot be trusted."""


class WorkerError(LeanQError):
    """Trouble on a worker's machine, never a candidate's fault."""


class ToolchainError(WorkerError):
    """No usable Lean was found, or an environment cannot be read."""


class SandboxError(WorkerError):
    """A Lean process could not be started or watched."""


def to_install(extra: str) -> str:
    """Returns the command that adds an extra to leanq, from where leanq was installed."""
    from importlib import metadata  # slow, and seldom needed

    try:
        found = json.loads(metadata.distribution("leanq").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        found = {}
    url = str(found.get("url", ""))
    if "dir_info" in found:
        editable = "-e " if found["dir_info"].get("editable") else ""
        return f"pip install {editable}'{unquote(urlsplit(url).path)}[{extra}]'"
    if kind := found.get("vcs_info", {}).get("vcs"):
        url = f"{kind}+{url}"
    return f"pip install 'leanq[{extra}] @ {url}'" if url else f"pip install 'leanq[{extra}]'"
