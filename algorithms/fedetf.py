"""FedETF: unit features under a classifier that is a simplex equiangular tight frame, which nobody trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.balanced import log_prior
from algorithms.parts.layers import draw_linear, linear
from algorithms.parts.partial import part
from algorithms.parts.prototypes import class_counts
from algorithms.parts.replaced_heads import body, check_replaceable, idle_head, simplex_etf, with_idle_head
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.models.base import Network
from rayfl.objectives import Sum, function
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait

TRAINED = ("shared", "projection", "temperature")
"""What clients train and send back."""
_LAST = ("projection", "temperature", "classifier")


class FedETF(Averaging):
    """FedETF: the clients share all but the classifier, which is synthesized once and the same for all.

    With f(x) in R^L the input of the last linear layer, whose place the rest takes, a linear projection g to R^d, V the
    classifier, a matrix of d rows whose columns v_c are one a class, and beta a learned temperature, logits are

        z_c(x) = beta v_c^T mu(x),    mu(x) = g(f(x)) / ||g(f(x))||
        V = sqrt(C / (C - 1)) U (I - 1/C 1 1^T),    U^T U = I

    The v_c have length 1, and any two of them the cosine -1/(C - 1), the least that is possible for all pairs at once
    (a simplex equiangular tight frame, ETF). U is drawn once and V never trained. With n_kc the client's samples of
    class c, client k trains the body G of f, g and beta together on the balanced feature loss

        -log( n_ky^gamma e^{z_y} / sum_c n_kc^gamma e^{z_c} )

    A class of which the client has no sample is left out of the sum. The server takes the means of G, g and beta.

    After the last round each client personalizes: it trains G, g and beta for ``finetune_epochs`` on the same loss, and
    then, on the cross-entropy of z, V and g in turn while G and beta stand still: ``alternations`` times, for
    ``alternation_epochs`` each.

    Server: G, g, beta, and the fixed V. Client: nothing. Down: G, g, beta and V. Up: G, g and beta as trained, and n_k.
    Evaluated: the server's model (``global``), and after the last round the client's own (``finetuned``), also of
    clients never sampled.

    A client whose samples are all of one class has a loss of 0: but for weight decay it sends back what it received,
    and counts in the mean like the others. Nothing bounds beta.

    References:
        Li, Shang, He, Lin, Wu: No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic
        and Fixed Classifier, ICCV 2023 (arXiv 2303.10058), its ETF classifier and balanced feature loss; the steps of
        personalization are those of the authors' code.
    """

    name: Literal["fedetf"] = "fedetf"
    personalized: ClassVar[str] = "finetuned"
    personalized_later: ClassVar[bool] = True
    citation: ClassVar[str] = "Li et al., ICCV 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "every class has a vector of the classifier"}
    server_keeps: ClassVar[str] = "G, g, beta, V"
    newcomer: ClassVar[str] = "G, g, beta and V; fine-tuned after the last round"

    projection_dim: int | None = setting(
        None, "d", "width of the projection, at least the number of classes C; null: C", ge=2, kept=True
    )
    temperature: float = setting(1.0, "beta", "initial temperature, which is trained", gt=0, kept=True)
    balance_exponent: float = setting(
        1.0, "gamma", "exponent of the class counts in the loss; 0: plain cross-entropy", ge=0, le=100
    )
    absent_count: float = setting(
        0.0,
        "",
        "n_kc of a class that the client lacks; 0 leaves it out of the softmax (paper), 1 is the authors' code",
        ge=0,
        le=1,
        unless={"balance_exponent": (0,)},
    )
    finetune_epochs: int | None = setting(
        None, "E_ft", "personalization: epochs of G, g and beta together; null: train.local_epochs", ge=0
    )
    alternations: int = setting(
        20, "", "personalization: how often V and g are trained in turn", ge=0, unless={"alternation_epochs": (0,)}
    )
    alternation_epochs: int = setting(
        3, "", "personalization: epochs of V, and as many of g, each time", ge=0, unless={"alternations": (0,)}
    )
    classifier_lr: float = setting(
        0.1,
        "eta_V",
        "personalization: learning rate of V, by plain SGD",
        ge=0,
        unless={"alternations": (0,), "alternation_epochs": (0,)},
    )
    projection_lr: float = setting(
        0.05,
        "eta_g",
        "personalization: learning rate of g in its turn, by the configured optimizer",
        ge=0,
        unless={"alternations": (0,), "alternation_epochs": (0,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_replaceable("FedETF", task.network)
        classes = task.network.head_shape[0]
        if classes < 2:
            raise ConfigError("FedETF's classifier is a simplex of the classes, which needs two of them at least")
        if self.projection_dim is not None and self.projection_dim < classes:
            raise ConfigError(
                f"algorithm.projection_dim is {self.projection_dim}, in which {classes} classes have no orthonormal "
                f"directions: set {classes} or more, or null"
            )
        if not set(body(task.network)) & set(task.network.parameter_names):
            raise ConfigError(
                "FedETF trains all layers but the last, of which this model trains none: choose a deeper model"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        network = task.network
        model = network.initialize(context.streams.integer("init.global"))
        like = next(iter(model.values()))
        classes, width = network.head_shape
        dim = self.projection_dim or classes
        return {
            "shared": part(model, body(network)),
            "projection": draw_linear(width, dim, like, context.streams.generator("init.projection")),
            "temperature": like.new_tensor(self.temperature),
            "classifier": simplex_etf(classes, dim, context.streams.generator("init.classifier")).to(like),
        }

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        kept = {name: server[name] for name in TRAINED}
        sent = {**kept, "classifier": server["classifier"]}
        return clients.mean(self.local_update, cohort, broadcast=sent, also=self.remainder(kept, cohort, clients))

    async def local_update(  # type: ignore[override]
        self, client: Client, shared: Tree, projection: Tree, temperature: Tensor, classifier: Tensor
    ) -> Weighted:
        """Trains body, projection and temperature under the fixed classifier."""
        received = {"shared": shared, "projection": projection, "temperature": temperature, "classifier": classifier}
        trained = await self.trained(client, received)
        client.publish(local=_predictor(client.task.network, trained))
        return self.weighted(client, {name: trained[name] for name in TRAINED})

    async def trained(self, client: Client, server: Tree, **options: Any) -> Tree:
        """Returns the whole model of a server's tree after local steps on the balanced feature loss.

        Args:
            client: the client.
            server: what :meth:`init` returns.
            **options: of ``client.train``.
        """
        network, classifier = client.task.network, server["classifier"]
        counts = class_counts(client.examples().y, len(classifier))
        prior = log_prior(counts, self.balance_exponent, self.absent_count).to(classifier)
        found = await client.train(
            {"model": server["shared"], "projection": server["projection"], "temperature": server["temperature"]},
            self.objective,
            frozen={"head": idle_head(network, classifier), "classifier": classifier, "prior": prior},
            **options,
        )
        return {"shared": found.pop("model"), **found, "classifier": classifier}

    @property
    def objective(self) -> Sum:
        """The balanced feature loss."""
        return function(self._balanced)

    def _balanced(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, _ = task.head_inputs_and_logits({**frozen["head"], **trained["model"]}, batch)
        logits = etf_logits(trained["projection"], trained["temperature"], frozen["classifier"], features)
        return task.loss_of(logits + frozen["prior"], batch)

    def _on_features(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The cross-entropy where a mini-batch's inputs are features."""
        model = {**frozen, **trained}
        logits = etf_logits(model["projection"], model["temperature"], model["classifier"], batch.x)
        return task.loss_of(logits, batch)

    async def finetune(self, client: Client, server: Tree) -> Tree:
        """Returns the client's own model, of the parts of a server's tree."""
        own = await self.trained(client, server, epochs=self.finetune_epochs, keep_optimizer=False, stream=".finetune")
        network = client.task.network
        # the body stands still from here on, so its features are computed once
        model = with_idle_head(network, own["shared"], own["classifier"])
        features = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(model, x)[0])
        examples = Examples(features, client.examples().y)
        plain = ParameterGroup(lr=self.classifier_lr, momentum=0.0, weight_decay=0.0, optimizer="sgd")
        turns = (("classifier", "V", plain), ("projection", "g", ParameterGroup(lr=self.projection_lr)))
        for turn in range(self.alternations):
            for name, symbol, rule in turns:
                found = await client.train(
                    {name: own[name]},
                    function(self._on_features),
                    frozen={other: own[other] for other in _LAST if other != name},
                    examples=examples,
                    epochs=self.alternation_epochs,
                    groups={name: rule},
                    keep_optimizer=False,
                    stream=f".finetune.{symbol}{turn}",
                )
                own = {**own, **found}
        return own

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {"global": _predictor(task.network, server)}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        rows = self.global_predictors(server, client.task)
        if client.context.final:
            rows["finetuned"] = _predictor(client.task.network, await self.finetune(client, server))
        return rows

    def update(self, trained: Any, received: Tree, task: Task) -> None:
        """None: clients send no layer of the head."""
        return None


def etf_logits(projection: Mapping[str, Tensor], temperature: Tensor, classifier: Tensor, features: Tensor) -> Tensor:
    """z of shape (b, C), for features f of shape (b, L) and a classifier of shape (C, d)."""
    return temperature * F.linear(F.normalize(linear(projection, features), dim=-1), classifier)


def _predictor(network: Network, model: Tree) -> Predictor:
    """The prediction of body, projection, temperature and classifier."""
    last = {"temperature": model["temperature"], "classifier": model["classifier"]}
    whole = with_idle_head(network, model["shared"], model["classifier"])
    return Predictor.of(whole, model["projection"], last, combine=_log_probabilities)


def _log_probabilities(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Log-probabilities (b, C) of (network, projection, temperature and classifier)."""
    model, projection, last = models
    features, _ = task.network.head_inputs_and_logits(model, x, training=False)
    return etf_logits(projection, last["temperature"], last["classifier"], features).log_softmax(-1)
