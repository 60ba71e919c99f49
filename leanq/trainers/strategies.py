"""Strategies that choose the next state of a proof search: best first, beam, Monte Carlo tree
search.

A search tells its strategy of every new state and of every expanded one. The strategy hands out
states to expand, several at a time. The tree's nodes hold all that it needs after a restart.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

Status = Literal["open", "expanded", "dropped"]
"""``dropped``: never to be expanded."""


class SearchNode(Struct):
    """One state of a search.

    Attributes:
        state: its id.
        goals: its open goals, as Lean prints them.
        tactic: the tactic that led here from the parent; None at the root.
        parent: the parent's number in the tree; None at the root.
        depth: how many tactics led here.
        logprob: the sum of the policy's log probabilities of these tactics.
        value: the caller's value function of it, if there is one: more is better.
        status: whether it is to be expanded, or has been.
        visits: how many expansions there were at or below it.
        total: the sum of their values.
    """

    state: str
    goals: tuple[str, ...]
    tactic: str | None = None
    parent: int | None = None
    depth: int = 0
    logprob: float = 0.0
    value: float | None = None
    status: Status = "open"
    visits: int = 0
    total: float = 0.0

    @property
    def score(self) -> float:
        """The node's value, or without a value function its log probability: more is better."""
        return self.logprob if self.value is None else self.value


class Strategy:
    """Chooses the order of a search. One object serves one search."""

    def start(self, nodes: Sequence[SearchNode]) -> None:
        """Starts or resumes a search with these nodes; the list grows with the search."""
        self._nodes = nodes
        for number, node in enumerate(nodes):
            if node.status == "open":
                self.added(number)

    def added(self, number: int) -> None:
        """Takes in a new node."""

    def take(self, most: int) -> list[int]:
        """Returns the numbers of open nodes to expand now; none while it waits for an expansion, or
        if nothing is left."""
        raise NotImplementedError

    def expanded(self, number: int, children: Sequence[int]) -> None:
        """Takes in that a node was expanded into these new ones."""


class BestFirst(Strategy):
    """Takes the open node with the highest score first."""

    def start(self, nodes: Sequence[SearchNode]) -> None:
        self._heap: list[tuple[float, int]] = []
        super().start(nodes)

    def added(self, number: int) -> None:
        heapq.heappush(self._heap, (-self._nodes[number].score, number))

    def take(self, most: int) -> list[int]:
        return [heapq.heappop(self._heap)[1] for _ in range(min(most, len(self._heap)))]


class Beam(Strategy):
    """Takes the ``width`` best nodes of each level, and drops all others."""

    def __init__(self, width: int = 16) -> None:
        self._width = width

    def start(self, nodes: Sequence[SearchNode]) -> None:
        self._levels: defaultdict[int, list[int]] = defaultdict(list)
        self._chosen: list[int] = []
        self._under_way = 0
        super().start(nodes)

    def added(self, number: int) -> None:
        self._levels[self._nodes[number].depth].append(number)

    def take(self, most: int) -> list[int]:
        if not self._chosen and not self._under_way and self._levels:
            level = self._levels.pop(min(self._levels))
            level.sort(key=lambda number: -self._nodes[number].score)
            self._chosen, dropped = level[: self._width], level[self._width :]
            for number in dropped:
                self._nodes[number].status = "dropped"
        taken, self._chosen = self._chosen[:most], self._chosen[most:]
        self._under_way += len(taken)
        return taken

    def expanded(self, number: int, children: Sequence[int]) -> None:
        self._under_way -= 1


class MonteCarlo(Strategy):
    """Monte Carlo tree search with the policy's probabilities as priors (PUCT).

    From the root down, it takes the child with the highest sum of two terms. One is the mean value.
    The other is ``exploration`` times the child's prior, times the square root of its parent's
    visits over its own. A node that is being expanded counts as visited without success, so that
    others are taken beside it. A node without a value counts with the geometric mean of its
    tactics' probabilities.

    Args:
        exploration: the weight of rarely visited nodes.
    """

    def __init__(self, exploration: float = 1.5) -> None:
        self._exploration = exploration

    def start(self, nodes: Sequence[SearchNode]) -> None:
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        self._priors: dict[int, float] = {}
        self._pending: defaultdict[int, int] = defaultdict(int)
        # Nodes that are being expanded, or have no open node below them.
        self._closed: set[int] = set()
        super().start(nodes)
        for number, node in enumerate(nodes):
            if node.parent is not None:
                self._children[node.parent].append(number)
        for children in self._children.values():
            self._set_priors(children)
        for number in reversed(range(len(nodes))):
            self._close_if_done(number)

    def take(self, most: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < most and self._nodes and 0 not in self._closed:
            path = [0]
            while self._nodes[path[-1]].status == "expanded":
                path.append(max(self._open_children(path[-1]), key=self._rank))
            taken.append(path[-1])
            for number in path:
                self._pending[number] += 1
            self._closed.add(path[-1])
            for number in reversed(path[:-1]):
                self._close_if_done(number)
        return taken

    def expanded(self, number: int, children: Sequence[int]) -> None:
        node = self._nodes[number]
        self._children[number] = list(children)
        self._set_priors(children)
        value = 0.0
        if children and node.value is not None:
            value = node.value
        elif children:
            value = math.exp(node.logprob / max(node.depth, 1))
        self._closed.discard(number)
        above: int | None = number
        while above is not None:
            self._nodes[above].visits += 1
            self._nodes[above].total += value
            self._pending[above] -= 1
            self._closed.discard(above)
            self._close_if_done(above)
            above = self._nodes[above].parent

    def _open_children(self, number: int) -> list[int]:
        return [child for child in self._children[number] if child not in self._closed]

    def _close_if_done(self, number: int) -> None:
        if self._nodes[number].status != "open" and not self._open_children(number):
            self._closed.add(number)

    def _set_priors(self, children: Sequence[int]) -> None:
        # Of siblings, so the logarithms of their paths differ as those of their tactics do.
        logprobs = [self._nodes[child].logprob for child in children]
        weights = [math.exp(each - max(logprobs)) for each in logprobs]
        for child, weight in zip(children, weights, strict=True):
            self._priors[child] = weight / sum(weights)

    def _rank(self, number: int) -> float:
        node = self._nodes[number]
        assert node.parent is not None
        visits = node.visits + self._pending[number]
        around = self._nodes[node.parent].visits + self._pending[node.parent]
        bonus = self._exploration * self._priors[number] * math.sqrt(around) / (1 + visits)
        return (node.total / visits if visits else 0.0) + bonus


def ancestors(nodes: Sequence[SearchNode], number: int) -> list[int]:
    """Returns the way from the root to a node, both included."""
    path = [number]
    while (parent := nodes[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]
