"""FedPHP: every client inherits a private model from its own past and learns from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import Aggregation, Averaging, setting
from algorithms.parts.mixture import parameters
from algorithms.parts.transfer import (
    ONE_SAMPLE,
    OneSample,
    distillation,
    half_squared_distance,
    maximum_mean_discrepancy,
)
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree, interpolate, squared_distance
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait

_TRANSFERS = ("mmd", "kd", "l2", "prox")


class FedPHP(Averaging):
    """FedPHP: federated averaging in which every client inherits a private model (HPM) from its own past.

    The HPM theta_p is the moving average of what the client trained whenever it was selected. In the next
    selection it is the frozen teacher (evaluation mode) of the model theta that the server sent:

        loss = (1 - lambda) CE(theta) + lambda L_kt(theta, theta_p)

    with L_kt the maximum mean discrepancy of the features, distillation of the logits, half the squared distance
    of the features, or the squared distance of the parameters. After training, theta_p moves to
    (1 - mu) theta + mu theta_p.

    Server: model theta_s. Client: theta_p (at first the server's initial model) and z, how often it was selected;
    neither is ever sent. Down: theta_s. Up: theta (and n_k). Evaluated: the HPM. Right after local training
    also theta (local), and the mean of their probabilities (ensemble).

    The discrepancy of a mini-batch of one sample is 0 here (``one_sample``): no paper says what it should be.
    Where the official code deviates (mean weighted by samples, mu clipped at 0.9, distillation without softening
    the student) the paper is followed and the deviation is an option. That code's gradient clipping and minimum number
    of local steps are ``train.max_grad_norm`` and ``train.min_local_steps``; its augmentation is left out.

    References:
        Li, Zhan, Shao, Li, Song: FedPHP: Federated Personalization with Inherited Private Models, ECML PKDD 2021,
        Algorithm 1 and eqs. 5 (HPM), 6-9 (distillation, features, MMD, parameters) and 10 (loss).
    """

    name: Literal["fedphp"] = "fedphp"
    personalized: ClassVar[str] = "hpm"
    citation: ClassVar[str] = "Li et al., ECML PKDD 2021"
    client_keeps: ClassVar[str] = "HPM theta_p, z_k"
    server_keeps: ClassVar[str] = "theta_s"
    newcomer: ClassVar[str] = "w, and an HPM that inherits from w and a local update"

    aggregation: Aggregation = setting(
        "uniform",
        "q_k",
        "weights of the mean: uniform 1/|S| (paper); samples n_k / sum over the cohort (official code); population "
        "n_k / sum over all clients, the rest staying on the old server model; tokens those that a language model "
        "learns, in place of samples",
    )
    transfer: Literal["mmd", "kd", "l2", "prox", "none"] = setting(
        "mmd",
        "L_kt",
        "what the HPM teaches: mmd feature distribution, kd logits, l2 features, prox parameters, none nothing",
    )
    transfer_weight: float = setting(
        0.01, "lambda", "weight of the transfer; cross-entropy gets the rest", ge=0, le=1, only={"transfer": _TRANSFERS}
    )
    momentum_schedule: Literal["a", "b", "c"] = setting(
        "a",
        "Mu-A, Mu-B, Mu-C",
        "momentum of the HPM: a grows with the client's selections z, macro_momentum z / (Q T), with Q T rounded down; "
        "b macro_momentum always; c round / rounds",
    )
    macro_momentum: float = setting(
        0.9,
        "mu_macro",
        "momentum of a client selected as often as expected (a), or always (b)",
        ge=0,
        le=1,
        only={"momentum_schedule": ("a", "b")},
    )
    momentum_clip: float = setting(
        1.0,
        "",
        "largest momentum under schedule a (the official code takes 0.9)",
        ge=0,
        le=1,
        only={"momentum_schedule": ("a",)},
        unless={"macro_momentum": (0,)},
    )
    count: Literal["before", "after"] = setting(
        "before",
        "z_k",
        "whether z leaves out the current selection (Algorithm 1) or includes it (text)",
        only={"momentum_schedule": ("a",)},
        unless={"macro_momentum": (0,)},
    )
    temperature: float = setting(
        4.0, "tau", "temperature of distillation", gt=0, only={"transfer": ("kd",)}, unless={"transfer_weight": (0,)}
    )
    kd_form: Literal["paper", "code"] = setting(
        "paper",
        "",
        "distillation with both models softened (paper), or with the teacher alone (official code)",
        only={"transfer": ("kd",)},
        unless={"transfer_weight": (0,)},
    )
    one_sample: OneSample = setting(
        "skip", "", f"transfer=mmd: {ONE_SAMPLE}", only={"transfer": ("mmd",)}, unless={"transfer_weight": (0,)}
    )
    skip_first_transfer: bool = setting(
        False,
        "",
        "train without transfer in a client's first selection, when its HPM is still the initial model",
        only={"transfer": _TRANSFERS},
        unless={"transfer_weight": (0,)},
    )

    def needed(self) -> Mapping[Trait, str]:
        """Returns what the transfer needs."""
        if self.transfer == "kd":
            return {"distribution": "transfer=kd distills probabilities of classes"}
        return {"features": f"transfer={self.transfer} compares features"} if self.transfer in ("mmd", "l2") else {}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        inherited = self._inherited(client)
        selections: int = client.state.get("selections", 0)
        if self.transfers(selections):
            trained = await client.train(model, self.objective, frozen={"hpm": inherited})
        else:
            trained = await client.train(model, super().objective)
        updated = interpolate(trained, inherited, self.momentum(selections, client.context))
        client.state["hpm"] = updated
        client.state["selections"] = selections + 1
        client.publish(hpm=Predictor.of(updated), local=Predictor.of(trained), ensemble=Predictor.of(updated, trained))
        return self.weighted(client, trained)

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """Cross-entropy and transfer, from one forward pass of each model."""
        loss, transfer = self._terms(model, frozen["hpm"], batch, task)
        return (1 - self.transfer_weight) * loss + self.transfer_weight * transfer

    def transfers(self, selections: int) -> bool:
        """Returns whether the HPM teaches a client that was selected ``selections`` times before."""
        if self.transfer == "none" or self.transfer_weight == 0:
            return False
        return selections > 0 or not self.skip_first_transfer

    def momentum(self, selections: int, context: RoundContext) -> float:
        """mu, the share of the old HPM in the new one.

        Args:
            selections: how often the client was selected before this round.
            context: round, rounds, cohort and number of clients.
        """
        if self.momentum_schedule == "b":
            return self.macro_momentum
        if self.momentum_schedule == "c":
            return context.round / context.rounds
        cohort = context.mean_cohort
        expected = max(int(cohort * context.rounds / context.num_clients), 1)
        counted = selections + (self.count == "after")
        return min(self.macro_momentum * counted / expected, self.momentum_clip)

    def course(self, round: int, rounds: int) -> Any:
        """The number of rounds, of which schedules a and c of the momentum are fractions."""
        return None if self.momentum_schedule == "b" else rounds

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, with an HPM that begins as the server's model; sends nothing."""
        client.state["hpm"] = server["model"]
        await self.local_update(client, server["model"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"global": Predictor.of(server["model"]), "hpm": Predictor.of(self._inherited(client))}

    def _terms(self, model: Model, inherited: Model, batch: Batch, task: Task) -> tuple[Tensor, Tensor]:
        """Cross-entropy and L_kt."""
        if self.transfer == "prox":
            moved, anchor = parameters(model, task), parameters(inherited, task)
            return task.loss(model, batch), squared_distance(moved, anchor)
        features, logits = task.features_and_logits(model, batch)
        old_features, old_logits = task.features_and_logits(inherited, batch, training=False)
        loss: Tensor = task.loss_of(logits, batch)
        if self.transfer == "kd":
            return loss, distillation(logits, old_logits, batch, self.temperature, self.kd_form)
        if self.transfer == "mmd":
            return loss, maximum_mean_discrepancy(features, old_features, batch, self.one_sample)
        return loss, half_squared_distance(features, old_features, batch)

    @staticmethod
    def _inherited(client: Client) -> Tree:
        """theta_p; the server's initial model until the client is selected."""
        stored: Tree | None = client.state.get("hpm")
        return client.initial_model() if stored is None else stored
