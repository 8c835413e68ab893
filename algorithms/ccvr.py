"""CCVR: federated averaging, and a last layer that the server retrains on features drawn from Gaussians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Clients, check_head, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.moments import class_moments, virtual_features
from algorithms.parts.partial import part
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.params import Tree, map_leaves
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_IDLE: Mapping[str, tuple[Any, ...]] = {"virtual_features": (0,)}


class CCVR(FineTuned):
    """CCVR (calibration with virtual representations): after averaging, the server retrains the last layer.

    Rounds are those of federated averaging. After the last one (and every ``calibrate_every`` rounds) all K clients get
    the new w. With z in R^d the input of the last linear layer in evaluation mode, client k sends for each class c the
    number N_ck of its samples, and the sums S_ck of z and P_ck of z z^T over these. The server adds them up over k:

        mu_c = S_c / N_c,    Sigma_c = (P_c - N_c mu_c mu_c^T) / (N_c - 1)

    The paper's clients send the mean mu_ck and the covariance Sigma_ck, of which its eqs. 3 and 4 make the same:

        mu_c = sum_k N_ck/N_c mu_ck
        Sigma_c = sum_k (N_ck - 1)/(N_c - 1) Sigma_ck + sum_k N_ck/(N_c - 1) mu_ck mu_ck^T - N_c/(N_c - 1) mu_c mu_c^T

    The server draws M_c features of each class from N(mu_c, Sigma_c), and takes epochs of plain SGD (``server_epochs``)
    on their cross-entropy, over the last layer W alone and from that of w. Training goes on from w, never from the
    calibrated W.

    Server: w and the calibrated W. Client: nothing. Down: w; to calibrate, the new w to all. Up: w_k and n_k; to
    calibrate N_ck, S_ck and P_ck of all. Evaluated: w (``global``), and after a round that ends with a calibration w
    with the calibrated W (``calibrated``); with ``finetune_epochs`` each client fine-tunes the latter. Without virtual
    features (M_c = 0) it is federated averaging, and both are the same.

    A class without samples gets no features. One with a single sample has Sigma_c = 0, where eq. 4 divides by 0.

    References:
        Luo, Chen, Hu, Zhang, Liang, Feng: No Fear of Heterogeneity: Classifier Calibration for Federated Learning with
        Non-IID Data, NeurIPS 2021, Algorithm 1 and eqs. 3-4.
    """

    name: Literal["ccvr"] = "ccvr"
    personalized: ClassVar[str] = "calibrated"
    personalized_later: ClassVar[bool] = True
    citation: ClassVar[str] = "Luo et al., NeurIPS 2021"
    no_privacy: ClassVar[str] = "its clients send sums of features and of their products, too, which are no model"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "features have a Gaussian for each class"}
    server_keeps: ClassVar[str] = "w, calibrated W"
    newcomer: ClassVar[str] = "w, and the calibrated W; fine-tuned after the last round, if finetune_epochs is set"

    virtual_features: int = setting(
        500, "M_c", "features that are drawn of each class; 0: no calibration, federated averaging", ge=0
    )
    calibrate_every: int | None = setting(
        None,
        "",
        "rounds from one calibration to the next, beside that after the last round; null: only after the last (paper)",
        ge=1,
    )
    server_epochs: int = setting(10, "", "passes of the server over the drawn features", ge=1, unless=_IDLE)
    server_lr: float | None = setting(
        None, "eta_W", "learning rate of the server; null: the clients' of the round", ge=0, unless=_IDLE
    )
    server_batch_size: int | None = setting(
        64, "", "drawn features in a mini-batch of the server; null: all", ge=1, unless=_IDLE
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        network = task.network
        check_head("CCVR", network, bias=True)
        if not network.body_names and not network.fixed_parameters:
            raise ConfigError(
                "CCVR retrains the last layer on features, but this model has no layer before it, so that its features "
                "are the samples themselves: choose a deeper model, or algorithm=fedavg"
            )
        if not context.smallest_cohort and not context.cohort(context.rounds - 1):
            raise ConfigError(
                "CCVR calibrates after the last round, and with train.sampling=poisson and this seed nobody takes part "
                f"in round {context.rounds}: change train.rounds or the seed, or set train.sampling=fixed"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        every, rounds = self.calibrate_every, context.rounds
        if every is None or every < rounds:
            return ()
        return (f"algorithm.calibrate_every is {every}, and the run has {rounds} rounds: only the last calibrates",)

    def course(self, round: int, rounds: int) -> Any:
        """Whether the round ends with a calibration, and so sends more."""
        return self.calibrates(round, rounds)

    def calibrates(self, round: int, rounds: int) -> bool:
        """Returns whether round t (0-indexed) of T ends with a calibration."""
        every = self.calibrate_every
        return round == rounds - 1 or (every is not None and (round + 1) % every == 0)

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        changed = super().round(server, cohort, clients)
        context = clients.context
        # a calibrated layer of an earlier round does not fit the new body
        head = self.calibrated(changed["model"], clients) if self.calibrates(context.round, context.rounds) else {}
        return {**changed, "calibrated": head}

    def calibrated(self, model: Tree, clients: Clients) -> Tree:
        """The last layer after the calibration."""
        head = part(model, clients.task.network.head_names)
        if not self.virtual_features:
            return head
        everyone = range(clients.context.num_clients)
        mean = clients.mean(self.moments, everyone, broadcast={"model": model}, required=True)
        totals = map_leaves(lambda leaf: leaf * len(everyone), mean)
        totals["counts"] = totals["counts"].round()
        return clients.on_server(self.calibrate, {"head": head, "moments": totals})

    async def moments(self, client: Client, model: Tree) -> Weighted:
        """N_ck, S_ck and P_ck of the client's training samples."""
        features = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(model, x)[0])
        return Weighted(class_moments(features, client.examples().y, client.task.network.head_shape[0]))

    async def calibrate(self, server: Server, head: Tree, moments: Tree) -> Tree:
        """The last layer after the server's epochs on drawn features.

        Args:
            server: the server.
            head: W, by the names in the model.
            moments: N_c, S_c and P_c.
        """
        generator = server.context.streams.generator("virtual", server.context.round)
        features, labels = virtual_features(moments, self.virtual_features, generator)
        return await server.train(
            head,
            self.head_loss,
            examples=Examples(features.to(head[server.task.network.head_weight]), labels),
            epochs=self.server_epochs,
            settings=TrainConfig(
                batch_size=self.server_batch_size, lr=server.lr if self.server_lr is None else self.server_lr
            ),
            stream=".calibration",
        )

    def head_loss(self, head: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The loss of the last layer on a mini-batch of its inputs."""
        weight = task.network.head_weight
        return task.loss_of(F.linear(batch.x, head[weight], head.get(weight.removesuffix("weight") + "bias")), batch)

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        rows = {"global": Predictor.of(server["model"])}
        if head := server.get("calibrated"):
            rows["calibrated"] = Predictor.of({**server["model"], **head})
        return rows

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        final = {**server["model"], **server.get("calibrated", {})}
        return await super().predictors(client, {"model": final}) | self.global_predictors(server, client.task)
