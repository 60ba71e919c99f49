"""One process of the REPL, for one request at a time, and what it says of a text: Lean's verdict,
and the goals in the text's holes."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from msgspec import structs

from leanq.errors import ReplError, SandboxError
from leanq.lean.diagnostics import Printed, classify_end, classify_printed, signal_name
from leanq.lean.recipes import Hole
from leanq.lean.repl.protocol import (
    Answer,
    Command,
    Elaborated,
    Exchange,
    OpenGoal,
    Refused,
    Stepped,
    elaborate,
    read_answer,
    run_tactic,
)
from leanq.lean.sandbox.sandbox import Limits, Process, Sandbox, Usage
from leanq.lean.steps.goals import Seen, look
from leanq.lean.steps.holes import Draft, are_plain, draft_probe, find_holes
from leanq.lean.syntax import Header, header_statements, place_of
from leanq.queue.requests import Infotree, Message, Reply
from leanq.queue.tasks import run_apart

# Imports depend on the machine alone, not on the candidate: a library may be large, a disk cold.
_HEADER_LIMITS = Limits(cpu_s=300.0, wall_s=900.0, memory_bytes=16 << 30)
# Its version takes the import of the smallest library at most.
VERSION_LIMITS = Limits(cpu_s=60.0, wall_s=60.0, memory_bytes=16 << 30)
# Between requests it has nothing to do.
_IDLE_LIMITS = Limits(cpu_s=10.0, wall_s=math.inf, memory_bytes=4 << 30, look_s=1.0)
_MOST_PRINTED_BYTES = 32 << 20
_READ_AT_ONCE_BYTES = 20_000
# CPU time between two commands; with more, a candidate has left something running.
_RESTLESS_S = 0.05

_VERSION = re.compile(r'(?:Lean |")([^\s"]+)')


class TimedOutError(ReplError):
    """The command alone has spent its budget of time, as ``reply`` says, and the process is
    gone."""

    def __init__(self, text: str, reply: Reply) -> None:
        super().__init__(text, reply)
        self.reply = reply


@dataclass(frozen=True, slots=True)
class Recycling:
    """When a process has served for long enough; it frees nothing by itself."""

    memory_bytes: int
    requests: int
    age_s: float


def outcome_of(answer: Elaborated) -> Reply:
    """Returns Lean's verdict on a text before any audit, without messages about its header."""
    return classify_printed(Printed(answer.messages), open_goals=bool(answer.sorries))


def opened_at(
    holes: Sequence[Hole], code: str, sorries: Sequence[OpenGoal]
) -> Mapping[int, OpenGoal]:
    """Returns the goal that was met in each hole, by its number, if there was exactly one."""
    met = Counter(each.at for each in sorries)
    by_place = {each.at: each for each in sorries if met[each.at] == 1}
    places = ((number, place_of(code, hole.offset)) for number, hole in enumerate(holes))
    return {number: by_place[place] for number, place in places if place in by_place}


@lru_cache(256)
def header_key(header: Header) -> str:
    """Returns a header's statements, one a line; headers with the same key mean the same."""
    return "\n".join(text for text, _ in header_statements(header))


