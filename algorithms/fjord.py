"""FjORD: ordered dropout, in which every step of a client trains a width drawn up to its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from algorithms.base import setting
from algorithms.parts.submodels import Submodels
from algorithms.parts.transfer import distillation
from algorithms.parts.widths import Held, count_of, narrowed, window
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.models.units import Units
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Task, Trait


class FjORD(Submodels):
    """FjORD (ordered dropout): every step of a client trains a width drawn up to its own, so that all widths work.

    A client of width r_k has the first ceil(r_k d) of the d units of each hidden layer. For each mini-batch it draws a
    width p among ``widths`` up to r_k, all alike likely, and goes down the loss of the first ceil(p d) units. So a unit
    learns to work without those after it, and the model can be cut to any of the widths. With self-distillation, the
    whole submodel with logits z_r is trained on the same mini-batch, and teaches the drawn one with logits z_p,

        CE(z_r) + (1 - alpha) CE(z_p) + alpha T^2 KL(softmax(z_r / T) || softmax(z_p / T))

    in which the teacher is a constant. Each element of the server's model becomes the mean over the clients of the
    cohort that have it, and stays as it is if nobody has.

    Server: model w. Client: nothing. Down: the client's units of w. Up: these, trained, and n_k. Evaluated: w
    (``global``) and the client's units of w (``submodel``).

    References:
        Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane: FjORD: Fair and Accurate Federated Learning under
        Heterogeneous Targets with Ordered Dropout, NeurIPS 2021 (arXiv:2102.13451).
    """

    name: Literal["fjord"] = "fjord"
    citation: ClassVar[str] = "Horvath et al., NeurIPS 2021"

    widths: tuple[Annotated[float, Field(gt=0, le=1)], ...] = setting(
        (1.0, 0.8, 0.6, 0.4, 0.2),
        "r_k",
        "shares of each hidden layer's units: those that clients have, and those that steps draw",
        min_length=1,
    )
    self_distillation: bool = setting(False, "", "whether the client's whole submodel teaches the width that is drawn")
    distillation_weight: float = setting(
        1.0,
        "alpha",
        "weight of the divergence, beside 1 - alpha of the cross-entropy",
        ge=0,
        le=1,
        only={"self_distillation": (True,)},
    )
    temperature: float = setting(
        1.0,
        "T",
        "temperature of both distributions",
        gt=0,
        only={"self_distillation": (True,)},
        unless={"distillation_weight": (0,)},
    )

    def needed(self) -> Mapping[Trait, str]:
        return {"distribution": "the two widths distil probabilities of classes"} if self.self_distillation else {}

    def held(self, client: int, context: RoundContext, round: int, units: Units) -> Held:
        return window(units, self.width(client, context, round))

    @property
    def objective(self) -> Sum:
        """The loss of the width that is drawn, with or without the one of the whole submodel."""
        return function(self._nested) if self._draws else loss()

    @property
    def _draws(self) -> bool:
        return len(set(self.widths)) > 1 or self.self_distillation

    async def train(self, client: Client, start: Tree, width: float) -> Tree:
        if not self._draws:
            return await super().train(client, start, width)
        network: Any = client.task.network
        allowed = sorted({one for one in self.widths if one <= width})
        counts = np.array([[count_of(size, one) for size in network.units.sizes] for one in allowed])

        def draw(generator: np.random.Generator, steps: int) -> Tree:
            return {"counts": counts[generator.integers(len(allowed), size=steps)]}

        return await client.train(start, self.objective, draw=draw)

    def _nested(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        network: Any = task.network
        drawn = narrowed(model, draw["counts"], network.units)
        if not self.self_distillation:
            return task.loss(drawn, batch)
        whole, narrow = task.logits(model, batch), task.logits(drawn, batch)
        taught = distillation(narrow, whole.detach(), batch, self.temperature)
        alpha = self.distillation_weight
        return task.loss_of(whole, batch) + (1 - alpha) * task.loss_of(narrow, batch) + alpha * taught
