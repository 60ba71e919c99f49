"""Searches for proofs over states: a policy proposes tactics, the fleet tries them, a strategy
chooses."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Unpack

import msgspec
from msgspec import Struct, structs

from leanq.errors import DataError, InvalidRequestError, TooLargeError, UsageError
from leanq.lean.goals.holes import find_holes, read_tactic
from leanq.producer.request_builder import Check
from leanq.queue.requests import LEAN_VERDICTS, Reply
from leanq.trainers.feedback import shortened
from leanq.trainers.strategies import BestFirst, SearchNode, Strategy, ancestors

Ended = Literal["proved", "exhausted", "steps", "time"]
"""How a search ended: with a proof, with nothing left to try, or at its budget."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A tactic to try, and the natural logarithm of its probability."""

    tactic: str
    logprob: float = 0.0


Policy = Callable[[Sequence[SearchNode]], Awaitable[Sequence[Sequence[Suggestion | str]]]]
"""Proposes tactics for each of several states; a plain text has the log probability 0."""

Value = Callable[[Sequence[SearchNode]], Awaitable[Sequence[float]]]
"""Says how promising each of several states is: more is better. Monte Carlo tree search needs
values between 0 and 1."""


class Prover(Protocol):
    """The methods that a search needs of a client; ``leanq.LeanQClient``,
    ``leanq.AsyncLeanQClient`` and ``leanq.Pool`` have them."""

    def check(self, code: str, **options: Unpack[Check]) -> Pending: ...

    def step(self, state: str, tactic: str, **options: Unpack[Check]) -> Pending: ...

    def verify(
        self,
        target: str | None,
        code: str,
        *,
        theorems: Iterable[str] = (),
        holes: Iterable[str] = (),
        **options: Unpack[Check],
    ) -> Pending: ...


