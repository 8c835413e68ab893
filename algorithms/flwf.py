"""FLwF-2T: what arrives later is learned under two teachers, the client's model of before and the server's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.prototypes import class_counts
from algorithms.parts.requirements import without_stages
from algorithms.parts.transfer import distillation, limited
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import Sum, function
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_UNTAUGHT = {"classification_weight": (1,)}


class FLwF(FineTuned):
    """FLwF-2T (federated learning without forgetting, two teachers): later stages are learned under old models.

    For data that change over rounds (the section ``stages``). In the first stage it is federated averaging. In a later
    one client k has two teachers: the model theta_k that it trained in its last round before the stage, and the model w
    that it received. It trains w on

        alpha CE(z, y) + beta D(z_k, z) + (1 - alpha - beta) D(z_w, z)
        D(t, z) = mean KL(softmax(t / tau) || softmax(z / tau))

    where z_k and z_w are the teachers' logits, constants of evaluation mode. With ``teachers: client`` it is FLwF, with
    one teacher and the weights alpha and 1 - alpha; ``teachers: server`` has the other one alone. A client that took no
    part in earlier stages has no model of its own to teach it: the server's teaches it alone, with 1 - alpha, and under
    ``teachers: client`` it trains on CE. With ``outputs: separate`` D compares the logits of the classes alone that
    the client has had samples of in earlier stages, and CE those of all others, and of classes that it has samples of
    now; a client that took no part in earlier stages trains on CE. With ``finetune_epochs`` each client fine-tunes the
    final model on CE.

    Server: model w. Client: theta_k, the model it last trained, and the classes it has had; nothing without stages.
    Down: w. Up: w_k and n_k. Evaluated: w (``global``).

    References:
        Usmanova, Portet, Lalanda, Vega: A Distillation-Based Approach Integrating Continual Learning and Federated
        Learning for Pervasive Services, arXiv 2109.04197, 2021, FLwF and FLwF-2T.
        Li, Hoiem: Learning without Forgetting, ECCV 2016.
    """

    name: Literal["flwf"] = "flwf"
    citation: ClassVar[str] = "Usmanova et al., arXiv 2021"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "it distills probabilities of the classes of earlier stages"}
    client_keeps: ClassVar[str] = "theta_k, its classes"

    teachers: Literal["both", "client", "server"] = setting(
        "both",
        "",
        "who teaches in later stages: both models (FLwF-2T), the client's of before alone (FLwF), or the received one",
        kept=True,
    )
    classification_weight: float = setting(
        0.4, "alpha", "weight of the cross-entropy in later stages; 1 is federated averaging", ge=0, le=1
    )
    client_weight: float = setting(
        0.3,
        "beta",
        "weight of the client's model of before; the server's has what is left of 1",
        ge=0,
        le=1,
        only={"teachers": ("both",)},
    )
    temperature: float = setting(2.0, "tau", "temperature of the distillation", gt=0, unless=_UNTAUGHT)
    outputs: Literal["all", "separate"] = setting(
        "all",
        "",
        "classes whose logits are compared: all; or in D those of earlier stages, in CE all others and those present",
        unless=_UNTAUGHT,
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.teachers == "both" and self.classification_weight + self.client_weight > 1:
            raise ConfigError(
                f"algorithm.classification_weight={self.classification_weight} and algorithm.client_weight="
                f"{self.client_weight} are more than 1 together, and leave less than nothing for the server's model: "
                "lower one of the two"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return without_stages(context, "federated averaging")

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        stages = client.context.stages
        if stages.active:
            self._enter(client)
        teachers = self._teachers(client, model) if stages.active and self.classification_weight < 1 else {}
        trained = await client.train(model, self.taught if teachers else self.objective, frozen=teachers or None)
        if stages.active and self.teachers != "server":
            client.state["last"] = copy(trained)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def _enter(self, client: Client) -> None:
        """Notes the classes of the stage; in a client's first round of a later one its last model becomes a teacher."""
        state, stage = client.state, client.context.stage
        counts = class_counts(client.examples().y, client.task.network.head_shape[0]) > 0
        if state.get("stage", stage) != stage:
            state.update({"past": state["last"]} if "last" in state else {})
            state["earlier"] = state["earlier"] | state["present"]
        elif "stage" not in state:
            state["earlier"] = torch.zeros_like(counts)
        state.update(stage=stage, present=counts)

    def _teachers(self, client: Client, model: Tree) -> Tree:
        """The models that teach in a round (``past``, ``received``), and of which classes D and CE compare logits."""
        state = client.state
        if not client.context.stage:
            return {}
        found: Tree = {"past": state["past"]} if "past" in state else {}
        if self.teachers != "client":
            found["received"] = model
        if self.outputs == "separate" and found:
            # of a client without earlier classes there is nothing to compare
            earlier, present = state["earlier"], state["present"]
            found = {**found, "earlier": earlier, "open": present | ~earlier} if earlier.any() else {}
        return found

    @property
    def taught(self) -> Sum:
        """What is minimized under teachers."""
        return function(self._taught)

    def _taught(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        logits = task.logits(model, batch)
        teachers = [name for name in ("past", "received") if name in frozen]
        weights = dict.fromkeys(teachers, 1 - self.classification_weight)
        if len(teachers) > 1:
            weights = {"past": self.client_weight, "received": weights["received"] - self.client_weight}
        found = self.classification_weight * task.loss_of(limited(logits, frozen.get("open")), batch)
        for name in teachers:
            teacher = task.logits(frozen[name], batch, training=False)
            student, teacher = (limited(one, frozen.get("earlier")) for one in (logits, teacher))
            apart = distillation(student, teacher, batch, self.temperature) / self.temperature**2
            found = found + weights[name] * apart
        return found
