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

from rayfl.examples import InputSpec, Target
from rayfl.metrics import Measures, MeasuresBySample, Metric
from rayfl.models.base import Network
from rayfl.tasks.predictor import Model as Model
from rayfl.tasks.predictor import Predictor as Predictor


@dataclass(frozen=True)
class Batch:
    """A mini-batch of one client.

    Attributes:
        x: inputs, shape (b, *input shape).
        y: targets, b rows: class labels, int64 of shape (b,); those of another task (:data:`rayfl.examples.Target`); or
            those that a method has given the samples, shape (b, ...).
        mask: None, or 1 for a sample and 0 for padding, shape (b,). The vectorised engine pads the batches of clients
            of different sizes, so average over a batch with :meth:`mean`.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None

    @property
    def size(self) -> int | Tensor:
        """Returns b without the padding."""
        return self.y.shape[0] if self.mask is None else self.mask.sum()

    def mean(self, values: Tensor) -> Tensor:
        """Returns the mean of ``values``, shape (b,), over the samples without padding; a scalar."""
        if self.mask is None:
            return values.mean()
        return (values * self.mask).sum() / self.mask.sum()

    def parts(self, count: int, least: int = 1) -> list[Batch]:
        """Splits the mini-batch into consecutive parts whose sizes differ by at most one.

        A mini-batch with too few samples is not split: every part is the whole of it. Parts may contain padding, like
        the mini-batch: average with :meth:`mean`.

        Args:
            count: number of parts.
            least: minimum number of samples in a part.
        """
        width = self.y.shape[0]
        if self.mask is None:
            if width < count * least:
                return [self] * count
            cuts = [width * part // count for part in range(count + 1)]
            return [Batch(self.x[i:j], self.y[i:j]) for i, j in pairwise(cuts)]
        size = self.mask.sum().long()  # padding comes last
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
    """The interface of tasks that methods and the engine use; see :class:`NetworkTask`."""

    network: Network
    name: str
    traits: frozenset[Trait]
    inputs_per_sample: ClassVar[int]
    mixes_outputs: ClassVar[bool]

    @property
    def measures(self) -> Measures:
        """Returns how predictions are scored."""
        ...

    @property
    def candidates(self) -> Sequence[Task]:
        """Returns one task per architecture that a client may have; this task itself if there is only one."""
        ...

    def logits(self, model: Model, batch: Batch, training: bool = True) -> Tensor: ...

    def features_and_logits(self, model: Model, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]: ...

    def head_inputs_and_logits(self, model: Model, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]: ...

    def features(self, model: Model, batch: Batch, training: bool = True) -> Tensor: ...

    def classify(self, model: Model, features: Tensor, training: bool = True) -> Tensor: ...

    def loss(self, model: Model, batch: Batch, training: bool = True) -> Tensor: ...

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor: ...

    def predicted(self, outputs: Tensor) -> Tensor: ...

    def score_of(self, predicted: Tensor, x: Tensor) -> Tensor: ...

    def predictions(self, models: Sequence[Model], x: Tensor) -> Tensor: ...

    def asked(self, y: Tensor) -> Tensor | None: ...

    def statistics(self, predictor: Predictor, models: Sequence[Model], x: Tensor, y: Tensor) -> Tensor: ...


def tells_steps(task: Task) -> bool:
    """Returns whether a network of the task has layers that need a random key at every step."""
    return any(one.network.stochastic or one.network.batch_statistics for one in task.candidates)


def begin_step(task: Task, key: Tensor, padded: bool = False, first: bool = True) -> None:
    """Gives the task's networks the random key of the next step, or continues the same step (``first=False``).

    See :meth:`rayfl.models.base.Network.begin_step`.
    """
    for number, candidate in enumerate(task.candidates):
        candidate.network.begin_step(key, padded, number << 32 if first else None)


def recorded_names(task: Task) -> frozenset[str]:
    """Returns the names of module buffers (such as running statistics): written by forward passes, not by steps."""
    return frozenset(name for candidate in task.candidates for name in candidate.network.buffer_names)


class NetworkTask(ABC):
    """A learning task: the loss of a network, its predictions, and their metrics.

    Args:
        network: the stateless network whose tree is trained.
        candidates: one task per architecture, if clients may differ in it.
        spec: of the data; None if the task does not depend on it.

    Attributes:
        name: the name of the task.
        target: the kind of targets it learns from.
        traits: properties that methods may require.
        metrics: the metrics, if the class declares them; needed to compare the trials of a sweep.
        compares_samples: whether the loss compares samples of a mini-batch, so that a single one has none of its own.
        inputs_per_sample: how many inputs of the network a sample is.
        scored_by_predictions: whether :attr:`measures` score predictions alone; else :meth:`statistics` must be asked.
        mixes_outputs: whether a mixture of the outputs of several models can be scored.
        measures: how its predictions are scored.
    """

    name: str
    target: ClassVar[Target]
    traits: frozenset[Trait] = frozenset()
    metrics: ClassVar[tuple[Metric, ...]] = ()
    compares_samples: bool = False
    inputs_per_sample: ClassVar[int] = 1
    scored_by_predictions: ClassVar[bool] = True
    mixes_outputs: ClassVar[bool] = True

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
        """Returns the loss of given network outputs; a scalar, the mean over the batch without padding."""

    def predicted(self, outputs: Tensor) -> Tensor:
        """Returns the predictions for given network outputs, one row per sample; by default the outputs themselves."""
        return outputs

    def mixed(self, predictions: Sequence[Tensor]) -> Tensor:
        """Returns the prediction of an ensemble from its models' predictions; by default the mean."""
        return torch.stack(list(predictions)).mean(0)

    def score_of(self, predicted: Tensor, x: Tensor) -> Tensor:
        """Returns what is scored of predictions for these inputs, one row per sample; by default the predictions."""
        return predicted

    def predictions(self, models: Sequence[Model], x: Tensor) -> Tensor:
        """Returns the ensemble prediction of models in evaluation mode, one row per sample."""
        members = [self.predicted(self.network.logits(model, x, training=False)) for model in models]
        return self.score_of(members[0] if len(members) == 1 else self.mixed(members), x)

    def statistics(self, predictor: Predictor, models: Sequence[Model], x: Tensor, y: Tensor) -> Tensor:
        """Returns the sums of :attr:`measures` over a predictor's predictions, float64 of shape (``size``,).

        An evaluation asks for those of each batch, unless the measures compare samples.

        Args:
            predictor: what is scored; its own task, if it has one, computes the predictions.
            models: its models, built.
            x: inputs, shape (n, *input shape).
            y: targets, n rows.
        """
        return self.measures.statistics(predictor.predictions(models, x, self, self.asked(y)), y)

    @property
    def by_sample(self) -> MeasuresBySample | None:
        """Returns the measures if they sum over samples (:meth:`outcomes`); None if the task has custom scoring."""
        measures, kept = self.measures, type(self).statistics is NetworkTask.statistics
        kept &= type(measures).statistics is MeasuresBySample.statistics
        return measures if kept and isinstance(measures, MeasuresBySample) else None

    def outcomes(self, models: Mapping[str, Tensor], x: Tensor, y: Tensor, stacked: bool) -> tuple[Tensor, ...]:
        """Returns the measures' summands for each sample's prediction in evaluation mode; see :attr:`by_sample`.

        Args:
            models: one model; where several are stacked, leaves of shape (N, *shape).
            x: inputs, shape (b, *input shape); of each model, if stacked, shape (N, b, *input shape).
            y: targets, b or (N, b) rows.
            stacked: whether models are stacked.

        Returns:
            Tensors of b or N b rows.
        """
        measures = self.by_sample
        assert measures is not None
        if not stacked:
            return measures.by_sample(self.predictions([models], x), y)
        return measures.by_sample(self.stacked_predictions(models, x).flatten(0, 1), y.flatten(0, 1))

    def stacked_predictions(self, models: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Returns the predictions of stacked models, each for its own samples; see :meth:`outcomes`."""
        found: Tensor = vmap(lambda model, inputs: self.predictions([model], inputs))(dict(models), x)
        return found

    def asked(self, y: Tensor) -> Tensor | None:
        """Returns, for texts with targets y, the positions where a token is predicted; None without texts."""
        return None

    def logits(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """Returns the network's outputs, shape (b, C); ``training=False`` (for teachers): no dropout, fixed buffers."""
        return self.network.logits(model, batch.x, training=training, mask=batch.mask)

    def features_and_logits(self, model: Model, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]:
        """Returns features of shape (b, f) and outputs of shape (b, C) from one forward pass."""
        return self.network.features_and_logits(model, batch.x, training=training, mask=batch.mask)

    def head_inputs_and_logits(self, model: Model, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]:
        """Returns the last linear layer's inputs, shape (b, f), and outputs of shape (b, C) from one forward pass."""
        return self.network.head_inputs_and_logits(model, batch.x, training=training, mask=batch.mask)

    def features(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """Returns features of shape (b, f); ``training`` as for :meth:`logits`."""
        return self.network.features(model, batch.x, training=training, mask=batch.mask)

    def classify(self, model: Model, features: Tensor, training: bool = True) -> Tensor:
        """Returns outputs of shape (b, C) for features of shape (b, f); ``training`` as for :meth:`logits`."""
        return self.network.classify(model, features, training=training)

    def loss(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """Returns the loss of ``model`` on ``batch``; a scalar. ``training`` as for :meth:`logits`."""
        return self.loss_of(self.logits(model, batch, training), batch)