Pending = Coroutine[Any, Any, Reply] | Future[Reply]


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a search is.

    Attributes:
        steps: how many tactics went to the fleet.
        expanded: how many states the policy was asked about.
        states: how many states were found.
        elapsed_s: seconds of search, those before a resumption included.
        unanswered: steps without a verdict of Lean's, by leanq's verdict, such as ``timeout``;
            ``invalid`` for tactics that no worker could read.
        refused: proofs that ``verify`` did not accept, by its verdict.
    """

    steps: int
    expanded: int
    states: int
    elapsed_s: float
    unanswered: Counter[str]
    refused: Counter[str]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """How a search ended.

    Attributes:
        ended: why the search ended.
        tactics: the proof's, in order.
        code: the statement with the proof in its place, as it was verified.
        reply: the verification's reply.
        progress: the progress at the end.
    """

    ended: Ended
    progress: SearchProgress
    tactics: tuple[str, ...] = ()
    code: str | None = None
    reply: Reply | None = None


class _Saved(Struct):
    """All of a search that outlives its process; its counts are those of SearchProgress."""

    statement: str
    nodes: list[SearchNode]
    steps: int
    expanded: int
    elapsed_s: float
    unanswered: dict[str, int]
    refused: dict[str, int]

    def __post_init__(self) -> None:
        self.unanswered, self.refused = Counter(self.unanswered), Counter(self.refused)


class ProofSearch:
    """One search for one proof.

    States are told apart by their ids, so no state is expanded twice. A proof that a step completes
    is verified against the statement before it counts.

    Examples:
        >>> async def policy(nodes):                       # a model would go here
        ...     return [["intro h", "exact h", "constructor"] for node in nodes]
        >>> async def prove(statement):
        ...     async with AsyncLeanQClient() as lean:
        ...         return await ProofSearch(statement, policy).run(lean)
        >>> found = asyncio.run(prove("theorem t (p : Prop) : p → p := sorry"))
        >>> found.ended, found.tactics
        ('proved', ('intro h', 'exact h'))

    Args:
        statement: Lean text with one ``sorry``, in whose place the proof goes.
        policy: proposes tactics.
        strategy: chooses the order; best first unless given.
        value: says how promising new states are; otherwise the policy's probabilities do.
        batch: how many states the policy is asked about at once.
        batches: how many batches are under way at once. While the policy thinks about one, the
            fleet works on another.
        outstanding: how many steps are with the fleet at once.
        options: of each step, such as ``timeout_s``, ``env`` and ``tenant``.

    Raises:
        UsageError: the statement does not have exactly one ``sorry``.
    """

    def __init__(
        self,
        statement: str,
        policy: Policy,
        *,
        strategy: Strategy | None = None,
        value: Value | None = None,
        batch: int = 8,
        batches: int = 2,
        outstanding: int = 256,
        **options: Unpack[Check],
    ) -> None:
        count = len(find_holes(statement))
        if count != 1:
            raise UsageError(f"a search needs a statement with one sorry, got {count}")
        if min(batch, batches, outstanding) < 1:
            raise UsageError("batch, batches and outstanding must be at least 1")
        self._so_far = _Saved(statement, [], 0, 0, 0.0, {}, {})
        self._policy, self._value = policy, value
        self._strategy: Strategy = strategy or BestFirst()
        self._batch, self._batches = batch, batches
        self._outstanding = outstanding
        self._options = options
        self._known: dict[str, int] = {}
        self._since_s: float | None = None
        self._found: SearchResult | None = None
        self._most_steps: int | None = None

    @classmethod
    def resume(cls, saved: bytes, policy: Policy, **how: Any) -> ProofSearch:
        """Returns the search that ``save`` wrote; other arguments as for a new one.

        Raises:
            DataError: the bytes are no search.
        """
        try:
            read = msgspec.msgpack.decode(saved, type=_Saved)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"these bytes are no saved search: {error}") from None
        if not _is_tree(read.nodes):
            raise DataError("these bytes are no saved search: its states are not a tree")
        search = cls(read.statement, policy, **how)
        search._so_far = read
        search._known = {node.state: number for number, node in enumerate(read.nodes)}
        return search

    def save(self) -> bytes:
        """Returns all that another process needs to go on; call it at any time. States that are
        being expanded will be expanded anew."""
        elapsed_s = self.progress.elapsed_s
        return msgspec.msgpack.encode(structs.replace(self._so_far, elapsed_s=elapsed_s))

    @property
    def statement(self) -> str:
        """The statement to prove."""
        return self._so_far.statement

    @property
    def nodes(self) -> list[SearchNode]:
        """The states that were found, the statement's own first."""
        return self._so_far.nodes

    @property
    def progress(self) -> SearchProgress:
        """How far it is."""
        running_s = 0.0 if self._since_s is None else time.monotonic() - self._since_s
        it = self._so_far
        return SearchProgress(
            it.steps,
            it.expanded,
            len(it.nodes),
            it.elapsed_s + running_s,
            Counter(it.unanswered),
            Counter(it.refused),
        )

    async def run(
        self, lean: Prover, *, max_steps: int | None = None, max_s: float | None = None
    ) -> SearchResult:
        """Searches until there is a proof, nothing is left, or the budget is spent.

        Call it again with a larger budget to go on. Cancelling it withdraws the steps that are with
        the fleet.

        Args:
            max_steps: the most tactics to try, over all runs.
            max_s: the most seconds of this run.

        Raises:
            UsageError: Lean finds errors in the statement, or nothing to prove.
            LeanQError: the fleet cannot be reached, or lacks the environment; the states found so
                far stay.
            Exception: the policy raised it.
        """
        self._since_s = time.monotonic()
        self._most_steps = max_steps
        # They belong to the event loop of this run.
        self._may_send, self._proved = asyncio.Semaphore(self._outstanding), asyncio.Event()
        try:
            async with asyncio.timeout(max_s) as budget:
                if not self.nodes:
                    state, goal = await opened(lean.check(self.statement, **self._options))
                    self._known[state] = 0
                    self.nodes.append(SearchNode(state, (goal,)))
                self._strategy.start(self.nodes)
                ended = await self._search(lean)
        except TimeoutError:
            if not budget.expired():
                raise
            ended = "time"
        finally:
            self._so_far.elapsed_s, self._since_s = self.progress.elapsed_s, None
        return self._found or SearchResult(ended, self.progress)

    async def _search(self, lean: Prover) -> Ended:
        running: set[asyncio.Task[Any]] = set()
        proved = asyncio.create_task(self._proved.wait())
        try:
            while not self._found:
                while len(running) < self._batches and not self._is_spent:
                    numbers = self._strategy.take(self._batch)
                    if not numbers:
                        break
                    running.add(asyncio.create_task(self._expand(lean, numbers)))
                if not running:
                    return "steps" if self._is_spent else "exhausted"
                # Once a step has proved it, the others of its batch are of no use.
                done, _ = await asyncio.wait(
                    {*running, proved}, return_when=asyncio.FIRST_COMPLETED
                )
                running -= done
                for task in done:
                    task.result()
            return "proved"
        finally:
            for task in (*running, proved):
                task.cancel()
            await asyncio.gather(*running, proved, return_exceptions=True)

    @property
    def _is_spent(self) -> bool:
        return self._most_steps is not None and self._so_far.steps >= self._most_steps

    async def _expand(self, lean: Prover, numbers: Sequence[int]) -> None:
        proposed = await self._policy([self.nodes[number] for number in numbers])
        if len(proposed) != len(numbers):
            raise UsageError(
                f"the policy was asked about {len(numbers)} states and answered for {len(proposed)}"
            )
        children: list[list[SearchNode]] = [[] for _ in numbers]
        try:
            async with asyncio.TaskGroup() as group:
                for number, suggestions, new in zip(numbers, proposed, children, strict=True):
                    for suggestion in _distinct(suggestions):
                        group.create_task(self._try(lean, number, suggestion, new))
        except BaseExceptionGroup as errors:
            # The first error; the others are mostly the same.
            raise errors.exceptions[0] from None
        made = [node for new in children for node in new]
        if self._value and made:
            for node, value in zip(made, await self._value(made), strict=True):
                node.value = float(value)
        for number, new in zip(numbers, children, strict=True):
            if not self._is_spent:
                # At the end of a budget, some of its tactics were not tried.
                self.nodes[number].status = "expanded"
            self._so_far.expanded += 1
            added = [self._add(node) for node in new if node.state not in self._known]
            self._strategy.expanded(number, added)

    async def _try(
        self, lean: Prover, number: int, suggestion: Suggestion, new: list[SearchNode]
    ) -> None:
        node = self.nodes[number]
        async with self._may_send:
            if self._found or self._is_spent:
                return
            self._so_far.steps += 1
            try:
                reply = await reply_of(lean.step(node.state, suggestion.tactic, **self._options))
            except (InvalidRequestError, TooLargeError):
                self._so_far.unanswered["invalid"] += 1
                return
        if reply.verdict not in LEAN_VERDICTS:
            self._so_far.unanswered[reply.verdict or ""] += 1
        elif reply.verdict == "accepted":
            await self._finish(lean, number, suggestion.tactic)
        elif reply.state and reply.state not in self._known:
            new.append(
                SearchNode(
                    reply.state,
                    reply.goals,
                    suggestion.tactic,
                    number,
                    node.depth + 1,
                    node.logprob + suggestion.logprob,
                )
            )

    async def _finish(self, lean: Prover, number: int, last: str) -> None:
        way = [self.nodes[each].tactic for each in ancestors(self.nodes, number)]
        tactics = (*filter(None, way), last)
        code, reply = await verified(lean, self.statement, tactics, self._options)
        if reply.verdict != "accepted":
            self._so_far.refused[reply.verdict or ""] += 1
        elif not self._found:
            self._found = SearchResult("proved", self.progress, tactics, code, reply)
            self._proved.set()

    def _add(self, node: SearchNode) -> int:
        number = self._known[node.state] = len(self.nodes)
        self.nodes.append(node)
        self._strategy.added(number)
        return number


