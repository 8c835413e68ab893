"""Refuses, before any actor starts, settings that do not go with the clients, the method or the model."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rayfl.config.schema import ExperimentConfig
from rayfl.data.federated import FederatedDataset
from rayfl.diagnosis.tracebacks import own_definition
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError, DataError, MethodError
from rayfl.examples import InputSpec
from rayfl.models.private_norm import private_names
from rayfl.params import leaves
from rayfl.storage import treefile
from rayfl.system.config import NoSystem
from rayfl.system.devices import Device
from rayfl.system.schedule import options_without_losses
from rayfl.tasks.anomaly import AnomalyDetection
from rayfl.tasks.base import NetworkTask
from rayfl.tasks.beside_training import TaskBesideTraining
from rayfl.tasks.self_supervised import SelfSupervised
from rayfl.tasks.survival import Survival

_log = logging.getLogger("rayfl")
_SHOWN = 3


def check_trainable(samples: np.ndarray, names: Sequence[str]) -> None:
    """Refuses clients that may be sampled and have nothing to train on, which a data set of one's own may have."""
    if len(idle := np.flatnonzero(samples == 0)):
        named = ", ".join(f"{client} ({names[client]})" for client in idle[:_SHOWN].tolist())
        raise DataError(
            f"dataset: {len(idle)} of {len(samples)} clients have no training samples, so that they have no weight "
            f"in a mean and no update: {named}{', ...' if len(idle) > _SHOWN else ''}. Leave them out of the data set"
        )


def names_remarks(names: Sequence[str]) -> list[str]:
    """Returns which clients' names look the same but are not, so that one client may have become two; mostly nothing.

    Args:
        names: of all clients, by client.
    """
    looks: dict[str, list[int]] = {}
    for client, name in enumerate(names):
        plain = name if name.isascii() else unicodedata.normalize("NFKC", name)
        looks.setdefault(" ".join(plain.split()), []).append(client)
    alike = [clients for clients in looks.values() if len(clients) > 1]
    if not alike:
        return []
    named = "; ".join(" and ".join(f"{client} ({names[client]!a})" for client in one) for one in alike[:_SHOWN])
    return [
        f"names of clients differ only by blanks or by the Unicode form of their letters (NFC, NFD): {named}"
        f"{'; ...' if len(alike) > _SHOWN else ''}. They are trained and scored as different clients: if they are one, "
        "write the name in one way"
    ]


def check_server(server: Any, init: Callable[..., Any]) -> None:
    """Refuses what a method's ``init`` has returned, unless it is a tree that can be kept.

    Raises:
        MethodError: naming what it is, or the value that cannot be kept.
    """
    where = own_definition(init)
    if not isinstance(server, Mapping):
        raise MethodError(
            f"init must return the server's tree, a dict of tensors and numbers, got {server!r:.80}{where}"
        )
    try:
        treefile.check(server)
    except TypeError as error:
        raise MethodError(f"what init returned cannot be kept: {error}{where}") from None


def check_learned(dataset: FederatedDataset, clients: int, task: NetworkTask) -> None:
    """Refuses data with no training sample of the kind that the task learns of, and names clients that have none.

    Args:
        dataset: the data.
        clients: how many may train; they are the first.
        task: what is learned.

    Raises:
        DataError: no client has such a sample.
    """
    if isinstance(task, Survival):
        what, has = "event", "has an event"
        fix = "an event that was seen is 1 in the targets (time, event), one that was not 0"
    elif isinstance(task, AnomalyDetection) and task.trains == "normal":
        what, has = "normal sample", "is a normal one"
        fix = "name the classes of normal samples by task.normal, or set task.trains=all"
    else:
        return
    none = [client for client in range(clients) if not task.learned_of(dataset.labels(client)["train"]).any()]
    if len(none) == clients:
        raise DataError(f"dataset: no training sample of any client {has}, so that there is nothing to learn: {fix}")
    if none:
        named = ", ".join(f"{client} ({dataset.names[client]})" for client in none[:_SHOWN])
        _log.warning(
            "%d of %d clients have no %s among their training samples and learn nothing by themselves: %s%s",
            len(none), clients, what, named, ", ..." if len(none) > _SHOWN else "",
        )  # fmt: skip


def check_unlabelled(config: ExperimentConfig, task: NetworkTask) -> None:
    """Refuses what does not go with training without labels and an evaluation beside training samples.

    Args:
        config: the experiment.
        task: what is learned.

    Raises:
        ConfigError: naming the option and the fix.
    """
    if not isinstance(task, TaskBesideTraining):
        return
    if isinstance(task, SelfSupervised) and task.objective.name == "byol" and not config.algorithm.keeps_target:
        raise ConfigError(
            f"task.objective=byol needs a target network that clients keep, which {config.algorithm.name} has not: set "
            "algorithm=fedema or algorithm=fedu, or task.objective=simsiam"
        )
    labels = f"task={task.name} learns without labels, and its evaluation needs the true ones of training samples"
    if config.noise.kind != "none":
        raise ConfigError(f"noise: {labels}: leave it out")
    if config.labelled.active:
        raise ConfigError(f"labelled: {labels}: leave it out")
    if config.attack.labels != "honest":
        raise ConfigError(f"attack.labels: {labels}: choose attack.message, or leave it out")
    for option in ("official_test", "official_personalized"):
        if getattr(config.evaluation, option):
            raise ConfigError(
                f"evaluation.{option}: task={task.name} compares samples with the training samples of their client, "
                "and those of the official test part have none: leave it out"
            )


