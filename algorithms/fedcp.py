"""FedCP: a policy splits every feature vector between a global and a personal head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Clients, check_head, setting
from algorithms.parts.heads import head_logits
from algorithms.parts.layers import draw_linear, linear, normalized, unit_norm
from algorithms.parts.partial import PartialModel, part
from algorithms.parts.transfer import fixed_kernel_discrepancy
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree, interpolate
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)
"""Of the kernels of the discrepancy."""
SHARED = ("shared", "head", "policy")
"""What travels."""
_TINY = 1e-12


class FedCP(PartialModel):
    """FedCP: a conditional policy splits the features of every sample between a global and a personal head.

    With f(x) in R^d the input of the last linear layer, W_k a client's own head, W_g the received one, and v_k the sum
    of the rows of W_k's weight, scaled to length 1, the policy network (a linear layer d -> 2d, layer normalization,
    ReLU) reads f v_k and gives a pair of numbers for every feature. Their softmax is (r, s), r + s = 1, and a client
    trains body, W_k and policy together on

        CE(W_k (f r) + W_g (f s)) + lambda MMD(f, f_g)

    where W_g, v_k and the features f_g of the received body are constant. MMD is the squared distance of kernel means
    under the sum of exp(-D / 2a), a = 10, 15, 20, 50. In training Gumbel noise is added to the pair. The client keeps
    W_k and sends (W_k + W_g)/2 in its place.

    Server: body G, head W_g, policy. Client: W_k, at first the initial head; never sent by itself. Down: all three. Up:
    G_k, (W_k + W_g)/2, the policy and n_k. Evaluated: the latest G, W_g and policy with the client's W_k
    (``personalized``), without noise; a client never sampled has the initial head. G with W_g alone, which nobody
    trains together, is ``global``.

    References:
        Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedCP: Separating Feature Information for Personalized Federated Learning
        via Conditional Policy, KDD 2023, its conditional policy network and the loss with MMD.
    """

    name: Literal["fedcp"] = "fedcp"
    citation: ClassVar[str] = "Zhang et al., KDD 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "a policy splits the features of a sample"}
    client_keeps: ClassVar[str] = "W_k"
    server_keeps: ClassVar[str] = "G, W_g, policy"
    newcomer: ClassVar[str] = "body and policy, and a head after a local update"

    head_group: Literal["last_layer"] = setting("last_layer", "", "the head: the last linear layer")
    alignment_weight: float = setting(5.0, "lambda", "weight of the discrepancy of features", ge=0)
    policy_temperature: float = setting(1.0, "tau", "temperature of the softmax", gt=0)
    policy_noise: Literal["train", "none", "always"] = setting(
        "train", "", "Gumbel noise before the softmax: in training, never, or in evaluation too (official code)"
    )
    policy_lr: float | None = setting(
        None, "", "learning rate of the policy; null: that of the round, 0: it stays as it is", ge=0
    )

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("FedCP", task.network)
        super().check(task, context)

    def init(self, task: Task, context: RoundContext) -> Tree:
        network, model = task.network, task.network.initialize(context.streams.integer("init.global"))
        weight, generator = model[network.head_weight], context.streams.generator("init.policy")
        width = weight.shape[1]
        policy = {**draw_linear(width, 2 * width, weight, generator), **unit_norm(2 * width, weight)}
        return {
            "shared": part(model, self.shared(network)),
            "head": part(model, network.head_names),
            "policy": policy,
        }

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        tree = {name: server[name] for name in SHARED}
        rest = self.remainder(tree, cohort, clients)
        return clients.mean(self.split_update, cohort, broadcast=tree, also=rest)

    async def split_update(self, client: Client, shared: Tree, head: Tree, policy: Tree) -> Weighted:
        """Trains body, own head and policy; keeps the head and sends its mean with the received one."""
        network, start = client.task.network, self.assembled(client, shared)
        size, width = client.context.train.batch_size or client.num_samples, network.head_shape[1]
        trained = await client.train(
            {"model": start, "policy": policy},
            self.objective,
            frozen={"received": {**start, **head}, "context": context_of(start[network.head_weight])},
            draw=None
            if self.policy_noise == "none"
            else lambda g, steps: {"noise": gumbel(g, (steps, size, 2, width))},
            groups={"policy": ParameterGroup(lr=self.policy_lr)},
        )
        model = trained["model"]
        own = client.state["personal"] = part(model, self.personal(network))
        client.publish(local=self._split(client, model, head, trained["policy"]))
        sent = {"shared": part(model, self.shared(network)), "head": interpolate(own, head, 0.5)}
        return self.weighted(client, {**sent, "policy": trained["policy"]})

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.split_update(client, *(server[name] for name in SHARED))
        return {}

    @property
    def objective(self) -> Sum:
        """The cross-entropy of both heads together, and the discrepancy of features."""
        return function(self._split_loss)

    def _split_loss(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, _ = task.head_inputs_and_logits(trained["model"], batch)
        noise = None if draw is None else draw["noise"][: len(batch.y)]
        shares = policy_shares(trained["policy"], features * frozen["context"], self.policy_temperature, noise)
        logits = both_heads(task, trained["model"], frozen["received"], features, shares)
        value = task.loss_of(logits, batch)
        if self.alignment_weight == 0:
            return value
        received, _ = task.head_inputs_and_logits(frozen["received"], batch, training=False)
        return value + self.alignment_weight * fixed_kernel_discrepancy(features, received, batch, BANDWIDTHS)

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {"global": Predictor.of({**server["shared"], **server["head"]})}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = self.assembled(client, server["shared"])
        return {
            "personalized": self._split(client, model, server["head"], server["policy"]),
            **self.global_predictors(server, client.task),
        }

    def _split(self, client: Client, model: Model, head: Model, policy: Model) -> Predictor:
        """The prediction of both heads together."""
        streams, place = client.context.streams, (client.round, client.id)

        def predictions(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
            own, other, tensors = models
            features, _ = task.network.head_inputs_and_logits(own, x, training=False)
            noise = None
            if self.policy_noise == "always":
                drawn = gumbel(streams.generator("policy", *place), (len(x), 2, features.shape[1]))
                noise = torch.from_numpy(drawn).to(features)
            read = features * context_of(own[task.network.head_weight])
            shares = policy_shares(tensors, read, self.policy_temperature, noise)
            found: Tensor = task.predicted(both_heads(task, own, other, features, shares))
            return found

        return Predictor.of(model, head, policy, combine=predictions)


def context_of(weight: Tensor) -> Tensor:
    """v_k: the sum over classes of the rows of a head's weight (C, d), scaled to length 1; shape (d,)."""
    total = weight.detach().sum(0)
    length: Tensor = total.norm().clamp_min(_TINY)
    return total / length


