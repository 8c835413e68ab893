"""FedEraser: what clients that leave have done is taken back by training the kept changes of the others once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.kept_models import largest_model
from algorithms.parts.means import mean_of
from rayfl.aggregation.exact_sum import Weighted
from rayfl.data.partitions.joining import ClientStages
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree, map_leaves
from rayfl.tasks.base import Task

_AGAIN = {"unlearning": ("calibrate",)}


class FedEraser(FineTuned):
    """FedEraser: federated averaging whose model forgets the clients that leave.

    For clients that leave in groups (``stages.name=clients stages.course=leave``). Every Delta t rounds the server
    keeps the change U_k = x_k - w of each client's model. When clients leave, it goes back to the initial model v and
    passes once more through the rounds that it has kept, without them. In the first of these it takes the others'
    changes as they are. In each later one the clients of that round that are still there train v to y_k, for a part r
    of the local epochs, and what they change has the length of what they changed then, tensor by tensor:

        V_k = |U_k| (y_k - v) / |y_k - v|,    v <- v + sum_k q_k V_k

    The last v is the server's model, and the V_k are kept in place of the U_k. A tensor that does not change keeps
    still. Buffers (running statistics) are averaged. ``unlearning: retrain`` begins with the initial model again, and
    keeps no changes. Nothing is forgotten as long as none of those who leave has taken part. With ``finetune_epochs``
    each client fine-tunes the final model.

    Server: model w, the kept U_k, and who has taken part and has left. Client: nothing. Down: w, and v in each kept
    round. Up: x_k and n_k, and y_k. Evaluated: w (``global``), also for those who have left.

    References:
        Liu, Ma, Yang, Wang, Liu: FedEraser: Enabling Efficient Client-Level Data Removal from Federated Learning
        Models, IWQoS 2021.
    """

    name: Literal["federaser"] = "federaser"
    citation: ClassVar[str] = "Liu et al., IWQoS 2021"
    no_privacy: ClassVar[str] = "its server keeps each client's changes, and uses them when others leave"
    server_keeps: ClassVar[str] = "w, U_k"
    kept_on_server: ClassVar[str] = "the changes of each client in the rounds that are kept"

    unlearning: Literal["calibrate", "retrain"] = setting(
        "calibrate",
        "",
        "what happens when clients leave: kept changes are trained once more, or training begins again",
        kept=True,
    )
    keep_every: int = setting(2, "Delta t", "changes are kept every this many rounds", ge=1, only=_AGAIN, kept=True)
    calibration_share: float = setting(
        0.5, "r", "share of the local epochs that clients train once more, rounded up", gt=0, le=1, only=_AGAIN
    )
    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of the mean: samples n_k / sum over the cohort; uniform 1/|S|"
    )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if isinstance(context.stages, ClientStages) and context.stages.course == "leave":
            return ()
        return ("nobody leaves (stages.name=clients, stages.course=leave), so that this is federated averaging",)

    def kept_bytes(self, task: Task, context: RoundContext, samples: int) -> int:
        """See :class:`KeptModels`."""
        if self.unlearning == "retrain":
            return 0
        return -(-context.rounds // self.keep_every) * context.cohort_size * largest_model(task)

    def init(self, task: Task, context: RoundContext) -> Tree:
        nobody = torch.zeros(context.num_clients, dtype=torch.bool)
        return {**super().init(task, context), "kept": {}, "there": nobody, "left": nobody.clone()}

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        context, left = clients.context, self.left(clients)
        model, kept, new = server["model"], server["kept"], left & ~server["left"]
        if bool((new & server["there"]).any()):
            model, kept = self.init(clients.task, context)["model"], {}
            if self.unlearning == "calibrate":
                model, kept = self.forgotten(model, server["kept"], left, clients)
        there = server["there"].clone()
        there[list(cohort)] = True
        changed = {"there": there, "left": left}
        if self.unlearning == "retrain" or context.round % self.keep_every:
            return {**changed, "model": clients.mean(self.local_update, cohort, {"model": model}), "kept": kept}
        messages = clients.each(self.local_update, cohort, {"model": model})
        own = {
            str(k): {"change": self.change(message.tree, model, clients.task), "weight": message.weight}
            for k, message in messages.items()
        }
        mean = mean_of(messages.values())
        return {**changed, "model": mean, "kept": {**kept, str(context.round): own}}

    def left(self, clients: Clients) -> Tensor:
        """Returns who has left by the round, bool of shape (K,)."""
        stages, count = clients.context.stages, clients.context.num_clients
        if not (isinstance(stages, ClientStages) and stages.course == "leave"):
            return torch.zeros(count, dtype=torch.bool)
        return torch.from_numpy(clients.num_samples(range(count)) == 0)

    def forgotten(self, model: Tree, kept: Tree, left: Tensor, clients: Clients) -> tuple[Tree, Tree]:
        """Passes through the kept rounds without those who have left.

        Args:
            model: the initial one.
            kept: by round and client, ``change`` and ``weight``.
            left: who has left, bool of shape (K,).
            clients: those who are there train.

        Returns:
            The model, and what is kept in place of ``kept``.
        """
        task, renewed = clients.task, dict[str, Tree]()
        for round in sorted(map(int, kept)):
            own = {int(k): entry for k, entry in kept[str(round)].items() if not left[int(k)]}
            if not own:
                continue
            changes: Mapping[int, Tree] = {k: entry["change"] for k, entry in own.items()}
            if renewed:
                messages = clients.each(self.calibrate, sorted(own), {"model": model, "number": round})
                found = {k: self.change(message.tree, model, task) for k, message in messages.items()}
                changes = {k: self.lengthened(found[k], own[k]["change"], task) for k in found}
            mean = mean_of(Weighted(changes[k], own[k]["weight"]) for k in sorted(changes))
            model = self.moved(model, mean, task)
            renewed[str(round)] = {str(k): {"change": changes[k], "weight": own[k]["weight"]} for k in changes}
        return model, renewed

    async def calibrate(self, client: Client, model: Tree, number: int) -> Weighted:
        """Trains the received model for a part of the local epochs, as in one of the kept rounds."""
        epochs = ceil(client.context.train.local_epochs * Fraction(str(self.calibration_share)))
        trained = await client.train(model, self.objective, epochs=epochs, stream=f".calibrate.{number}")
        return self.weighted(client, trained)

    def change(self, trained: Tree, model: Tree, task: Task) -> Tree:
        """Returns what of a model has changed; of its buffers what they are."""
        names = set(task.network.parameter_names)
        return {name: leaf - model[name] if name in names else leaf for name, leaf in trained.items()}

    def lengthened(self, change: Tree, old: Tree, task: Task) -> Tree:
        """Returns a change whose tensors have the lengths of those of an old one."""

        def scaled(new: Tensor, before: Tensor) -> Tensor:
            length = new.double().norm()
            return (new.double() * (before.double().norm() / length)).to(new.dtype) if length > 0 else new

        names = task.network.parameter_names
        return {**change, **map_leaves(scaled, {n: change[n] for n in names}, {n: old[n] for n in names})}

    def moved(self, model: Tree, change: Tree, task: Task) -> Tree:
        """Returns the model after a mean change."""
        names = set(task.network.parameter_names)
        return {name: model[name] + leaf if name in names else leaf for name, leaf in change.items()}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}
