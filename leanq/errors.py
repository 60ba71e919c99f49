"""Every exception of leanq.

::

    LeanQError
    ├── UsageError                the caller's input is wrong; nothing was sent
    │   ├── InvalidRequestError       a field is malformed, empty or out of range
    │   ├── TooLargeError             the request is larger than the queue takes
    │   ├── RecipeError               bytes that are no exported state, or a damaged one
    │   ├── UnknownStateError         no such state here, or of an environment that nobody offers
    │   └── UnknownEnvironmentError   no worker has ever offered the environment
    ├── QueueError                the queue could not take or answer the request
    │   ├── UnavailableError          no Redis at the URL, or it refuses to serve
    │   └── QueueFullError            back-pressure; carries ``retry_after_s``
    ├── TargetError               a fleet's platform could not be asked, or refused an order
    ├── NoRewardError             a verdict that says nothing about the proof has no reward
    ├── RequestError              a worker answered that it cannot carry the request out
    ├── LostError                 the server forgot the request and it was not sent again
    ├── ClosedError               the client was closed while the request was outstanding
    ├── WireError                 bytes from the queue that are no message of leanq's
    │   └── NewerMessageError         a message of a later release than this one
    └── WorkerError               trouble on a worker's machine, never a candidate's fault
        ├── ToolchainError            no usable Lean, or an environment that cannot be read
        ├── SandboxError              a Lean process could not be started or watched
        ├── ReplError                 what a REPL printed is no answer that can be trusted
        └── AuditError                a compiled result that cannot be read as data

A verdict is never an exception: ``timeout``, ``memory``, ``crashed``, ``cancelled``,
``poisoned`` and ``expired`` arrive as replies.
"""

from __future__ import annotations


class LeanQError(Exception):
    """The root of the tree. Its text is one line, made for people."""


class UsageError(LeanQError):
    """The caller's input is wrong. Nothing was sent."""


class InvalidRequestError(UsageError):
    """A field of the request is malformed, empty or out of range."""


class TooLargeError(UsageError):
    """The request is larger than the queue takes."""


class RecipeError(UsageError):
    """Bytes that mean no state: damaged, or something else."""


class UnknownStateError(UsageError):
    """No such state is known here, or it is of an environment that nobody offers."""


class UnknownEnvironmentError(UsageError):
    """Workers have registered environments, and this is none of them."""


class QueueError(LeanQError):
    """The queue could not take or answer the request."""


class UnavailableError(QueueError):
    """No Redis answers at the URL, or it refuses to serve."""


class QueueFullError(QueueError):
    """The environment is full for this tenant, or the server is out of memory."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class TargetError(LeanQError):
    """The platform that a fleet runs on could not be asked, or refused an order."""


class NoRewardError(LeanQError):
    """The verdict says nothing about the proof, so it has no reward."""


class RequestError(LeanQError):
    """A worker answered that it could not carry the request out."""


class LostError(LeanQError):
    """The server no longer knows the request, and it could not be sent again."""


class ClosedError(LeanQError):
    """The client was closed while the request was outstanding."""


class WireError(LeanQError):
    """Bytes that are no message of leanq's."""


class NewerMessageError(WireError):
    """A message of a later release than this one, which a newer peer can read."""


class WorkerError(LeanQError):
    """Trouble on a worker's machine, never a candidate's fault."""


class ToolchainError(WorkerError):
    """No usable Lean was found, or an environment cannot be read."""


class SandboxError(WorkerError):
    """A Lean process could not be started or watched."""


class ReplError(WorkerError):
    """What a REPL printed is no answer, or more than one."""


class AuditError(WorkerError):
    """A compiled result could not be read as data."""
