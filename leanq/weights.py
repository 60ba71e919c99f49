"""Which clusters a client has, and how much of what is new goes to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .config import Settings, each_cluster, without_password
from .errors import UsageError

_MOST = 1e9


class Clusters:
    """A client's clusters, and their weights, which any thread may change at any time.

    Raises:
        UsageError: no cluster, one twice, unlike numbers of shards, or weights that are none.
    """

    def __init__(self, each: Sequence[tuple[Settings, float]]) -> None:
        self.each = tuple(settings for settings, _ in each)
        if not each:
            raise UsageError("a client needs at least one URL")
        if len({settings.url for settings in self.each}) < len(self.each):
            raise UsageError("a cluster is named twice")
        if len({settings.shards for settings in self.each}) > 1:
            raise UsageError("clusters of one client must have the same number of shards")
        self._weights = _checked({settings.url: weight for settings, weight in each})

    @classmethod
    def load(
        cls,
        url: str | Settings | Sequence[str | Settings],
        weights: Sequence[float] | None,
        environ: Mapping[str, str],
    ) -> Clusters:
        """The clusters at ``url``, which is one, several, or a text that names several."""
        named: list[tuple[str | Settings, float | None]]
        if isinstance(url, str):
            named = [*each_cluster(url)]
        elif isinstance(url, Settings):
            named = [(url, None)]
        else:
            named = [(each, None) for each in url]
        if weights is not None:
            if any(weight is not None for _, weight in named):
                raise UsageError("the weights stand in the URL and beside it; give them once")
            if len(weights) != len(named):
                raise UsageError(f"there are {len(weights)} weights for {len(named)} clusters")
            named = [(each, weight) for (each, _), weight in zip(named, weights, strict=True)]
        return cls(
            [
                (
                    each if isinstance(each, Settings) else Settings.load(each, environ),
                    1.0 if weight is None else weight,
                )
                for each, weight in named
            ]
        )

    def weight(self, url: str) -> float:
        """The weight of the cluster at ``url``."""
        return self._weights[url]

    def change(self, weights: Mapping[str, float]) -> None:
        """Changes the weights of the clusters at these URLs; the others keep theirs.

        Raises:
            UsageError: not a cluster of this client, or weights that are none.
        """
        for url in weights:
            if url not in self._weights:
                raise UsageError(f"the client has no cluster {without_password(url)!r}")
        # A new one, so that nobody reads it half changed.
        self._weights = _checked({**self._weights, **weights})


def _checked(weights: dict[str, float]) -> dict[str, float]:
    for url, weight in weights.items():
        if not 0 <= weight <= _MOST:
            name = without_password(url)
            raise UsageError(f"the weight of {name} is {weight:g}; it must lie in 0 to {_MOST:g}")
    if not any(weights.values()):
        raise UsageError("all weights are 0; requests must be able to go somewhere")
    return weights
