"""pFedBayes: every client learns a distribution of its own over models, near one that all clients share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Aggregation, Averaging, Clients, check_sgd, setting
from algorithms.parts.mixture import parameters
from algorithms.parts.requirements import clipped_together
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.gradients.counted_normals import drawn_keys, normals
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree, interpolate
from rayfl.tasks.base import Batch, Model, Predictor, Task


class PFedBayes(Averaging):
    """pFedBayes: Gaussian posteriors of the clients, and a Gaussian prior of all that the server averages.

    Client i has q_i and the server w, Gaussians with independent parameters of means mu and standard deviations
    sigma = log(1 + e^rho). Client i receives w as its localized w_i. On each mini-batch q_i takes R steps on

        Omega_i / n_i = mean_k CE(mu + sigma eps_k) + zeta/n_i KL(q_i || w_i),    eps_k ~ N(0, I),  k = 1..K

    and then w_i one step on zeta/n_i KL(q_i || w_i), with q_i as it is by then. The server takes

        (mu, rho) <- (1 - beta) (mu, rho) + beta mean_i (mu, rho) of w_i

    of the cohort, where the divergence is, summed over all parameters,

        KL(q || w) = sum log(sigma_w / sigma_q) + (sigma_q^2 + (mu_q - mu_w)^2) / (2 sigma_w^2) - 1/2

    At first mu of w is the initial model, and rho is ``initial_rho`` everywhere; q_i is w as the client first receives
    it, and goes on from round to round.

    Server: mu and rho of w. Client: q_i, never sent. Down: mu and rho of w. Up: those of w_i, and n_i. Evaluated: the
    model mu of w (``global``), and that of q_i, or ``evaluation_samples`` models drawn from q_i, which predict by their
    mean (``personalized``); after training also mu of w_i (``local``). A client never sampled has w for q_i. Only q_i
    ever sees data: running statistics are recorded by its drawn models and sent with w_i.

    References:
        Zhang, Li, Li, Guo, Shao: Personalized Federated Learning via Variational Bayesian Inference, ICML 2022,
        Algorithm 1.
    """

    name: Literal["pfedbayes"] = "pfedbayes"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Zhang et al., ICML 2022"
    client_keeps: ClassVar[str] = "q_k"
    server_keeps: ClassVar[str] = "mu, rho of w"
    newcomer: ClassVar[str] = "w, and q after a local update from it"
    no_privacy: ClassVar[str] = "its clients send a distribution over models, not the change of one model"
    no_private_norm: ClassVar[dict[str, str]] = {
        "all": "a client sends two tensors, mu and rho, for each scale and shift, of which one can be kept"
    }
    running_statistics: ClassVar[str] = "they are those of drawn models, and models of means are scored with them"

    aggregation: Aggregation = setting(
        "uniform",
        "q_k",
        "weights of the mean: uniform 1/|S| (paper); samples n_k / sum over the cohort; population n_k / sum over all "
        "clients, the rest staying on the old server model; tokens those that a language model learns, in "
        "place of samples",
    )
    kl_weight: float = setting(10.0, "zeta", "weight of the divergence, whose sum with n_i CE is Omega_i", gt=0)
    initial_rho: float = setting(-3.0, "rho_0", "rho of w at first: sigma = log(1 + e^rho)", kept=True)
    weight_samples: int = setting(1, "K", "models drawn for each step of q_i", ge=1)
    order: Literal["alternating", "together"] = setting(
        "alternating",
        "",
        "alternating: q_i, then w_i, by plain SGD (paper); together: one step of both at a time, in half the "
        "computation, by any optimizer",
    )
    personal_steps: int = setting(
        1, "R", "steps of q_i on each mini-batch (authors' code: 5)", ge=1, only={"order": ("alternating",)}
    )
    global_lr: float | None = setting(
        None, "eta_2", "learning rate of w_i, which follows the rounds as train.lr does; null: train.lr", gt=0
    )
    server_mix: float = setting(1.0, "beta", "step of the server towards the mean of the w_i", gt=0)
    evaluation_samples: int = setting(
        0, "", "models drawn from q_i for its predictions; 0: the one model mu, the mean of q_i", ge=0
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        train = context.train
        if train.weight_decay > 0:
            raise ConfigError(
                "pFedBayes shrinks nothing towards 0, least of all rho: the divergence from w is its regularization. "
                f"Set train.weight_decay=0, not {train.weight_decay}"
            )
        if self.order == "together":
            return
        alone = "q_i and w_i take turns, and whose turn it is not must not move; or set algorithm.order=together"
        check_sgd("pFedBayes", train, alone)
        if train.momentum > 0:
            raise ConfigError(f"pFedBayes needs train.momentum=0, not {train.momentum}: {alone}")

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return clipped_together(context, "q_i and w_i") if self.order == "together" else ()

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        rho = {name: torch.full_like(leaf, self.initial_rho) for name, leaf in parameters(model, task).items()}
        return {"model": model, "rho": rho}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        mean = clients.mean(self.learn, cohort, server, also=self.remainder(server, cohort, clients))
        task, beta = clients.task, self.server_mix
        mu = interpolate(parameters(server["model"], task), parameters(mean["model"], task), beta)
        return {"model": {**mean["model"], **mu}, "rho": interpolate(server["rho"], mean["rho"], beta)}

    async def learn(self, client: Client, model: Tree, rho: Tree) -> Weighted:
        """Trains q_i and w_i; returns w_i: its ``rho``, and as ``model`` mu with the running statistics of q_i."""
        factor = client.context.train.factor_in(client.round)
        received = distribution(parameters(model, client.task), rho)
        trained = await client.train(
            {"posterior": self.posterior(client, model, rho), "prior": received},
            self.objective,
            # a tensor: clients with different plain numbers are not stacked
            frozen={"share": next(iter(rho.values())).new_tensor(self.kl_weight / max(client.num_samples, 1))},
            draw=self.draws,
            repeats=self.turns,
            groups={} if self.global_lr is None else {"prior": ParameterGroup(lr=self.global_lr * factor)},
        )
        posterior, prior = trained["posterior"], trained["prior"]
        client.state["posterior"] = posterior
        local = {**posterior["mu"], **prior["mu"]}
        client.publish(local=Predictor.of(local), personalized=self.predictor(client, posterior))
        return self.weighted(client, {"model": local, "rho": prior["rho"]})

    def posterior(self, client: Client, model: Tree, rho: Tree) -> Tree:
        """q_i, which is w as received for a client that has not trained yet."""
        found: Tree = client.state.get("posterior") or distribution(model, rho)
        return found

    @property
    def turns(self) -> int:
        """Steps on each mini-batch."""
        return self.personal_steps + 1 if self.order == "alternating" else 1

    def draws(self, generator: np.random.Generator, steps: int) -> Tree:
        """Keys of the noise, and whether q_i and w_i move in a step, 1 or 0."""
        turn = np.arange(steps) % self.turns
        last = turn == self.turns - 1
        return {
            "keys": drawn_keys(generator, steps, self.weight_samples),
            "posterior": np.where(last, self.order == "together", 1.0),
            "prior": np.where(last, 1.0, 0.0),
        }

    def objective(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """Omega_i / n_i, whose gradient is that of q_i, of w_i, or of both."""
        names = task.network.parameter_names
        posterior, prior = trained["posterior"], trained["prior"]
        mu, rho = (moved(flat(posterior[part], names), draw["posterior"]) for part in ("mu", "rho"))
        known = (moved(flat(prior[part], names), draw["prior"]) for part in ("mu", "rho"))
        sigma = F.softplus(rho)
        losses = [
            task.loss(shaped(mu + sigma * normals(key, len(mu)), posterior["mu"], names), batch)
            for key in draw["keys"].unbind()
        ]
        share: Tensor = frozen["share"]
        return torch.stack(losses).mean() + share * divergence(mu, sigma, *known)

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        return super().update(trained["model"], received, task)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        posterior = self.posterior(client, server["model"], server["rho"])
        return {"global": Predictor.of(server["model"]), "personalized": self.predictor(client, posterior)}

    def predictor(self, client: Client, posterior: Tree) -> Predictor:
        """q_i's model of means, or models drawn from it, with the same noise in every round."""
        if not self.evaluation_samples:
            return Predictor.of(posterior["mu"])
        keys = drawn_keys(client.context.streams.generator("posterior", client=client.id), self.evaluation_samples)
        names = client.task.network.parameter_names
        return Predictor.of(*(partial(drawn_model, posterior, torch.from_numpy(key), names) for key in keys))

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.learn(client, server["model"], server["rho"])
        return {}


