"""Statistics of the clients' updates in a round, beyond their mean."""

from __future__ import annotations

from algorithms.clients import merge
from rayfl.aggregation.exact_sum import ExactSum
from rayfl.models.pretrained.products import product_error
from rayfl.params import Tree


class Updates:
    """Sums over the updates of a round; see ``actors.hosting.outcomes.update_of`` for what each client adds."""

    def __init__(self) -> None:
        self._sum = ExactSum()

    def add(self, part: ExactSum, round: int, procedure: str) -> None:
        """Adds a host's sum; raises as :func:`algorithms.clients.merge`."""
        merge(self._sum, part, round, procedure)

    def variance(self) -> float | None:
        """Returns the total variance of the updates, sum of ||D_k - mean D||^2; None if the method reports none."""
        mean = self._mean()
        if "change" not in mean:
            return None
        spread = float(mean["squared_norm"]) - float(mean["change"] @ mean["change"])
        return self._sum.weight * max(spread, 0.0)

    def product_error(self) -> float | None:
        """Returns the distance from the mean adapters' product to the mean product; None without adapters."""
        mean = self._mean()
        return product_error(mean["products"]) if "products" in mean else None

    def _mean(self) -> Tree:
        return self._sum.mean() if self._sum.weight else {}
