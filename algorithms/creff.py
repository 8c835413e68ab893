"""CReFF: federated averaging, and a last layer that the server retrains on features learned from clients' gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, check_head, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.heads import head_logits
from algorithms.parts.partial import part
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.models.base import Network
from rayfl.params import Tree, map_leaves
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_SMALL = 1e-6
"""Added to the product of two norms that a cosine is divided by."""


class CReFF(FineTuned):
    """CReFF (classifier re-training with federated features): balanced features stand in for the clients' own.

    Rounds are those of federated averaging. With z in R^d the input of the last linear layer in evaluation mode, and W
    (weight and bias) the retrained one, client k sends for each class c of which it has samples, at the body of the w
    that it received, before it trains,

        g_kc = mean over its samples of class c of the gradient of CE(W z, c) in W

    The server takes g_c, the mean of g_kc over the clients that sent one, all alike. It keeps m features v_c of each
    class, drawn from N(0, 1) at first, and moves them by ``match_steps`` steps of plain SGD on

        sum_c D( gradient in W of the mean of CE(W v_c, c),  g_c )

    over the classes that somebody has, where D(a, b) is the sum over the outputs of 1 - cos(a_j, b_j), and one more
    term for the biases. W is then drawn again, and trained on the cross-entropy of all v for ``retrain_epochs``.
    Training goes on from the mean w, never from W.

    Server: w, W and the features v. Client: nothing. Down: w and W. Up: w_k and n_k, g_kc, and which classes there are.
    Evaluated: w (``global``), and w with W as its last layer (``retrained``), which with ``finetune_epochs`` each
    client fine-tunes.

    Features of a class that no client of any cohort has had are noise, and W is trained on them too.

    References:
        Shang, Lu, Huang, Wang: Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with
        Federated Features, IJCAI 2022 (arXiv 2204.13399); D as in the authors' code.
    """

    name: Literal["creff"] = "creff"
    personalized: ClassVar[str] = "retrained"
    citation: ClassVar[str] = "Shang et al., IJCAI 2022"
    no_privacy: ClassVar[str] = "its clients send gradients by class, too, which are no model"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "gradients are taken for each class"}
    server_keeps: ClassVar[str] = "w, W, v"
    newcomer: ClassVar[str] = "w with W; fine-tuned after the last round, if finetune_epochs is set"

    features_per_class: int = setting(100, "m", "features of each class", ge=1, kept=True)
    match_steps: int = setting(100, "I", "steps of the features towards the clients' gradients in a round", ge=0)
    feature_lr: float = setting(0.1, "", "learning rate of the features", ge=0, unless={"match_steps": (0,)})
    retrain_epochs: int = setting(300, "J", "passes over the features on which W is trained in a round", ge=0)
    retrain_lr: float = setting(0.01, "", "learning rate of W", ge=0, unless={"retrain_epochs": (0,)})
    retrain_batch_size: int | None = setting(
        32, "", "features in a mini-batch of W's training; null: all", ge=1, unless={"retrain_epochs": (0,)}
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        network = task.network
        check_head("CReFF", network, bias=True)
        if not network.body_names and not network.fixed_parameters:
            raise ConfigError(
                "CReFF learns inputs of the last layer, but this model has no layer before it, so that these would be "
                "samples: choose a deeper model, or algorithm=fedavg"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        classes, width = task.network.head_shape
        drawn = context.streams.generator("init.features").standard_normal((classes, self.features_per_class, width))
        weight = model[task.network.head_weight]
        return {
            "model": model,
            "retrained": part(model, task.network.head_names),
            "features": torch.from_numpy(drawn).to(weight),
        }

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"], "retrained": server["retrained"]}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, head, network = server["model"], server["retrained"], clients.task.network
        nothing = {
            "gradients": class_gradients(network, head, server["features"][:0, 0], torch.zeros(0, dtype=torch.int64)),
            "exist": head[network.head_weight].new_zeros(network.head_shape[0]),
        }
        rest = self.remainder({"model": model, **nothing}, cohort, clients)
        mean = clients.mean(self.local_update, cohort, broadcast=self.sent(server), also=rest)
        present = mean["exist"] > 0
        share = torch.where(present, mean["exist"], 1)
        wanted = map_leaves(lambda sums: sums / share.view(-1, *[1] * (sums.dim() - 1)), mean["gradients"])
        given = {"features": server["features"], "head": head, "wanted": wanted, "present": present.to(share)}
        return {"model": mean["model"], **clients.on_server(self.retrain, given)}

    async def local_update(self, client: Client, model: Tree, retrained: Tree) -> Weighted:  # type: ignore[override]
        """Takes gradients by class at the received model, and trains it."""
        network = client.task.network
        features = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(model, x)[0])
        labels = client.examples().y
        gradients = class_gradients(network, retrained, features.to(retrained[network.head_weight]), labels)
        exist = torch.bincount(labels, minlength=network.head_shape[0]).clamp(max=1)
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        # whatever the weight of the model, every client weighs the same in the gradients
        share = 1 if self.aggregation == "uniform" else 1 / client.num_samples
        sent = {"gradients": gradients, "exist": exist.to(retrained[network.head_weight])}
        return self.weighted(client, {"model": trained, **map_leaves(lambda leaf: share * leaf, sent)})

    async def retrain(self, server: Server, features: Tensor, head: Tree, wanted: Tree, present: Tensor) -> Tree:
        """The features and the last layer of the next round.

        Args:
            server: the server.
            features: v, shape (C, m, d).
            head: W, by the names in the model, of which clients took gradients.
            wanted: g_c, as of :func:`class_gradients`.
            present: 1 for classes that somebody has, else 0, shape (C,).
        """
        network, context = server.task.network, server.context
        if self.match_steps:
            found = await server.train(
                {"features": features},
                self.mismatch,
                frozen={"head": head, "wanted": wanted, "present": present},
                steps=self.match_steps,
                settings=TrainConfig(lr=self.feature_lr),
                stream=".features",
            )
            features = found["features"]
        fresh = part(network.initialize(context.streams.integer("init.retrained", context.round)), network.head_names)
        labels = torch.arange(len(features), device=features.device).repeat_interleave(features.shape[1])
        trained = await server.train(
            map_leaves(lambda leaf: leaf.to(features), fresh),
            self.head_loss,
            examples=Examples(features.flatten(0, 1), labels),
            epochs=self.retrain_epochs,
            settings=TrainConfig(batch_size=self.retrain_batch_size, lr=self.retrain_lr),
            stream=".retraining",
        )
        return {"features": features, "retrained": trained}

    def mismatch(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """How far the features' gradients are from the clients', over the classes that these have."""
        found = feature_gradients(task.network, frozen["head"], trained["features"])
        present: Tensor = frozen["present"]
        return (gradient_distances(found, frozen["wanted"]) * present).sum()

    def head_loss(self, head: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The loss of the last layer on a mini-batch of its inputs."""
        return task.loss_of(head_logits(task.network, head, batch.x), batch)

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        return super().update(trained["model"], received, task)

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        model = server["model"]
        return {"global": Predictor.of(model), "retrained": Predictor.of({**model, **server["retrained"]})}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        final = {**server["model"], **server["retrained"]}
        return await super().predictors(client, {"model": final}) | self.global_predictors(server, client.task)


