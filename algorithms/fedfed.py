"""FedFed: clients share, with noise, what of their samples classifies them, and train on that of all clients too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.autoencoders import decoded, draw_autoencoder, encoded, told
from algorithms.parts.places import from_digits, in_digits, passes
from algorithms.parts.proximity import proximity
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.gradients.counted_normals import drawn_keys, normals
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait
from rayfl.tasks.texts import next_power

_FIRST_STAGE = "distillation_rounds"
_OF_MINI_BATCHES = ("batch_size", "drop_last", "shuffle", "min_local_steps", "max_local_steps", "max_grad_norm")


class FedFed(FineTuned):
    """FedFed (federated feature distillation): clients share noisy features that tell the label, and little else.

    In the first T_d rounds clients train the model w and a variational autoencoder q together. q(x) is to keep what
    the label can do without, so that x_s = x - q(x) is what a sample's label needs. With Adam they go down

        a CE(w(x_s + n), y) + b CE(w(x), y) + c max(0, ||x_s||^2 / d - rho) + e KL(q(z|x) || N(0, I)) / m

    where n ~ N(0, sigma_s^2 I), x in R^d, and z in R^m is the code of x. The server averages both. Then every client,
    sampled or not, sends x_p = x_s + n of all its training samples, once, with their labels; z is here its mean. They
    are D^s. In later rounds the server sends client k of the cohort n_k samples of D^s, drawn without replacement, and
    on mini-batches of the same size of its own samples and of these it goes down

        CE(w(x), y) + lambda CE(w(x_p), y_p) + mu/2 ||w - w^t||^2

    with w^t as received. mu = 0 is FedFed on federated averaging, mu > 0 that on FedProx.

    Server: w, q, and then D^s. Client: nothing. Down: w and q, later w and n_k samples of D^s. Up: w_k, n_k and its own
    q, later w_k and n_k alone, and in between, once and from all clients, x_p and labels. Evaluated: w (``global``).

    References:
        Yang, Zhang, Zheng, Tian, Peng, Liu, Han: FedFed: Feature Distillation against Data Heterogeneity in Federated
        Learning, NeurIPS 2023 (arXiv 2310.05077), Algorithms 1 and 2.
    """

    name: Literal["fedfed"] = "fedfed"
    citation: ClassVar[str] = "Yang et al., NeurIPS 2023"
    no_privacy: ClassVar[str] = "its clients send features of their samples with labels, too, which are no model"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "features are shared with their classes"}
    server_keeps: ClassVar[str] = "w, q, D^s"
    kept_on_server: ClassVar[str] = "features of all clients' training samples"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of the means: samples n_k / sum over the cohort, or uniform 1/|S|"
    )
    distillation_rounds: int = setting(
        15, "T_d", "rounds in which q is trained, the first of the run; D^s is shared after them", ge=1,
        kept=_FIRST_STAGE,
    )  # fmt: skip
    distillation_epochs: int = setting(1, "E_d", "local epochs in these rounds", ge=0, kept=_FIRST_STAGE)
    distillation_lr: float = setting(1e-3, "", "learning rate of Adam in these rounds", ge=0, kept=_FIRST_STAGE)
    noise: float = setting(
        0.15,
        "sigma_s",
        "standard deviation of the noise on features, in units of the inputs; 0: they are shared as they are",
        ge=0,
        kept=_FIRST_STAGE,
    )
    sensitive_weight: float = setting(
        2.0, "a", "weight of the cross-entropy of features with noise", ge=0, kept=_FIRST_STAGE
    )
    input_weight: float = setting(
        0.4, "b", "weight of the cross-entropy of samples, in the first T_d rounds", ge=0, kept=_FIRST_STAGE
    )
    bound_weight: float = setting(
        5.0, "c", "weight of what the mean square of a sample's features is above rho", ge=0, kept=_FIRST_STAGE
    )
    bound: float = setting(
        0.0,
        "rho",
        "mean square of a sample's features that costs nothing",
        ge=0,
        kept=_FIRST_STAGE,
        unless={"bound_weight": (0,)},
    )
    code_weight: float = setting(
        0.005, "e", "weight of the divergence of codes from a standard normal, by dimension", ge=0, kept=_FIRST_STAGE
    )
    code_dim: int = setting(64, "m", "length of a code", ge=1, kept=True)
    hidden: int = setting(256, "", "width of the layers of q", ge=1, kept=True)
    shared_weight: float = setting(
        1.0, "lambda", "weight of the cross-entropy of shared features; 0: nothing is shared", ge=0
    )
    proximal_weight: float = setting(0.0, "mu", "weight of a proximal term after the first T_d rounds", ge=0)

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        spec = getattr(task, "spec", None)
        if spec is not None and spec.kind == "tokens":
            raise ConfigError(
                f"algorithm: fedfed cannot learn task={task.name} from rows of tokens: nothing can be taken away from "
                "the number of a token. Choose another method, such as fedgen or fedavg"
            )
        if spec is not None and spec.kind == "graph":
            raise ConfigError(
                f"algorithm: fedfed cannot learn task={task.name} from graphs: an edge is there or not, and with noise "
                "an array is no graph. Choose another method, such as fedgen or fedavg"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if context.rounds > self.distillation_rounds:
            return ()
        return (
            f"nobody trains on shared features: algorithm.distillation_rounds is {self.distillation_rounds}, and the "
            f"run has {context.rounds} rounds",
        )

    def kept_bytes(self, task: Task, context: RoundContext, samples: int) -> int:
        spec = getattr(task, "spec", None)
        if spec is None or not self.shared_weight or context.rounds <= self.distillation_rounds:
            return 0
        features: int = math.prod(spec.shape)
        return samples * (4 * features + 8)

    def init(self, task: Task, context: RoundContext) -> Tree:
        # clients know the shape of inputs: they draw the first q, which is the same for all
        return {**super().init(task, context), "autoencoder": {}}

    def sent(self, server: Tree) -> Tree:
        return {name: part for name, part in server.items() if name != "shared"}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        if clients.context.round < self.distillation_rounds:
            return clients.mean(self.distil, cohort, self.sent(server))
        sent = {"model": server["model"]}
        if not self.shared_weight:
            return clients.mean(self.guided_update, cohort, sent)  # a fork may share, for which q is kept
        shared = server.get("shared") or self.collected(server["autoencoder"], clients)
        lent = {client: self.lent(shared, client, clients) for client in cohort}
        return clients.mean(self.guided_update, cohort, sent, lent) | {"shared": shared, "autoencoder": {}}

    async def distil(self, client: Client, model: Tree, autoencoder: Tree | None = None) -> Weighted:
        """Trains w and q together."""
        train = client.context.train
        size = train.batch_size or client.num_samples
        trained = await client.train(
            {"model": model, "autoencoder": autoencoder or self.first(client, model)},
            self.distilled,
            draw=lambda generator, steps: {"keys": drawn_keys(generator, steps, size)},
            epochs=self.distillation_epochs,
            settings=TrainConfig(
                optimizer="adam", lr=self.distillation_lr, **{name: getattr(train, name) for name in _OF_MINI_BATCHES}
            ),
        )
        client.publish(local=Predictor.of(trained["model"]))
        return self.weighted(client, trained)

    def first(self, client: Client, model: Tree) -> Tree:
        """The q that all clients begin with."""
        inputs = client.examples().x[0].numel()
        drawn = client.context.streams.generator("init.autoencoder")
        return draw_autoencoder(inputs, self.hidden, self.code_dim, next(iter(model.values())), drawn)

    def distilled(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The loss of the first stage."""
        network, x = trained["autoencoder"], batch.x.flatten(1)
        drawn = normals(draw["keys"][: len(x)], self.code_dim + x.shape[1])
        of_code, of_features = drawn[:, : self.code_dim], drawn[:, self.code_dim :]
        mean, log_variance = encoded(network, x)
        features = x - decoded(network, mean + (log_variance / 2).exp() * of_code)
        noisy = (features + self.noise * of_features).view_as(batch.x)
        own, others = self.losses(trained["model"], batch, noisy, batch.y, task)
        above = F.relu(features.square().mean(1) - self.bound)
        value: Tensor = self.sensitive_weight * others + self.input_weight * own
        value = value + self.bound_weight * batch.mean(above)
        return value + self.code_weight * batch.mean(told(mean, log_variance)) / self.code_dim

    def losses(self, model: Any, batch: Batch, x: Tensor, y: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        """The losses of a mini-batch, and of one more of the same size, from one forward pass."""
        # in turn, so that padding comes last: random layers tell rows by their number
        both = Batch(_in_turn(batch.x, x), _in_turn(batch.y, y), batch.mask)
        if batch.mask is not None:
            both = replace(both, mask=_in_turn(batch.mask, batch.mask))
        own, others = task.logits(model, both).view(len(x), 2, -1).unbind(1)
        return task.loss_of(own, batch), task.loss_of(others, Batch(x, y, batch.mask))

    def collected(self, autoencoder: Tree, clients: Clients) -> Tree:
        """D^s: ``x`` and ``y`` of the samples of all clients, in their order."""
        everyone = range(clients.context.num_clients)
        found = clients.map(self.shared_features, everyone, {"autoencoder": autoencoder}, required=True)
        return {name: torch.cat([one[name] for one in found.values()]) for name in ("x", "y")}

    async def shared_features(self, client: Client, autoencoder: Tree | None = None) -> Tree:
        """x_p and labels of the client's training samples."""
        examples = client.examples()
        network = autoencoder or self.first(client, client.initial_model())
        robust = await client.outputs(lambda x, task: decoded(network, encoded(network, x.flatten(1))[0]))
        drawn = client.context.streams.generator("features", client.round, client.id)
        noise = torch.from_numpy(drawn.standard_normal(robust.shape)).to(robust)
        features = examples.x.flatten(1) - robust + self.noise * noise
        return {"x": features.view_as(examples.x), "y": examples.y.clone()}

    def lent(self, shared: Tree, client: int, clients: Clients) -> Tree:
        """The samples of D^s that a client is sent in a round: as many as its own."""
        drawn = clients.context.streams.generator("shared", clients.context.round, client)
        (count,) = clients.num_samples([client])
        places = torch.from_numpy(drawn.choice(len(shared["y"]), count, replace=False))
        return {name: leaf[places] for name, leaf in shared.items()}

    async def guided_update(
        self, client: Client, model: Tree, x: Tensor | None = None, y: Tensor | None = None
    ) -> Weighted:
        """Trains the received model on the client's samples and on those of D^s."""
        frozen: Tree = {"received": model} if self.proximal_weight else {}
        draw = None
        if x is not None and y is not None:
            # clients whose tables have one size can be stacked
            frozen |= {"x": _filled(x), "y": _filled(y)}
            size, count = client.context.train.batch_size or client.num_samples, len(y)

            def draw(generator: np.random.Generator, steps: int) -> Tree:
                return {"places": in_digits(passes(generator, count, steps, size))}

        trained = await client.train(model, self.objective, frozen=frozen, draw=draw)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, {"model": trained})

    @property
    def objective(self) -> Sum:
        """The loss after the first stage."""
        near = self.proximal_weight * proximity("half_squared", TRAINED, "received")
        return (function(self._guided) if self.shared_weight else super().objective) + near

    def _guided(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        places = from_digits(draw["places"][: len(batch.y)])
        own, others = self.losses(model, batch, frozen["x"][places], frozen["y"][places], task)
        return own + self.shared_weight * others

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        return super().update(trained["model"], received, task)


def _in_turn(one: Tensor, other: Tensor) -> Tensor:
    """The rows of two tensors, shape (b, ...) each, in turn; shape (2 b, ...)."""
    return torch.stack([one, other], 1).flatten(0, 1)


def _filled(table: Tensor) -> Tensor:
    """A table with further rows of 0, up to a power of two."""
    more = next_power(len(table)) - len(table)
    return torch.cat([table, table.new_zeros(more, *table.shape[1:])]) if more else table
