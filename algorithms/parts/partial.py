"""Models of which one part is shared through the server and the other part is each client's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.requirements import check_low_rank
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.requests import Objective
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.models.base import Network
from rayfl.models.factorization import OWN_FACTORS
from rayfl.models.networks.recommenders import ITEMS, USER
from rayfl.models.networks.structural import STRUCTURE
from rayfl.objectives import TRAINED, loss
from rayfl.params import Tree
from rayfl.tasks.base import Model, Predictor, Task


class PartialModel(Averaging):
    """A method that cuts the model into body and head, of which the server averages one and clients keep the other.

    The server holds the shared part alone (``shared``). A client's own part (``personal``) is at first that of the
    common initial model. Buffers (running statistics) belong to the body, or to the head where that is everything.
    """

    personalized: ClassVar[str] = "personalized"
    shares: ClassVar[Literal["body", "head"]] = "body"
    newcomer: ClassVar[str] = "the shared part, and a part of its own that it fits to that, which stays as it is"

    head_group: Literal[
        "last_layer",
        "classifier_block",
        "none",
        "all",
        "lora_a",
        "lora_b",
        "adapters",
        "lora_b_and_head",
        "own_factors",
        "own_factors_and_head",
        "user",
        "all_but_items",
        "structure",
    ] = setting(
        "last_layer",
        "K_P",
        "the head: the last linear layer, the model's classifier block (all fully connected layers of a convolutional "
        "net; the SuPerFed tables), nothing, or everything; of a pretrained model's adapters one factor, both, or B "
        "with the last layers (in FedPer: FedSA-LoRA); the second factors of model.factorize=pfedpara, without or with "
        "the last layer (in FedPer: pFedPara); in a model that recommends the vectors of the user (in FedPer: FCF, "
        "FedNCF), or all but those of items; what reads the structure of graphs (in LG-FedAvg: FedStar); the rest is "
        "the body",
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        proper = self.head_group not in ("none", "all")
        if self.head_group in _OF_ADAPTERS and "adapters" not in task.network.groups:
            raise ConfigError(
                f"algorithm.head_group is {self.head_group}, but this model has no adapters: set model=pretrained, or "
                "head_group=last_layer"
            )
        if self.head_group in _OF_WEIGHTS and OWN_FACTORS not in task.network.groups:
            raise ConfigError(
                f"algorithm.head_group={self.head_group} needs weights W1 * (W2 + 1) with factors of W2 of the "
                "client's own, and this model has none: set model.factorize=pfedpara (docs/models.md#low-rank-factors)"
            )
        for option, group in ((USER, USER), (_ALL_BUT_ITEMS, ITEMS)):
            if self.head_group == option and group not in task.network.groups:
                raise ConfigError(
                    f"algorithm.head_group={option} is for models with vectors of {_MEANT[group]}, and this model has "
                    "none: set model=neural_cf or model=matrix_factorization, or head_group=last_layer"
                )
        if self.head_group == STRUCTURE and STRUCTURE not in task.network.groups:
            raise ConfigError(
                "algorithm.head_group=structure is for models with a channel that reads the structure of graphs, and "
                "this model has none: set model=structural_gin, or head_group=last_layer"
            )
        if self.head_group in _OF_FACTORS:
            check_low_rank(f"algorithm.head_group={self.head_group}", task.network)
        if proper and not self.head(task.network):
            raise ConfigError(
                f"algorithm.head_group is {self.head_group}, of which this model trains nothing (requires_grad=False; "
                "model.adapter.trains): leave it on there, or set head_group=none if that is meant"
            )
        if proper and not set(self.body(task.network)) & set(task.network.parameter_names):
            offered = get_args(type(self).model_fields["head_group"].annotation)
            all_of_it = ", or head_group=all if that is meant" if "all" in offered else ""
            raise ConfigError(
                f"algorithm.head_group is {self.head_group}, which is all that this model trains, so that no body is "
                f"left: choose a model with more layers{all_of_it}"
            )

    def head(self, network: Network) -> tuple[str, ...]:
        """Names of the tensors of the head."""
        own, items = (network.groups.get(name, ()) for name in (OWN_FACTORS, ITEMS))
        groups = {
            "last_layer": network.head_names,
            "classifier_block": network.classifier_names,
            "none": (),
            "all": network.parameter_names + network.buffer_names,
            **{name: network.groups.get(name, ()) for name in ("lora_a", "lora_b", "adapters")},
            "lora_b_and_head": network.groups.get("lora_b", ()) + network.groups.get("head", ()),
            "own_factors": own,
            "own_factors_and_head": own + network.head_names,
            _ALL_BUT_ITEMS: tuple(name for name in network.parameter_names if name not in items),
            **{name: network.groups.get(name, ()) for name in (USER, STRUCTURE)},
        }
        return groups[self.head_group]

    def body(self, network: Network) -> tuple[str, ...]:
        """Names of the tensors of the body: all but the head's."""
        head = set(self.head(network))
        return tuple(name for name in network.parameter_names + network.buffer_names if name not in head)

    def shared(self, network: Network) -> tuple[str, ...]:
        """Names of the part that travels."""
        return self.body(network) if self.shares == "body" else self.head(network)

    def personal(self, network: Network) -> tuple[str, ...]:
        """Names of the part that stays with the client."""
        return self.head(network) if self.shares == "body" else self.body(network)

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {"shared": part(super().init(task, context)["model"], self.shared(task.network))}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        shared = shared_part(server)
        rest = self.remainder(shared, cohort, clients)
        return {"shared": clients.mean(self.local_update, cohort, broadcast={"shared": shared}, also=rest)}

    async def local_update(self, client: Client, shared: Tree) -> Weighted:
        """Trains the received part together with the client's own, and keeps the latter."""
        network = client.task.network
        trained = await self.train_model(client, self.assembled(client, shared))
        if self.personal(network):
            client.state["personal"] = part(trained, self.personal(network))
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, part(trained, self.shared(network)))

    async def train_model(self, client: Client, model: Tree) -> Tree:
        """The client's training of the whole model: both parts jointly, with one optimizer."""
        return await client.train(model, self.objective)

    async def train_part(
        self,
        client: Client,
        model: Model,
        names: Sequence[str],
        epochs: int | None = None,
        stream: str = "",
        lr: float | None = None,
        objective: Objective | None = None,
        reads: Tree | None = None,
        examples: Examples | None = None,
    ) -> Tree:
        """Trains some tensors of a model while the others are no part of the optimizer.

        Args:
            client: the client.
            model: the whole model, left as it is.
            names: what is trained. Without any parameter among them no training takes place.
            epochs: default the configured local epochs; with 0 no training takes place and no momentum is kept.
            stream: suffix of the streams.
            lr: default the round's learning rate.
            objective: default :meth:`part_objective`; finds the whole model under ``model`` of what is frozen.
            reads: what else the objective finds there.
            examples: what to train on; default the client's training samples.

        Returns:
            The named tensors.
        """
        network = client.task.network
        if epochs == 0 or not set(names) & set(network.parameter_names):
            return part(model, names)
        # A training pass writes running statistics into the tensors it is given: they must be the client's own copy,
        # never the received ones, which all clients of an actor share. Where the body is frozen it is dropped.
        trained = await client.train(
            part(model, (*names, *network.buffer_names)),
            objective or self.part_objective,
            frozen={"model": dict(model), **(reads or {})},
            epochs=epochs,
            lr=lr,
            stream=stream,
            examples=examples,
        )
        return part(trained, names)

    @property
    def part_objective(self) -> Any:
        """The loss of the model with its moving part."""
        return loss(TRAINED, completed_by="model")

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        return super().update(trained, {"model": received.get("shared", {})}, task)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(self.assembled(client, shared_part(server)))}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Fits the part that is the client's own, from the initial one, while the shared part stays as it is."""
        network = client.task.network
        own = self.personal(network)
        if own:
            model = self.assembled(client, shared_part(server))
            client.state["personal"] = part(await self.train_part(client, model, own, stream=".join"), own)
        return {}

    def assembled(self, client: Client, shared: Model) -> Tree:
        """The whole model of a shared part and the client's own part, which is the initial one until it trains."""
        network = client.task.network
        own: Tree | None = client.state.get("personal")
        if own is None:
            own = part(client.initial_model(), self.personal(network)) if self.personal(network) else {}
        # in the network's order, as if the model had never been cut
        return part({**own, **shared}, network.parameter_names + network.buffer_names)


_OF_FACTORS = ("lora_a", "lora_b", "lora_b_and_head")
_OF_ADAPTERS = (*_OF_FACTORS, "adapters")
_OF_WEIGHTS = ("own_factors", "own_factors_and_head")
_ALL_BUT_ITEMS = "all_but_items"
_MEANT = {USER: "a user", ITEMS: "items"}


def shared_part(server: Tree) -> Tree:
    """What the server holds of the model; nothing, if it keeps no part (a tree without leaves is not stored)."""
    shared: Tree = server.get("shared", {})
    return shared


def part(model: Model, names: Iterable[str]) -> Tree:
    """The named tensors of a model, in the order of the names."""
    return {name: model[name] for name in dict.fromkeys(names)}


def separated(model: Model, network: Network) -> Tree:
    """A model as ``parameters`` and, if there are any, ``buffers``, for a server that treats these in another way."""
    buffers = part(model, network.buffer_names)
    return {"parameters": part(model, network.parameter_names), **({"buffers": buffers} if buffers else {})}


def joined(parts: Tree, like: Model) -> Tree:
    """The model that :func:`separated` has taken apart, with its tensors in the order of another's."""
    return part({**parts["parameters"], **parts.get("buffers", {})}, like)
