"""What differential privacy of clients' samples promises, and which runs cannot have it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence

from rayfl.config.beginning import branch_of
from rayfl.config.schema import ExperimentConfig
from rayfl.engine.example_accounting import Exposure, exposure_of, largest_and_middle
from rayfl.engine.privacy import INSTALL
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.cohorts import attendances
from rayfl.errors import ConfigError
from rayfl.experiment.client_privacy import warn_of_delta
from rayfl.randomness import RandomStreams
from rayfl.system.config import NoSystem
from rayfl.tasks.base import NetworkTask

_log = logging.getLogger("rayfl")
_OPTION = "privacy.example_clip_norm"


def check_example_privacy(
    config: ExperimentConfig, task: NetworkTask, context: RoundContext, samples: Sequence[int]
) -> None:
    """Refuses a run whose clients' samples cannot be made private as asked, and logs what is promised.

    Args:
        config: the experiment.
        task: has the model.
        context: of round 0.
        samples: n_k by client.

    Raises:
        ConfigError: naming the option and the fix.
    """
    privacy = config.privacy
    if not privacy.of_examples:
        return
    if why := config.algorithm.why_no_example_privacy():
        raise ConfigError(f"{_OPTION}: not with {config.algorithm.name}: {why}")
    _check_train(config)
    for candidate in task.candidates:
        _check_network(candidate)
    if not privacy.example_noise_multiplier:
        _log.warning("privacy.example_noise_multiplier is 0: gradients of samples are clipped, and nothing is private")
        return
    if importlib.util.find_spec("opacus") is None:
        raise ConfigError(f"{_OPTION}: epsilon is computed by opacus, which is not installed: {INSTALL}")
    if config.init.source is not None and config.init.what == "model":
        _log.warning("privacy: what the model of init.from has learned from these samples is not counted in epsilon")
    warn_of_delta("privacy.example_delta", max(privacy.example_delta_of(int(own)) for own in samples if own))
    _log.info("%s", example_promise(config, samples, context.rounds, planned=True))


def example_epsilons(config: ExperimentConfig, samples: Sequence[int], rounds: int, planned: bool) -> list[float]:
    """Returns epsilon of the samples of each client, by client.

    Args:
        config: the experiment; gradients of samples have noise.
        samples: n_k by client that may train.
        rounds: rounds done.
        planned: whether every client is taken to be in every round; otherwise those that were sampled are.

    Raises:
        ImportError: opacus is not installed.
    """
    return [one.epsilon(config.privacy.accountant) for one in _exposures(config, samples, rounds, planned)]


def _exposures(config: ExperimentConfig, samples: Sequence[int], rounds: int, planned: bool) -> list[Exposure]:
    """Returns what the samples of each client go through, by client; arguments are those of example_epsilons."""
    train, clients, method = config.train, len(samples), config.algorithm
    sizes = (train.clients_per_round, train.min_clients_per_round)
    streams = RandomStreams(config.seed, branch=branch_of(config.init, config.privacy))
    attended = () if planned else attendances(streams, rounds, clients, *sizes, train.sampling)
    found = []
    for client, own in enumerate(map(int, samples)):
        times = (rounds if planned else attended[client]) + method.rounds_of_everybody(rounds)
        drawn = {steps: count * times for steps, count in method.noised_batches(train, own).items()}
        found.append(exposure_of(config.privacy, drawn, own, train.batch_size))
    return found


def example_promise(config: ExperimentConfig, samples: Sequence[int], rounds: int, planned: bool) -> str:
    """Returns what is promised about clients' samples after a number of rounds, in words.

    See :func:`example_epsilons` for the arguments, and :func:`largest_and_middle` for the two numbers.
    """
    if importlib.util.find_spec("opacus") is None:
        return f"Privacy of samples: {INSTALL} to see epsilon."
    largest, middle = largest_and_middle(_exposures(config, samples, rounds, planned), config.privacy.accountant)
    deltas = [config.privacy.example_delta_of(int(own)) for own in samples if own]
    among = f"{min(deltas):.2g}" + (f" to {max(deltas):.2g}" if max(deltas) > min(deltas) else "")
    return (
        f"Privacy of samples: epsilon = {largest:.2f} for the client where it is largest, "
        f"{middle:.2f} at the median, at delta = {among}, after {rounds} rounds"
        f"{' if every client is in each' if planned else ''}, against the server and other clients; scores are not "
        "private."
    )


def _check_train(config: ExperimentConfig) -> None:
    train = config.train
    if getattr(config.algorithm, "aggregation", "samples") == "tokens":
        raise ConfigError(
            f"{_OPTION}: with algorithm.aggregation=tokens clients send how many tokens they have: set samples"
        )
    if not isinstance(config.system, NoSystem):
        raise ConfigError(f"{_OPTION}: epsilon counts the cohorts of runs without simulated devices: leave out system")
    if train.drop_last or not train.shuffle:
        option = "drop_last" if train.drop_last else "shuffle"
        raise ConfigError(
            f"train.{option}: with {_OPTION} mini-batches have each sample by chance (Poisson sampling), so that there "
            "is no last one and no order: leave it out"
        )
    for option in ("compile", "capture"):
        if getattr(config.engine, option):
            raise ConfigError(f"engine.{option}: not with {_OPTION}, whose steps are neither compiled nor recorded")


def _check_network(task: NetworkTask) -> None:
    network = task.network
    if task.compares_samples:
        raise ConfigError(
            f"{_OPTION}: the loss of task={task.name} compares samples of a mini-batch, so that no sample has a "
            "gradient of its own"
        )
    if task.target == "ranking":
        raise ConfigError(
            f"{_OPTION}: the items that a user did not choose are drawn for all of its samples from those that no "
            "sample has, so that one sample changes the others: set privacy.clip_norm, which protects whole users"
        )
    if network.batch_statistics or network.buffer_names:
        what = "batch normalization mixes" if network.batch_statistics else "buffers of the model may mix"
        raise ConfigError(
            f"{_OPTION}: {what} the samples of a mini-batch, so that clipping does not limit what one of them changes: "
            "set model.norm=group, or choose a model without it"
        )
    if not network.vectorizable:
        raise ConfigError(
            f"{_OPTION}: gradients of single samples are taken in stacks of models, and {network.why_not_vectorizable}"
            ": choose another model"
        )
