"""Which clients' messages gradient inversion can attack, and what must be known beside its numbers."""

from __future__ import annotations

from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.runs.folder import RunFolder
from rayfl.runs.gradient_matching import Labels, Objective


def check_attack(run: RunFolder, client: int, labels: Labels) -> None:
    """Refuses, before a round is repeated, what cannot be attacked.

    Raises:
        ConfigError: naming what stands against it.
    """
    config, task, spec = run.config, run.parts.task, run.parts.dataset.spec
    method, train, network = config.algorithm, config.train, task.network
    if spec.kind != "image":
        inputs = "tokens" if spec.kind == "tokens" else "graphs, with edges that are there or not"
        raise ConfigError(
            f"{run.uri}: its inputs are {inputs}, which no gradient leads to; invert is for images and vectors"
        )
    if task.name != "classification":
        raise ConfigError(f"{run.uri} is a run of {task.name}; invert is for task=classification")
    if why := method.why_no_gradient():
        raise ConfigError(f"invert: what clients of {method.name} send is no gradient of their loss: {why}")
    if train.optimizer != "sgd":
        raise ConfigError(f"invert: steps of train.optimizer={train.optimizer} are no gradients; it is for sgd")
    if train.momentum and train.persist_optimizer:
        raise ConfigError("invert: with train.persist_optimizer a message has the momentum of earlier rounds, too")
    if network.stochastic:
        raise ConfigError("invert: the model has dropout, and nobody but the client knows what was dropped")
    if network.why_differentiable_once:
        raise ConfigError(f"invert: it needs second derivatives: {network.why_differentiable_once}")
    if run.parts.augmentation is not None:
        raise ConfigError("invert: clients trained on changed images (augment), with which nothing can be compared")
    if client in run.parts.attackers:
        raise ConfigError(f"client {client} is malicious: its samples, or its message, are not what they are here")
    if labels == "inferred" and head_bias(network) is None:
        raise ConfigError("--labels inferred: they follow from the gradient of the head's bias, and there is none")


def caveats(run: RunFolder, steps: int, objective: Objective) -> list[str]:
    """Returns what a reader of the numbers should know, a sentence each."""
    found, config = [], run.config
    if steps > 1:
        found.append(f"the message is of {steps} local steps, and is taken for one gradient of all samples in them")
    if config.privacy.distributed:
        found.append(
            f"privacy.mechanism={config.privacy.mechanism}: the message has the noise of one client, and epsilon "
            "is of the sum, which has that of all"
        )
    elif config.privacy.noise_multiplier and not config.privacy.local:
        found.append(
            "privacy.noise_multiplier: the server adds that noise to the sum of the messages, so that this message has "
            "none; it is clipped alone. Noise against the server is privacy.noise_at=clients, or "
            "privacy.example_noise_multiplier"
        )
    if run.parts.context.secure_sum is not None:
        found.append(
            "compression=secure_aggregation: the server sees sums of messages alone; this is what one would give away "
            "without its mask"
        )
    shortened = config.privacy.on or config.privacy.of_examples or config.train.max_grad_norm is not None
    if objective == "l2" and shortened:
        found.append("--objective l2 supposes that the message is as long as the gradient, and gradients are clipped")
    return found


def head_bias(network: Network) -> str | None:
    """Returns the name of the head's bias, if it is trained."""
    name = f"{network.head_weight.removesuffix('weight')}bias"
    return name if name in network.parameter_names else None
