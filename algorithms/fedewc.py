"""FedEWC: elastic weight consolidation on clients whose data change, with an average of their models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.fisher import FisherInformation
from algorithms.parts.mixture import parameters
from algorithms.parts.requirements import without_stages
from rayfl.aggregation.exact_sum import Weighted
from rayfl.data.partitions.stage import Staged
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree, copy, map_leaves
from rayfl.tasks.base import Batch, Predictor, Task

_OFF = {"consolidation_weight": (0,)}


class FedEWC(FisherInformation, FineTuned):
    """FedEWC: federated averaging of clients that hold what mattered in earlier stages (online EWC on each client).

    For data that change over rounds (the section ``stages``). After each local update client k knows the diagonal F of
    Fisher information at w_k, the model that it trained, on the samples of the stage, and keeps both in place of those
    of its last round in this stage: in the next one the samples are gone. In its first round of a later stage it
    consolidates,

        F_k <- gamma F_k + F,    a_k <- w_k

    and it then trains the received model, in all rounds of the stage, on

        CE + lambda/2 (theta - a_k)^T diag(F_k) (theta - a_k)

    F_k is 0 at first: in the first stage, and until it has taken part in an earlier one, a client trains on CE. Without
    stages it is federated averaging. F is the mean over samples of squared gradients (``fisher_form``), no element
    larger than c. A step of SGD overshoots where lambda F_k times the learning rate is more than 1, and diverges where
    it is more than 2. F takes one pass over the samples in each round, and none in the last stage. Nothing of it is
    sent. With ``finetune_epochs`` each client fine-tunes the final model on CE.

    Server: model w. Client: F_k and the anchor a_k, and F and w_k of its last round; nothing without stages. Down: w.
    Up: w_k and n_k. Evaluated: w (``global``).

    References:
        Schwarz, Luketina, Czarnecki, Grabska-Barwinska, Teh, Pascanu, Hadsell: Progress & Compress: A Scalable
        Framework for Continual Learning, ICML 2018, online EWC.
        Kirkpatrick et al.: Overcoming Catastrophic Forgetting in Neural Networks, PNAS 2017, EWC.
        Zhang, Chen, Zhuang, Lyu: TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation, ICCV 2023,
        which has EWC on clients to compare with.
    """

    name: Literal["fedewc"] = "fedewc"
    citation: ClassVar[str] = "Schwarz et al., ICML 2018"
    client_keeps: ClassVar[str] = "F_k, a_k, F, w_k"

    consolidation_weight: float = setting(
        100.0, "lambda", "weight of the quadratic term; 0 is federated averaging", ge=0, kept=True
    )
    decay: float = setting(
        1.0,
        "gamma",
        "share of the earlier stages' Fisher information that stays in the next; 0: the last stage alone",
        ge=0,
        le=1,
        unless=_OFF,
    )
    fisher_limit: float | None = setting(
        0.01, "c", "largest element of Fisher information of a stage; null: no limit", gt=0, unless=_OFF, kept=True
    )
    anchor: Literal["trained", "received"] = setting(
        "trained",
        "a_k",
        "where a client is held: at the model that it trained last, or at the one that it received as the stage began",
        unless=_OFF,
    )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return without_stages(context, "federated averaging")

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        stages, stage, state = client.context.stages, client.context.stage, client.state
        if stage > state.get("stage", stage):
            self._consolidate(client, model)
        held = state.get("held") if self.consolidation_weight else None
        trained = await client.train(model, self.objective if held is None else self.held, frozen=held)
        if self.consolidation_weight and isinstance(stages, Staged) and stage < stages.count - 1:
            fisher = await self.fisher(client, trained)
            if self.fisher_limit is not None:
                fisher = map_leaves(lambda leaf: leaf.clamp(max=self.fisher_limit), fisher)
            last = {"fisher": fisher, "anchor": copy(parameters(trained, client.task))}
            state.update(stage=stage, last=last)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def _consolidate(self, client: Client, model: Tree) -> None:
        """Adds the Fisher information of the client's last round to that of earlier stages, and moves the anchor."""
        last = client.state.pop("last")
        fisher, anchor = last["fisher"], last["anchor"]
        if "held" in client.state:
            earlier = client.state["held"]["fisher"]
            fisher = map_leaves(lambda old, new: self.decay * old + new, earlier, fisher)
        if self.anchor == "received":
            anchor = copy(parameters(model, client.task))
        client.state["held"] = {"fisher": fisher, "anchor": anchor}
        client.state.pop("stage")

    @property
    def held(self) -> Sum:
        """CE and the quadratic term."""
        return loss() + self.consolidation_weight / 2 * function(self._apart)

    def _apart(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        apart = map_leaves(
            lambda leaf, fisher, anchor: (fisher * (leaf - anchor).square()).sum(),
            parameters(model, task),
            frozen["fisher"],
            frozen["anchor"],
        )
        found: Tensor = sum(apart.values())  # type: ignore[assignment]
        return found
