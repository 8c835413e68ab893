"""FedTPG: one network, learned by all clients, makes the context of CLIP's texts from the names of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.prompt_generator import first_generator, generated
from algorithms.parts.prompts import check_context, clip_of, with_context
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.pretrained.text_head import CONTEXT
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedTPG(Averaging):
    """FedTPG: federated averaging of a network that generates prompts from class names.

    The generator f makes M context vectors from the names of some classes, by cross-attention of M learned queries to
    the names' text features. With C_k the classes of which client k has training samples, T_k the features of their
    names alone and z_c(p) the logit of class c with the context p, client k goes down

        CE over c in C_k of z_c(f(T_k))

    so that one generator makes another context for each set of classes, also for classes that no client has trained
    with. Adapters in the image tower, if there are any, are shared and averaged with the generator.

    Server: f. Client: nothing. Down: f. Up: f as trained, and n_k. Evaluated, over all classes: the context made of the
    names of the client's own classes (``personalized``), and that made of all names (``global``).

    References:
        Qiu, Li, Mummadi, Ganesh, Li, Peng, Lin: Federated Text-driven Prompt Generation for Vision-Language Models,
        ICLR 2024 (arXiv 2310.06123).
    """

    name: Literal["fedtpg"] = "fedtpg"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Qiu et al., ICLR 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "the texts of CLIP tell classes"}
    server_keeps: ClassVar[str] = "f"
    newcomer: ClassVar[str] = "the context that f makes of the names of its classes"

    names: Literal["own", "all"] = setting(
        "own", "C_k", "the classes that a client's context and cross-entropy are about: its own (paper), or all"
    )
    heads: int = setting(4, "", "heads of the generator's attention", ge=1)
    expansion: int = setting(4, "", "width of the generator's feed-forward part, in widths of the text tower", ge=1)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_context("FedTPG", task.network)
        shape = task.network.initialize(0)[CONTEXT].shape
        if len(shape) > 2:
            raise ConfigError("FedTPG makes one context for all classes: set model.prompt.context=shared")
        if clip_of(task).begins_as_words:
            raise ConfigError(
                "FedTPG makes the context, which does not begin as the template's words: set model.prompt.start=drawn"
            )
        if shape[-1] % self.heads:
            raise ConfigError(
                f"algorithm.heads={self.heads}: the text tower is {shape[-1]} wide, which cannot be cut into as many "
                f"parts: choose a divisor of {shape[-1]}"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        generator = context.streams.generator("init.generator")
        first = first_generator(model[CONTEXT], task.network.head_shape[1], self.expansion, generator)
        adapters = {name: leaf for name, leaf in model.items() if name != CONTEXT}
        return {"shared": {"generator": first, **({"adapters": adapters} if adapters else {})}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        shared = server["shared"]
        rest = self.remainder(shared, cohort, clients)
        return {"shared": clients.mean(self.generator_update, cohort, broadcast={"shared": shared}, also=rest)}

    async def generator_update(self, client: Client, shared: Tree) -> Weighted:
        """Trains the received generator on the names of the client's classes."""
        task = client.task
        constants = {"names": self.name_features(task, shared), "own": self.own_classes(client)}
        trained = await client.train(shared, self.objective, frozen=constants)
        client.publish(local=self.prompted(trained, task, constants["own"]))
        return self.weighted(client, trained)

    @property
    def objective(self) -> Sum:
        """The cross-entropy among the client's classes, with the context that the generator makes of their names."""
        return function(self._prompted_loss)

    def _prompted_loss(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        logits = task.logits(self.model(trained, frozen["names"], frozen["own"]), batch)
        # Padding of a stack may have any class: its loss must be finite, so that it counts zero times.
        lowest = torch.finfo(logits.dtype).min / 4
        return task.loss_of(logits.masked_fill(frozen["own"] == 0, lowest), batch)

    def model(self, shared: Mapping[str, Any], names: Tensor, own: Tensor) -> Tree:
        """CLIP with the context that the generator makes.

        Args:
            shared: ``generator``, and ``adapters`` where there are any.
            names: features of the names of all classes, shape (C, D).
            own: nonzero for the classes whose names are read, shape (C,).
        """
        return with_context(shared.get("adapters", {}), generated(shared["generator"], names, own, self.heads))

    def name_features(self, task: Task, shared: Mapping[str, Any]) -> Tensor:
        """Features of the names of all classes, shape (C, D), of the generator's type and device."""
        return clip_of(task).name_features.to(shared["generator"]["queries"])

    def own_classes(self, client: Client) -> Tensor:
        """One for each class that the client reads the name of, else zero, shape (C,); all where it has no samples."""
        labels, classes = client.examples().y, client.task.network.head_shape[0]
        counts = torch.bincount(labels, minlength=classes)
        return torch.ones_like(counts) if self.names == "all" or not len(labels) else (counts > 0).to(counts.dtype)

    def prompted(self, shared: Model, task: Task, own: Tensor | None = None) -> Predictor:
        """The prediction with the context made of the names of some classes, or of all."""
        names = self.name_features(task, shared)
        with torch.no_grad():
            return Predictor.of(self.model(shared, names, names.new_ones(len(names)) if own is None else own))

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {"global": self.prompted(server["shared"], task)}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        own = self.prompted(server["shared"], client.task, self.own_classes(client))
        return {"personalized": own, **self.global_predictors(server, client.task)}
