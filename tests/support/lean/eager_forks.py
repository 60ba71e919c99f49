"""A fork server that preloads each header with its first text: the tests' option ``--forks``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from leanq.errors import SandboxError
from leanq.lean.run.fork_server import ForkServer
from leanq.lean.run.proof import SHARED, Key, memory_of
from leanq.lean.sandbox.sandbox import Sandbox


class EagerForkServer(ForkServer):
    """What is proved of one environment it takes for proved of all of the tests'."""

    def __init__(self, environment: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(environment, *arguments, **options)
        self._of = environment
        self._tried: set[Key] = set()
        self._trying = asyncio.Lock()

    async def take(
        self,
        key: Key,
        command: Sequence[str],
        tenant: str | None = None,
        *,
        patience_s: float = math.inf,
    ) -> Sandbox | None:
        async with self._trying:
            if key not in self._tried:
                self._tried.add(key)
                memory_of(self._of, key).keep()
                memory_of(self._of, key, SHARED).keep()
                try:
                    await self.preload(key)
                except (SandboxError, OSError):
                    return None
        return await super().take(key, command, tenant, patience_s=patience_s)
