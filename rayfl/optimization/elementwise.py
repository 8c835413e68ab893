"""Optimizers beside SGD and Adam, of rayfl and of users: rules that treat every number by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from rayfl.errors import ConfigError
from rayfl.naming.objects import import_object, names_an_object
from rayfl.naming.spelling import nearest

Share = Annotated[float, Field(ge=0, lt=1)]


class ElementwiseOptimizer(BaseModel, ABC):
    """An optimizer, whose options are fields.

    Every number must be updated by its own value, gradient and state alone: steps get tensors in other shapes than the
    model's, such as pieces of them, or those of many clients at once. Weight decay and bounds are not its business.

    Attributes:
        decoupled: whether weight decay shrinks the parameters before the step, by the learning rate times it, instead
            of being added to the gradient.
        counts: whether steps need their number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    decoupled: ClassVar[bool] = False
    counts: ClassVar[bool] = False

    @property
    def slots(self) -> tuple[str, ...]:
        """Returns the names of the tensors that are kept for every parameter, which begin as zeros."""
        return ()

    @abstractmethod
    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        slots: Sequence[list[Tensor]],
        number: Tensor | None,
        lr: float,
    ) -> None:
        """Takes one step, in place.

        Args:
            parameters: to change.
            gradients: of them; may be overwritten.
            slots: to change; a list like ``parameters`` for each name in :attr:`slots`.
            number: of the step, from 1; a float32 scalar on the parameters' device. None unless :attr:`counts`.
            lr: learning rate.
        """


class Adagrad(ElementwiseOptimizer):
    """Adagrad (Duchi, Hazan, Singer, JMLR 2011): s <- s + g^2, w <- w - lr g / (sqrt(s) + eps)."""

    initial: float = Field(0.0, ge=0, allow_inf_nan=False, description="s before the first step")
    eps: float = Field(1e-10, gt=0, allow_inf_nan=False, description="added to the root of s")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("sum",)

    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        slots: Sequence[list[Tensor]],
        number: Tensor | None,
        lr: float,
    ) -> None:
        torch._foreach_addcmul_(slots[0], gradients, gradients)
        roots = torch._foreach_add(slots[0], self.initial)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, self.eps)
        torch._foreach_addcdiv_(parameters, gradients, roots, value=-lr)


class RMSprop(ElementwiseOptimizer):
    """RMSprop (Hinton's lecture 6e, 2012): v <- alpha v + (1 - alpha) g^2, w <- w - lr g / (sqrt(v) + eps).

    With a momentum, as in PyTorch, b <- momentum b + g / (sqrt(v) + eps), and w <- w - lr b.
    """

    alpha: Share = Field(0.99, description="decay of v")
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="added to the root of v")
    momentum: Share = Field(0.0, description="decay of b")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("v", "b") if self.momentum else ("v",)

    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        slots: Sequence[list[Tensor]],
        number: Tensor | None,
        lr: float,
    ) -> None:
        torch._foreach_mul_(slots[0], self.alpha)
        torch._foreach_addcmul_(slots[0], gradients, gradients, value=1 - self.alpha)
        roots = torch._foreach_sqrt(slots[0])
        torch._foreach_add_(roots, self.eps)
        if not self.momentum:
            torch._foreach_addcdiv_(parameters, gradients, roots, value=-lr)
            return
        torch._foreach_mul_(slots[1], self.momentum)
        torch._foreach_addcdiv_(slots[1], gradients, roots)
        torch._foreach_add_(parameters, slots[1], alpha=-lr)


class Lion(ElementwiseOptimizer):
    """Lion (Chen et al., NeurIPS 2023, program 1), with decoupled weight decay.

    w <- w - lr sign(beta1 m + (1 - beta1) g), then m <- beta2 m + (1 - beta2) g.
    """

    decoupled: ClassVar[bool] = True

    betas: tuple[Share, Share] = Field((0.9, 0.99), description="beta1, of the step; beta2, of m")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("m",)

    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        slots: Sequence[list[Tensor]],
        number: Tensor | None,
        lr: float,
    ) -> None:
        signs = torch._foreach_mul(slots[0], self.betas[0])
        torch._foreach_add_(signs, gradients, alpha=1 - self.betas[0])
        torch._foreach_sign_(signs)
        torch._foreach_add_(parameters, signs, alpha=-lr)
        torch._foreach_mul_(slots[0], self.betas[1])
        torch._foreach_add_(slots[0], gradients, alpha=1 - self.betas[1])


ELEMENTWISE: Mapping[str, type[ElementwiseOptimizer]] = {"adagrad": Adagrad, "lion": Lion, "rmsprop": RMSprop}
"""Those that have a name in configurations."""

Options = tuple[tuple[str, Any], ...]


class Chosen(NamedTuple):
    """An optimizer of this module by name, or a user's as ``my_module:MyOptimizer``; with its options."""

    name: str
    options: Options = ()


@lru_cache
def made(chosen: Chosen) -> ElementwiseOptimizer:
    """Returns the optimizer of a name, with its options.

    Raises:
        ConfigError: there is none of this name, or it has no such options.
    """
    found = import_object(chosen.name, "train.optimizer") if names_an_object(chosen.name) else ELEMENTWISE[chosen.name]
    if not (isinstance(found, type) and issubclass(found, ElementwiseOptimizer)):
        raise ConfigError(f"train.optimizer: {chosen.name!r} is no subclass of rayfl.ElementwiseOptimizer")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"train.optimizer: {chosen.name!r} does not define {', '.join(missing)}")
    try:
        return found(**dict(chosen.options))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] != "extra_forbidden":
            raise ConfigError(f"train.optimizer_options.{name}: {first['msg']}") from error
        known = list(found.model_fields)
        raise ConfigError(
            f"train.optimizer_options: {chosen.name} has no {name!r}{nearest(name, known)}; it has "
            f"{', '.join(known) or 'none'}"
        ) from error
