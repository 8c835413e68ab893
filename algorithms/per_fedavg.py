"""Per-FedAvg: an initial model that is good after one gradient step of each client."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import Aggregation, Averaging, setting
from algorithms.parts.mixture import parameters
from algorithms.parts.slopes import buffers, check_second_derivative, slope
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import loss
from rayfl.params import Tree, add_scaled, copy, map_leaves
from rayfl.tasks.base import Batch, Predictor, Task


class PerFedAvg(Averaging):
    """Per-FedAvg: learns an initial model that is good after one gradient step of each client.

    The server minimises the mean of F_k(w - alpha grad f_k(w)). A local step goes from x along the gradient of that,
    on parts D, D' and D'' of its mini-batch:

        v = grad f(x - alpha grad f(x; D); D')
        fo:    x <- x - beta v
        hf:    x <- x - beta (v - alpha (grad f(x + delta v; D'') - grad f(x - delta v; D'')) / (2 delta))
        exact: x <- x - beta (v - alpha Hess f(x; D) v)

    with beta the learning rate of the training section. ``fo`` leaves the Hessian out, ``hf`` takes its product with v
    from two more gradients, ``exact`` differentiates through the inner step. The mini-batch of the training section is
    cut into two parts, for ``hf`` into three; one with too few samples is not cut, every part is all of it.

    Server: model w. Client: nothing. Down: w. Up: x_k (and n_k, where it is the weight). Evaluated: w (``global``) and
    w after ``adapt_steps`` steps of gradient descent with rate alpha on the client's training samples
    (``personalized``), also for clients never sampled.

    Running statistics are recorded by the pass at x - alpha grad f(x; D) alone.

    References:
        Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
        Meta-Learning Approach, NeurIPS 2020, Algorithm 1 and its variants FO and HF.
    """

    name: Literal["per_fedavg"] = "per_fedavg"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Fallah et al., NeurIPS 2020"
    newcomer: ClassVar[str] = "w, and w after the gradient steps"

    aggregation: Aggregation = setting(
        "uniform",
        "",
        "weights of the mean: uniform 1/|S| (paper); samples n_k / sum over the cohort; population n_k / sum over all "
        "clients, the rest staying on the old server model; tokens those that a language model learns, in "
        "place of samples",
    )
    version: Literal["fo", "hf", "exact"] = setting(
        "fo", "FO, HF", "without the Hessian, with a difference of gradients for it, or through the inner step"
    )
    alpha: float = setting(0.01, "alpha", "learning rate of the inner step and of the personalized model's", ge=0)
    delta: float = setting(
        1e-3,
        "delta",
        "hf: distance of the two gradients; the smaller, the more digits they lose",
        ge=1e-4,
        only={"version": ("hf",)},
        unless={"alpha": (0,)},
    )
    adapt_steps: int = setting(1, "", "steps from w to the personalized model", ge=0, unless={"alpha": (0,)})
    adapt_batch: Literal["full", "batch"] = setting(
        "full",
        "",
        "samples of such a step: all training samples of the client, or a mini-batch",
        unless={"adapt_steps": (0,), "alpha": (0,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.version == "exact" and (why := task.network.why_differentiable_once):
            raise ConfigError(f"algorithm.version=exact needs a second derivative; {why}, or algorithm.version=hf")
        if self.adapt_batch == "batch" and context.train.optimizer != "sgd":
            raise ConfigError(
                f"algorithm.adapt_batch=batch takes steps of SGD, but train.optimizer is {context.train.optimizer}: "
                "set train.optimizer=sgd, or algorithm.adapt_batch=full"
            )

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """A scalar whose gradient is that of the meta-objective, as ``version`` has it."""
        # normalization over a mini-batch is not defined for one sample
        first, second, *third = batch.parts(3 if self.version == "hf" else 2, 2 if task.network.batch_statistics else 1)
        here = parameters(model, task)
        if self.version == "exact":
            check_second_derivative(here, task)
        step = slope(model, here, first, task)
        adapted = add_scaled(here, step if self.version == "exact" else _constant(step), -self.alpha)
        value = task.loss({**model, **adapted}, second)
        for part in third:
            direction = _constant(slope(model, adapted, second, task))
            drawn, ends = task.network.draws, []
            for shift in (self.delta, -self.delta):
                task.network.draws = drawn  # other masks of dropout would differ by more than delta does
                ends.append(task.loss({**copy(buffers(model, task)), **add_scaled(here, direction, shift)}, part))
            value = value - self.alpha / (2 * self.delta) * (ends[0] - ends[1])
        return value

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = server["model"]
        return {"global": Predictor.of(model), "personalized": Predictor.of(await self.adapted(client, model))}

    async def adapted(self, client: Client, model: Tree) -> Tree:
        """The model after the client's gradient steps; the model itself for a client without training samples."""
        if not client.num_samples:
            return model
        if self.adapt_batch == "batch":
            return await client.train(
                model,
                loss(),
                lr=self.alpha,
                momentum=0.0,
                weight_decay=0.0,
                steps=self.adapt_steps,
                keep_optimizer=False,
                stream=".adapt",
            )
        for _ in range(self.adapt_steps):
            gradient = await client.gradient(model, loss())
            moved = add_scaled(parameters(model, client.task), parameters(gradient, client.task), -self.alpha)
            model = {**model, **moved}
        return model


def _constant(tree: Tree) -> Tree:
    return map_leaves(Tensor.detach, tree)
