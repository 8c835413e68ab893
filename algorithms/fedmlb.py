"""FedMLB: local training beside branches that begin in the local network and end in the received one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.requirements import check_cut_by_depth
from algorithms.parts.transfer import distillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_MOST = 5


class FedMLB(FineTuned):
    """FedMLB (multi-level branched regularization): local steps that keep each level fit for what follows it globally.

    The network is cut after B of its stages (a stage is a layer with what follows it up to the next one, or a residual
    block). Branch i runs the local network up to the i-th cut and the received one from there, which is frozen.
    With z the logits of the local network for a mini-batch, and z_i those of branch i, clients minimise

        CE(z) + lambda_1/B sum_i CE(z_i) + lambda_2/B sum_i KL(p_i || p)

    where p and p_i are the softmax of z / tau and of z_i / tau. Gradients flow through the branches, and through both
    sides of the divergence, into the local network's first stages. So what these compute stays of use to the received
    network's later ones. With lambda_1 = lambda_2 = 0 it is federated averaging. With ``finetune_epochs`` each client
    fine-tunes the final model on the cross-entropy alone.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k.

    References:
        Kim, Kim, Han: Multi-Level Branched Regularization for Federated Learning, ICML 2022.
    """

    name: Literal["fedmlb"] = "fedmlb"
    citation: ClassVar[str] = "Kim et al., ICML 2022"

    branch_weight: float = setting(1.0, "lambda_1", "weight of the branches' cross-entropy", ge=0)
    distillation_weight: float = setting(1.0, "lambda_2", "weight of what branches teach the local network", ge=0)
    temperature: float = setting(
        1.0, "tau", "temperature of both distributions", gt=0, unless={"distillation_weight": (0,)}
    )
    cuts: tuple[Annotated[int, Field(ge=1)], ...] | None = setting(
        None,
        "",
        "after which stages, from 1, the branches leave the local network; null: at most 5, from after the first to "
        "after the last, evenly by number",
        min_length=1,
    )

    @field_validator("cuts")
    @classmethod
    def _ascending(cls, cuts: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if cuts is not None and list(cuts) != sorted(set(cuts)):
            raise ValueError("cuts: give each stage once, ascending")
        return cuts

    def needed(self) -> Mapping[Trait, str]:
        if self.distillation_weight == 0:
            return {"features": "its branches give one output a sample"}
        return {"distribution": "its branches teach the local network probabilities of classes"}

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        stages = check_cut_by_depth(self.name, task.network)
        if self.cuts is not None and self.cuts[-1] > stages:
            raise ConfigError(
                f"algorithm.cuts has {self.cuts[-1]}, and this model has {stages} stages: name stages from 1 to "
                f"{stages}"
            )

    def places(self, task: Task) -> tuple[int, ...]:
        """The stages after which branches leave the local network, from 0, shape (B,)."""
        if self.cuts is not None:
            return tuple(cut - 1 for cut in self.cuts)
        last = len(task.network.depths.stages) - 1
        count = min(_MOST, last + 1)
        return tuple(i * last // max(count - 1, 1) for i in range(count))

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        _ = client.task.network.depths  # found here, once for each process: no network can be made inside a step
        trained = await client.train(model, self.objective, frozen={"received": model})
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE + lambda_1 mean CE of branches + lambda_2 mean KL from branches."""
        if self.branch_weight == 0 and self.distillation_weight == 0:
            return task.loss(model, batch)
        places, network = self.places(task), task.network
        walk = partial(network.depths.between, places=places)
        *values, logits = network.walked(model, batch.x, walk, training=True, mask=batch.mask)
        total = task.loss_of(logits, batch)
        branches = [
            self._finished(frozen["received"], one, batch, task, at) for one, at in zip(values, places, strict=True)
        ]
        if self.branch_weight:
            total = total + self.branch_weight * torch.stack([task.loss_of(one, batch) for one in branches]).mean()
        if self.distillation_weight:
            # the authors' divergence has no factor tau^2
            share, tau = self.distillation_weight / self.temperature**2, self.temperature
            total = total + share * torch.stack([distillation(logits, one, batch, tau) for one in branches]).mean()
        return total

    def _finished(self, received: Any, value: Tensor, batch: Batch, task: Task, place: int) -> Tensor:
        """The logits of the received network, in evaluation mode, from a value between its stages."""
        depths = task.network.depths

        def rest(model: nn.Module, value: Tensor) -> list[Tensor]:
            return [depths.after(model, value, place)]

        return task.network.walked(received, value, rest, mask=batch.mask)[0]
