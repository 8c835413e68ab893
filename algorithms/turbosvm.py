"""TurboSVM-FL: rows of the last layer are averaged where they are support vectors, and spread apart."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Clients, check_head, setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.masks import kept_count
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.robust import combined
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.models.base import Network
from rayfl.params import TINY, Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class TurboSVM(FineTuning):
    """TurboSVM-FL: the server fits a support vector machine to the clients' classifiers, and averages by it.

    A class embedding e_kc is a row of the last layer with its bias: that of class c in client k's trained model.
    The server takes the mean of the models, weighted by their samples. Then it fits a linear support vector machine
    that tells the classes of all e_kc, one class from another, with the penalty C_t = (T - t) / T in round t = 0, 1, ..
    of T, and puts in the place of each row

        e_c = sum_{k in V_c} n_k e_kc / sum_{k in V_c} n_k

    where V_c are the clients whose e_kc is a support vector; the fewer rounds are left, the more there are. A class
    without one keeps its mean. Last, one step of Adam, which goes on from round to round, spreads the rows:

        sum_{a < b} exp( -d_ab^2 / 2 ),    d_ab = h_ab . (e_a - e_b) / ||h_ab||

    with h_ab the normal of the hyperplane between two classes. Clients do not do more than in federated
    averaging. With ``finetune_epochs`` each client fine-tunes the final model.

    Server: model w, and the state of Adam. Client: nothing. Down: w. Up: w_k and n_k. Evaluated: w (``global``).

    References:
        Wang, Bodonhelyi, Bozkir, Kasneci: TurboSVM-FL: Boosting Federated Learning through SVM Aggregation for Lazy
        Clients, AAAI 2024 (arXiv 2401.12012).
    """

    name: Literal["turbosvm"] = "turbosvm"
    citation: ClassVar[str] = "Wang et al., AAAI 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "every class has a row of the last layer"}
    no_privacy: ClassVar[str] = "its server compares the last layers of single clients"
    own_rule: ClassVar[str] = "it averages last layers where they are support vectors"
    server_keeps: ClassVar[str] = "w, Adam's state"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of all means: samples n_k, or uniform"
    )
    penalty: float | None = setting(
        None, "C", "penalty of the support vector machine in all rounds; null: (T - t) / T", gt=0
    )
    class_share: float = setting(
        1.0, "", "share of the classes, drawn in each round, whose rows are changed; 2 classes at least", gt=0, le=1
    )
    selective: bool = setting(True, "", "average support vectors alone; false: all embeddings")
    spread_lr: float = setting(0.01, "eta_s", "learning rate of the step that spreads rows; 0: none", ge=0, kept=True)

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("TurboSVM-FL", task.network, bias=True)
        super().check(task, context)

    def course(self, round: int, rounds: int) -> Any:
        return self._penalty(round, rounds) if self.penalty is None else None

    def _penalty(self, round: int, rounds: int) -> float:
        """C_t."""
        return self.penalty or max(rounds - round, 1) / rounds

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, network, context = server["model"], clients.task.network, clients.context
        messages = clients.each(self.local_update, cohort, {"model": model})
        models = [message.tree for message in messages.values()]
        sizes = torch.tensor([float(message.weight) for message in messages.values()], dtype=torch.float64)
        mean = {**model, **combined(models, {name: model[name] for name in models[0]}, sizes / sizes.sum())}
        generator = context.streams.generator("classes", context.round)
        classes = drawn_classes(network.head_shape[0], self.class_share, generator)
        rows = torch.stack([embeddings(network, one).double() for one in models])
        penalty = self._penalty(context.round, context.rounds)
        chosen, normals = support_vectors(rows[:, classes].numpy(), penalty)
        found = embeddings(network, mean)
        if self.selective:
            own = mean_of_chosen(rows[:, classes], torch.from_numpy(chosen) * sizes[:, None], found[classes])
            found = found.index_copy(0, classes, own)
        if not self.spread_lr:
            return {"model": {**mean, **split(network, found)}}
        given = {"rows": found, "normals": torch.from_numpy(normals).to(found), "classes": classes}
        adam = {"adam": server["adam"]} if "adam" in server else {}
        spread = clients.on_server(self.spread, {**given, **adam})
        return {"model": {**mean, **split(network, spread["rows"])}, "adam": spread["adam"]}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return Weighted(trained, 1 if self.aggregation == "uniform" else client.num_samples)

    async def spread(
        self, server: Server, rows: Tensor, normals: Tensor, classes: Tensor, adam: Tree | None = None
    ) -> Tree:
        """The rows after a step that spreads them, and Adam's state.

        Args:
            server: the server.
            rows: e_c, shape (C, d + 1).
            normals: h_ab of the pairs a < b of the chosen classes, shape (pairs, d + 1).
            classes: the chosen ones, ascending.
            adam: its state after earlier rounds.
        """
        if adam is not None:
            server.state["optimizer"] = adam
        trained = await server.train(
            {"rows": rows},
            self.nearness,
            frozen={"normals": normals, "classes": classes},
            steps=1,
            settings=TrainConfig(optimizer="adam", lr=self.spread_lr, eps=1e-5),
            keep_optimizer=True,
            stream=".spread",
        )
        return {"rows": trained["rows"], "adam": server.state["optimizer"]}

    def nearness(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """How near rows are to each other, along the normals of the hyperplanes between their classes."""
        rows = trained["rows"][frozen["classes"]]
        first, second = torch.triu_indices(len(rows), len(rows), 1)
        normals = frozen["normals"]
        apart = (normals * (rows[first] - rows[second])).sum(-1) / normals.norm(dim=-1).clamp(min=TINY)
        found: Tensor = (-apart.square() / 2).exp().sum()
        return found


def mean_of_chosen(rows: Tensor, weights: Tensor, means: Tensor) -> Tensor:
    """e_c, in the type of the means, shape (C, d + 1).

    Args:
        rows: e_kc, float64, shape (m, C, d + 1).
        weights: n_k of support vectors, else 0, shape (m, C).
        means: what classes without a support vector have, shape (C, d + 1).
    """
    total = weights.sum(0)[:, None]
    sums = torch.einsum("kc,kcd->cd", weights, rows)
    return torch.where(total > 0, sums / torch.where(total > 0, total, 1), means.double()).to(means)


def drawn_classes(count: int, share: float, generator: np.random.Generator) -> Tensor:
    """The classes whose rows are changed, ascending, int64.

    Args:
        count: C.
        share: of them.
        generator: draws.
    """
    wanted = min(max(kept_count(share, count), 2), count)
    return torch.from_numpy(np.sort(generator.choice(count, wanted, replace=False)))


def embeddings(network: Network, model: Tree) -> Tensor:
    """e_c of a model: the rows of the last layer, with their biases if there are any, shape (C, d + 1) or (C, d)."""
    return torch.cat([model[name].reshape(network.head_shape[0], -1) for name in _ordered(network)], 1)


def split(network: Network, rows: Tensor) -> Tree:
    """The tensors of the last layer whose :func:`embeddings` are given."""
    width = network.head_shape[1]
    parts = {name: rows[:, :width] if name == network.head_weight else rows[:, width] for name in _ordered(network)}
    return {name: leaf.contiguous() for name, leaf in parts.items()}


def _ordered(network: Network) -> list[str]:
    return sorted(network.head_names, key=lambda name: name != network.head_weight)


def support_vectors(rows: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Fits the machine; returns which embeddings are support vectors, bool (m, C), and h_ab for a < b, (pairs, d + 1).

    Args:
        rows: e_kc, float64, shape (m, C, d + 1).
        penalty: C_t.
    """
    # a second of imports that only this needs
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.svm import SVC

    clients, classes, width = rows.shape
    machine = SVC(kernel="linear", C=penalty, max_iter=50, tol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        machine.fit(rows.reshape(-1, width), np.tile(np.arange(classes), clients))
    chosen = np.zeros(clients * classes, dtype=bool)
    chosen[machine.support_] = True
    return chosen.reshape(clients, classes), np.array(machine.coef_)
