"""FedHKD: clients learn from the mean features of each class, and from what models say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, check_head, setting
from algorithms.parts.heads import head_logits
from algorithms.parts.prototypes import class_means, renewed
from algorithms.parts.settings import TOGETHER
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_UNTAUGHT = {f"prediction_weight{TOGETHER}feature_weight": ((0, 0),)}


class FedHKD(Averaging):
    """FedHKD (hyper-knowledge distillation): federated averaging that exchanges mean features and predictions by class.

    With f(x) in R^d the input of the last linear layer W, client k goes down from the received model

        CE + lambda mean_c ||softmax(W H_c / tau) - Q_c||_2 + gamma mean ||f(x) - H_y||_2

    with the first mean over classes that have hyper-knowledge (H_c, Q_c), and the second over the mini-batch, in which
    samples of other classes count 0. Then it sends its model, and for each of its classes

        h_kc = mean of f(x),    q_kc = mean of softmax(W f(x) / tau)

    over its samples of the class, by its trained model in evaluation mode. The server takes the mean of the models, and

        H_c = sum_k n_kc h_kc / sum_k n_kc,    Q_c = sum_k n_kc q_kc / sum_k n_kc

    over the clients of the cohort that send them; a class that nobody sends keeps what it has. In the first round there
    is no hyper-knowledge. With ``noise`` a client adds to each number of h_kc a Gaussian of standard deviation
    sigma 2 zeta / n_kc, with zeta the largest size of this feature among its samples of the class.

    Server: w, H and Q with marks of the classes that have them. Client: its model as trained last; never sent but as
    part of the mean. Down: what the server has. Up: w_k, h_kc, q_kc and n_kc. What no
    distance with a weight needs is not exchanged. Evaluated: w (``global``), and the
    client's model as trained last (``personalized``), which of a client never sampled is w.

    References:
        Chen, Wang, Vikalo: The Best of Both Worlds: Accurate Global and Personalized Models through Federated Learning
        with Data-Free Hyper-Knowledge Distillation, ICLR 2023 (arXiv 2301.08968).
    """

    name: Literal["fedhkd"] = "fedhkd"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Chen et al., ICLR 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "clients exchange mean features and predictions by class"}
    no_privacy: ClassVar[str] = "its clients send mean features and predictions by class, too, which are no model"
    client_keeps: ClassVar[str] = "w_k"
    server_keeps: ClassVar[str] = "w, H, Q"
    newcomer: ClassVar[str] = "w, and a model after a local update from it"

    prediction_weight: float = setting(0.05, "lambda", "weight of the distance of predictions from Q", ge=0)
    feature_weight: float = setting(0.05, "gamma", "weight of the distance of features from H", ge=0)
    temperature: float = setting(
        0.5,
        "tau",
        "temperature of q, and of the predictions that are compared with Q",
        gt=0,
        unless={"prediction_weight": (0,)},
    )
    least_share: float = setting(
        0.0,
        "nu",
        "share of a client's samples that a class needs to be sent; 0: all classes that it has",
        ge=0,
        lt=1,
        unless=_UNTAUGHT,
    )
    noise: float = setting(
        0.0,
        "sigma",
        "standard deviation of the noise on h, in units of how far one sample can move it; 0: none",
        ge=0,
        unless=_UNTAUGHT,
    )

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("FedHKD", task.network)
        super().check(task, context)

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        like = model[task.network.head_weight]
        classes = len(like)
        shapes = {"features": like.shape, "predictions": (classes, classes)}
        knowledge = {name: like.new_zeros(shapes[name]) for name in self._exchanged}
        return {"model": model, **({"knowledge": {**knowledge, "exist": like.new_zeros(classes)}} if knowledge else {})}

    @property
    def _exchanged(self) -> tuple[str, ...]:
        """What of each class clients exchange."""
        if self.prediction_weight > 0:
            return ("features", "predictions")
        return ("features",) if self.feature_weight > 0 else ()

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        known, tree = server.get("knowledge", {}), {"model": server["model"]}
        if known:
            nothing = {name: torch.zeros_like(known[name]) for name in self._exchanged}
            tree["sums"] = {**nothing, "counts": torch.zeros_like(known["exist"])}
        mean = clients.mean(self.taught_update, cohort, broadcast=server, also=self.remainder(tree, cohort, clients))
        if not known:
            return mean
        sums = mean.pop("sums")
        found = {
            name: renewed({"means": known[name], "exist": known["exist"]}, sums[name], sums["counts"])
            for name in self._exchanged
        }
        knowledge = {name: tree["means"] for name, tree in found.items()}
        return {**mean, "knowledge": {**knowledge, "exist": found["features"]["exist"]}}

    async def taught_update(self, client: Client, model: Tree, knowledge: Tree | None = None) -> Weighted:
        """Trains the received model with the hyper-knowledge.

        Args:
            client: who trains.
            model: w.
            knowledge: H and Q, and which classes have them; None where both distances have no weight.
        """
        taught = knowledge is not None and bool(knowledge["exist"].any())
        trained = await client.train(model, self.objective if taught else loss(), frozen=knowledge if taught else None)
        client.state["personal"] = copy(trained)
        client.publish(local=Predictor.of(trained))
        if knowledge is None:
            return self.weighted(client, {"model": trained})
        sums = await self._sums(client, trained, knowledge)
        weight = 1 if self.aggregation == "uniform" else max(client.num_samples, 1)
        # whatever the weight of the model, every sample counts the same in the means by class
        return self.weighted(client, {"model": trained, "sums": {name: leaf / weight for name, leaf in sums.items()}})

    async def _sums(self, client: Client, model: Tree, knowledge: Tree) -> Tree:
        """Sums by class: ``features`` n h (C, d), ``predictions`` n q (C, C) if asked for, and ``counts`` n, (C,)."""
        width = knowledge["features"].shape[1]

        def outputs(x: Tensor, task: Any) -> Tensor:
            features, logits = task.network.head_inputs_and_logits(model, x)
            return torch.cat([features, (logits / self.temperature).softmax(-1)], 1)

        both, labels = await client.outputs(outputs), client.examples().y
        counts, means = class_means(both, labels, len(knowledge["exist"]))
        counts = torch.where(counts >= self.least_share * len(labels), counts, 0)
        features, predictions = means[:, :width], means[:, width:]
        if self.noise > 0:
            generator = client.context.streams.generator("knowledge", client.round, client.id)
            drawn = torch.from_numpy(generator.standard_normal(tuple(features.shape))).to(features)
            spread = 2 * largest_sizes(both[:, :width], labels, len(counts)) / counts.clamp(min=1)[:, None]
            features = features + self.noise * spread * drawn
        found = {"features": features, "predictions": predictions}
        sums = {name: counts[:, None] * found[name] for name in self._exchanged}
        return {name: leaf.to(knowledge["exist"]) for name, leaf in {**sums, "counts": counts}.items()}

    @property
    def objective(self) -> Sum:
        """The cross-entropy and both distances, from one forward pass."""
        return function(self._distilled)

    def _distilled(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, logits = task.head_inputs_and_logits(model, batch)
        value, exist = task.loss_of(logits, batch), frozen["exist"]
        if self.prediction_weight > 0:
            said = (head_logits(task.network, model, frozen["features"]) / self.temperature).softmax(-1)
            apart = (lengths(said - frozen["predictions"]) * exist).sum() / exist.sum()
            value = value + self.prediction_weight * apart
        if self.feature_weight > 0:
            apart = lengths(features - frozen["features"][batch.y]) * exist[batch.y]
            value = value + self.feature_weight * batch.mean(apart)
        return value

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        return super().update(trained["model"], received, task)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.taught_update(client, **server)
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        own: Tree | None = client.state.get("personal")
        return {
            "global": Predictor.of(server["model"]),
            "personalized": Predictor.of(server["model"] if own is None else own),
        }


def lengths(rows: Tensor) -> Tensor:
    """Norms of rows (n, d), shape (n,); of a row of zeros the gradient is 0."""
    squares = rows.square().sum(-1)
    return torch.where(squares > 0, squares, 1).sqrt() * (squares > 0)


def largest_sizes(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """zeta, the largest size of each feature among the samples of each class, shape (C, d), float64; 0 without any.

    Args:
        features: f, shape (n, d).
        labels: y, shape (n,).
        classes: C.
    """
    sizes = features.double().abs()
    places = labels[:, None].expand_as(sizes)
    return sizes.new_zeros(classes, sizes.shape[1]).scatter_reduce(0, places, sizes, "amax")
