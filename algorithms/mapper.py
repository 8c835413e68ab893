"""MAPPER: each client interpolates between a central and a local model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from algorithms.base import Averaging, setting
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.objectives import frozen, line, loss
from rayfl.params import Tree, interpolate
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class Mapper(Averaging):
    """MAPPER: a central model is trained inside the interpolations that suit the clients best.

    A client fits a local model h_l for every lambda of a grid, by minimising the loss of

        lambda h_l + (1 - lambda) h_c

    over h_l, and keeps the pair (lambda*, h_l*) of the smallest loss. Then it trains the received h_c on the loss of
    that interpolation, with lambda* and h_l* fixed. Each fit takes the local epochs of the training section; the one
    of lambda has batches of its own (suffix ``.lambda=<lambda>``), the training of h_c those of federated averaging.

    Server: model h_c. Client: h_l and lambda of its last participation. Down: h_c. Up: h_c,k and n_k. Evaluated:
    h_c (``global``) and the interpolation with the latest h_c (``personalized``); a client never sampled fits and
    selects before each evaluation (``unseen``), which it forgets afterwards.

    The original samples one client a round. The code of Ditto's authors takes a single step on h_c, fine-tunes the
    interpolation at the end and keeps the update of one client. Here the updates of the cohort are averaged, and
    nothing is fine-tuned.

    References:
        Mansour, Mohri, Ro, Suresh: Three Approaches for Personalization with Applications to Federated Learning,
        arXiv:2002.10619, 2020, the algorithm MAPPER of the section on model interpolation.
    """

    name: Literal["mapper"] = "mapper"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Mansour et al., arXiv 2020"
    client_keeps: ClassVar[str] = "h_l, lambda"
    server_keeps: ClassVar[str] = "h_c"
    newcomer: ClassVar[str] = "w, and h_l and lambda as selected for it"

    grid: tuple[Annotated[float, Field(ge=0, le=1)], ...] = setting(
        (0.25, 0.5, 0.75), "Lambda", "shares of the local model that are tried", min_length=1
    )
    space: Literal["weights", "outputs"] = setting(
        "weights", "", "interpolate the weights, or the predicted probabilities of two models (original)", kept=True
    )
    warm_start: Literal["own", "received"] = setting(
        "own", "", "where h_l starts: the client's last one (the received model in its first participation), or h_c"
    )
    select_on: Literal["train", "validation"] = setting(
        "train", "", "samples whose loss selects lambda (training samples where a client has none for validation)"
    )
    unseen: Literal["local", "global"] = setting(
        "local", "", "personalized model of a client never sampled: fitted and selected for the evaluation, or h_c"
    )

    def needed(self) -> Mapping[Trait, str]:
        """Returns what the mixture of outputs needs."""
        return {"distribution": "space=outputs mixes probabilities of classes"} if self.space == "outputs" else {}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        coefficient, local = await self.select(client, model)
        central = model
        if coefficient < 1:
            central = await self._fit(client, {"central": model}, {"local": local}, coefficient)
        client.state["local"], client.state["coefficient"] = local, coefficient
        client.publish(
            local=Predictor.of(central), personalized=self.interpolation(central, local, coefficient, client.task)
        )
        return self.weighted(client, central)

    async def select(self, client: Client, central: Tree) -> tuple[float, Tree]:
        """lambda* and h_l*: of the smallest loss on the grid, the first of several; h_c is as received."""
        own: Tree = client.state.get("local", central)
        start = own if self.warm_start == "own" else central
        split = self.select_on if len(client.examples(self.select_on)) else "train"
        fits: list[tuple[float, float, Tree]] = []
        for coefficient in self.grid:
            local = start
            if coefficient > 0:
                suffix = f".lambda={coefficient}"
                local = await self._fit(client, {"local": start}, {"central": central}, coefficient, suffix)
            predictor = self.interpolation(central, local, coefficient, client.task)
            loss = (await client.score(predictor, split)).loss
            fits.append((math.inf if math.isnan(loss) else loss, coefficient, local))
        _, coefficient, local = min(fits, key=lambda fit: fit[0])
        return coefficient, local

    def objective_of(self, end: str) -> Any:
        """The loss of the interpolation, of which one end is trained."""
        if self.space == "outputs":
            return self._loss_of_outputs
        return loss(at=line("central", "local", frozen("coefficient"), buffers_of=end))

    def _loss_of_outputs(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        ends = {**frozen, **model}
        # The end that is not trained predicts as it does in the evaluation.
        first, second = (task.logits(ends[end], batch, training=end in model) for end in ("central", "local"))
        # Log-probabilities are logits that the softmax leaves as they are.
        found: Tensor = task.loss_of(_log_mixture(first, second, frozen["coefficient"]), batch)
        return found

    def interpolation(self, central: Model, local: Model, coefficient: float, task: Task) -> Predictor:
        """lambda h_l + (1 - lambda) h_c; running statistics are interpolated as the weights are."""
        if self.space == "weights":
            return Predictor.of(interpolate(central, local, coefficient))
        return Predictor.of(central, local, combine=partial(_log_probabilities, coefficient))

    async def join(self, client: Client, server: Tree) -> Tree:
        """Fits and selects an own model."""
        client.state["coefficient"], client.state["local"] = await self.select(client, server["model"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        central = server["model"]
        rows = {"global": Predictor.of(central), "personalized": Predictor.of(central)}
        if "local" in client.state:
            pair = client.state["coefficient"], client.state["local"]
        elif self.unseen == "local":
            pair = await self.select(client, central)
        else:
            return rows
        coefficient, local = pair
        return rows | {"personalized": self.interpolation(central, local, coefficient, client.task)}

    async def _fit(self, client: Client, end: Tree, other: Tree, coefficient: float, suffix: str = "") -> Tree:
        """Trains one end of the interpolation."""
        # a tensor, so that clients with unequal lambda can be trained together
        known = {**other, "coefficient": torch.tensor(coefficient, dtype=torch.float64)}
        # a fit of h_l starts from the winner of another grid point: no momentum of its own to go on with
        keep = False if suffix else None
        (name,) = end
        trained = await client.train(end, self.objective_of(name), frozen=known, keep_optimizer=keep, stream=suffix)
        tree: Tree = trained[name]
        return tree


def _log_mixture(central: Tensor, local: Tensor, coefficient: Tensor) -> Tensor:
    """log((1 - coefficient) p + coefficient q) for the logits of p and q, shape (b, C)."""
    weight = coefficient.to(central)
    return torch.logaddexp((1 - weight).log() + central.log_softmax(-1), weight.log() + local.log_softmax(-1))


def _log_probabilities(coefficient: float, models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Returns what the interpolation of two models' probabilities predicts; log-probabilities of shape (b, C)."""
    central, local = (task.network.logits(model, x, training=False) for model in models)
    return _log_mixture(central, local, torch.tensor(coefficient, dtype=torch.float64))