def check_patches(config: ExperimentConfig, spec: InputSpec, tasks: Sequence[NetworkTask]) -> None:
    """Refuses patches that the model cannot be trained on.

    Args:
        config: the experiment.
        spec: of the data.
        tasks: one for each architecture.

    Raises:
        ModelError: the model is not made for inputs as small as that.
        ConfigError: its parameters depend on the size of its inputs.
    """
    patches = config.augment.trained_on(spec)
    if patches == spec:
        return
    for network, task in zip(config.model.networks(patches), tasks, strict=True):
        made, whole = (
            {path: leaf.shape for path, leaf in leaves(one.initialize(0))} for one in (network, task.network)
        )
        if made != whole:
            raise ConfigError(
                f"augment.patch: model {config.model.name} has other parameters for patches than for the data's whole "
                "inputs, on which it is evaluated: choose one that takes any size, such as unet, or leave out patch"
            )


def check_system(config: ExperimentConfig, devices: Sequence[Device], num_clients: int) -> None:
    """Refuses a simulated system that the method or the cohort cannot have.

    Args:
        config: the experiment.
        devices: the clients' simulated devices.
        num_clients: how many may train.

    Raises:
        ConfigError: naming the option and the fix.
    """
    system, algorithm, wanted = config.system, config.algorithm, config.train.clients_per_round
    if config.train.min_clients_per_round is not None and not isinstance(system, NoSystem):
        raise ConfigError(
            "train.min_clients_per_round: on simulated devices (system) cohorts lose clients by availability, "
            "drop-outs and deadlines; leave it out"
        )
    if config.train.stragglers and not isinstance(system, NoSystem):
        raise ConfigError(
            "train.stragglers: on simulated devices (system) slow clients take longer for all of their work, and are "
            "waited for or left out; choose one of the two"
        )
    buffered = not isinstance(system, NoSystem) and system.mode == "buffered"
    if algorithm.asynchronous and not buffered:
        raise ConfigError(
            f"{algorithm.name} has rounds without a barrier, in which clients of different speed begin and end at "
            "any time: set system=given, sampled or trace, and system.mode=buffered (docs/system.md)"
        )
    if buffered and not algorithm.asynchronous:
        raise ConfigError(
            f"system.mode is buffered, but {algorithm.name} expects that a round's clients all begin with it: set "
            "system.mode=synchronous, or choose fedbuff, ca2fl or fedasync, or a class that says asynchronous = True "
            "(docs/write-a-method.md)"
        )
    if isinstance(system, NoSystem) or not devices:
        return
    if (why := algorithm.everyone_needed()) and (lossless := options_without_losses(system, devices)):
        raise ConfigError(
            f"system: simulated devices leave clients out of rounds, which {algorithm.name} cannot do without: "
            f"{why}. Set {', '.join(lossless)}, or choose another method"
        )
    if system.over_sampling > 1 and wanted in ("all", num_clients):
        raise ConfigError("system.over_sampling: train.clients_per_round asks all clients already; leave it out")
    if system.concurrency is not None and system.concurrency > num_clients:
        raise ConfigError(f"system.concurrency is {system.concurrency}, but there are only {num_clients} clients")


def statistics_remarks(algorithm: Any, task: NetworkTask) -> list[str]:
    """Returns what is wrong with a network's running statistics in the models that a method scores; mostly nothing.

    Args:
        algorithm: the method.
        task: has the networks.
    """
    names = [name for one in task.candidates for name in one.network.buffer_names]
    if not algorithm.running_statistics or not any(name.endswith(("running_mean", "running_var")) for name in names):
        return []
    return [
        f"the model has running statistics of batch normalization, and {algorithm.running_statistics}: scores can be "
        "far too low. Set model.norm=batch_no_stats (or group), or choose a model without them"
    ]


def precision_remarks(config: ExperimentConfig) -> list[str]:
    """Returns what is wrong with forward passes in bfloat16 for a method; mostly nothing."""
    why = config.algorithm.reduced_precision
    if not why or config.engine.precision != "bfloat16":
        return []
    return [f"engine.precision is bfloat16, and {why}: set it to float32, or algorithm.perturbation far higher"]


def check_private_norm(config: ExperimentConfig, task: NetworkTask, context: RoundContext) -> None:
    """Refuses normalization layers of the clients' own where there is nothing to keep, or the method needs them.

    Raises:
        ConfigError: naming the option, the method and why.
    """
    algorithm, policy, network = config.algorithm, config.train.private_norm, task.network
    names = private_names(network, policy)
    if policy in algorithm.no_private_norm:
        why = algorithm.no_private_norm[policy]
    elif len(task.candidates) > 1:
        why = "clients have different architectures"
    elif not names:
        what = "running statistics" if policy == "statistics" else "tensors"
        why = f"this model has no normalization layer with {what} (model.norm, docs/models.md)"
    elif not any(path.rpartition("/")[2] in names for path, _ in leaves(algorithm.init(task, context))):
        why = "nothing of a normalization layer is sent anyway"
    elif config.evaluation.official_test:
        why = "the server's model lacks what evaluation.official_test needs; set one of the two"
    else:
        return
    raise ConfigError(f"train.private_norm is {policy}, which {algorithm.name} cannot have here: {why}")
