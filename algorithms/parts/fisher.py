"""Methods that know how much each parameter matters to a client's samples: the diagonal of Fisher information."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.func import vmap

from algorithms.base import Algorithm, setting
from algorithms.parts.accumulators import ACCUMULATOR, adding
from algorithms.parts.mixture import parameters
from algorithms.parts.slopes import constant_slope, takes_transforms
from rayfl.engine.client import Client
from rayfl.objectives import Sum, function
from rayfl.params import Tree, map_leaves, zeros_like
from rayfl.tasks.base import Batch, Model, Task

_TOGETHER = 64
"""Samples of a mini-batch where each has a gradient of its own."""
_IN_MEMORY = 1 << 24
"""Elements of gradients that are in memory together, of a client."""


class FisherInformation(Algorithm):
    """A method whose clients know the diagonal of Fisher information, at a model and on their training samples.

    It is the empirical one, of the labels that samples have, not of labels drawn from the model.
    """

    fisher_form: Literal["samples", "batches"] = setting(
        "samples",
        "F",
        "mean of squared gradients: those of samples, which is Fisher information; or those of the mean losses of "
        "mini-batches (public codes), which is smaller and takes one gradient for each",
    )

    async def fisher(self, client: Client, model: Tree) -> Tree:
        """F at a model, by parameter, from one pass over the client's samples in evaluation mode.

        A straggler passes over a share of its samples; the mean is over these.

        Args:
            client: whose samples.
            model: the model.
        """
        zeros = zeros_like(parameters(model, client.task))
        first = next(iter(zeros.values()))
        # clipped gradients would scale what is collected
        once: Tree = {"min_local_steps": 0, "max_local_steps": None, "drop_last": False, "max_grad_norm": None}
        if self.fisher_form == "samples":
            once["batch_size"] = _TOGETHER
        found = await client.train(
            {"squares": zeros, "count": first.new_zeros(())},
            self.squares,
            frozen={"model": model},
            epochs=1,
            settings=client.context.train.model_copy(update=once),
            groups={"squares": ACCUMULATOR, "count": ACCUMULATOR},
            keep_optimizer=False,
            stream=".fisher",
        )
        count = found["count"]
        return map_leaves(lambda leaf: leaf / count, found["squares"])

    @property
    def squares(self) -> Sum:
        """Returns what adds up squared gradients, and what they are means over."""
        return function(self._squares)

    def _squares(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        model = frozen["model"]

        def gradient(x: Tensor, y: Tensor) -> Tree:
            return constant_slope(model, Batch(x[None], y[None]), task, scored(task))[0]

        if self.fisher_form == "batches":
            whole, _ = constant_slope(model, batch, task, scored(task))
            squares, count = map_leaves(Tensor.square, whole), trained["count"].new_ones(())
        elif takes_transforms(task):
            size = sum(leaf.numel() for leaf in trained["squares"].values())
            squares = vmap(gradient, chunk_size=max(1, _IN_MEMORY // size))(batch.x, batch.y)
            squares = map_leaves(lambda leaf: _total(leaf.square(), batch), squares)
            count = trained["count"].new_zeros(()) + batch.size
        else:
            each = [gradient(x, y) for x, y in zip(batch.x, batch.y, strict=True)]
            squares = map_leaves(lambda *leaf: sum(one.square() for one in leaf), *each)
            count = trained["count"].new_zeros(()) + batch.size
        terms = [adding(total, squares[name]) for name, total in trained["squares"].items()]
        found: Tensor = sum(terms, adding(trained["count"], count))
        return found


def scored(task: Task) -> Any:
    """Returns the loss of a model in evaluation mode, as a function of model and samples."""

    def loss(model: Model, batch: Batch) -> Tensor:
        return task.loss_of(task.logits(model, batch, training=False), batch)

    return loss


def _total(values: Tensor, batch: Batch) -> Tensor:
    """The sum over samples without padding, of values of shape (b, ...)."""
    if batch.mask is not None:
        values = values * batch.mask.to(values).view(-1, *(1,) * (values.dim() - 1))
    return values.sum(0)