def _distinct(suggestions: Sequence[Suggestion | str]) -> Iterator[Suggestion]:
    seen: set[str] = set()
    for each in suggestions:
        suggestion = Suggestion(each) if isinstance(each, str) else each
        if suggestion.tactic not in seen:
            seen.add(suggestion.tactic)
            yield suggestion


def proof_texts(statement: str, tactics: Sequence[str]) -> Iterator[str]:
    """Yields the statement with these tactics in place of its sorry: first as people write it, then
    within braces. A text of several lines may not stand everywhere without them."""
    (hole,) = find_holes(statement)
    before, behind = statement[: hole.offset], statement[hole.offset + len("sorry") :]
    texts = [read_tactic(tactic).text for tactic in tactics]
    line = before[before.rfind("\n") + 1 :]
    if hole.form == "tactic":
        margin = "\n" + " " * len(line)
        yield before + margin.join(text.replace("\n", margin) for text in texts) + behind
        opened, closed = "{", "}"
    else:
        margin = "\n" + " " * (len(line) - len(line.lstrip()) + 2)
        body = "".join(margin + text.replace("\n", margin) for text in texts)
        alone = not behind.strip() or behind.startswith("\n")
        yield f"{before}by{body}{behind}" if alone else f"{before}(by{body}){behind}"
        opened, closed = "(by {", "})"
    yield before + opened + "\n" + "\n;\n".join(texts) + "\n" + closed + behind


def _is_tree(nodes: Sequence[SearchNode]) -> bool:
    """Returns whether each node but the first has a parent before it."""
    return all(
        (node.parent is None) == (number == 0)
        and (node.parent is None or 0 <= node.parent < number)
        for number, node in enumerate(nodes)
    )


async def opened(check: Pending) -> tuple[str, str]:
    """Returns the state and the goal of the one sorry of a statement, by its check.

    Raises:
        UsageError: Lean finds errors in the statement, or nothing to prove.
    """
    reply = await reply_of(check)
    states = [(sorry.state, sorry.goal or "") for sorry in reply.sorries if sorry.state]
    if reply.verdict != "incomplete" or len(states) != 1:
        said = "; ".join(message.text for message in reply.messages)
        raise UsageError(
            "expected a statement that Lean takes, with one sorry that has a goal; "
            f"it says {reply.verdict} ({reply.reason}): {shortened(said, 500) or 'nothing'}"
        )
    return states[0]


async def verified(
    lean: Prover,
    statement: str,
    tactics: Sequence[str],
    options: Check,
    answer: Callable[[Pending], Awaitable[Reply]] | None = None,
) -> tuple[str, Reply]:
    """Verifies a proof, since a step's word is only about its own hole; returns the text that was
    accepted, and its reply.

    If none was, the first verdict that is not Lean's goes before Lean's: that text might have been
    accepted. ``answer`` awaits each verification.
    """
    told: tuple[str, Reply] | None = None
    for code in proof_texts(statement, tactics):
        reply = await (answer or reply_of)(lean.verify(statement, code, **options))
        if reply.verdict == "accepted":
            return code, reply
        if told is None or told[1].verdict in LEAN_VERDICTS:
            told = code, reply
    assert told
    return told


async def reply_of(pending: Pending) -> Reply:
    """Returns the reply of any client's method."""
    if isinstance(pending, Future):
        return await asyncio.wrap_future(pending)
    return await pending
