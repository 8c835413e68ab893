"""What methods require of a task, a model and an optimizer, refused by name where it is lacking."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError, ModelError
from rayfl.models.base import Network
from rayfl.models.layers.factors import FIRST
from rayfl.tasks.base import Task, Trait

_TRAITS: Mapping[Trait, str] = {
    "classes": "one class a sample",
    "distribution": "a probability distribution over classes a sample",
    "features": "one vector of features a sample",
}


def check_traits(method: str, needed: Mapping[Trait, str], task: Task) -> None:
    """Refuses a task that lacks what a method needs.

    Args:
        method: what to call the method.
        needed: the traits, and why each is needed.
        task: the task.

    Raises:
        ConfigError: naming the task, what it lacks, and the fix.
    """
    for trait, why in needed.items():
        if trait not in task.traits:
            raise ConfigError(
                f"algorithm: {method} cannot learn task={task.name}, which has not {_TRAITS[trait]}: {why}. "
                "Choose another method: docs/tasks.md has a table of methods and tasks"
            )


def check_everyone(subject: str, context: RoundContext, otherwise: str = "") -> None:
    """Refuses cohorts that lack clients.

    Args:
        subject: what every client is needed for, a clause that begins the message.
        context: the size of cohorts, and the number of clients.
        otherwise: another way out, for the end of the message.

    Raises:
        ConfigError: naming the options and the fix.
    """
    if context.smallest_cohort == context.num_clients:
        return
    most, least = context.train.clients_per_round, context.train.min_clients_per_round
    sizes = f"train.clients_per_round is {most}" + ("" if least is None else f" (at least {least})")
    more = "" if least is None else " and train.min_clients_per_round=null"
    raise ConfigError(
        f"{subject}, but {sizes} of {context.num_clients} clients: set train.clients_per_round=all{more}{otherwise}"
    )


def check_head(method: str, network: Network, bias: bool = False) -> None:
    """Refuses a model whose last layer a method works on, but which does not train that layer.

    Args:
        method: what to call the method.
        network: the model.
        bias: whether the layer's bias, if it has one, must be trained as well.

    Raises:
        ConfigError: the weight of the last layer is in no model of a client or the server: it requires no gradient, or
            has factors in its place.
    """
    check_no_factors_in_head(method, network)
    if network.head_is_fixed:
        raise ConfigError(
            f"{method} needs the last layer's weight to be trained, but in this model {network.head_weight!r} has "
            "requires_grad=False: leave it on there, or choose another method"
        )
    name = network.head_weight.removesuffix("weight") + "bias"
    if bias and name in network.fixed_parameters:
        raise ConfigError(
            f"{method} trains the last layer, but in this model {name!r} has requires_grad=False: leave it on there, "
            "or choose another method"
        )


def check_cut_by_depth(method: str, network: Network) -> int:
    """Refuses a model that cannot be cut by depth; returns how many stages it has.

    Args:
        method: what to call the method.
        network: the model.

    Raises:
        ConfigError: naming the layer with which it is not known where to cut, and the fix.
    """
    fix = "choose a model of linear layers and convolutions (model=two_cnn, vgg9, resnet9, resnet18, ...)"
    if "adapters" in network.groups:
        raise ConfigError(f"{method} needs a model that is cut by depth, not a transformer with adapters: {fix}")
    try:
        return len(network.depths.stages)
    except ModelError as error:
        raise ConfigError(f"{method} needs a model that can be cut by depth: {fix}. This one: {error}") from None


def check_no_factors_in_head(method: str, network: Network) -> None:
    """Refuses a model whose last layer has factors in the place of its weight.

    Args:
        method: what to call the method, which works on that weight or replaces it.
        network: the model.

    Raises:
        ConfigError: naming the fix.
    """
    if any(name.endswith(FIRST) for name in network.head_names):
        raise ConfigError(
            f"{method} needs the last layer's weight, but in this model factors have taken its place: set "
            "model.factorize.layers=hidden, or choose another method"
        )


def check_low_rank(option: str, network: Network) -> None:
    """Refuses adapters that are not two factors, whether both are trained or one.

    Args:
        option: what needs factors: a method, or an option as a user would write it.
        network: the model, with adapters.

    Raises:
        ConfigError: naming what to set.
    """
    if not (network.groups["lora_a"] or network.groups["lora_b"]):
        kind = next((kind for kind in ("ia3", "prompt", "features") if network.groups.get(kind)), "another kind")
        raise ConfigError(
            f"{option} needs model.adapter.name=lora: it is about the factors A and B of adapters, and those of "
            f"{kind} have none"
        )


def check_initial_models(method: str, network: Network) -> None:
    """Refuses a model that is the same function however its initial values are drawn.

    Args:
        method: what to call the method, whose several models must differ in the beginning.
        network: the model.

    Raises:
        ConfigError: naming the fix.
    """
    one, other = (network.initialize(seed) for seed in (0, 1))
    # While its second factor is zero, an adapter adds nothing, whatever the first one is.
    idle = {name.replace(".lora_B.", ".lora_A.") for name in network.groups.get("lora_b", ()) if not one[name].any()}
    if any(not torch.equal(one[name], other[name]) for name in one.keys() - idle):
        return
    raise ConfigError(
        f"{method} needs initial models that differ: equal ones stay equal, and it would be federated averaging. This "
        "model begins the same with every seed (its weights are given, or its adapters add nothing and no other layer "
        "is drawn): choose a model whose initial values are drawn, train a new head, or choose another method"
    )


def clipped_together(context: RoundContext, what: str) -> tuple[str, ...]:
    """Returns the remark that clipping couples what a method trains in one pass; empty without clipping.

    Args:
        context: has the training section.
        what: of which the gradients are.
    """
    if context.train.max_grad_norm is None:
        return ()
    return (f"train.max_grad_norm is about the gradients of {what} together, so that each shortens the other",)


def without_stages(context: RoundContext, otherwise: str) -> tuple[str, ...]:
    """Says what a method for data that change is where they do not; nothing where they do.

    Args:
        context: of round 0.
        otherwise: what it is then.
    """
    if context.stages.active:
        return ()
    return (f"the clients' data stay as they are (the section stages), so that this is {otherwise}",)


def check_sgd(method: str, train: TrainConfig, reason: str, heavy_ball: bool = False) -> None:
    """Refuses an optimizer other than SGD, for a method whose own formulas suppose its steps.

    Args:
        method: what to call the method.
        train: the training section.
        reason: what supposes SGD, for the message.
        heavy_ball: whether SGD must also have neither Nesterov's momentum nor dampening.

    Raises:
        ConfigError: naming the option and the fix.
    """
    if train.optimizer != "sgd":
        raise ConfigError(f"{method} needs train.optimizer=sgd, not {train.optimizer}: {reason}")
    for field in ("nesterov", "dampening") if heavy_ball else ():
        if getattr(train, field):
            raise ConfigError(f"{method} does without train.{field}: {reason}")
