"""SemiFL: the server has the labels, and clients learn from what its model is sure of of their images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.mixture import parameters
from algorithms.parts.weak_strong import WeakAndStrong, pseudo_labels
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.params import Tree, add_scaled, subtract, zeros_like
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_SURE, _UNSURE = "sure", "unsure"


class SemiFL(WeakAndStrong, Averaging):
    """SemiFL: clients without labels train on the received model's, and the server on its own labels in between.

    At the start of a round a client labels all of its images u with what the received model w says of them, q =
    softmax(f(w, u)) in evaluation mode: y = argmax q. Those with max q >= tau are D_fix. As many are drawn from all
    images, with replacement: D_mix. With B images of either, strong changes A(.), weak ones a(.) and l ~ Beta(a, a) for
    each step, it goes down

        1/B sum CE(f(A(u)), y) + lambda 1/B sum [l CE(f(m), y) + (1 - l) CE(f(m), y')],    m = l a(u) + (1 - l) a(u')

    over pairs of (u, y) of D_fix and (u', y') of D_mix. A client that is sure of no image takes no part. Towards the
    mean x of the others' models the server moves with momentum, and then it trains on its labelled samples:

        v <- beta v + (x - w)
        w <- E_s epochs from w + v on CE(f(a(x)), y)

    Clients use no labels, also where they have some (``labelled.at=clients``).

    Server: w, v, and labelled samples (``holdout.public``). Client: nothing. Down: w. Up: w_k, if it is sure of an
    image. Evaluated: w (``global``), after the server's training.

    References:
        Diao, Ding, Tarokh: SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with Alternate Training,
        NeurIPS 2022 (arXiv 2106.01432), Algorithm 1; formulas of the authors' code.
    """

    name: Literal["semifl"] = "semifl"
    citation: ClassVar[str] = "Diao et al., NeurIPS 2022"
    no_privacy: ClassVar[str] = "its server learns which clients are sure of none of their samples"
    needs: ClassVar[Mapping[Trait, str]] = {
        "classes": "what it is sure of is a class",
        "distribution": "how sure it is is a probability",
    }
    server_keeps: ClassVar[str] = "w, v"
    learns_without_labels: ClassVar[bool] = True
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("statistics", "all"), "the server trains the model on its own samples, and needs all of its layers for that"
    )

    aggregation: Literal["samples", "uniform"] = setting(
        "uniform", "q_k", "weights of the mean: samples n_k / sum over the cohort, or uniform 1/|S|"
    )
    mix_weight: float = setting(1.0, "lambda", "weight of the loss on mixed images; 0: D_fix alone", ge=0)
    mix_concentration: float = setting(0.75, "a", "of the Beta distribution of l", gt=0, unless={"mix_weight": (0,)})
    server_epochs: int | None = setting(
        None, "E_s", "epochs of the server in a round; null: train.local_epochs; 0: none", ge=0
    )
    server_batch_size: int | None = setting(
        None, "", "samples of a mini-batch of the server; null: train.batch_size", ge=1, unless={"server_epochs": (0,)}
    )
    server_momentum: float = setting(0.5, "beta", "momentum of the server", ge=0, lt=1)

    def check_data(self, task: Task, sizes: Any, public: int) -> None:
        super().check_data(task, sizes, public)
        if not public:
            raise ConfigError(
                "holdout.public is 0, but in semifl the server trains on labelled samples of its own: set "
                "holdout.public=100, and labelled.at=server"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        return {**server, "momentum": zeros_like(parameters(server["model"], task))}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model: Tree = server["model"]
        momentum: Tree = server["momentum"]
        mean = clients.means(self.local_update, cohort, {"model": model}).get(_SURE, model)
        change = subtract({name: mean[name] for name in momentum}, {name: model[name] for name in momentum})
        momentum = add_scaled(change, momentum, self.server_momentum)
        moved = add_scaled({name: model[name] for name in momentum}, momentum, 1.0)
        found = {**mean, **moved}
        if self.server_epochs != 0:
            found = clients.on_server(self.tune, {"model": found})["model"]
        return {"model": found, "momentum": momentum}

    async def tune(self, server: Server, model: Tree) -> Tree:
        """Trains the model on the server's labelled samples, weakly changed."""
        train = server.context.train
        if self.server_batch_size is not None:
            train = train.model_copy(update={"batch_size": self.server_batch_size})
        options: Any = {"settings": train, "views": server.context.augmentation, "epochs": self.server_epochs}
        return {"model": await server.train(model, self.objective, examples=server.labelled_public(), **options)}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        x = torch.cat([client.examples().x, client.unlabelled().x])
        logits = await client.outputs(lambda part, task: task.network.logits(model, part, training=False), x)
        labels, sure = pseudo_labels(logits, self.threshold)
        fixed = sure.nonzero()[:, 0]
        if not len(fixed):
            return Weighted({"none": torch.zeros((), device=x.device)}, 1, group=_UNSURE)
        generator = client.context.streams.generator("mix.samples", client.round, client.id)
        mixed = torch.from_numpy(generator.integers(len(x), size=len(fixed))).to(x.device)
        chosen = torch.cat([fixed, mixed])
        trained = await client.train(
            model,
            self.taught,
            examples=Examples(x[chosen], labels[chosen]),
            plan=client.paired_batches(len(fixed), len(fixed)),
            views=client.context.views,
            draw=self.shares if self.mix_weight else None,
        )
        client.publish(local=Predictor.of(trained))
        weight = 1 if self.aggregation == "uniform" else len(x)
        return replace(Weighted(trained, weight), group=_SURE)

    def shares(self, generator: np.random.Generator, steps: int) -> Tree:
        """l by step."""
        return {"share": generator.beta(self.mix_concentration, self.mix_concentration, steps)}

    def taught(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The losses on images that the model was sure of, and on mixed ones."""
        fixed, others = batch.parts(2)
        strong = replace(fixed, x=fixed.x[:, 1])
        found: Tensor = task.loss_of(task.logits(model, strong), strong)
        if not self.mix_weight:
            return found
        share = draw["share"].to(found.dtype)
        mixed = replace(fixed, x=share * fixed.x[:, 0] + (1 - share) * others.x[:, 0])
        logits = task.logits(model, mixed)
        of_both = share * task.loss_of(logits, fixed) + (1 - share) * task.loss_of(logits, others)
        found = found + self.mix_weight * of_both
        return found

    def samples_in_steps(self, train: TrainConfig, labelled: int, unlabelled: int) -> int:
        return 2 * train.samples_in_steps(labelled + unlabelled)

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}
