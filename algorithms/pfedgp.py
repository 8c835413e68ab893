"""pFedGP: a shared kernel, and a tree of Gaussian processes of each client's own that predicts from its samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.aligned_models import FLOOR
from algorithms.parts.binary_gaussian_processes import JITTER, NORMALS, kernel, log_probability, posterior, sampled
from algorithms.parts.class_tree import class_tree
from algorithms.parts.masks import kept_counts
from algorithms.parts.partial import part
from algorithms.parts.prototypes import class_means
from algorithms.parts.replaced_heads import body, check_replaceable, idle_head, with_idle_head
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.gradients.counted_normals import drawn_keys, normals
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class PFedGP(Averaging):
    """pFedGP: a shared deep kernel, and personal Gaussian processes that classify by the client's own samples.

    With f(x) the input of the last linear layer, whose place the processes take, the kernel is

        K_ij = a exp( -||u_i - u_j||^2 / (2 l^2) ) + 0.001 [i = j],    u = f(x) / ||f(x)||

    A client divides its classes into two sides, each of these again, and so on, by 2-means of its mean features by
    class at the received body G. At each node v of this tree a process g_v ~ N(0, K) on the samples of the node's
    classes says on which side s = +-1 a sample is: p(s | x) = sigmoid(s g_v(x)). Polya-Gamma variables omega, which a
    Gibbs sampler of ``chains`` chains draws, make it Gaussian, and the probability of a class is the product of those
    of its sides along the tree,

        p(y | x) = prod_v p_v(s_v(y) | x),    p_v(s | x) = mean_omega E[ sigmoid(s g_v(x)) | omega, x_1..x_n, s_1..s_n ]

    To train G, each side of a node is cut at random on each mini-batch: of its samples ``predict_share``, T_v, are
    predicted from the others. Client k goes down

        sum_v mean_{i in T_v} -log p_v(s_i | x_i)

    where the draws of omega stand still. A client that has one class trains nothing, and predicts it.

    Server: G. Client: nothing; its tree and processes are made of its training samples when it predicts. Down: G. Up:
    G_k. Evaluated: G with the client's processes (``personalized``), after training also G_k with those at it
    (``local``). Classes of which a client has no sample get probability 1e-12. Clients never sampled need no training.
    There is no global model.

    References:
        Achituve, Shamsian, Navon, Chechik, Fetaya: Personalized Federated Learning with Gaussian Processes,
        NeurIPS 2021.
    """

    name: Literal["pfedgp"] = "pfedgp"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Achituve et al., NeurIPS 2021"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "processes divide classes"}
    server_keeps: ClassVar[str] = "G"
    newcomer: ClassVar[str] = "G, and processes on its own samples"

    aggregation: Literal["uniform", "samples", "population"] = setting(
        "uniform",
        "q_k",
        "weights of the mean: uniform 1/|S| (authors' code); samples n_k / sum over the cohort; population n_k / sum "
        "over all clients, the rest staying on the server's",
    )
    kernel_scale: float = setting(8.0, "a", "variance of a process (authors' code: 8)", gt=0)
    kernel_length: float = setting(1.0, "l", "length scale, of directions of features (authors' code: 1)", gt=0)
    predict_share: float = setting(
        0.5, "", "share of each side's samples in a mini-batch that is predicted from the others", gt=0, lt=1
    )
    chains: int = setting(20, "", "chains that draw omega in training (authors' code: 20)", ge=1)
    gibbs_steps: int = setting(5, "", "steps of a chain, in training and to predict (authors' code: 5)", ge=0)
    evaluation_chains: int = setting(30, "", "chains that draw omega to predict (authors' code: 30)", ge=1)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_replaceable("pFedGP", task.network)
        if not set(body(task.network)) & set(task.network.parameter_names):
            raise ConfigError(
                "pFedGP trains all layers but the last, of which this model trains none: choose a deeper model"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {"shared": part(super().init(task, context)["model"], body(task.network))}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        rest = self.remainder(server["shared"], cohort, clients)
        return {"shared": clients.mean(self.local_update, cohort, broadcast={"shared": server["shared"]}, also=rest)}

    async def local_update(self, client: Client, shared: Tree) -> Weighted:
        """Trains the received body under the tree that it gives."""
        network = client.task.network
        features = await self.features(client, shared)
        sides = self.sides(client, features)
        trained, rows = shared, client.context.train.batch_size or client.num_samples
        if len(sides):
            trained = await client.train(
                part(shared, body(network)),
                self.objective,
                frozen={"model": idle_head(network, next(iter(shared.values()))), "sides": sides},
                draw=partial(self.draws, (len(sides), rows)),
            )
        client.publish(local=await self.predictor(client, trained))
        return self.weighted(client, trained)

    async def features(self, client: Client, shared: Model) -> Tensor:
        """f of the client's training samples in evaluation mode, float64 of shape (n, f)."""
        model = with_idle_head(client.task.network, shared, next(iter(shared.values())))
        return (await client.outputs(lambda x, task: task.network.head_inputs_and_logits(model, x)[0])).double()

    def sides(self, client: Client, features: Tensor) -> Tensor:
        """Of each node and class, see :func:`algorithms.parts.class_tree.class_tree`; shape (V, C)."""
        counts, means = class_means(features, client.examples().y, client.task.network.head_shape[0])
        generator = client.context.streams.generator("kmeans", client=client.id)
        tree = class_tree(means.cpu().numpy(), (counts > 0).cpu().numpy(), generator)
        return torch.from_numpy(tree).to(features)

    def draws(self, shape: tuple[int, int], generator: np.random.Generator, steps: int) -> Tree:
        """The order in which a side's samples are predicted, and a key for each sample and draw of omega."""
        nodes, rows = shape
        keys = drawn_keys(generator, steps, self.gibbs_steps + 1, rows)
        return {"order": generator.random((steps, rows, nodes)), "keys": keys}

    @property
    def objective(self) -> Sum:
        """The mean -log p of what is predicted at each node, summed over nodes."""
        return function(self._predictive)

    def _predictive(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        inputs, _ = task.head_inputs_and_logits({**frozen["model"], **trained}, batch)
        # float64: kernels of alike features are nearly singular
        features, side, rows = inputs.double(), frozen["sides"].double().T[batch.y].T, len(batch.y)
        held = self.held(side if batch.mask is None else side * batch.mask, draw["order"][:rows].T)
        if batch.mask is not None:
            features, side = torch.where(batch.mask[:, None] > 0, features, 0.0), side * batch.mask
        K = self.own_kernel(features)
        kappa = torch.where(held, 0.0, side / 2)
        numbers = [self.numbers(keys[:rows].double(), len(side), self.chains) for keys in draw["keys"].unbind()]
        omega = sampled(K.detach(), kappa, self.chains, numbers)
        mean, variance = posterior(K, K, K.diagonal(), kappa[:, None].expand_as(omega), omega)
        logs = torch.where(held, log_probability(mean, variance, side), 0.0)
        return -(logs.sum(1) / held.sum(1).clamp(min=1)).sum().to(inputs.dtype)

    def held(self, side: Tensor, order: Tensor) -> Tensor:
        """Which samples are predicted at each node: of each side the first, rounded down; shape (V, n).

        Args:
            side: of the samples, 0 where they are not in the node, shape (V, n).
            order: numbers that order them, shape (V, n).
        """
        same = (side[:, :, None] == side[:, None, :]) & (side != 0)[:, None, :]
        rank = (same & (order[:, None, :] < order[:, :, None])).sum(-1)
        return (side != 0) & (rank < kept_counts(self.predict_share, same.sum(-1)))

    def numbers(self, keys: Tensor, nodes: int, chains: int) -> Tensor:
        """Normal numbers of a draw of omega, which depend on the samples' keys alone; shape (V, chains, n, NORMALS)."""
        return normals(keys, nodes * chains * NORMALS).view(len(keys), nodes, chains, NORMALS).movedim(0, 2)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": await self.predictor(client, server["shared"])}

    async def predictor(self, client: Client, shared: Tree) -> Predictor:
        """A body with the client's processes at it."""
        network = client.task.network
        features = await self.features(client, shared)
        sides, labels = self.sides(client, features), client.examples().y
        keys = drawn_keys(
            client.context.streams.generator("posterior", client=client.id), self.gibbs_steps + 1, len(labels)
        )
        processes = partial(self.processes, features, labels, sides, torch.from_numpy(keys).to(features))
        model = with_idle_head(network, shared, next(iter(shared.values())))
        return Predictor.of(model, processes, combine=self.predictions)

    def processes(self, features: Tensor, labels: Tensor, sides: Tensor, keys: Tensor) -> Tree:
        """What a client predicts from: ``sides``, ``present``, and ``nodes``, with features, kappa and omega of each.

        Args:
            features: f of the training samples, shape (n, f).
            labels: their classes, shape (n,).
            sides: of the tree, shape (V, C).
            keys: for the draws of omega, shape (steps, n, 7).
        """
        nodes: Tree = {}
        for number, row in enumerate(sides):
            inside = row[labels] != 0
            own, kappa = features[inside], row[labels][inside][None] / 2
            K = self.own_kernel(own)
            numbers = [self.numbers(one[inside], 1, self.evaluation_chains) for one in keys]
            omega = sampled(K, kappa, self.evaluation_chains, numbers)
            nodes[str(number)] = {"features": own, "kappa": kappa, "omega": omega}
        present = F.one_hot(labels, sides.shape[1]).sum(0) > 0
        return {"sides": sides, "present": present, "nodes": nodes}

    def predictions(self, models: Sequence[Any], x: Tensor, task: Any) -> Tensor:
        """Log-probabilities (b, C) of a body with processes."""
        model, own = models
        features: Tensor = task.network.head_inputs_and_logits(model, x, training=False)[0].double()
        classes = own["present"].shape[0]
        if not own["present"].any():
            return features.new_full((len(features), classes), -math.log(classes))
        found = features.new_zeros((len(features), classes))
        for row, node in zip(own["sides"], own["nodes"].values(), strict=True):
            cross = kernel(node["features"], features, self.kernel_scale, self.kernel_length)
            before = cross.new_full(features.shape[:1], self.kernel_scale + JITTER)
            omega = node["omega"]
            kappa = node["kappa"][:, None].expand_as(omega)
            mean, variance = posterior(self.own_kernel(node["features"]), cross, before, kappa, omega)
            for side in (1.0, -1.0):
                logs = log_probability(mean, variance, features.new_full((1, 1), side))[0]
                found = torch.where(row == side, found + logs[:, None], found)
        return found.masked_fill(~own["present"], FLOOR)

    def own_kernel(self, features: Tensor) -> Tensor:
        """K of samples, shape (n, n)."""
        eye = JITTER * torch.eye(len(features), dtype=features.dtype, device=features.device)
        return kernel(features, features, self.kernel_scale, self.kernel_length) + eye
