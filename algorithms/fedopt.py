"""FedOpt: federated averaging whose server takes the clients' mean change for a gradient."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.mixture import parameters
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree, add_scaled, interpolate, map_leaves, subtract, zeros_like
from rayfl.tasks.base import Task


class FedOpt(FineTuned):
    """Federated averaging whose server steps with an optimizer along the clients' mean change.

    Of the mean x of the clients' models the server takes Delta = x - w and steps along it. It does so with the
    parameters: buffers (running statistics) are those of x.
    """

    personalized: ClassVar[str] = "global"

    server_lr: float = setting(0.1, "eta_g", "learning rate of the server", gt=0)

    @abstractmethod
    def moments(self, zeros: Tree) -> Tree:
        """Returns what the optimizer starts with, from zeros in the place of the parameters."""

    @abstractmethod
    def stepped(self, model: Tree, mean: Tree, moments: Tree) -> tuple[Tree, Tree]:
        """The server's new parameters and moments.

        Args:
            model: w.
            mean: x.
            moments: what the optimizer keeps.
        """

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        return {**server, "moments": self.moments(zeros_like(parameters(server["model"], task)))}

    def summed(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        mean = super().round(server, cohort, clients)["model"]
        moving = server["moments"]["first"]
        model, target = ({name: tree[name] for name in moving} for tree in (server["model"], mean))
        stepped, moments = self.stepped(model, target, server["moments"])
        return {"model": {**mean, **stepped}, "moments": moments}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}


class FedAvgM(FedOpt):
    """FedAvgM: federated averaging with momentum at the server.

    With Delta = sum_k q_k (x_k - w), the mean change of the cohort's models,

        u <- beta u + Delta
        w <- w + eta_g u        (with ``nesterov`` w + eta_g (Delta + beta u))

    so that beta = 0 and eta_g = 1 is federated averaging. Buffers (running statistics) are averaged. With
    ``finetune_epochs`` each client fine-tunes the final model.

    Server: model w and momentum u, zero at first. Client: nothing. Down: w. Up: x_k and n_k.

    References:
        Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification,
        arXiv:1909.06335, 2019; Reddi et al., ICLR 2021, Algorithm 1 with SGD and momentum.
    """

    name: Literal["fedavgm"] = "fedavgm"
    citation: ClassVar[str] = "Hsu et al., arXiv 2019"
    no_example_privacy: ClassVar[str] = ""
    no_gradient: ClassVar[str] = ""
    server_keeps: ClassVar[str] = "w, u"

    server_lr: float = setting(1.0, "eta_g", "learning rate of the server", gt=0)
    server_momentum: float = setting(0.9, "beta", "momentum of the server", ge=0, lt=1)
    nesterov: bool = setting(
        False, "", "Nesterov's momentum in place of the heavy ball", unless={"server_momentum": (0,)}
    )

    def moments(self, zeros: Tree) -> Tree:
        return {"first": zeros}

    def stepped(self, model: Tree, mean: Tree, moments: Tree) -> tuple[Tree, Tree]:
        change, beta = subtract(mean, model), self.server_momentum
        moved = interpolate(model, mean, self.server_lr)
        first = add_scaled(change, moments["first"], beta)
        pushes = first if self.nesterov else moments["first"]
        # without momentum nothing is added, not even zeros: the mean is then taken to the bit
        return (add_scaled(moved, pushes, self.server_lr * beta) if beta else moved), {"first": first}


class Adaptive(FedOpt):
    """FedOpt with a step size of each parameter's own."""

    first_decay: float = setting(0.9, "beta_1", "decay of the mean change m", ge=0, lt=1)
    adaptivity: float = setting(1e-3, "tau", "added to the root of v; the larger, the less adaptive", gt=0)
    initial_accumulator: float = setting(0.0, "v_0", "v before the first round", ge=0, kept=True)

    def moments(self, zeros: Tree) -> Tree:
        start = map_leaves(lambda leaf: leaf + self.initial_accumulator, zeros)
        return {"first": zeros, "second": start, "steps": 0}

    @abstractmethod
    def second(self, v: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """The new v of a parameter from the old one and Delta^2."""

    def correction(self, steps: int) -> float:
        """Returns what the learning rate is multiplied by in the server's step number ``steps``, 1 being the first."""
        return 1.0

    def stepped(self, model: Tree, mean: Tree, moments: Tree) -> tuple[Tree, Tree]:
        change, steps = subtract(mean, model), int(moments["steps"]) + 1
        first = interpolate(change, moments["first"], self.first_decay)
        second = map_leaves(lambda v, d: self.second(v, d.square()), moments["second"], change)
        rate = self.server_lr * self.correction(steps)
        moved = map_leaves(lambda w, m, v: w + rate * m / (v.sqrt() + self.adaptivity), model, first, second)
        return moved, {"first": first, "second": second, "steps": steps}


class FedAdagrad(Adaptive):
    """FedAdagrad: federated averaging whose server steps with Adagrad.

    With Delta = sum_k q_k (x_k - w), the mean change of the cohort's models, for every parameter

        m <- beta_1 m + (1 - beta_1) Delta
        v <- v + Delta^2
        w <- w + eta_g m / (sqrt(v) + tau)

    Buffers (running statistics) are averaged. With ``finetune_epochs`` each client fine-tunes the final model.

    Server: model w, m and v. Client: nothing. Down: w. Up: x_k and n_k.

    References:
        Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021,
        Algorithm 2.
    """

    name: Literal["fedadagrad"] = "fedadagrad"
    citation: ClassVar[str] = "Reddi et al., ICLR 2021"
    no_example_privacy: ClassVar[str] = ""
    no_gradient: ClassVar[str] = ""
    server_keeps: ClassVar[str] = "w, m, v"

    first_decay: float = setting(
        0.0, "beta_1", "decay of the mean change m; the paper's experiments have 0", ge=0, lt=1
    )

    def second(self, v: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        return v + squares


class Decaying(Adaptive):
    """FedOpt whose second moment forgets."""

    second_decay: float = setting(0.99, "beta_2", "decay of v", ge=0, lt=1)
    bias_correction: bool = setting(
        False,
        "",
        "multiply the learning rate by sqrt(1 - beta_2^t) / (1 - beta_1^t) in step t, as Google's runs do; the paper "
        "does not",
    )

    def correction(self, steps: int) -> float:
        if not self.bias_correction:
            return 1.0
        return math.sqrt(1 - self.second_decay**steps) / (1 - self.first_decay**steps)


class FedYogi(Decaying):
    """FedYogi: federated averaging whose server steps with Yogi.

    With Delta = sum_k q_k (x_k - w), the mean change of the cohort's models, for every parameter

        m <- beta_1 m + (1 - beta_1) Delta
        v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)
        w <- w + eta_g m / (sqrt(v) + tau)

    so that v changes by (1 - beta_2) Delta^2 at most, and never falls quickly. Buffers (running statistics) are
    averaged. With ``finetune_epochs`` each client fine-tunes the final model.

    Server: model w, m and v. Client: nothing. Down: w. Up: x_k and n_k.

    References:
        Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021,
        Algorithm 2.
    """

    name: Literal["fedyogi"] = "fedyogi"
    citation: ClassVar[str] = "Reddi et al., ICLR 2021"
    no_example_privacy: ClassVar[str] = ""
    no_gradient: ClassVar[str] = ""
    server_keeps: ClassVar[str] = "w, m, v"

    def second(self, v: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        return v - (1 - self.second_decay) * squares * torch.sign(v - squares)


class FedAdam(Decaying):
    """FedAdam: federated averaging whose server steps with Adam.

    With Delta = sum_k q_k (x_k - w), the mean change of the cohort's models, for every parameter

        m <- beta_1 m + (1 - beta_1) Delta
        v <- beta_2 v + (1 - beta_2) Delta^2
        w <- w + eta_g m / (sqrt(v) + tau)

    without correction of the two moments' bias. Buffers (running statistics) are averaged. With ``finetune_epochs``
    each client fine-tunes the final model.

    Server: model w, m and v. Client: nothing. Down: w. Up: x_k and n_k.

    References:
        Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021,
        Algorithm 2.
    """

    name: Literal["fedadam"] = "fedadam"
    citation: ClassVar[str] = "Reddi et al., ICLR 2021"
    no_example_privacy: ClassVar[str] = ""
    no_gradient: ClassVar[str] = ""
    server_keeps: ClassVar[str] = "w, m, v"

    def second(self, v: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        return self.second_decay * v + (1 - self.second_decay) * squares