@dataclass(eq=False)
class Session:
    """One process of the REPL, from :meth:`start`. ``requests``: how many commands of candidates it
    got; ``cpu_s``: the time of all. Once ``spoiled``, it must not be used again."""

    sandbox: Sandbox
    _process: Process
    states: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    cpu_s: float = 0.0
    spoiled: bool = False
    # The REPL's answers to headers, with places in their keys.
    _imported: dict[str, Elaborated] = field(default_factory=dict)
    _born_s: float = field(default_factory=time.monotonic)
    _memory_bytes: int = 0
    _spent_s: float = 0.0
    _asking: bool = False
    # Set if a candidate may have left something running; its own start takes CPU time as well.
    _touched: bool = False

    @classmethod
    async def start(
        cls, sandbox: Sandbox, argv: Sequence[str], variables: Mapping[str, str]
    ) -> Session:
        """Starts the program in a sandbox that runs none; raises SandboxError if it cannot."""
        process = await sandbox.start(argv, env=variables, limits=_IDLE_LIMITS)
        return cls(sandbox, process)

    @property
    def usable(self) -> bool:
        """True if it waits for a command, and for nothing else. Output between two commands comes
        from a thread that a candidate has left there."""
        if self.spoiled or self._asking or self._process.ended:
            return False
        return not self._process.discard().strip()

    def is_worn(self, rules: Recycling) -> bool:
        return (
            self._memory_bytes > rules.memory_bytes
            or self.requests >= rules.requests
            or time.monotonic() - self._born_s > rules.age_s
        )

    async def version(self) -> str:
        """Returns the version of its Lean; raises ReplError if it does not answer the question."""
        said = ""
        # The first needs no library, the second serves if the first is not known yet.
        for question in ("prelude\n#version", "#eval Lean.versionString"):
            try:
                answer = await self.ask(elaborate(question), VERSION_LIMITS)
            except TimedOutError:
                wall_s = VERSION_LIMITS.wall_s
                raise ReplError(f"it did not answer within {wall_s:g} s") from None
            said = str(answer)
            for message, _ in answer.messages if isinstance(answer, Elaborated) else ():
                if found := _VERSION.match(message.text):
                    return found[1]
        raise ReplError(f"it does not say of which Lean it is: {said}")

    @property
    def headers(self) -> Collection[str]:
        return self._imported.keys()

    def whole(self, answer: Elaborated, header: Header) -> Reply:
        """Returns Lean's verdict on a text, with the messages about its header first."""
        lines = [place_of(header.text, start) for _, start in header_statements(header)]
        notes: list[Message] = []
        for note, _ in self._imported[header_key(header)].messages:
            # With blanks and comments between the words, columns are a little off.
            line, column = lines[note.line - 1] if 0 < note.line <= len(lines) else (1, 0)
            column += note.column
            notes.append(
                structs.replace(note, line=line, column=column, end_line=None, end_column=None)
            )
        reply = outcome_of(answer)
        return structs.replace(reply, messages=(*notes, *reply.messages))

    async def see(self, code: str, header: Header, answer: Elaborated, limits: Limits) -> Seen:
        """Returns the holes of an elaborated text. The REPL says which goals it has met where, and
        not what can stand there. If the text does not tell either, the REPL is asked once more with
        empty blocks in the holes. Errors as of :meth:`ask`."""
        holes = find_holes(code)
        opened = opened_at(holes, code, answer.sorries)
        if len(opened) == len(holes) and are_plain(code, holes):
            return Seen(holes, {number: each.goal for number, each in opened.items()})

        async def run(draft: Draft) -> Reply:
            return outcome_of(await self.elaborate(draft.text, header, limits))

        return await look(holes, run, lambda forms: draft_probe(code, holes, forms))

    async def load(self, header: Header) -> bool:
        """Elaborates a header, unless it has; returns whether Lean finds no error in it, or else it
        is not kept. Errors as of :meth:`ask`."""
        key = header_key(header)
        if key in self._imported:
            return True
        try:
            answer = await self.ask(elaborate(key), _HEADER_LIMITS)
        except TimedOutError as error:
            raise ReplError(f"its imports do not end: {error}") from None
        if not isinstance(answer, Elaborated) or Printed(answer.messages).failed:
            return False
        self._imported[key] = answer
        return True

    async def elaborate(
        self, code: str, header: Header, limits: Limits, infotree: Infotree | Literal[""] = ""
    ) -> Elaborated:
        """Returns Lean's answer about a text with a loaded header. Places are those in ``code``:
        blanks stand where its header was. Errors as of :meth:`ask`."""
        self.requests += 1
        blanks = "".join("\n" if each == "\n" else " " for each in header.text)
        body = blanks + code[header.end_offset :]
        env = self._imported[header_key(header)].env
        answer = await self.ask(elaborate(body, env, infotree), limits)
        self._touched = True
        if not isinstance(answer, Elaborated):
            raise ReplError(f"no answer to a text: {answer}")
        return answer

    async def run_tactic(self, tactic: str, proof_state: int, limits: Limits) -> Stepped | Refused:
        """Returns Lean's answer about a tactic on a state. Errors as of :meth:`ask`."""
        self.requests += 1
        answer = await self.ask(run_tactic(tactic, proof_state), limits)
        self._touched = True
        if isinstance(answer, Elaborated) or (isinstance(answer, Refused) and not answer.by_lean):
            raise ReplError(f"no answer to a tactic: {answer}")
        return answer

    def hold(self, state: str, opened: OpenGoal) -> None:
        if opened.proof_state is not None:
            self.states[state] = opened.proof_state

    async def ask(self, command: Command, limits: Limits) -> Answer:
        """Runs one command within limits; memory counts above its present memory. Raises ReplError
        if it ended, or its output cannot be trusted: do not use it again. Raises SandboxError if
        the machine failed."""
        return read_answer(await self.exchange(command, limits))

    async def exchange(self, command: Command, limits: Limits) -> Mapping[str, Any]:
        exchange = Exchange(command)
        self._asking = True
        idle = await self._renew(limits)
        if idle is None:
            raise ReplError(await self._last_words("while it was idle"))
        restless = self._touched and idle.cpu_s > _RESTLESS_S
        self._process.discard()
        self._process.write(exchange.sent)
        while chunk := await self._process.read():
            if exchange.take(chunk):
                self.spoiled = self.spoiled or restless
                return await self._answer(exchange)
            if exchange.printed_bytes > _MOST_PRINTED_BYTES:
                await self._process.kill()
        exit_ = await self._process.wait()
        cpu_s = exit_.cpu_s - self._spent_s
        self.cpu_s += cpu_s
        words = await self._last_words("before it had answered")
        if exit_.stopped in ("cpu", "wall") and not restless:
            own = replace(exit_, cpu_s=cpu_s)
            raise TimedOutError(words, classify_end((), own, limits, self._process.stderr_tail))
        raise ReplError(words)

    async def end(self) -> None:
        """Ends the process. The sandbox can start another."""
        self.spoiled = True
        await self._process.kill()

    async def _answer(self, exchange: Exchange) -> Mapping[str, Any]:
        # One that has ended since will be found so.
        if used := await self._renew(_IDLE_LIMITS):
            self.cpu_s += used.cpu_s
            self._memory_bytes = used.memory_bytes
        at_once = exchange.printed_bytes < _READ_AT_ONCE_BYTES
        answer = await run_apart(exchange.answer, at_once=at_once)
        self._asking = False
        return answer

    async def _renew(self, limits: Limits) -> Usage | None:
        """Sets new limits; returns its usage until now, or None if it has ended."""
        try:
            used = await self._process.renew(limits)
        except SandboxError:
            return None
        self._spent_s += used.cpu_s
        return used

    async def _last_words(self, when: str) -> str:
        """Returns how it ended; raises SandboxError if the machine is to blame."""
        exit_ = await self._process.wait()
        said = self._process.stderr_tail.decode(errors="replace").strip().split("\n")[-1]
        how = f"of {signal_name(exit_.signal)}" if exit_.signal else f"with exit code {exit_.code}"
        if exit_.stopped:
            how = f"by its limit ({exit_.stopped})"
        return f"the REPL ended {how} {when}{said and ': '}{said}"
