"""Rewards for trainers: verifies candidates against the statements of their problems.

A completion's reward is 1 if ``verify`` accepts one of its candidates, and 0 if Lean or the judge
refuses them all. A rewritten theorem earns nothing. A timeout or a crash says nothing about the
proof, and its reward is None. A fleet that does not answer raises an exception; it never gives 0.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Unpack

from msgspec.structs import replace

from leanq.client import LeanQClient
from leanq.errors import (
    InvalidRequestError,
    RequestError,
    StalledError,
    TooLargeError,
    UsageError,
)
from leanq.lean.goals.completions import (
    Outcome,
    best_of,
    candidates_of,
    fault_of_target,
    outcome_of,
)
from leanq.lean.goals.holes import find_holes
from leanq.producer.request_builder import Check
from leanq.queue.requests import Reply
from leanq.trainers.replay_writer import ReplayWriter, earned_by, writer_for
from leanq.trainers.search import Prover, reply_of

Completion = str | Sequence[Mapping[str, Any]]
"""A model's answer: a text, or a conversation that ends with it."""

Extract = Callable[[str, str], str | Sequence[str]]
"""Makes texts to verify from a statement and a model's answer, best first."""

Partial = Callable[[Reply, str], float]
"""Returns the partial credit of a candidate that is not accepted, from 0 to below 1, by its reply
and its text. It is called only for verdicts of Lean's and the judge's."""

# How Lean begins what is to be shown of each goal, in ``conv`` too.
_GOAL = re.compile(r"^(?:⊢|\|) ", re.MULTILINE)

