"""kNN-Per: the federated model's prediction, mixed with a vote of the client's nearest training samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Averaging, setting
from algorithms.parts.lines import GRID
from algorithms.parts.masks import kept_count
from rayfl.engine.client import Client
from rayfl.params import Tree
from rayfl.tasks.base import Model, Predictor, Trait

_CHUNK = 256


class Neighbours:
    """The shares of the classes among a sample's nearest neighbours in a datastore.

    Args:
        keys: features of the datastore's samples, shape (n, d); at least one.
        labels: their classes, int64, shape (n,).
        classes: C.
        count: how many neighbours vote, k; all where there are fewer samples.
        scale: sigma, of the kernel that weighs them.
        kernel: ``gaussian``, exp(-||.||^2 / (d sigma)); ``laplace``, exp(-||.|| / sigma).
    """

    def __init__(
        self,
        keys: Tensor,
        labels: Tensor,
        classes: int,
        count: int,
        scale: float,
        kernel: Literal["gaussian", "laplace"] = "gaussian",
    ) -> None:
        self._keys = keys
        self._votes = F.one_hot(labels, classes).to(keys)
        self._count = min(count, len(keys))
        self._scale = scale * (keys.shape[1] if kernel == "gaussian" else 1)
        self._kernel = kernel

    def shares(self, features: Tensor) -> Tensor:
        """Probabilities of shape (b, C) of features of shape (b, d); of equally near samples the first count."""
        return torch.cat([self._shares(part) for part in features.split(_CHUNK)])  # type: ignore[no-untyped-call]

    def _shares(self, features: Tensor) -> Tensor:
        # differences and no products of vectors: a sample's distance to itself is exactly 0
        distances = torch.cdist(features, self._keys, compute_mode="donot_use_mm_for_euclid_dist")
        nearest, places = (found[:, : self._count] for found in distances.sort(dim=1, stable=True))
        costs = nearest.square() if self._kernel == "gaussian" else nearest
        # the same ratios without underflow far from all samples
        weights = ((costs[:, :1] - costs) / self._scale).exp()
        return (weights[..., None] * self._votes[places]).sum(1) / weights.sum(1, keepdim=True)


class KnnPer(Averaging):
    """kNN-Per: federated averaging; a client's prediction is mixed with the vote of its nearest training samples.

    Training is that of federated averaging. To predict for x, client i takes the k of its training samples x_j whose
    features (what the last layer reads, in evaluation mode) are nearest to those of x, and predicts

        lambda kNN(y | x) + (1 - lambda) softmax(z(x)),    kNN(y | x) = sum_{j: y_j = y} a_j / sum_j a_j,
        a_j = exp(-||f(x) - f(x_j)||^2 / (d sigma))

    for lambda = 0, 0.1, ..., 1, among which one is chosen as for all methods that sweep: one for all clients, or one
    for each, on validation samples.

    Server: model w. Client: nothing; its features are those of w, made when it predicts. Down: w. Up: w_k and n_k.
    Evaluated: w (``global``), and the mixtures (``lambda=0.0`` to ``lambda=1.0``). Clients never sampled need no
    training. A client without training samples predicts with w.

    References:
        Marfoq, Neglia, Kameni, Vidal: Personalized Federated Learning through Local Memorization, ICML 2022,
        Algorithm 1 and eqs. 3-5.
    """

    name: Literal["knn_per"] = "knn_per"
    personalized: ClassVar[str] = "lambda"
    sweep: ClassVar[str | None] = "lambda"
    citation: ClassVar[str] = "Marfoq et al., ICML 2022"
    no_gradient: ClassVar[str] = ""
    newcomer: ClassVar[str] = "w, and the vote of its own samples"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "neighbours vote for a class"}

    neighbours: int = setting(10, "k", "how many training samples vote", ge=1)
    kernel: Literal["gaussian", "laplace"] = setting(
        "gaussian",
        "",
        "weights of the votes: exp(-||.||^2 / (d sigma)) (authors' code), or exp(-||.|| / sigma) (paper)",
    )
    kernel_scale: float = setting(1.0, "sigma", "scale of the distances", gt=0)
    capacity: float | None = setting(
        None,
        "",
        "share of its training samples that a client keeps features of, drawn at random; null: all",
        gt=0,
        le=1,
    )
    mix: Literal["probabilities", "logits"] = setting(
        "probabilities",
        "",
        "what is mixed with the vote: the model's probabilities (paper), or its logits (authors' code), of which "
        "mixture the softmax is the prediction",
    )

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = server["model"]
        rows = {"global": Predictor.of(model)}
        voters = await self.voters(client, model)
        if voters is None:
            return rows | {f"lambda={value}": rows["global"] for value in GRID}
        seen = _Votes(voters)
        return rows | {
            f"lambda={value}": Predictor.of(model, combine=_Mixture(seen, value, self.mix)) if value else rows["global"]
            for value in GRID
        }

    async def voters(self, client: Client, model: Model) -> Neighbours | None:
        """The client's datastore; None without training samples."""
        examples = client.examples()
        if not len(examples):
            return None
        keys = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(model, x)[0])
        labels = examples.y
        if self.capacity is not None:
            generator = client.context.streams.generator("datastore", client=client.id)
            size = max(kept_count(self.capacity, len(labels)), 1)
            kept = torch.from_numpy(generator.permutation(len(labels))[:size]).sort().values.to(labels.device)
            keys, labels = keys[kept], labels[kept]
        classes = client.task.network.head_shape[0]
        return Neighbours(keys, labels, classes, self.neighbours, self.kernel_scale, self.kernel)


class _Votes:
    """Logits and votes by batch: all rows of a client's sweep ask for the same ones, one row after the other."""

    def __init__(self, voters: Neighbours) -> None:
        self._voters = voters
        self._found: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def of(self, model: Model, x: Tensor, task: Any) -> tuple[Tensor, Tensor]:
        """Logits and votes, both of shape (b, C)."""
        if x.requires_grad:  # a slope is asked for, which what was found before has not
            return self._made(model, x, task)
        key = x.data_ptr(), len(x)
        if key not in self._found:
            # with the batch itself, whose memory no other one then gets
            self._found[key] = x, *self._made(model, x, task)
        return self._found[key][1:]

    def _made(self, model: Model, x: Tensor, task: Any) -> tuple[Tensor, Tensor]:
        features, logits = task.network.head_inputs_and_logits(model, x)
        return logits, self._voters.shares(features)


class _Mixture:
    """Log-probabilities (b, C) of model and vote, mixed with one lambda."""

    def __init__(self, votes: _Votes, coefficient: float, mix: str) -> None:
        self._votes, self._coefficient, self._mix = votes, coefficient, mix

    def __call__(self, models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
        logits, votes = self._votes.of(models[0], x, task)
        if self._mix == "logits":
            return torch.lerp(logits, votes, self._coefficient).log_softmax(-1)
        mixed = torch.lerp(logits.softmax(-1), votes, self._coefficient)
        # of lambda = 1 a class without a vote has the smallest probability there is, so that losses are finite
        return mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()
