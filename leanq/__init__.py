"""leanq: Lean 4 on fleets of cheap, preemptible machines."""

from .client import AsyncLeanQClient, LeanQClient, LeanQFuture
from .config import Settings
from .stream import Result
from .wire import Message, Reply, Sorry

__all__ = [
    "AsyncLeanQClient",
    "LeanQClient",
    "LeanQFuture",
    "Message",
    "Reply",
    "Result",
    "Settings",
    "Sorry",
]
__version__ = "0.1.0"
