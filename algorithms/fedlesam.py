"""FedLESAM: local steps take gradients uphill in a direction that clients read off the models they have received."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.mixture import parameters
from algorithms.parts.uphill import Moved, scaled_to
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, loss
from rayfl.params import Tree, copy, subtract
from rayfl.tasks.base import Predictor, Task


class FedLESAM(FineTuned):
    """FedLESAM: sharpness-aware steps at the cost of plain ones, whose direction is that in which the model came.

    Client k keeps the model w_old that it received when it last took part. The way from there to the received w_t is
    downhill for all clients together, so the way back is taken for uphill. A local step on a mini-batch, whose mean
    loss is f, is

        e = rho (w_old - w_t) / ||w_old - w_t||,    w <- w - eta grad f(w + e)

    The norm is that of all parameters as one vector. e is the same in all steps of a round, so that a step has a
    single pass. In a client's first participation there is no w_old, and e is 0; it also is 0 where w_old is w_t. With
    ``previous=server`` w_old is the global model of the round before, which the server sends along, the same for all
    clients.

    Running statistics are recorded by the only pass, at w + e. Momentum, weight decay, clipping and the other
    optimizers are those of federated averaging; none of them enters e.

    Server: model w; with ``previous=server`` also the one before. Client: w_old. Down: w; with ``previous=server`` also
    the one before. Up: w_k and n_k. Evaluated: w (``global``). With ``finetune_epochs`` each client fine-tunes the
    final model by plain steps.

    References:
        Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang: Locally Estimated Global Perturbations are Better than Local
        Perturbations for Federated Sharpness-aware Minimization, ICML 2024, FedLESAM.
    """

    name: Literal["fedlesam"] = "fedlesam"
    citation: ClassVar[str] = "Fan et al., ICML 2024"
    client_keeps: ClassVar[str] = "w_old"

    radius: float = setting(0.05, "rho", "length of e; 0 is federated averaging", ge=0)
    previous: Literal["own", "server"] = setting(
        "own",
        "w_old",
        "the model that the client received when it last took part (paper), or the server's of the round before "
        "(official code)",
        unless={"radius": (0,)},
        kept=True,
    )
    first_previous: Literal["none", "initial"] = setting(
        "none",
        "",
        "w_old in a client's first participation: none, and e is 0, or the initial model",
        only={"previous": ("own",)},
        unless={"radius": (0,)},
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        return {**server, "previous": copy(server["model"])} if self._sends_previous else server

    def sent(self, server: Tree) -> Tree:
        if not self._sends_previous:
            return {"model": server["model"]}
        return {"model": server["model"], "previous": server.get("previous", server["model"])}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        rest = self.remainder(server["model"], cohort, clients)
        mean = clients.mean(self.local_update, cohort, broadcast=self.sent(server), also=rest)
        return {"model": mean, **({"previous": server["model"]} if self._sends_previous else {})}

    async def local_update(self, client: Client, model: Tree, previous: Tree | None = None) -> Weighted:
        """Trains the received model.

        Args:
            client: who trains.
            model: w_t.
            previous: the server's model of the round before; None where clients keep their own w_old.
        """
        trained = await client.train(model, self.objective, frozen=self._known(client, model, previous))
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def _known(self, client: Client, model: Tree, previous: Tree | None) -> Tree | None:
        """Returns e, and keeps the received parameters where they are the client's next w_old."""
        if self.radius == 0:
            return None
        received = parameters(model, client.task)
        if previous is None:
            previous = client.state.get("previous")
            client.state["previous"] = copy(received)
        if previous is None:
            previous = client.initial_model() if self.first_previous == "initial" else received
        return {"apart": scaled_to(self.radius, subtract(parameters(previous, client.task), received))}

    @property
    def objective(self) -> Sum:
        """f(w + e)."""
        return loss() if self.radius == 0 else loss(at=Moved("apart"))

    @property
    def _sends_previous(self) -> bool:
        return self.radius > 0 and self.previous == "server"

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}