log = logging.getLogger("leanq.rewards")


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one completion.

    Attributes:
        reward: from 0 to 1; None if nothing was said about the proof.
        candidate: the Lean text that was accepted, or else the first one that the reward rests on.
        reply: the verification's; None if the text could not be sent.
    """

    reward: float | None
    candidate: str
    reply: Reply | None = None


class LeanReward:
    """Scores any number of completions at once; an asynchronous reward function in TRL's form.

    Examples:
        >>> statement = "theorem and_swap (p q : Prop) (h : And p q) : And q p := sorry"
        >>> answer = statement.replace("sorry", "And.intro h.right h.left")
        >>> rewritten = "theorem and_swap (p : Prop) (h : p) : p := h"
        >>> score = LeanReward()
        >>> asyncio.run(score(completions=[answer, rewritten], statement=[statement] * 2))
        [1.0, 0.0]
        >>> score.close()

    A copy by pickle, as verl and Ray make it, goes on with a client of its own.

    Args:
        lean: the client; unless given, one for ``LEANQ_URL`` or ``leanq up``, made at its first use
            and again after a fork.
        column: the data set's column with the statements: Lean text with ``sorry`` for proofs.
        extract: makes candidates from the statement and the model's answer, in a thread;
            ``lean_text`` unless given. They are verified in their order, until one is accepted.
            Use ``proof_text`` for models that write the proof alone.
        partial: gives partial credit; none unless given.
        stall_s: StalledError is raised after so many seconds without a reply.
        outstanding: how many candidates are with the fleet at once.
        memory: a replay memory for candidates with their verdicts, rewards and tags: a name in the
            client's Redis, or a ``leanq.trainers.ReplayWriter`` with its own bounds and tags.
            Trouble with it is logged and counted, and changes no reward.
        tag_columns: columns of the data set that become tags of these entries.
        options: of each request, such as ``timeout_s``, ``env`` and ``tenant``.
    """

    # TRL names the reward by it in its log; nan, as it reads None, is left out of a group's mean.
    __name__ = "lean"

    def __init__(
        self,
        lean: Prover | None = None,
        *,
        column: str = "statement",
        extract: Extract | None = None,
        partial: Partial | None = None,
        stall_s: float = 900.0,
        outstanding: int = 1024,
        memory: str | ReplayWriter | None = None,
        tag_columns: Sequence[str] = (),
        **options: Unpack[Check],
    ) -> None:
        if options.get("trust_programs") or options.get("audit") is False:
            raise UsageError("a reward rests on the judge: no trust_programs and no audit=False")
        self._lean, self._own = lean, lean is None
        self._column = column
        self._extract = extract or lean_text
        self._partial = partial
        self._stall_s = stall_s
        self._outstanding = outstanding
        # A reward needs no printed statements, which take time on the worker.
        self._options: Check = {"statements": False, **options}
        self._memory = None if memory is None else writer_for(memory, lean)
        self._own_memory = isinstance(memory, str)
        self._tag_columns = tag_columns
        tenant = options.get("tenant", getattr(lean, "tenant", "default"))
        self._tags = {"tenant": str(tenant)}

    async def __call__(
        self, completions: Sequence[Completion], **columns: Any
    ) -> list[float | None]:
        """Returns the rewards, in the order of the completions.

        If the trainer passes TRL's ``log_extra`` and ``log_metric``, verdicts go to its log. For
        each batch these are ``lean/accepted`` (the share), ``lean/no_reward`` (the share without a
        reward) and a share for each other verdict; for each completion ``lean_verdict`` and
        ``lean_reason``.

        Args:
            completions: the model's answers.
            columns: the data set's columns, each as long as the completions; one holds the
                statements.

        Raises:
            StalledError, QueueError: as of ``scores``.
        """
        scores = await self.scores(self._statements(columns), completions, self._tags_of(columns))
        verdicts = [str(score.reply.verdict) if score.reply else "unread" for score in scores]
        if log_extra := columns.get("log_extra"):
            log_extra("lean_verdict", verdicts)
            log_extra("lean_reason", [(s.reply.reason if s.reply else None) or "" for s in scores])
        rewards = [score.reward for score in scores]
        if scores and (log_metric := columns.get("log_metric")):
            counts = {"accepted": 0, **Counter(verdicts), "no_reward": rewards.count(None)}
            for name, count in counts.items():
                log_metric(f"lean/{name}", count / len(scores))
        return rewards

    async def scores(
        self,
        statements: Sequence[str],
        completions: Sequence[Completion],
        tags: Sequence[Mapping[str, str]] | None = None,
    ) -> list[Score]:
        """Returns the score of each completion for its statement.

        Args:
            statements: one for each completion.
            completions: the model's answers.
            tags: of each completion, for the replay memory.

        Raises:
            UsageError: statements and completions differ in number, or a statement is no text.
            StalledError: the fleet has not answered for ``stall_s`` seconds.
            QueueError: the queue cannot be reached.
        """
        if len(statements) != len(completions):
            raise UsageError(
                f"there are {len(statements)} statements for {len(completions)} completions"
            )
        for statement in statements:
            if not isinstance(statement, str):
                raise UsageError(f"a statement must be a text, got {type(statement).__name__}")
        may_send, now_s = asyncio.Semaphore(self._outstanding), asyncio.get_running_loop().time

        def answered() -> None:
            if not stall.expired():
                stall.reschedule(now_s() + self._stall_s)

        async def one(statement: str, completion: Completion, tags: Mapping[str, str]) -> Score:
            async with may_send:
                score = await self._score(statement, _written(completion), answered)
            if self._memory and score.reply:
                self._memory.add(
                    score.reply,
                    score.candidate,
                    earned=score.reward,
                    tags={**self._tags, **tags},
                )
            return score

        tagged = [{}] * len(completions) if tags is None else tags
        try:
            async with asyncio.timeout(self._stall_s) as stall, asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(one(*each))
                    for each in zip(statements, completions, tagged, strict=True)
                ]
        except TimeoutError:
            raise StalledError(
                f"no candidate was verified within {self._stall_s:g} seconds; are there workers, "
                "and is the environment paused? (leanq status)"
            ) from None
        except BaseExceptionGroup as errors:
            # The first error; the others are mostly the same.
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def with_goals(self, reply: Reply, candidate: str) -> Reply:
        """Returns an ``incomplete`` reply of a verification with the goals of the candidate's
        sorries, and any other reply as it is. Only a check tells the goals; use them for feedback
        or partial credit.

        Raises:
            QueueError: the queue cannot be reached.
        """
        if reply.verdict != "incomplete" or reply.sorries:
            return reply
        checked = await reply_of(self._client().check(candidate, **self._options))
        return replace(reply, sorries=checked.sorries)

    def close(self) -> None:
        """Closes the client and the replay memory's writer, if this object made them."""
        if self._own_memory and self._memory:
            self._memory.close()
        if self._own and isinstance(self._lean, LeanQClient):
            self._lean.close()
            self._lean = None

    def _statements(self, columns: Mapping[str, Any]) -> Sequence[str]:
        if self._column not in columns:
            raise UsageError(
                f"there is no column {self._column!r} with the statements; "
                f"got {', '.join(sorted(columns)) or 'none'}"
            )
        statements: Sequence[str] = columns[self._column]
        return statements

    def _tags_of(self, columns: Mapping[str, Any]) -> list[dict[str, str]] | None:
        if missing := set(self._tag_columns) - columns.keys():
            raise UsageError(f"there is no column {min(missing)!r} for tags")
        if not self._tag_columns:
            return None
        rows = zip(*(columns[name] for name in self._tag_columns), strict=True)
        return [dict(zip(self._tag_columns, map(str, row), strict=True)) for row in rows]

    async def _score(self, statement: str, text: str, answered: Callable[[], None]) -> Score:
        # A model's answer may be long, and the trainer's loop has other work.
        made = await asyncio.to_thread(self._extract, statement, text)

        async def verify(candidate: str) -> tuple[Score, Outcome]:
            found = await self._verified(statement, candidate)
            answered()
            return found

        candidates = (made,) if isinstance(made, str) else made
        score = await best_of(candidates, verify) or Score(0.0, "")
        if score.reward == 0 and score.reply and self._partial:
            reply = await self.with_goals(score.reply, score.candidate)
            earned = min(max(self._partial(reply, score.candidate), 0.0), 0.999)
            return Score(earned, score.candidate, reply)
        return score

    async def _verified(self, statement: str, candidate: str) -> tuple[Score, Outcome]:
        """Returns the score of a candidate, and what it says of the completion."""
        try:
            reply = await reply_of(self._client().verify(statement, candidate, **self._options))
        except (InvalidRequestError, TooLargeError):
            # Lean could not read it; that is the model's fault.
            return Score(0.0, candidate), "refuses"
        except RequestError as error:
            # The fault lies in the problem or the environment: one of thousands must not end a
            # training.
            log.warning("no reward for an answer to %.200r: %s", statement, error)
            return Score(None, candidate), "decides"
        if fault := fault_of_target(reply):
            log.warning("no reward for an answer to %.200r: %s", statement, fault.text)
            return Score(None, candidate, reply), "decides"
        return Score(earned_by(reply), candidate, reply), outcome_of(reply)

    def _client(self) -> Prover:
        if self._lean is None:
            self._lean = LeanQClient()
        return self._lean


