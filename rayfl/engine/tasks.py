"""What is learned: batches, losses and predictions, as pure functions of a model's tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.engine.chain import Layer
from rayfl.models.base import Network

Model = Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """A mini-batch of one client.

    Attributes:
        x: inputs, shape (b, *input shape).
        y: labels, int64, shape (b,); or the targets that a method has given its samples, shape (b, ...).
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


@dataclass(frozen=True)
class Predictor:
    """A model worth a row in the results; several models predict by their mean probability.

    A model may be given as a function that makes it, called when it is scored: a sweep over many models of one
    client then never holds them all at once.

    Attributes:
        models: the models, or functions that make them.
        combine: None, or ``(models, x, task) -> log-probabilities`` of shape (b, C) for another prediction than the
            mean probability. Called without gradients; networks have to be run with ``training=False``.
        task: what the models are of; None stands for the experiment's task (its first candidate).
    """

    models: tuple[Model | Callable[[], Model], ...]
    combine: Callable[[Sequence[Model], Tensor, Any], Tensor] | None = None
    task: Any = None

    @classmethod
    def of(
        cls,
        *models: Model | Callable[[], Model],
        combine: Callable[[Sequence[Model], Tensor, Any], Tensor] | None = None,
        task: Any = None,
    ) -> Predictor:
        """A predictor from one model or several."""
        return cls(models, combine, task)

    def built(self) -> list[Model]:
        """The models themselves."""
        return [model() if callable(model) else model for model in self.models]

    def log_probabilities(self, models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
        """Log-probabilities of shape (b, C) that the built models predict."""
        task = self.task or task
        if self.combine is not None:
            return self.combine(models, x, task)
        predicted: Tensor = task.log_probabilities(models, x)
        return predicted


class Task(Protocol):
    """What methods and engine need of that which is learned; see :class:`Classification`."""

    network: Network

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

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor: ...

    def log_probabilities(self, models: Sequence[Model], x: Tensor) -> Tensor: ...


def recorded_names(task: Task) -> frozenset[str]:
    """Names of the tensors that travel with the parameters, and that no step moves but a forward pass may write to."""
    return frozenset(name for candidate in task.candidates for name in candidate.network.buffer_names)


class Classification:
    """Classification with cross-entropy.

    Args:
        network: the stateless network whose tree is trained.
        candidates: one task per architecture, if clients may differ in it.
    """

    def __init__(self, network: Network, candidates: Sequence[Classification] = ()) -> None:
        self.network = network
        self.candidates: tuple[Classification, ...] = tuple(candidates) or (self,)

    def logits(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """Logits of shape (b, C). ``training=False`` for a teacher: no dropout, no change of buffers."""
        return self.network.logits(model, batch.x, training=training)

    def features_and_logits(self, model: Model, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]:
        """Features of shape (b, f) and logits of shape (b, C) from one forward pass."""
        return self.network.features_and_logits(model, batch.x, training=training)

    def head_inputs_and_logits(self, model: Model, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]:
        """Returns the last linear layer's inputs, shape (b, f), and logits of shape (b, C) from one forward pass."""
        return self.network.head_inputs_and_logits(model, batch.x, training=training)

    def features(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """Features of shape (b, f); ``training`` as for :meth:`logits`."""
        return self.network.features(model, batch.x, training=training)

    def classify(self, model: Model, features: Tensor, training: bool = True) -> Tensor:
        """Logits of shape (b, C) of given features of shape (b, f); ``training`` as for :meth:`logits`."""
        return self.network.classify(model, features, training=training)

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """Mean cross-entropy of ``model`` on ``batch``; a scalar."""
        return self.cross_entropy(self.logits(model, batch), batch)

    def chain(self, model: Model) -> list[Layer] | None:
        """The layers of a fully connected network whose :meth:`loss` is their cross-entropy; None for any other.

        Raises:
            ModelError: ``model`` is not of this network.
        """
        own, base = type(self), Classification
        plain = own.loss is base.loss and own.logits is base.logits and own.cross_entropy is base.cross_entropy
        return self.network.chain(model) if plain else None

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean cross-entropy of given logits; a scalar."""
        if batch.mask is None:
            return F.cross_entropy(logits, batch.y)
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))

    def log_probabilities(self, models: Sequence[Model], x: Tensor) -> Tensor:
        """Log-probabilities of shape (b, C), in evaluation mode; the mean probability of several models."""
        members = [self.network.logits(model, x, training=False).log_softmax(-1) for model in models]
        if len(members) == 1:
            return members[0]
        return torch.logsumexp(torch.stack(members), 0) - math.log(len(members))
