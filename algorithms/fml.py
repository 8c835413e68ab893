"""Federated mutual learning: a private model and the shared one teach each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import Aggregation, setting
from algorithms.parts.newcomers import TrainedNewcomers
from algorithms.parts.requirements import clipped_together
from algorithms.parts.transfer import distillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class FML(TrainedNewcomers):
    """FML (federated mutual learning, FedDML): a private model of each client and the shared one teach each other.

    A client trains its private model v_k and its version w_k of the shared model, the meme, on the same batches:

        L_v = alpha CE(v) + (1 - alpha) KL(p_w || p_v)
        L_w = beta  CE(w) + (1 - beta)  KL(p_v || p_w)

    with p_v and p_w the probabilities from one forward pass of each, both constants where they teach. KL is summed
    over classes and averaged over samples.

    Server: meme w. Client: v_k, at first an own draw; its momentum, if it persists. Down: w. Up: w_k. Evaluated: w
    (``global``) and v_k (``personalized``), after training also w_k (``local``).

    Public code deviates: the authors' keeps the private optimizer from round to round (an option here), an earlier
    version of it adds the two terms with weight 1, and PFLlib averages KL over classes as well and has both losses
    move both models. The paper's losses are followed. One pass trains both models, so ``train.max_grad_norm`` limits
    their joint gradient.

    References:
        Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu: Federated Mutual Learning, arXiv:2006.16765, 2020,
        Algorithm 1 and its losses L_local and L_meme.
    """

    name: Literal["fml"] = "fml"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Shen et al., arXiv 2020"
    needs: ClassVar[Mapping[Trait, str]] = {"distribution": "the two models distill probabilities of classes"}
    client_keeps: ClassVar[str] = "v_k"
    server_keeps: ClassVar[str] = "w (meme)"
    newcomer: ClassVar[str] = "w, and an own model after a local update"

    aggregation: Aggregation = setting(
        "uniform",
        "q_k",
        "weights of the mean: uniform 1/|S| (authors' code); samples n_k / sum over the cohort; population n_k / sum "
        "over all clients, the rest staying on the old server model; tokens those that a language model learns, in "
        "place of samples",
    )
    private_weight: float = setting(
        0.5,
        "alpha",
        "weight of cross-entropy in the private model's loss; what the meme teaches gets the rest",
        ge=0,
        le=1,
    )
    meme_weight: float = setting(
        0.5,
        "beta",
        "weight of cross-entropy in the meme's loss; what the private model teaches gets the rest",
        ge=0,
        le=1,
    )
    persist_private_optimizer: bool = setting(
        False,
        "",
        "keep the private model's optimizer from round to round while the meme's begins afresh (authors' code); false: "
        "both as train.persist_optimizer says",
        kept=True,
    )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        train, together = context.train, clipped_together(context, "the private model and of the meme model")
        if self.persist_private_optimizer and train.optimizer == "sgd" and not train.momentum:
            nothing = "algorithm.persist_private_optimizer has no effect: SGD without train.momentum keeps nothing"
            return (nothing, *together)
        return together

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        start = {"private": self._private(client), "meme": model}
        kept = ("private",) if self.persist_private_optimizer else None
        trained = await client.train(start, self.objective, keep_optimizer=kept)
        client.state["private"] = trained["private"]
        client.publish(personalized=Predictor.of(trained["private"]), local=Predictor.of(trained["meme"]))
        return self.weighted(client, trained["meme"])

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """L_v + L_w, whose gradients are apart: each takes the other's logits as constants."""
        meme, private = task.logits(model["meme"], batch), task.logits(model["private"], batch)
        return mutual_loss(private, meme.detach(), batch, task, self.private_weight) + mutual_loss(
            meme, private.detach(), batch, task, self.meme_weight
        )

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"global": Predictor.of(server["model"]), "personalized": Predictor.of(self._private(client))}

    @staticmethod
    def _private(client: Client) -> Tree:
        """v_k, an own draw until the client has trained."""
        stored: Tree | None = client.state.get("private")
        return client.fresh_model() if stored is None else stored


def mutual_loss(student: Tensor, teacher: Tensor, batch: Batch, task: Task, weight: float) -> Tensor:
    """weight CE(student) + (1 - weight) KL(teacher || student), from logits of shape (b, C); a scalar."""
    taught = distillation(student, teacher, batch, temperature=1.0)
    return weight * task.loss_of(student, batch) + (1 - weight) * taught
