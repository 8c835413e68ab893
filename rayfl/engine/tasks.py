"""Learning tasks: batches, losses and predictions, as pure functions of a model's tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from rayfl.engine.predictor import Model as Model
from rayfl.engine.predictor import Predictor as Predictor
from rayfl.examples import InputSpec, Target
from rayfl.metrics import Measures, MeasuresBySample, Metric
from rayfl.models.base import Network


@dataclass(frozen=True)
class Batch:
    """A mini-batch of one client.

    Attributes:
        x: inputs, shape (b, *input shape).
        y: targets: labels, int64 of shape (b,), what another task has (:data:`rayfl.examples.Target`), b rows, or the
            targets that a method has given its samples, shape (b, ...).
        mask: None, or 1 for a sample and 0 for padding, shape (b,). The vectorised engine pads the batches
            of ragged clients; whatever averages over a batch goes through :meth:`mean`.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None

    @property
    def size(self) -> int | Tensor:
        """b without the padding."""
        return self.y.shape[0] if self.mask is None else self.mask.sum()

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the samples of ``values``, shape (b,); a scalar."""
        if self.mask is None:
            return values.mean()
        return (values * self.mask).sum() / self.mask.sum()

    def parts(self, count: int, least: int = 1) -> list[Batch]:
        """Consecutive parts of the mini-batch, of sizes that differ by at most one.

        A mini-batch with too few samples is not cut: every part is then all of it. A part is padded like the
        mini-batch: only its :meth:`mean` leaves the padding out.

        Args:
            count: how many parts.
            least: samples that a part must have.
        """
        width = self.y.shape[0]
        if self.mask is None:
            if width < count * least:
                return [self] * count
            cuts = [width * part // count for part in range(count + 1)]
            return [Batch(self.x[i:j], self.y[i:j]) for i, j in pairwise(cuts)]
        size = self.mask.sum().long()  # the padding comes last
        places = torch.arange(max(-(-width // count), min(width, count * least - 1)), device=self.y.device)
        found = []
        for part in range(count):
            whole = size < count * least
            first = torch.where(whole, 0, size * part // count)
            last = torch.where(whole, size, size * (part + 1) // count)
            index = (first + places).clamp(max=width - 1)
            found.append(Batch(self.x[index], self.y[index], (first + places < last).to(self.mask.dtype)))
        return found


Trait = Literal["classes", "distribution", "features"]
"""What a method may need of a task: one class a sample as its target; outputs that are logits of a probability
distribution over classes, one a sample; one vector of features a sample."""


class Task(Protocol):
    """What methods and engine need of that which is learned; see :class:`NetworkTask`."""

    network: Network
    name: str
    traits: frozenset[Trait]

    @property
    def measures(self) -> Measures:
        """Returns how predictions are scored."""
        ...

    @property
    def candidates(self) -> Sequence[Task]:
        """One task per architecture that a client may have; this task itself where there is only one."""
        ...

    def logits(self, model: Model, batch: Batch, training: bool = True) -> Tensor: ...

    def features_and_logits(self, model: Model, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]: ...

    def head_inputs_and_logits(self, model: Model, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]: ...

    def features(self, model: Model, batch: Batch, training: bool = True) -> Tensor: ...

    def classify(self, model: Model, features: Tensor, training: bool = True) -> Tensor: ...

    def loss(self, model: Model, batch: Batch) -> Tensor: ...

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor: ...

    def predicted(self, outputs: Tensor) -> Tensor: ...

    def predictions(self, models: Sequence[Model], x: Tensor) -> Tensor: ...

    def asked(self, y: Tensor) -> Tensor | None: ...

    def statistics(self, predictor: Predictor, models: Sequence[Model], x: Tensor, y: Tensor) -> Tensor: ...


def tells_steps(task: Task) -> bool:
    """Returns whether a network of the task has layers that are to be told of every step."""
    return any(one.network.stochastic or one.network.batch_statistics for one in task.candidates)


def begin_step(task: Task, key: Tensor, padded: bool = False, first: bool = True) -> None:
    """Tells the task's networks of the next step, or of what follows in it (without ``first``).

    See :meth:`rayfl.models.base.Network.begin_step`.
    """
    for number, candidate in enumerate(task.candidates):
        candidate.network.begin_step(key, padded, number << 32 if first else None)


def recorded_names(task: Task) -> frozenset[str]:
    """Names of the tensors that travel with the parameters, and that no step moves but a forward pass may write to."""
    return frozenset(name for candidate in task.candidates for name in candidate.network.buffer_names)


class NetworkTask(ABC):
    """Something that a network learns: its loss, what it predicts, and how that is scored.

    Args:
        network: the stateless network whose tree is trained.
        candidates: one task per architecture, if clients may differ in it.
        spec: of the data; None where nothing depends on it.

    Attributes:
        name: what the task is called.
        target: what it learns from.
        traits: what methods may need of it.
        metrics: those of the measures, if known of the class: a sweep of a user's own task is compared by them.
        measures: how its predictions are scored.
    """

    name: str
    target: ClassVar[Target]
    traits: frozenset[Trait] = frozenset()
    metrics: ClassVar[tuple[Metric, ...]] = ()

    def __init__(self, network: Network, candidates: Sequence[Any] = (), spec: InputSpec | None = None) -> None:
        self.network = network
        self.candidates: tuple[Any, ...] = tuple(candidates) or (self,)
        self.spec = spec

    @property
    @abstractmethod
    def measures(self) -> Measures:
        """Returns how predictions are scored."""

    @abstractmethod
    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The loss of given outputs of the network; a scalar, a mean over the batch without its padding."""

    def predicted(self, outputs: Tensor) -> Tensor:
        """Returns what is scored of outputs of the network, one row a sample; by default these themselves."""
        return outputs

    def mixed(self, predictions: Sequence[Tensor]) -> Tensor:
        """Returns what several models predict together, of their own predictions; by default the mean."""
        return torch.stack(list(predictions)).mean(0)

    def predictions(self, models: Sequence[Model], x: Tensor) -> Tensor:
        """Returns what models predict together in evaluation mode, one row a sample."""
        members = [self.predicted(self.network.logits(model, x, training=False)) for model in models]
        return members[0] if len(members) == 1 else self.mixed(members)

    def statistics(self, predictor: Predictor, models: Sequence[Model], x: Tensor, y: Tensor) -> Tensor:
        """The sums of :attr:`measures` for what a predictor says of some samples, float64 of shape (``size``,).

        Args:
            predictor: what is scored; its own task, if it has one, computes.
            models: its models, built.
            x: inputs, shape (n, *input shape).
            y: targets, n rows.
        """
        return self.measures.statistics(predictor.predictions(models, x, self, self.asked(y)), y)

    @property
    def by_sample(self) -> MeasuresBySample | None:
        """Returns the measures, where :meth:`outcomes` finds what they add; None where a task scores in its own way."""
        measures, kept = self.measures, type(self).statistics is NetworkTask.statistics
        kept &= type(measures).statistics is MeasuresBySample.statistics
        return measures if kept and isinstance(measures, MeasuresBySample) else None

    def outcomes(self, models: Mapping[str, Tensor], x: Tensor, y: Tensor, stacked: bool) -> tuple[Tensor, ...]:
        """What the measures add, of each sample's prediction in evaluation mode; see :attr:`by_sample`.

        Args:
            models: one model; where several are stacked, leaves of shape (N, *shape).
            x: inputs, shape (b, *input shape); of each model, if stacked, shape (N, b, *input shape).
            y: targets, b or (N, b) rows.
            stacked: whether models are.

        Returns:
            Tensors of b or N b rows.
        """
        measures = self.by_sample
        assert measures is not None
        if not stacked:
            return measures.by_sample(self.predictions([models], x), y)
        return measures.by_sample(self.stacked_predictions(models, x).flatten(0, 1), y.flatten(0, 1))

    def stacked_predictions(self, models: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Returns what stacked models predict, each for its own samples; see :meth:`outcomes`."""
        found: Tensor = vmap(lambda model, inputs: self.predictions([model], inputs))(dict(models), x)
        return found

    def asked(self, y: Tensor) -> Tensor | None:
        """Returns at which positions of texts with targets y a token is predicted; None where samples are no texts."""
        return None

    def logits(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """Outputs of the network, shape (b, C). ``training=False`` for a teacher: no dropout, no change of buffers."""
        return self.network.logits(model, batch.x, training=training, mask=batch.mask)

    def features_and_logits(self, model: Model, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]:
        """Features of shape (b, f) and outputs of shape (b, C) from one forward pass."""
        return self.network.features_and_logits(model, batch.x, training=training, mask=batch.mask)

    def head_inputs_and_logits(self, model: Model, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]:
        """Returns what the last linear layer reads, shape (b, f), and outputs of shape (b, C) from one forward pass."""
        return self.network.head_inputs_and_logits(model, batch.x, training=training, mask=batch.mask)

    def features(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """Features of shape (b, f); ``training`` as for :meth:`logits`."""
        return self.network.features(model, batch.x, training=training, mask=batch.mask)

    def classify(self, model: Model, features: Tensor, training: bool = True) -> Tensor:
        """Outputs of shape (b, C) of given features of shape (b, f); ``training`` as for :meth:`logits`."""
        return self.network.classify(model, features, training=training)

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """The loss of ``model`` on ``batch``; a scalar."""
        return self.loss_of(self.logits(model, batch), batch)