def distribution(mu: Tree, rho: Tree) -> Tree:
    """A Gaussian with independent parameters; ``mu`` may be a model with buffers."""
    return {"mu": mu, "rho": rho}


def divergence(mu: Tensor, sigma: Tensor, prior_mu: Tensor, prior_rho: Tensor) -> Tensor:
    """KL(q || w) of Gaussians with independent entries, in nats; a scalar.

    Args:
        mu: means of q, shape (d,).
        sigma: its standard deviations, shape (d,).
        prior_mu: means of w, shape (d,).
        prior_rho: of its standard deviations log(1 + e^rho), shape (d,).
    """
    prior_sigma = F.softplus(prior_rho)
    ratio, apart = sigma / prior_sigma, (mu - prior_mu) / prior_sigma
    return (ratio.square() + apart.square() - 1).sum() / 2 - ratio.log().sum()


def moved(values: Tensor, share: Tensor) -> Tensor:
    """The values, whose gradient is scaled by a share."""
    fixed = values.detach()
    return fixed + share * (values - fixed)


def flat(model: Model, names: Sequence[str]) -> Tensor:
    """The named tensors as one vector."""
    return torch.cat([model[name].flatten() for name in names])


def shaped(vector: Tensor, like: Model, names: Sequence[str]) -> Tree:
    """The model that :func:`flat` gives a vector of, with the other tensors of ``like``."""
    parts = torch.split(vector, [like[name].numel() for name in names])
    return {**like, **{name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}}


def drawn_model(posterior: Tree, key: Tensor, names: Sequence[str]) -> Tree:
    """A model drawn from a Gaussian, by a key of :func:`rayfl.engine.gradients.counted_normals.drawn_keys`."""
    mu, rho = flat(posterior["mu"], names), flat(posterior["rho"], names)
    return shaped(mu + F.softplus(rho) * normals(key.to(mu), len(mu)), posterior["mu"], names)
