"""Points between models, and angles, by what their adapters add to the base, s B A, in place of the factors A and B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from algorithms.parts.adapters import check_no_magnitudes
from algorithms.parts.requirements import check_low_rank
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.models.pretrained.mixing import blended, update_product
from rayfl.params import TINY
from rayfl.tasks.base import Batch, Model, Task


def check_products(option: str, network: Network) -> None:
    """Refuses a model whose adapters do not have two factors that are trained, or have magnitudes.

    Args:
        option: what asks for products, as a user would write it.
        network: the model.

    Raises:
        ConfigError: naming what to set.
    """
    if not network.groups.get("adapters"):
        raise ConfigError(
            f"{option} is about adapters, which this model does not have: set model=pretrained and model.folder "
            "(docs/adapters.md), or leave the option out"
        )
    check_low_rank(option, network)
    check_no_magnitudes(
        option, network, "a layer with magnitudes is no sum of W and s B A, so that products do not lie on a line"
    )
    if not (network.groups["lora_a"] and network.groups["lora_b"]):
        raise ConfigError(
            f"{option} needs model.adapter.trains=[a,b]: where one factor is common to all models, factors and "
            "products lie on the same lines, so leave the option out"
        )


def model_between(start: Model, end: Model, coefficient: Any, groups: Sequence[Sequence[str]] | None = None) -> Model:
    """The model that adds (1 - c) s B A + c s B' A' to the base, with adapters of twice the rank.

    Args:
        start: a model.
        end: a model of the same network.
        coefficient: c; with groups a vector with one entry for each.
        groups: names of the tensors that share an entry; None: all share one number.
    """
    entries = [(tuple(start), coefficient)] if groups is None else zip(groups, coefficient, strict=True)
    weights = {name: (1 - own, own) for names, own in entries for name in names}
    return blended([start, end], weights)


def squared_cosine_of_updates(one: Model, other: Model, network: Any) -> Tensor:
    """cos^2 of the angle between what two models add to the base; 0 where one of them adds nothing."""
    product = update_product(one, other, network.scale)
    norms = update_product(one, one, network.scale) * update_product(other, other, network.scale)
    return product * product / norms.clamp_min(TINY)


@dataclass(frozen=True)
class LossBetween:
    """The loss of the model between the trained ends ``federated`` and ``local``, an objective.

    Attributes:
        groups: what gives the names of the tensors that share an entry of the draw ``coefficient``; None: all share it.
    """

    groups: Callable[[Task], Sequence[Sequence[str]]] | None

    def __call__(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        groups = None if self.groups is None else self.groups(task)
        return task.loss(model_between(model["federated"], model["local"], draw["coefficient"], groups), batch)


def squared_cosine_of_ends(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """:func:`squared_cosine_of_updates` of the trained ends ``federated`` and ``local``, an objective."""
    return squared_cosine_of_updates(model["federated"], model["local"], task.network)


@dataclass(frozen=True, eq=False, slots=True)
class ProductMixture:
    """A point between two models, made when it is called; the models themselves at 0 and at 1.

    Attributes:
        start: a model.
        end: a model of the same network.
        coefficient: c of :func:`model_between`.
        task: tells the tensors of a model from others.
    """

    start: Model
    end: Model
    coefficient: float
    task: Task

    def __call__(self) -> Model:
        if self.coefficient in (0.0, 1.0):
            return self.end if self.coefficient else self.start
        names = self.task.network.parameter_names
        start, end = ({name: model[name] for name in names} for model in (self.start, self.end))
        return model_between(start, end, self.coefficient)
