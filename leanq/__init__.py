"""leanq: Lean 4 on fleets of cheap, preemptible machines."""

from leanq.client import AsyncLeanQClient, LeanQClient, LeanQFuture
from leanq.producer.stream import Result
from leanq.queue.requests import Message, Reply, Sorry
from leanq.queue.settings import Settings

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
