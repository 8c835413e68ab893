"""SCAFFOLD: control variates that correct the drift of local training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from algorithms.base import Algorithm, Clients, check_sgd, setting
from algorithms.parts.mixture import parameters
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, inner_product, loss
from rayfl.params import Tree, add_scaled, interpolate, map_leaves, subtract, zeros_like
from rayfl.tasks.base import Predictor, Task


def sum_of_step_weights(steps: int, momentum: float) -> float:
    """Returns how much gradient ``steps`` steps of SGD apply in total, in units of the learning rate.

    The gradient of step j of n is applied 1 + m + ... + m^(n - j) times, so the weights sum to

        sum_{i=1..n} (1 - m^i) / (1 - m) = (n - m (1 - m^n) / (1 - m)) / (1 - m),

    which is n without momentum.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


class Scaffold(Algorithm):
    """SCAFFOLD: every local gradient is corrected by c - c_k, the drift of client k from everybody's mean.

    A local step is y <- y - eta (g(y) - c_k + c). Afterwards the client renews c_k: with ``option2`` by the mean
    gradient of its own steps, read off the distance it moved, c_k - c + (w - y) / (n eta) for n steps of SGD; with
    ``option1`` by the full-batch gradient at w. Weight decay counts as part of the gradient, unless it is AdamW's.
    The server takes w + eta_g mean(y_k - w) and c + |S|/K mean(c_k^+ - c_k), both means uniform. Control variates
    exist for parameters; buffers (running statistics) are averaged.

    Server: model w and control variate c. Client: control variate c_k, zero at first. Down: w and c. Up: y_k (which
    says as much as y_k - w and makes the mean of y exact where eta_g = 1) and c_k^+ - c_k. A client that takes no
    step of positive length keeps its c_k.

    The original has no momentum. With ``momentum_on_corrected`` the momentum of the training section is applied to
    the corrected gradient, and ``option2`` divides by eta times :func:`sum_of_step_weights` instead of n eta: c_k
    then is the mean of the client's gradients weighted by how often momentum applied them.

    Public code deviates: the official SuPerFed code never applies the correction (its row is FedAvg), the official
    FedPHP code drops the |S|/K, so that c is no longer the mean of all c_k. The paper is followed.

    References:
        Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated
        Learning, ICML 2020, Algorithm 1 and eqs. 3-5.
    """

    name: Literal["scaffold"] = "scaffold"
    citation: ClassVar[str] = "Karimireddy et al., ICML 2020"
    no_example_privacy: ClassVar[str] = ""
    no_privacy: ClassVar[str] = (
        "its clients send changes of control variates, too, and its server counts the clients of a round"
    )
    client_keeps: ClassVar[str] = "c_k"
    server_keeps: ClassVar[str] = "w, c"
    newcomer: ClassVar[str] = "w"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "there is no mean control variate of a parameter that is never sent; statistics is possible"
    }

    server_lr: float = setting(1.0, "eta_g", "step of the server towards the mean of the clients' models", gt=0)
    control_update: Literal["option2", "option1"] = setting(
        "option2",
        "",
        "new c_k: the mean gradient of the local steps (option2), or the full-batch gradient at w (option1)",
    )
    momentum_on_corrected: bool = setting(
        False, "", "allow train.momentum > 0 and apply it to the corrected gradient; the original has no momentum"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        if self.control_update == "option2":
            reason = (
                "it reads c_k off the distance moved, which is a mean of gradients after other steps alone: set "
                "algorithm.control_update=option1 for that"
            )
            check_sgd("SCAFFOLD", context.train, reason, heavy_ball=True)
        if context.train.momentum > 0 and not self.momentum_on_corrected:
            raise ConfigError(
                f"SCAFFOLD has no momentum, but train.momentum is {context.train.momentum}: set train.momentum=0, or "
                "algorithm.momentum_on_corrected=true to apply it to the corrected gradient"
            )
        if context.train.momentum > 0 and context.train.persist_optimizer and self.control_update == "option2":
            raise ConfigError(
                "SCAFFOLD reads c_k off the distance moved, which is no mean of the gradients of this update where the "
                "buffers of the last one are kept: set train.persist_optimizer=false, or "
                "algorithm.control_update=option1"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.control_update == "option1" or context.train.max_grad_norm is None:
            return ()
        return (
            "c_k is read off the distance moved: where train.max_grad_norm shortens corrected gradients, it is no mean "
            "of the client's gradients (algorithm.control_update=option1 takes the gradient itself)",
        )

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        return {**server, "control": zeros_like(parameters(server["model"], task))}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, control = server["model"], server["control"]
        mean = clients.mean(self.local_update, cohort, broadcast={"model": model, "control": control})
        moved = interpolate({name: model[name] for name in control}, mean["model"], self.server_lr)
        share = len(cohort) / clients.context.num_clients
        return {"model": {**mean["model"], **moved}, "control": add_scaled(control, mean["control"], share)}

    async def local_update(self, client: Client, model: Tree, control: Tree) -> Weighted:
        own = client.state.get("control") or zeros_like(control)
        correction = subtract(control, own)
        trained = await client.train(model, self.objective, frozen={"correction": correction})
        client.publish(local=Predictor.of(trained))
        renewed = await self._renewed(client, model, trained, correction, own)
        client.state["control"] = renewed
        return Weighted({"model": trained, "control": subtract(renewed, own)})

    def why_no_example_privacy(self) -> str:
        of_gradient = "with algorithm.control_update=option1 its clients send a gradient of all samples without noise"
        return super().why_no_example_privacy() or (of_gradient if self.control_update == "option1" else "")

    @property
    def objective(self) -> Any:
        """CE + <c - c_k, y>, whose gradient is the corrected one."""
        return loss() + inner_product(TRAINED, "correction")

    async def _renewed(self, client: Client, received: Tree, trained: Tree, correction: Tree, own: Tree) -> Tree:
        """c_k^+; c_k itself where nothing was learned about the gradient."""
        train = client.context.train
        steps = client.num_steps()
        if steps == 0 or client.lr == 0:
            return own
        start = parameters(received, client.task)
        if self.control_update == "option1":
            gradient = await client.gradient(received, loss())
            coupled = 0.0 if train.rule.decoupled else train.weight_decay
            return add_scaled(parameters(gradient, client.task), start, coupled)
        scale = 1 / (client.lr * sum_of_step_weights(steps, train.momentum))
        moved = map_leaves(lambda leaf: leaf * scale, subtract(start, parameters(trained, client.task)))
        return subtract(moved, correction)
