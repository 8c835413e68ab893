"""pFedFDA: a shared body under a classifier of Gaussians, which every client adapts to its own features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, check_head, setting
from algorithms.parts.gaussians import Validation, classifier, estimated, folds, frequencies, interpolated
from algorithms.parts.partial import part
from algorithms.parts.replaced_heads import body
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.objectives import TRAINED, Sum, loss
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task, Trait

PRIOR_FLOOR = 1e-4
"""Added to a client's frequencies of classes, so that no class is impossible."""


class PFedFDA(Averaging):
    """pFedFDA: a shared body, and Gaussians of its features by class that are a classifier and are mixed by clients.

    With features f(x) in R^d, the input of the last linear layer, whose place the classifier takes, mu_y the mean of
    class y, Sigma a covariance common to the classes and pi_y priors, the posterior of the classes is

        p(y | x) = softmax_y(mu_y^T Sigma^-1 f(x) - 1/2 mu_y^T Sigma^-1 mu_y + log pi_y)

    A client takes for pi its frequencies of classes, trains the received body G_k with the received mu and Sigma, which
    stand still, by the cross-entropy of p, estimates mu^k and Sigma^k from all its samples at the trained body in
    evaluation mode, and sends G_k and

        mu_y <- beta_mu mu^k_y + (1 - beta_mu) mu_y,    Sigma <- beta_Sigma Sigma^k + (1 - beta_Sigma) Sigma

    beta_mu and beta_Sigma in [0, 1] minimise the cross-entropy of p on held-out folds of these features, with mu^k and
    Sigma^k from the other folds. The server takes the mean of each over the cohort. A class of which a client has too
    few samples keeps the received mean. Sigma^k has ``ridge`` on its diagonal, and Sigma is shrunk towards a multiple
    of I before it is inverted.

    Server: body G, mu_y and Sigma. Client: nothing. Down: G, mu_y and Sigma. Up: G_k, and mu_y and Sigma as mixed.
    Evaluated: G with mu and Sigma mixed as above, at G itself (``personalized``), and with those of the server and
    equal priors (``global``). So has every client, also one never sampled.

    References:
        McLaughlin, Su: Personalized Federated Learning via Feature Distribution Adaptation, NeurIPS 2024.
    """

    name: Literal["pfedfda"] = "pfedfda"
    personalized: ClassVar[str] = "personalized"
    no_privacy: ClassVar[str] = "its clients send covariances of features, which with noise are none any more"
    citation: ClassVar[str] = "McLaughlin and Su, NeurIPS 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "features have a Gaussian for each class"}
    server_keeps: ClassVar[str] = "G, mu_y, Sigma"
    newcomer: ClassVar[str] = "G, and mu_y and Sigma mixed with estimates of its own"

    interpolation: Literal["separate", "single", "fixed"] = setting(
        "separate", "", "beta_mu and beta_Sigma: chosen as two numbers (MB) or as one (SB), or both fixed_beta"
    )
    fixed_beta: float = setting(
        1.0,
        "beta",
        "weight of the client's own estimates in place of the chosen one; 1: local estimates alone (NB)",
        ge=0,
        le=1,
        only={"interpolation": ("fixed",)},
    )
    folds: int = setting(
        2, "k", "folds of the cross-validation that chooses beta", ge=2, unless={"interpolation": ("fixed",)}
    )
    least_samples: int = setting(
        3, "", "samples from which on a client's class has a mean of its own, in a fold's estimate too", ge=1
    )
    ridge: float = setting(1.0, "", "added to the diagonal of a client's covariance", gt=0)
    shrinkage: float = setting(
        1e-4, "epsilon", "share of the mean variance times I in the covariance that is inverted", ge=0, le=1
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        network = task.network
        check_head("pFedFDA", network, bias=True)
        if len(network.head_names) < 2:
            raise ConfigError(
                "pFedFDA's classifier has an intercept for each class, but this model's last layer has no bias: choose "
                "a model whose last layer has one"
            )
        if not set(body(network)) & set(network.parameter_names):
            raise ConfigError(
                "pFedFDA trains all layers but the last, of which this model trains none: choose a deeper model"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        weight = model[task.network.head_weight]
        means = context.streams.generator("init.generator").random(tuple(weight.shape))
        gaussians = {"means": torch.from_numpy(means).to(weight), "covariance": torch.eye(weight.shape[1]).to(weight)}
        return {"shared": part(model, body(task.network)), "gaussians": gaussians}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        sent = {"shared": server["shared"], "gaussians": server["gaussians"]}
        return clients.mean(self.local_update, cohort, broadcast=sent, also=self.remainder(sent, cohort, clients))

    async def local_update(self, client: Client, shared: Tree, gaussians: Tree) -> Weighted:  # type: ignore[override]
        """Trains the received body under the received classifier, and mixes the Gaussians."""
        network = client.task.network
        head = self.layer(network, gaussians, self.priors(client, gaussians))
        # a training pass writes running statistics into the tensors it is given, which must be the client's own
        trained = await client.train(part(shared, body(network)), self.objective, frozen={"model": head})
        mixed = await self.adapted(client, trained, gaussians)
        client.publish(local=Predictor.of(self.assembled(client, trained, mixed)))
        return self.weighted(client, {"shared": trained, "gaussians": mixed})

    @property
    def objective(self) -> Sum:
        """The loss of the moving body with the classifier."""
        return loss(TRAINED, completed_by="model")

    async def adapted(self, client: Client, shared: Tree, gaussians: Tree) -> Tree:
        """The Gaussians mixed with those of the client's samples at a body, in the type of the received ones."""
        network, labels = client.task.network, client.examples().y
        model = {**shared, **self.layer(network, gaussians, self.priors(client, gaussians))}
        features = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(model, x)[0])
        local = estimated(features, labels, gaussians, self.least_samples, self.ridge)
        mixed = interpolated(local, gaussians, self.coefficients(client, features, labels, gaussians))
        return {name: leaf.to(gaussians[name]) for name, leaf in mixed.items()}

    def coefficients(self, client: Client, features: Tensor, labels: Tensor, gaussians: Tree) -> Tensor:
        """beta_mu and beta_Sigma, shape (2,), float64."""
        if self.interpolation == "fixed":
            return torch.full((2,), self.fixed_beta, dtype=torch.float64, device=features.device)
        fold = folds(labels.tolist(), self.folds, client.context.streams.generator("folds", client=client.id))
        priors = self.priors(client, gaussians)
        options = self.least_samples, self.ridge, self.shrinkage
        validation = Validation(features, labels, fold, gaussians, priors, *options)
        return validation.best(self.interpolation == "single")

    def priors(self, client: Client, gaussians: Tree) -> Tensor:
        """pi_y of the client, shape (C,)."""
        return frequencies(client.examples().y, len(gaussians["means"]), PRIOR_FLOOR)

    def layer(self, network: Network, gaussians: Tree, priors: Tensor) -> Tree:
        """The classifier as the network's last layer."""
        found = dict(zip(("weight", "bias"), classifier(gaussians, priors, self.shrinkage), strict=True))
        return {name: found[name.rpartition(".")[2]].to(gaussians["means"]) for name in network.head_names}

    def assembled(self, client: Client, shared: Tree, gaussians: Tree) -> Tree:
        """The whole model of a body and Gaussians, with the client's priors."""
        network = client.task.network
        model = {**shared, **self.layer(network, gaussians, self.priors(client, gaussians))}
        return part(model, network.parameter_names + network.buffer_names)

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        gaussians = server["gaussians"]
        classes = len(gaussians["means"])
        equal = gaussians["means"].new_full((classes,), 1 / classes).double()
        return {"global": Predictor.of({**server["shared"], **self.layer(task.network, gaussians, equal)})}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        mixed = await self.adapted(client, server["shared"], server["gaussians"])
        own = Predictor.of(self.assembled(client, server["shared"], mixed))
        return {"personalized": own} | self.global_predictors(server, client.task)

    def update(self, trained: Any, received: Tree, task: Task) -> None:
        """None: clients send no layer of the head."""
        return None
