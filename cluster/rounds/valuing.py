"""Values the clients of each round (the section ``contribution``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from actors.federation.federation import Federation
from cluster.rounds.progress import Progress
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.robust import inner_products
from rayfl.experiment.parts import Parts
from rayfl.params import Tree
from rayfl.results.contributions import rows_of_round
from rayfl.valuation.cosine import cosines
from rayfl.valuation.game import Valued
from rayfl.valuation.section import Measured, NoContribution

_log = logging.getLogger("rayfl")
_SERVER = "model"
"""Where the server's tree has the model that is a mean of its clients'."""


class Valuer:
    """Values the clients of each round by their models, which the server has received.

    Args:
        parts: data set, task and context.
        federation: the clients.
    """

    def __init__(self, parts: Parts, federation: Federation) -> None:
        self._parts, self._federation = parts, federation
        self._section = parts.config.contribution
        self._said = False

    @property
    def on(self) -> bool:
        """Returns whether clients are valued."""
        return not isinstance(self._section, NoContribution)

    def value(self, before: Tree, progress: Progress) -> None:
        """Adds the rows of a round to its tables.

        Args:
            before: the server's tree before the round.
            progress: after it.

        Raises:
            HostDiedError: the host that evaluates models died.
            ClientError: a model cannot be evaluated.
        """
        messages = self._federation.messages
        if not messages:
            return
        self._federation.messages = {}
        section, round = self._section, progress.rounds_completed
        weights = torch.tensor([float(message.weight) for message in messages.values()], dtype=torch.float64)
        shares = dict(zip(messages, (weights / weights.sum()).tolist(), strict=True))
        metric = None
        if isinstance(section, Measured):
            metrics = self._parts.task.measures.metrics
            metric = next(one.name for one in metrics if section.metric in (None, one.name))
            valued = self._measured(messages, before, progress.server)
        else:
            valued = self._compared(messages, before, weights)
        if valued.found == "undefined" and not self._said:
            self._said = True
            _log.warning(
                "contribution: in round %d a model of some of the clients has no finite %s, so that its clients have "
                "no value; later such rounds are in contributions.parquet",
                round, metric,
            )  # fmt: skip
        facts = {name: getattr(valued, name) for name in _FACTS}
        rows = rows_of_round(round, section.name, metric, shares, valued.values.tolist(), facts)
        progress.tables.add_contributions(rows)

    def _measured(self, messages: Mapping[int, Weighted], before: Tree, after: Tree) -> Valued:
        common, _ = self._parts.config.algorithm.served(after, self._federation.context)
        given = {
            "messages": {str(client): message.tree for client, message in messages.items()},
            "weights": {str(client): float(message.weight) for client, message in messages.items()},
            "before": before[_SERVER],
            "after": after[_SERVER],
            "server": {name: value for name, value in common.items() if name != _SERVER},
        }
        found: dict[str, Any] = self._federation.on_one_host("global_predictors", "value", given)
        return Valued(**{**found, "values": found["values"].numpy()})

    def _compared(self, messages: Mapping[int, Weighted], before: Tree, weights: torch.Tensor) -> Valued:
        buffers = self._parts.task.network.buffer_names
        start = {name: leaf for name, leaf in before[_SERVER].items() if name not in buffers}
        trees = [{name: message.tree[name] for name in start} for message in messages.values()]
        found: np.ndarray = cosines(inner_products(trees, start), weights).numpy()
        return Valued(found)


_FACTS = ("found", "before", "after", "evaluations", "permutations", "truncated")
"""What of :class:`Valued` the rows of a round have."""
