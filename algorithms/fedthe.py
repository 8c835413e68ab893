"""FedTHE: a global and a personal head on one body, mixed for every test sample by what it looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import Averaging, Clients, check_head, setting
from algorithms.parts.balanced import log_prior
from algorithms.parts.head_mixtures import MixedHeads
from algorithms.parts.partial import part
from algorithms.parts.prototypes import class_counts
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import TRAINED, Sum, function, loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedTHE(Averaging):
    """FedTHE (test-time head ensemble): every test sample gets its own mixture of the global and a personal head.

    With f(x) the input of the last linear layer, z_g the logits of the model and n_c the client's samples of class c,
    client k goes down

        CE(z_g + gamma log(n + a), y)

    (balanced softmax) as the update of the model w, and then trains its personal head on CE(z_l, y) with the body that
    it has just trained, which stands still. Of that body it takes its mean features h_k over its training samples, and
    the server takes the mean h of those.

    To predict for a sample the client chooses e, the weight of the global head, from e_0 on by steps of Adam that
    minimize

        s H(p) + (1 - s) (e ||phi - h|| + (1 - e) ||phi - h_k||),    p = softmax(e z_g + (1 - e) z_l)

    where H is the entropy and s the cosine of the angle between both heads' probabilities: where they agree, e makes
    the prediction certain, and where they do not, it prefers the head whose clients' features are nearer. Here

        phi = beta f(x) + (1 - beta) m,    m <- alpha f(x) + (1 - alpha) m

    with the moving mean m of the samples up to this one, which begins with the first one. The order of samples is that
    in the split that is scored, and each scoring begins again. With beta = 1 no sample counts for another.

    Server: w and h. Client: personal head, and h_k. Down: w and h. Up: w_k, h_k and n_k. Evaluated: w (``global``), w
    with the client's head in place of its own (``personal``), and the mixture (``personalized``); after training also
    w_k (``local``). A client never sampled has w in all of these.

    References:
        Jiang, Lin: Test-Time Robust Personalization for Federated Learning, ICLR 2023 (arXiv 2205.10920), its FedTHE;
        FedTHE+, which also tunes the network for each test sample, is not here.
    """

    name: Literal["fedthe"] = "fedthe"
    personalized: ClassVar[str] = "personalized"
    no_privacy: ClassVar[str] = "its clients send their mean features with the model"
    citation: ClassVar[str] = "Jiang and Lin, ICLR 2023"
    needs: ClassVar[Mapping[Trait, str]] = {
        "classes": "the loss is balanced by the numbers of samples by class",
        "features": "the features of a sample are compared with means",
    }
    client_keeps: ClassVar[str] = "head_k, h_k"
    server_keeps: ClassVar[str] = "w, h"
    newcomer: ClassVar[str] = "w, and a personal head and mean features after a local update"

    balance_exponent: float = setting(
        1.0, "gamma", "exponent of the class counts in the model's loss; 0: plain cross-entropy", ge=0, le=100
    )
    added_count: float = setting(
        1.0,
        "a",
        "what is added to each class count (1: authors' code); 0: classes that a client lacks are left out",
        ge=0,
        unless={"balance_exponent": (0,)},
    )
    head_epochs: int = setting(1, "", "epochs of the personal head; 0: it stays the initial head", ge=0)
    head_lr: float | None = setting(
        None, "", "learning rate of the personal head; null: that of the round", ge=0, unless={"head_epochs": (0,)}
    )
    first_weight: float = setting(
        0.5,
        "e_0",
        "weight of the global head before the steps; 1: the global head alone, 0: the personal one",
        ge=0,
        le=1,
    )
    weight_steps: int = setting(
        20,
        "",
        "steps of Adam on the weight, for each sample; 0: all have e_0",
        ge=0,
        unless={"first_weight": (0, 1), "weight_lr": (0,)},
    )
    weight_lr: float = setting(
        0.1,
        "",
        "their learning rate, on the two numbers of which the weights are the softmax",
        ge=0,
        unless={"first_weight": (0, 1), "weight_steps": (0,)},
    )
    sample_share: float = setting(
        0.3,
        "beta",
        "share of the sample in what is compared with mean features; the rest is the moving mean of the samples so far",
        ge=0,
        le=1,
        unless={"first_weight": (0, 1), "weight_steps": (0,), "weight_lr": (0,)},
    )
    history_rate: float = setting(
        0.1,
        "alpha",
        "share of the newest sample in that moving mean",
        ge=0,
        le=1,
        unless={"first_weight": (0, 1), "weight_steps": (0,), "weight_lr": (0,), "sample_share": (1,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("FedTHE", task.network)

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        return {"model": model, "features": model[task.network.head_weight].new_zeros(task.network.head_shape[1])}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        given = {key: server[key] for key in ("model", "features")}
        rest = self.remainder(given, cohort, clients)
        return clients.mean(self.two_headed_update, cohort, broadcast=given, also=rest)

    async def two_headed_update(self, client: Client, model: Tree, features: Tensor) -> Weighted:
        """Trains the model, then the personal head, and takes the mean features."""
        balanced = self.balance_exponent > 0
        trained = await client.train(
            model,
            self.balanced if balanced else self.objective,
            frozen={"prior": self.prior(client, features)} if balanced else None,
        )
        head = await self.trained_head(client, trained)
        read = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(trained, x)[0])
        mean = read.double().mean(0).to(features)
        own = {"head": head, "features": mean}
        client.state.update(own)
        rows = self.rows(trained, own, features)
        client.publish(local=rows.pop("global"), **rows)
        return self.weighted(client, {"model": trained, "features": mean.clone()})

    def prior(self, client: Client, like: Tensor) -> Tensor:
        """gamma log(n_c + a) by class, shape (C,), of the type of ``like``."""
        counts = class_counts(client.examples().y, client.task.network.head_shape[0])
        return log_prior(counts + self.added_count, self.balance_exponent).to(like)

    async def trained_head(self, client: Client, model: Model) -> Tree:
        """The client's head after training on top of a body that stands still."""
        network = client.task.network
        head: Tree = client.state.get("head") or part(client.initial_model(), network.head_names)
        if not self.head_epochs:
            return head
        trained = await client.train(
            {**head, **part(model, network.buffer_names)},  # a pass writes statistics into what it trains
            self.head_objective,
            frozen={"model": model},
            epochs=self.head_epochs,
            lr=self.head_lr,
            stream=".1",
        )
        return part(trained, network.head_names)

    @property
    def balanced(self) -> Sum:
        """The balanced softmax."""
        return function(self._balanced)

    def _balanced(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        found: Tensor = task.loss_of(task.logits(model, batch) + frozen["prior"], batch)
        return found

    @property
    def head_objective(self) -> Sum:
        """The loss of the model with the head that moves."""
        return loss(TRAINED, completed_by="model")

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.two_headed_update(client, server["model"], server["features"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        if "head" not in client.state:
            return dict.fromkeys(("global", "personal", "personalized"), Predictor.of(server["model"]))
        return self.rows(server["model"], client.state, server["features"])

    def rows(self, model: Model, own: Mapping[str, Any], features: Tensor) -> dict[str, Predictor]:
        """The predictions of a model, of its body with the client's head, and of both heads.

        Args:
            model: with the global head.
            own: the client's ``head`` and mean ``features``.
            features: mean over clients.
        """
        heads = MixedHeads(self.first_weight, self.weight_steps, self.weight_lr, self.sample_share, self.history_rate)
        means = {"global": features, "personal": own["features"]}
        return {
            "global": Predictor.of(model),
            "personal": Predictor.of({**model, **own["head"]}),
            "personalized": Predictor.of(model, own["head"], means, dict, combine=heads.predictions),
        }
