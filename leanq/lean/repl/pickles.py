"""Pickles: a process's copy of the goal in a source's hole, so that another need not elaborate the
source again.

They are kept like Lean's snapshots of recipes, and hold less: the imports and the new constants.
All else that the source declares (notations, attributes, instances) is lost, and loading checks
nothing. So pickles are made only of sources that declare nothing but theorems, and no verdict rests
on one: it only shows where a search goes on. A failure on a state behind a pickle is tried again
with the source elaborated.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from dataclasses import replace

from cachetools import LRUCache

from leanq.errors import LeanQError, ReplError
from leanq.lean.recipes import Recipe, snapshot_key, text_hash
from leanq.lean.repl.program import ReplProgram
from leanq.lean.repl.session import Live, Session
from leanq.lean.repl.sessions import Sessions
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.snapshots.store import Snapshots
from leanq.lean.syntax import split_header, tokens
from leanq.states import States

log = logging.getLogger("leanq.worker")

SAVE_AFTER, SAVE_FROM_S = 2, 0.5
"""A pickle is made of a source that was elaborated so often, in so many CPU seconds."""

_SOURCES_REMEMBERED = 10_000
_SAVE_LIMITS = Limits(cpu_s=120.0, wall_s=600.0, memory_bytes=8 << 30)
# Their declarations would be lost.
_LOST = re.compile(
    r"def|abbrev|instance|class|structure|inductive|coinductive|mutual|axiom|opaque|deriving|derive"
    r"|open|scoped|local|export|namespace|section|variable|universe|attribute|set_option"
    r"|notation3?|infix[lr]?|prefix|postfix|macro(?:_rules)?|syntax|declare_syntax_cat|alias"
)


class Pickles:
    """The pickles of one environment, for one build of the REPL.

    Args:
        snapshots: the place for pickles; None to make and load none.
        sessions: the processes, one of which makes them between requests.
    """

    def __init__(
        self,
        snapshots: Snapshots | None,
        sessions: Sessions,
        program: ReplProgram,
        fingerprint: str,
    ) -> None:
        self.snapshots = snapshots
        self._sessions = sessions
        self._seen: LRUCache[str, int] = LRUCache(_SOURCES_REMEMBERED)
        # Another build may lay out its memory in another way.
        self._stamp = f"{fingerprint} {program.stamp()}" if snapshots else ""
        self._wanted: Recipe | None = None  # the source and hole of a pickle to make
        self.saving: asyncio.Task[None] | None = None

    async def load(
        self, session: Session, recipe: Recipe, limits: Limits, states: States
    ) -> Live | None:
        """Returns the goal in the open hole of the recipe's source, from a pickle; None if there is
        none.

        Raises:
            ReplError: the process could not load it and has to be replaced.
        """
        inbox = session.sandbox.inbox
        if self.snapshots is None or inbox is None or not can_be_pickled(recipe):
            return None
        key = self._key(recipe)
        pickle = await self.snapshots.fetch(key, states)
        if pickle is None:
            return None
        name = secrets.token_hex(8)
        try:
            path = await asyncio.to_thread(pickle.expose, inbox, name)
        except OSError:
            return None
        try:
            header = split_header(recipe.source.code)
            answer = await session.unpickle(path, header, limits)
        except ReplError:
            await self.snapshots.damaged(key, states)
            raise
        finally:
            # The process has it in its memory by now.
            for file in (path, path.with_name(f"{name}.deps")):
                file.unlink(missing_ok=True)
        return Live(answer.proof_state, pickled=True)

    def replayed(self, recipe: Recipe, cpu_s: float) -> None:
        """Notes that the recipe's source was elaborated, in so many seconds."""
        if self.snapshots is None or not can_be_pickled(recipe):
            return
        key = self._key(recipe)
        self._seen[key] = count = self._seen.get(key, 0) + 1
        is_worth_it = count >= SAVE_AFTER and cpu_s >= SAVE_FROM_S
        if is_worth_it and not self.snapshots.holds(key):
            self._wanted = recipe

    def begin(self, states: States) -> None:
        """Begins to make the wanted pickle, unless another is being made. Call it when the process
        that holds the state is free."""
        if self._wanted and not self.saving:
            self.saving = asyncio.create_task(self._save(self._wanted, states))
            self.saving.add_done_callback(self._saved)
        self._wanted = None

    async def close(self) -> None:
        """Stops making pickles."""
        if self.saving:
            self.saving.cancel()
            await asyncio.gather(self.saving, return_exceptions=True)

    async def _save(self, recipe: Recipe, states: States) -> None:
        assert self.snapshots is not None
        key = self._key(recipe)
        opened, _ = replace(recipe, tactics=()).records()[-1]
        header = split_header(recipe.source.code)
        try:
            if not await states.begin_snapshot(key):
                return
            async with self._sessions.take(header, opened) as session:
                live = session.states.get(opened)
                if live is None or live.pickled:
                    return
                name = f"{secrets.token_hex(8)}.pickle"
                file = session.sandbox.left / name
                await session.pickle(session.sandbox.scratch / name, live, _SAVE_LIMITS)
                # It depends on nothing beyond the fingerprint. The process is still there, and may
                # have put a link or a pipe in this place: do not open it.
                with file.with_name(f"{file.name}.deps").open("x") as deps:
                    deps.write("[]")
                await self.snapshots.keep(key, file, states)
        except (LeanQError, OSError) as error:
            log.warning("a pickle was not kept: %s", error)

    def _saved(self, task: asyncio.Task[None]) -> None:
        self.saving = None
        if not task.cancelled() and (fault := task.exception()):
            log.error("a pickle was not made", exc_info=fault)

    def _key(self, recipe: Recipe) -> str:
        source = text_hash(recipe.source.code)
        return snapshot_key(f"{self._stamp} {recipe.opened}", source)


def can_be_pickled(recipe: Recipe) -> bool:
    """Returns whether a pickle has all that the source declares, as far as its words tell."""
    code = recipe.source.code
    previous = ""
    for token in tokens(code[split_header(code).end_offset :]):
        if _LOST.fullmatch(token.text) or (previous, token.text) == ("@", "["):
            return False
        previous = token.text
    return True