def lean_text(statement: str, completion: str) -> tuple[str, ...]:
    """Returns the Lean texts to verify of a model's answer, best first, four at most.

    Texts that declare the statement's theorem come first, the last one before earlier ones. One
    without imports gets the statement's imports and definitions. Then proofs alone take the place
    of the ``sorry``.

    Examples:
        >>> lean_text("theorem t : p := sorry", "So:\\n```lean\\ntheorem t : p := h\\n```\\nDone.")
        ('theorem t : p := h',)
    """
    return candidates_of(statement, completion)


def proof_text(statement: str, completion: str) -> tuple[str, ...]:
    """Returns ``lean_text`` for models that write the proof alone.

    Examples:
        >>> proof_text("theorem t (h : p) : p := sorry", "by assumption")
        ('theorem t (h : p) : p := by assumption',)

    Raises:
        UsageError: the statement does not have exactly one ``sorry``.
    """
    if (count := len(find_holes(statement))) != 1:
        raise UsageError(f"a proof stands in the place of one sorry, got {count}")
    return candidates_of(statement, completion)


def by_place_of_error(most: float = 0.5) -> Partial:
    """Gives partial credit by the place of the first error: ``most`` times the share of lines
    before it. A text without errors gets none."""
    return functools.partial(_by_place_of_error, most)


def _by_place_of_error(most: float, reply: Reply, candidate: str) -> float:
    lines = [message.line for message in reply.messages if message.severity == "error"]
    if not lines or reply.reason != "lean_error":
        return 0.0
    return most * (min(lines) - 1) / max(candidate.count("\n") + 1, 1)


def by_goals_left(most: float = 0.5) -> Partial:
    """Gives partial credit for a text with ``sorry`` and without errors: ``most`` divided by the
    number of its goals plus one. One ``sorry`` may stand for several goals. If the goals of any are
    unknown, it gives none."""
    return functools.partial(_by_goals_left, most)


def _by_goals_left(most: float, reply: Reply, _: str) -> float:
    counts = [len(_GOAL.findall(sorry.goal or "")) for sorry in reply.sorries]
    if reply.verdict != "incomplete" or not counts or 0 in counts:
        return 0.0
    return most / (sum(counts) + 1)


def with_group_means(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> list[float]:
    """Replaces None by the mean of its group (0.0 if there is none), for trainers that know no
    missing reward. The advantage is then 0, which moves the policy neither way.

    Examples:
        >>> with_group_means([1.0, None, 0.0, None], ["a", "a", "a", "b"])
        [1.0, 0.5, 0.0, 0.0]
    """
    known: defaultdict[Hashable, list[float]] = defaultdict(list)
    for value, group in zip(rewards, groups, strict=True):
        if value is not None:
            known[group].append(value)
    return [
        fmean(known[group] or [0.0]) if value is None else value
        for value, group in zip(rewards, groups, strict=True)
    ]


def _written(completion: Completion) -> str:
    """Returns the text of a completion; "" if it has none, such as a call of a tool."""
    if isinstance(completion, str):
        return completion
    last = completion[-1] if isinstance(completion, Sequence) and completion else None
    content = last.get("content") if isinstance(last, Mapping) else None
    parts = content if isinstance(content, (list, tuple)) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "".join(text for text in texts if isinstance(text, str))
