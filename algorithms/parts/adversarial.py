"""Inputs that a model is made to get wrong: projected gradient ascent of the loss, within a ball around each input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Algorithm, setting
from algorithms.parts.input_bounds import bounds_of
from algorithms.parts.slopes import takes_transforms
from rayfl.engine.client import Client
from rayfl.engine.gradients.counted_normals import drawn_keys, normals
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait

_NO_BALL = {"radius": (0,)}
_NEAR = 1e-3


class Adversarial(Algorithm):
    """A method whose clients attack samples x of label y by projected gradient ascent (PGD):

    x_0 = x,  x_{i+1} = P(x_i + alpha sign grad CE(w(x_i), y)), where P cuts each number off at a distance of eps from
    x, and at the least and the largest value that the client's training samples have in its place.
    """

    needs: ClassVar[Mapping[Trait, str]] = {
        "classes": "it attacks one class a sample",
        "distribution": "it attacks probabilities of classes",
    }

    radius: float = setting(8 / 255, "eps", "largest change of a number of an input; 0: no attacks", ge=0)
    unit: Literal["range", "input"] = setting(
        "range",
        "",
        "in what eps and alpha are measured: the distance of the least from the largest value of the client's training "
        "samples (of images by channel, else number by number), which is that of black from white however images are "
        "normalized; or as inputs are",
        unless=_NO_BALL,
    )
    step: float = setting(2 / 255, "alpha", "length of a step, in the same unit", gt=0, unless=_NO_BALL)
    steps: int = setting(10, "J", "steps of an attack", ge=1, unless=_NO_BALL)
    start: Literal["sample", "near", "ball"] = setting(
        "sample",
        "x_0",
        "where attacks in training begin: at x; near it, at x plus normal numbers of a deviation of 0.001 in that "
        "unit; or at a point drawn evenly from the ball",
        unless=_NO_BALL,
    )
    score_attacked: bool = setting(
        True,
        "",
        "score the row attacked, too: the model on test samples that are attacked with what it says of them as the "
        "label; costs J + 1 passes more",
        unless=_NO_BALL,
    )

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        spec = getattr(task, "spec", None)
        if spec is not None and spec.kind != "image":
            why = "the number of a token" if spec.kind == "tokens" else "an edge, which is there or not,"
            raise ConfigError(
                f"algorithm: {self.name} cannot learn task={task.name} from {spec.kind.removesuffix('s')}s: {why} "
                "cannot be changed a little. Choose another method, such as fedavg"
            )

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        rows = await super().predictors(client, server)
        if self.radius and self.score_attacked:
            combine = partial(_log_probabilities, self)
            rows["attacked"] = Predictor.of(server["model"], self.limits(client), combine=combine)
        return rows

    def limits(self, client: Client) -> Tree:
        """What attacks of a client's samples read: ``low``, ``high`` and ``unit``, in the shape of an input.

        A number that is the same in all samples has a unit of 0 with ``unit: range``, and stays as it is;
        so do all numbers of a client that has no samples.
        """
        x = client.examples().x
        if not len(x):  # its test samples may be scored all the same
            x = x.new_zeros(1, *x.shape[1:])
        low, high = bounds_of(x)
        return {"low": low, "high": high, "unit": high - low if self.unit == "range" else torch.ones_like(low)}

    def starts(self, client: Client) -> Any:
        """``draw`` of a pass over the client's samples: what attacks that begin at random need."""
        if self.start == "sample" or not self.radius:
            return None
        size = client.context.train.batch_size or client.num_samples

        def keys(generator: np.random.Generator, steps: int) -> Tree:
            return {"keys": drawn_keys(generator, steps, size)}

        return keys

    def attacked(
        self,
        model: Model,
        batch: Batch,
        task: Task,
        limits: Model,
        draw: Any = None,
        of: Callable[[Tensor, Batch], Tensor] | None = None,
    ) -> Tensor:
        """x_J, a constant of the shape of the inputs; the model is in evaluation mode.

        Args:
            model: w with its buffers, which stay as they are.
            batch: x and y.
            task: the loss.
            limits: of :meth:`limits`.
            draw: of a step, by :meth:`starts`; None begins at x.
            of: what to go uphill on, a scalar of logits and samples; None: the task's loss.
        """
        if not self.radius:
            return batch.x
        x, radius = batch.x, self.radius * limits["unit"]
        low = torch.maximum(x - radius, torch.minimum(x, limits["low"]))
        high = torch.minimum(x + radius, torch.maximum(x, limits["high"]))
        at = {name: leaf.detach() for name, leaf in model.items()}
        moved = x
        if draw:
            noise = normals(draw["keys"][: len(x)], x[0].numel())
            if self.start == "near":
                moved = x + _NEAR * limits["unit"] * noise.to(x).view_as(x)
            else:
                # the distribution function of a normal number is even
                moved = x + radius * torch.erf(noise / 2**0.5).to(x).view_as(x)
            moved = moved.clamp(low, high)
        for _ in range(self.steps):
            uphill = _slope(at, replace(batch, x=moved), task, of or task.loss_of).sign()
            moved = (moved + self.step * limits["unit"] * uphill).clamp(low, high)
        return moved.detach()


def _slope(model: Model, batch: Batch, task: Task, of: Callable[[Tensor, Batch], Tensor]) -> Tensor:
    """The gradient of a scalar of logits with respect to a mini-batch's inputs."""

    def value(x: Tensor) -> Tensor:
        moved = replace(batch, x=x)
        return of(task.logits(model, moved, training=False), moved)

    if takes_transforms(task):
        found: Tensor = torch.func.grad(value)(batch.x)
        return found
    with torch.enable_grad():
        x = batch.x.detach().requires_grad_()
        return torch.autograd.grad(value(x), x)[0]


def _log_probabilities(method: Adversarial, models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Log-probabilities (b, C) of attacked samples."""
    model, limits = models
    said = task.logits(model, Batch(x, x), training=False).argmax(-1)
    moved = method.attacked(model, Batch(x, said), task, limits)
    predicted: Tensor = task.predictions([model], moved)
    return predicted