def policy_shares(policy: Mapping[str, Tensor], read: Tensor, temperature: float, noise: Tensor | None) -> Tensor:
    """r and s, shape (b, 2, d).

    Args:
        policy: tensors of the policy network.
        read: f v_k, shape (b, d).
        temperature: tau.
        noise: Gumbel noise of shape (b, 2, d), or None.
    """
    pairs = normalized(policy, linear(policy, read)).relu().reshape(*read.shape[:-1], 2, -1)
    found: Tensor = ((pairs if noise is None else pairs + noise) / temperature).softmax(-2)
    return found


def both_heads(task: Any, own: Model, received: Model, features: Tensor, shares: Tensor) -> Tensor:
    """Logits W_k (f r) + W_g (f s) of shape (b, C), with both biases.

    Args:
        task: knows the network.
        own: has the tensors of W_k.
        received: has the tensors of W_g.
        features: f, shape (b, d).
        shares: r and s, shape (b, 2, d).
    """
    personal, common = (features * shares[..., index, :] for index in (0, 1))
    return head_logits(task.network, own, personal) + head_logits(task.network, received, common)


def gumbel(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard Gumbel numbers, float32."""
    waiting = generator.standard_exponential(shape, dtype=np.float32)
    found: np.ndarray = -np.log(np.maximum(waiting, np.finfo(np.float32).tiny))
    return found