def class_gradients(network: Network, head: Tree, features: Tensor, labels: Tensor) -> Tree:
    """The mean gradient of the cross-entropy in a last layer, over the samples of each class; zero without any.

    Args:
        network: names the layer's tensors.
        head: W, by these names.
        features: z, shape (n, d).
        labels: int64 of shape (n,).

    Returns:
        By name, of shape (C, C, d) for the weight and (C, C) for the bias: row (c, j) is that of class c in output j.
    """
    classes = network.head_shape[0]
    errors = _errors(network, head, features, labels)
    bias = errors.new_zeros(classes, classes)
    weight = errors.new_zeros(classes, classes, features.shape[1])
    for label in sorted(set(labels.tolist())):
        own = labels == label
        bias[label] = errors[own].mean(0)
        weight[label] = errors[own].T @ features[own] / own.sum()
    return {name: weight if name == network.head_weight else bias for name in network.head_names}


def feature_gradients(network: Network, head: Tree, features: Tensor) -> Tree:
    """Those of :func:`class_gradients` for as many features of each class, v of shape (C, m, d); can be derived."""
    labels = torch.arange(len(features), device=features.device)[:, None].expand(features.shape[:2])
    errors = _errors(network, head, features, labels)
    weight = errors.mT @ features / features.shape[1]
    return {name: weight if name == network.head_weight else errors.mean(1) for name in network.head_names}


def _errors(network: Network, head: Tree, features: Tensor, labels: Tensor) -> Tensor:
    """Probabilities less the one of the label: the gradients of cross-entropies in logits, shape (..., C)."""
    said = head_logits(network, head, features).softmax(-1)
    return said - (labels[..., None] == torch.arange(said.shape[-1], device=said.device)).to(said)


def gradient_distances(one: Tree, other: Tree) -> Tensor:
    """D by class, shape (C,): the sum over outputs, and over the biases as one, of 1 - cos.

    Args:
        one: gradients as of :func:`class_gradients`.
        other: such, too.
    """
    parts = []
    for name, found in one.items():
        a, b = (leaf if leaf.dim() == 3 else leaf[:, None] for leaf in (found, other[name]))
        cosines = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1) + _SMALL)
        parts.append((1 - cosines).sum(-1))
    return torch.stack(parts).sum(0)
