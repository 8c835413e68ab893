"""Checks of the optimizer, before any actor starts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError, RayflError, text_of
from rayfl.naming.objects import names_an_object
from rayfl.optimization.elementwise import ElementwiseOptimizer

_log = logging.getLogger("rayfl")
_RESERVED = ("moved", "momentum", "count")
"""Names that the engine gives to other things than an optimizer's tensors."""


def check_optimizer(train: TrainConfig) -> None:
    """Refuses to keep what there is not (older runs may have asked for it), and names settings without effect."""
    if names_an_object(train.optimizer) and (own := train.rule.elementwise) is not None:
        try_optimizer(train.optimizer, own)
    if train.persist_optimizer and not train.rule.slots:
        raise ConfigError(
            f"train.persist_optimizer: {train.optimizer} "
            + (
                "without momentum keeps nothing: set train.momentum, or "
                if train.optimizer == "sgd"
                else "keeps nothing: "
            )
            + "drop train.persist_optimizer"
        )
    for option, why in (("lr", "no local step at this rate changes a model"), ("local_epochs", "no client trains")):
        if not getattr(train, option):
            _log.warning("train.%s is 0: %s, unless the method has an option of its own in its place", option, why)
    if train.schedule is None:
        return
    after = range(train.schedule.warmup, train.rounds)
    if not after:
        _log.warning(
            "train.schedule: the warm-up of %d rounds takes up all %d rounds: nothing is left for the schedule %s",
            train.schedule.warmup,
            train.rounds,
            train.schedule.name,
        )
    elif train.schedule.name != "constant" and len(after) > 1:
        if len({train.schedule.relative(round, train.rounds, train.lr) for round in after}) == 1:
            _log.warning(
                "train.schedule: the schedule %s changes no rate in the %d rounds that it has: see its options, and "
                "train.rounds",
                train.schedule.name,
                len(after),
            )


def try_optimizer(name: str, optimizer: ElementwiseOptimizer) -> None:
    """Takes some steps with a user's optimizer, to find out what is wrong with it.

    Args:
        name: of the optimizer, for messages.
        optimizer: what is tried.

    Raises:
        ConfigError: it fails, keeps tensors under names that are taken, moves nothing, is no function of what it is
            given, or treats a number by more than its own value, gradient and state.
    """
    if wrong := [slot for slot in optimizer.slots if slot in _RESERVED or "/" in slot]:
        raise ConfigError(
            f"train.optimizer: {name} keeps {', '.join(map(repr, wrong))}: give its slots other names, without '/'"
        )
    try:
        whole, again = _steps(optimizer, lambda tensor: [tensor]), _steps(optimizer, lambda tensor: [tensor])
        pieces = _steps(optimizer, lambda tensor: list(torch.split(tensor.flatten(), 5)))
    except RayflError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"train.optimizer: {name} fails: {type(error).__name__}: {text_of(error)}") from error
    if torch.equal(whole, _START):
        raise ConfigError(
            f"train.optimizer: steps of {name} leave all parameters as they are: it must change the tensors that it is "
            "given in place (parameter.sub_(...), torch._foreach_add_)"
        )
    if not torch.equal(whole, again):
        raise ConfigError(
            f"train.optimizer: two runs of {name} over the same gradients differ: it must not draw random numbers, nor "
            "keep anything outside its slots"
        )
    if not torch.allclose(whole, pieces, rtol=1e-9, atol=0):
        raise ConfigError(
            f"train.optimizer: {name} moves a number otherwise where its tensor is cut into pieces: rayfl steps on "
            "pieces of tensors, and on those of many clients together, so that an optimizer must treat every number by "
            "itself (no norms, products or means over a tensor)"
        )


_START = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def _steps(optimizer: ElementwiseOptimizer, cut: Callable[[Tensor], list[Tensor]]) -> Tensor:
    """Returns what three steps make of some numbers, which are cut into the tensors of a step."""
    parameters = [piece.clone() for piece in cut(_START)]
    slots = [[torch.zeros_like(piece) for piece in parameters] for _ in optimizer.slots]
    for number in range(1, 4):
        gradients = [piece.clone() for piece in cut(_START.cos() * (number - 1.7) + 0.01 * _START)]
        optimizer.step(parameters, gradients, slots, torch.tensor(float(number)) if optimizer.counts else None, 0.1)
    return torch.cat([piece.flatten() for piece in parameters]).view_as(_START)
