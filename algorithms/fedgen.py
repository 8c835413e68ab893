"""FedGen: the server learns to make features of each class from the clients' heads, and clients train on them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Clients, check_head, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.accumulators import ACCUMULATOR, averaging
from algorithms.parts.generators import diversity, linear
from algorithms.parts.partial import part
from algorithms.parts.prototypes import class_counts
from algorithms.parts.transfer import distillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.batches import num_steps
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_LEAST, _EPSILON, _SHARE = 1e-4, 1e-5, 0.1
_NO_TERMS = {"label_weight and feature_weight": ((0, 0),)}


def generated(generator: Mapping[str, Any], noise: Tensor, labels: Tensor, statistics: tuple[Tensor, Tensor]) -> Tensor:
    """G(y, eps): features of shape (b, d), from a layer, its normalization, ReLU and another layer.

    Args:
        generator: G's ``network``.
        noise: eps, of shape (b, m).
        labels: y, of shape (b,); whole numbers of any type.
        statistics: mean and variance by which the hidden layer (b, h) is normalized.
    """
    hidden = _hidden(generator, noise, labels)
    mean, variance = statistics
    norm = generator["norm"]
    hidden = (hidden - mean) * (variance + _EPSILON).rsqrt() * norm["gain"] + norm["offset"]
    return F.linear(hidden.relu(), generator["second"]["weight"], generator["second"]["bias"])


def _hidden(generator: Mapping[str, Any], noise: Tensor, labels: Tensor) -> Tensor:
    weight, bias = generator["first"]["weight"], generator["first"]["bias"]
    classes = weight.shape[1] - noise.shape[-1]
    # Made where it is needed: a step that waits for a transfer cannot be recorded as a CUDA graph.
    ones = torch.eye(classes, dtype=noise.dtype, device=noise.device)
    return F.linear(torch.cat([noise, ones[labels.long()]], -1), weight, bias)


class FedGen(FineTuned):
    """FedGen: federated averaging with a generator G(y, eps) of features that suit the heads of all clients.

    After the local updates the server goes down, with Adam and labels y that are drawn evenly,

        sum_k mean[ alpha_ky CE(h_k(G(y, eps)), y) ] + eta diversity,    alpha_ky = n_ky / sum_j n_jy

    where h_k is client k's last layer and n_ky its samples of class y. From the second round on a client's loss is

        CE(w) + rho a_t CE(h(G(y', eps)), y') + b_t KL(h(G(y, eps')) || w(x)),

    with G held still: the second term trains the head h alone, on labels y' of its own drawing; in the third the first
    argument is a constant, and y are the labels of the mini-batch. rho is the number of labels y' in the size of a
    mini-batch, a_t = max(a 0.98^t, 0.0001) and so is b_t. Features are what the last layer reads.

    Server: model w, G and its optimizer. Client: nothing. Down: w and G. Up: w_k, and its samples by class.

    References:
        Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021, Algorithm 1
        and eqs. 4, 7.
    """

    name: Literal["fedgen"] = "fedgen"
    citation: ClassVar[str] = "Zhu et al., ICML 2021"
    no_privacy: ClassVar[str] = "its clients send how many samples of each class they have"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "the generator makes features of each class"}
    server_keeps: ClassVar[str] = "w, G, its moments"

    label_weight: float = setting(
        10.0,
        "a",
        "weight in round 0 of the heads' loss on generated features",
        ge=0,
        unless={"regularized_epochs": (0,)},
    )
    feature_weight: float = setting(
        10.0,
        "b",
        "weight in round 0 of the divergence from generated features",
        ge=0,
        unless={"regularized_epochs": (0,)},
    )
    weight_decay_by_round: float = setting(
        0.98, "", "factor on both weights per round", gt=0, le=1, unless={"regularized_epochs": (0,), **_NO_TERMS}
    )
    regularized_epochs: int = setting(
        20, "", "local epochs with these terms; later ones are without", ge=0, unless=_NO_TERMS
    )
    generated_batch: int | None = setting(
        None,
        "",
        "generated features in a mini-batch, at clients and at the server; null: train.batch_size, or where that is "
        "null, too, as many as a client's samples, and 32 at the server",
        ge=1,
    )
    diversity_weight: float = setting(
        1.0, "eta", "weight of the diversity of features", ge=0, unless={"generator_steps": (0,)}
    )
    noise: Literal["gaussian", "uniform"] = setting("gaussian", "", "eps: standard normal, or uniform in [0, 1)")
    noise_dim: int = setting(32, "m", "length of eps", ge=1)
    generator_hidden: int = setting(256, "", "width of G's hidden layer", ge=1)
    generator_steps: int = setting(50, "", "steps of G in a round", ge=0)
    generator_lr: float = setting(3e-4, "", "learning rate of G in round 0", ge=0, unless={"generator_steps": (0,)})
    generator_lr_decay: float = setting(
        0.98, "", "factor on it per round", gt=0, le=1, unless={"generator_steps": (0,), "generator_lr": (0,)}
    )
    generator_weight_decay: float = setting(
        1e-2, "", "weight decay of G (added to the gradient)", ge=0, unless={"generator_steps": (0,)}
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_head("FedGen", task.network, bias=True)

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        like = server["model"][task.network.head_weight]
        drawn = context.streams.generator("init.generator")
        classes, features = like.shape
        hidden = self.generator_hidden
        network = {
            "first": linear(self.noise_dim + classes, hidden, like, drawn),
            "norm": {"gain": like.new_ones(hidden), "offset": like.new_zeros(hidden)},
            "second": linear(hidden, features, like, drawn),
        }
        statistics = {"mean": like.new_zeros(hidden), "variance": like.new_ones(hidden)}
        return {**server, "generator": {"network": network, "statistics": statistics}, "memory": {}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, generator = server["model"], server["generator"]
        sent = {"model": model, "generator": generator}
        zeros = model[clients.task.network.head_weight].new_zeros(clients.task.network.head_shape[0])
        rest = self.remainder({"model": model, "counts": zeros}, cohort, clients)
        changed: Tree = {"model": clients.mean(self.guided_update, cohort, sent, also=rest)["model"]}
        if self.generator_steps:
            # The server has the models and counts that were sent: it only has not kept them apart.
            known = clients.map(self.report, cohort, {}, counted=False)
            stacked = {key: torch.stack([known[k][key] for k in cohort]) for key in known[cohort[0]]}
            changed |= clients.on_server(
                self.fit, {"generator": generator, "known": stacked, "memory": server.get("memory", {})}
            )
        return changed

    def weights_in(self, round: int) -> tuple[float, float]:
        """a_t and b_t; 0 for a term that is off, and in round 0, when G has learned nothing."""
        a, b = (
            max(weight * self.weight_decay_by_round**round, _LEAST) if weight and round else 0.0
            for weight in (self.label_weight, self.feature_weight)
        )
        return a, b

    async def guided_update(self, client: Client, model: Tree, generator: Tree) -> Weighted:
        """Trains the received model, with generated features after the first round."""
        a, b = self.weights_in(client.round)
        head, classes = client.task.network.head_names, client.task.network.head_shape[0]
        if a or b:
            train = client.context.train
            size = train.batch_size or client.num_samples
            count = self.generated_batch or size
            epoch = num_steps(client.num_samples, train.batch_size, 1, train.drop_last)

            def draw(generator: np.random.Generator, steps: int) -> Tree:
                return {
                    "labels": generator.integers(classes, size=(steps, count)),
                    "noise": self.drawn(generator, (steps, count, self.noise_dim)),
                    "other_noise": self.drawn(generator, (steps, size, self.noise_dim)),
                    "active": (np.arange(steps) < self.regularized_epochs * epoch).astype(np.float64),
                }

            frozen = {"generator": generator, "weights": {"label": a * count / size, "feature": b}}
            trained = await client.train(model, self.regularized, frozen=frozen, draw=draw)
        else:
            trained = await client.train(model, self.objective)
        counts = class_counts(client.examples().y, classes).to(trained[head[0]])
        if self.generator_steps:
            client.state["sent"] = {"head": part(trained, head), "counts": counts}
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, {"model": trained, "counts": counts})

    async def report(self, client: Client) -> Tree:
        """The last layer and the counts by class that the client has sent; drops them."""
        sent = client.state.pop("sent")
        layer = {name.rpartition(".")[2]: leaf for name, leaf in sent["head"].items()}
        return {**layer, "counts": sent["counts"]}

    def regularized(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """A client's loss."""
        network, weights = task.network, frozen["weights"]
        generator, known = frozen["generator"]["network"], frozen["generator"]["statistics"]
        statistics = known["mean"], known["variance"]
        logits = task.logits(model, batch)
        layer = {name.rpartition(".")[2]: model[name] for name in network.head_names}
        made = generated(generator, draw["noise"], draw["labels"], statistics)
        classified = F.cross_entropy(F.linear(made, layer["weight"], layer.get("bias")), draw["labels"].long())
        seen = generated(generator, draw["other_noise"][: len(batch.y)], batch.y, statistics)
        bias = layer["bias"].detach() if "bias" in layer else None
        taught = distillation(logits, F.linear(seen, layer["weight"].detach(), bias), batch, temperature=1.0)
        extra = weights["label"] * classified + weights["feature"] * taught
        loss: Tensor = task.loss_of(logits, batch) + draw["active"] * extra
        return loss

    async def fit(self, server: Server, generator: Tree, known: Tree, memory: Tree | None = None) -> Tree:
        """G and its moments after the server's steps.

        Args:
            server: the server.
            generator: G.
            known: of the cohort's clients, stacked: ``weight`` (S, C, d) and ``bias`` (S, C) of the last layers, and
                ``counts`` (S, C).
            memory: moments; none before the first round.
        """
        counts, train = known["counts"], server.context.train
        labels = (counts > 1).any(0).nonzero()[:, 0].tolist()
        if not labels:
            return {"generator": generator, "memory": memory or {}}
        size = self.generated_batch or train.batch_size or 32

        def draw(generator: np.random.Generator, steps: int) -> Tree:
            noise = self.drawn(generator, (steps, size, self.noise_dim))
            return {"labels": generator.choice(labels, (steps, size)), "noise": noise}

        server.state["optimizer"] = memory or {}
        trained = await server.train(
            generator,
            self.generator_loss,
            frozen={"heads": {key: known[key] for key in ("weight", "bias") if key in known}, "shares": shares(counts)},
            draw=draw,
            steps=self.generator_steps,
            settings=TrainConfig(
                optimizer="adam",
                lr=self.generator_lr * self.generator_lr_decay**server.round,
                weight_decay=self.generator_weight_decay,
            ),
            groups={"statistics": ACCUMULATOR},
            keep_optimizer={"network"},
        )
        return {"generator": trained, "memory": server.state["optimizer"]}

    def generator_loss(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The server's loss, and running means of the hidden layer's statistics."""
        network, statistics = model["network"], model["statistics"]
        hidden = _hidden(network, draw["noise"], draw["labels"])
        found = hidden.mean(0), hidden.var(0, unbiased=False)
        made = generated(network, draw["noise"], draw["labels"], found)
        teachers = heads_loss(made, draw["labels"].long(), frozen["heads"], frozen["shares"])
        unbiased = found[1] * (len(hidden) / max(len(hidden) - 1, 1))
        value = teachers + self.diversity_weight * diversity(draw["noise"], made)
        mean, variance = statistics["mean"], statistics["variance"]
        return value + averaging(mean, found[0], _SHARE) + averaging(variance, unbiased, _SHARE)

    def drawn(self, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """eps."""
        return generator.standard_normal(shape) if self.noise == "gaussian" else generator.random(shape)

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        return super().update(trained["model"], received, task)


def shares(counts: Tensor) -> Tensor:
    """alpha_ky, of shape (S, C), from samples by client and class: their share in all samples of the class, or 0."""
    return counts / counts.sum(0).clamp(min=1)


def heads_loss(features: Tensor, labels: Tensor, heads: Mapping[str, Tensor], alpha: Tensor) -> Tensor:
    """sum_k of the mean of alpha_ky CE(h_k(z), y); a scalar.

    Args:
        features: z, of shape (b, d).
        labels: y, of shape (b,).
        heads: ``weight`` (S, C, d), and ``bias`` (S, C) if heads have one.
        alpha: of shape (S, C).
    """
    logits = torch.einsum("scd,bd->sbc", heads["weight"], features)
    if "bias" in heads:
        logits = logits + heads["bias"][:, None]
    each = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(alpha)), reduction="none").view(len(alpha), -1)
    return (alpha[:, labels] * each).mean(1).sum()
