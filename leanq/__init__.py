"""leanq: Lean 4 on fleets of cheap, preemptible machines.

This package holds the clients, their arguments and results, and the main errors. Every error is in
``leanq.errors``; rewards, proof search and replay memory are in ``leanq.trainers``; the
clients of campaigns are in ``leanq.campaigns``.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leanq.client import AsyncLeanQClient as AsyncLeanQClient
    from leanq.client import LeanQClient as LeanQClient
    from leanq.client import LeanQFuture as LeanQFuture
    from leanq.errors import ClosedError as ClosedError
    from leanq.errors import InvalidRequestError as InvalidRequestError
    from leanq.errors import LeanQError as LeanQError
    from leanq.errors import NoWorkerError as NoWorkerError
    from leanq.errors import QueueError as QueueError
    from leanq.errors import QueueFullError as QueueFullError
    from leanq.errors import RequestError as RequestError
    from leanq.errors import UnavailableError as UnavailableError
    from leanq.errors import UnknownEnvironmentError as UnknownEnvironmentError
    from leanq.errors import UnknownStateError as UnknownStateError
    from leanq.errors import UsageError as UsageError
    from leanq.errors import WorkerError as WorkerError
    from leanq.local import Pool as Pool
    from leanq.producer.request_builder import Check as Check
    from leanq.producer.request_builder import InEnvironment as InEnvironment
    from leanq.producer.request_builder import SubmitOptions as SubmitOptions
    from leanq.producer.route import NoWorker as NoWorker
    from leanq.producer.route import WhenFull as WhenFull
    from leanq.producer.stream import Result as Result
    from leanq.queue.requests import Failure as Failure
    from leanq.queue.requests import Message as Message
    from leanq.queue.requests import Reason as Reason
    from leanq.queue.requests import Reply as Reply
    from leanq.queue.requests import Rule as Rule
    from leanq.queue.requests import Sorry as Sorry
    from leanq.queue.requests import Theorem as Theorem
    from leanq.queue.requests import Verdict as Verdict
    from leanq.queue.requests import reward as reward
    from leanq.queue.settings import Settings as Settings

    __version__: str


def names_of(homes: Mapping[str, str], package: str) -> Callable[[str], Any]:
    """Returns a package's ``__getattr__``, which imports the module of a name at its first use."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find


# The public names, by their modules.
_HOMES = {
    name: f"leanq.{module}"
    for module, names in {
        "client": ("AsyncLeanQClient", "LeanQClient", "LeanQFuture"),
        "errors": (
            *("ClosedError", "InvalidRequestError", "LeanQError", "NoWorkerError", "QueueError"),
            *("QueueFullError", "RequestError", "UnavailableError", "UnknownEnvironmentError"),
            *("UnknownStateError", "UsageError", "WorkerError"),
        ),
        "local": ("Pool",),
        "producer.request_builder": ("Check", "InEnvironment", "SubmitOptions"),
        "producer.route": ("NoWorker", "WhenFull"),
        "producer.stream": ("Result",),
        "queue.requests": (
            *("Failure", "Message", "Reason", "Reply", "Rule", "Sorry", "Theorem", "Verdict"),
            "reward",
        ),
        "queue.settings": ("Settings",),
    }.items()
    for name in names
}
__all__ = list(_HOMES)
if not TYPE_CHECKING:
    _find = names_of(_HOMES, __name__)

    def __getattr__(name: str) -> Any:
        return _installed_version() if name == "__version__" else _find(name)


def _installed_version() -> str:
    """Returns the version that was built and installed; the build takes it from Git's tag."""
    # This takes longer to load than all else of leanq that a judge needs.
    from importlib import metadata

    try:
        return metadata.version("leanq")
    except metadata.PackageNotFoundError:  # a checkout on the path that nobody installed
        return "0.0"


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
