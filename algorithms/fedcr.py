"""FedCR: a shared extractor of drawn features, which all clients' features of a class draw to one distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Clients, check_head, setting
from algorithms.parts.drawn_features import distribution, divergence, drawn_predictor
from algorithms.parts.heads import head_logits
from algorithms.parts.layers import draw_linear
from algorithms.parts.partial import PartialModel, part
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.gradients.counted_normals import drawn_keys, normals
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class FedCR(PartialModel):
    """FedCR (common representation): a shared extractor of drawn features, and personal heads.

    With f(x) in R^d the input of the last linear layer, a further linear layer, the encoder, gives a Gaussian of
    representations for every sample, which the client's head W_k reads at L draws:

        (mu, rho) = A f(x) + b,    sigma = log(1 + e^rho),    z_l = mu + sigma eps_l,    eps_l ~ N(0, I)

    A client trains body, encoder and head together on

        1/L sum_l CE(W_k z_l, y) + beta KL( N(r_y, s_y^2) || N(mu, sigma^2) )

    with a mean over the mini-batch. The Gaussian of a class c is a product: that of a standard normal and of the
    Gaussians of all samples of the class that the last cohort has,

        1/s_c^2 = 1 + sum_i 1/sigma_i^2,    r_c = s_c^2 sum_i mu_i/sigma_i^2

    with mu_i and sigma_i those of the model that the sample's client has trained, in evaluation mode. At first it is
    the standard normal; a class that nobody in the cohort has keeps its Gaussian. The divergence, summed over d
    dimensions, aligns all clients' representations of a class.

    Server: body G, encoder, r and s. Client: head W_k, at first that of the common initial model; never sent. Down:
    what the server has. Up: G and the encoder as trained, and both sums of each class. Evaluated: W_k at mu with the
    latest G and encoder (``personalized``), or the mean probability of ``evaluation_samples`` representations; a client
    never sampled has the initial head. There is no global model.

    References:
        Zhang, Li, Dai, Zou, Xiong: FedCR: Personalized Federated Learning Based on Across-Client Common Representation
        with Conditional Mutual Information Regularization, ICML 2023; formulas of the authors' code.
    """

    name: Literal["fedcr"] = "fedcr"
    citation: ClassVar[str] = "Zhang et al., ICML 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "a layer makes a distribution of the features of a sample"}
    no_privacy: ClassVar[str] = "its clients send sums over their samples of a class, too, which are no model"
    client_keeps: ClassVar[str] = "W_k"
    server_keeps: ClassVar[str] = "G, A, b, r, s"
    newcomer: ClassVar[str] = "body and encoder, and a head after a local update"

    head_group: Literal["last_layer"] = setting("last_layer", "", "the head: the last linear layer")
    aggregation: Literal["uniform", "samples", "population"] = setting(
        "uniform",
        "q_k",
        "weights of the mean: uniform 1/|S| (authors' code); samples n_k / sum over the cohort; population n_k / sum "
        "over all clients, the rest staying on the server's",
    )
    information_weight: float = setting(0.001, "beta", "weight of the divergence", ge=0)
    train_samples: int = setting(15, "L", "representations of a sample that a local step draws", ge=1)
    evaluation_samples: int = setting(
        0, "", "representations of a sample that predict by their mean probability; 0: the one at mu", ge=0
    )

    def needed(self) -> Mapping[Trait, str]:
        if self.information_weight == 0:
            return self.needs
        return {**self.needs, "classes": "every class has a distribution of representations"}

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("FedCR", task.network)
        super().check(task, context)

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = task.network.initialize(context.streams.integer("init.global"))
        weight = model[task.network.head_weight]
        width = weight.shape[1]
        tree: Tree = {
            "shared": part(model, self.shared(task.network)),
            "encoder": draw_linear(width, 2 * width, weight, context.streams.generator("init.encoder")),
        }
        if self.information_weight > 0:
            tree["common"] = {"mean": torch.zeros_like(weight), "spread": torch.ones_like(weight)}
        return tree

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        trained = {name: server[name] for name in ("shared", "encoder")}
        if "common" in server:
            trained["sums"] = dict.fromkeys(("means", "precisions"), torch.zeros_like(server["common"]["mean"]))
        rest = self.remainder(trained, cohort, clients)
        mean = clients.mean(self.encoded_update, cohort, broadcast=server, also=rest)
        sums = mean.pop("sums", None)
        if sums is None:
            return mean
        counted = range(clients.context.num_clients) if self.aggregation == "population" else cohort
        total = len(cohort) if self.aggregation == "uniform" else int(clients.num_samples(counted).sum())
        return {**mean, "common": product(sums, total, server["common"])}

    async def encoded_update(self, client: Client, shared: Tree, encoder: Tree, common: Tree | None = None) -> Weighted:
        """Trains body, encoder and head, and keeps the head.

        Args:
            client: who trains.
            shared: G.
            encoder: A and b.
            common: r and s; None without the divergence.
        """
        network = client.task.network
        trained = await client.train(
            {"model": self.assembled(client, shared), "encoder": encoder},
            self.objective,
            frozen=common,
            draw=lambda generator, steps: {"keys": drawn_keys(generator, steps, self._batch_size(client))},
        )
        model, layer = trained["model"], trained["encoder"]
        client.state["personal"] = part(model, self.personal(network))
        client.publish(local=drawn_predictor(model, layer, self.evaluation_samples))
        sent: Tree = {"shared": part(model, self.shared(network)), "encoder": layer}
        weight = 1 if self.aggregation == "uniform" else client.num_samples
        if common is not None:
            places = await client.outputs(
                lambda x, t: torch.cat(distribution(layer, t.network.head_inputs_and_logits(model, x)[0]), 1)
            )
            # the mean over clients times the sum of their weights is the sum over all samples
            sums = class_sums(places.double(), client.examples().y, len(common["mean"]))
            sent["sums"] = {name: (leaf / max(weight, 1)).to(common["mean"]) for name, leaf in sums.items()}
        return Weighted(sent, weight)

    @staticmethod
    def _batch_size(client: Client) -> int:
        return client.context.train.batch_size or max(client.num_samples, 1)

    @property
    def objective(self) -> Sum:
        """The cross-entropy at drawn representations and the divergence, from one forward pass."""
        return function(self._aligned)

    def _aligned(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, _ = task.head_inputs_and_logits(trained["model"], batch)
        mu, sigma = distribution(trained["encoder"], features)
        count, size = self.train_samples, len(batch.y)
        noise = normals(draw["keys"][:size], count * mu.shape[1]).reshape(size, count, -1)
        logits = head_logits(task.network, trained["model"], mu[:, None] + sigma[:, None] * noise)
        value = task.loss_of(logits.flatten(0, 1), repeated(batch, count))
        if self.information_weight == 0:
            return value
        apart = divergence(frozen["mean"][batch.y], frozen["spread"][batch.y], mu, sigma)
        return value + self.information_weight * batch.mean(apart)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.encoded_update(client, **server)
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = self.assembled(client, server["shared"])
        return {"personalized": drawn_predictor(model, server["encoder"], self.evaluation_samples)}


def repeated(batch: Batch, count: int) -> Batch:
    """A mini-batch in which each target is there several times, one after the other; its inputs are as they were."""
    y, mask = (None if leaf is None else leaf[:, None].expand(-1, count).flatten() for leaf in (batch.y, batch.mask))
    assert y is not None
    return Batch(batch.x, y, mask)


def class_sums(places: Tensor, labels: Tensor, classes: int) -> Tree:
    """``means``, the sum of mu/sigma^2, and ``precisions``, that of 1/sigma^2, by class, shape (C, d) each.

    Args:
        places: mu and sigma of the samples, shape (n, 2 d).
        labels: y, shape (n,).
        classes: C.
    """
    mu, sigma = places.chunk(2, dim=1)
    precisions = sigma.square().reciprocal()
    members = F.one_hot(labels, classes).to(places).T
    return {"means": members @ (mu * precisions), "precisions": members @ precisions}


def product(sums: Tree, total: float, known: Tree) -> Tree:
    """The Gaussians of all classes: ``mean`` r and ``spread`` s, shape (C, d) each.

    Args:
        sums: of :func:`class_sums`, over clients, divided by ``total``.
        total: the sum of the clients' weights.
        known: r and s, which classes without samples keep.
    """
    precisions = 1 + total * sums["precisions"]
    found = {"mean": total * sums["means"] / precisions, "spread": precisions.rsqrt()}
    return {name: torch.where(sums["precisions"] > 0, leaf, known[name]) for name, leaf in found.items()}
