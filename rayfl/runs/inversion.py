"""What a client's message gives away of its samples: gradient inversion by a server that does what it should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfl.engine.client import Client
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError, RunError
from rayfl.examples import Examples
from rayfl.metrics.inversion import matched, psnr
from rayfl.runs.attackable import head_bias
from rayfl.runs.folder import RunFolder
from rayfl.runs.gradient_matching import Attack, Labels, Leak, cosine, inferred_labels

_MOST = 256
"""Samples of a message that can be looked for."""
_OTHERS = 50
"""Other clients whose samples stand for what is known without the message."""
_NOISE = 256
"""Inputs of noise whose mean prediction stands for that of the client's samples."""


@dataclass(frozen=True)
class Message:
    """What passed between the server and a client in a round, as :func:`cluster.replay.sent_message` repeats it.

    Attributes:
        received: the model that the client received, by name of a tensor, on the CPU.
        sent: what it sent, with the noise of its own steps, clipped and compressed as configured; the same names.
    """

    received: Mapping[str, Tensor]
    sent: Mapping[str, Tensor]


@dataclass(frozen=True)
class Inverted:
    """A client's samples beside what the attack made of its message, in units of the search.

    Images are in [0, 1]. Columns of vectors have the mean 0 and the deviation 1 over other clients' samples.

    Attributes:
        places: which of the client's training samples; int64 of shape (n,).
        originals: the samples, shape (n, *input shape).
        found: the reconstruction that each has, of the same shape.
        labels: of the samples, shape (n,).
        errors: mean squared error of each reconstruction, shape (n,).
        guesses: that of the guess without the message: the mean of other clients' samples of the class.
        steps: local steps behind the message.
        agreement: cosine of the message and the gradient of the samples' mean loss at the received model.
        labels_right: share of the labels that the attack had right.
        images: whether the samples are images.
    """

    places: np.ndarray
    originals: np.ndarray
    found: np.ndarray
    labels: np.ndarray
    errors: np.ndarray
    guesses: np.ndarray
    steps: int
    agreement: float
    labels_right: float
    images: bool

    def scores(self) -> dict[str, Any]:
        """Returns means over samples; the ratios in dB are None for vectors, which have no largest value."""
        ratios = [float(psnr(errors).mean()) if self.images else None for errors in (self.errors, self.guesses)]
        return {
            "samples": len(self.places), "mse": float(self.errors.mean()), "guess_mse": float(self.guesses.mean()),
            "psnr": ratios[0], "guess_psnr": ratios[1], "nearer": int((self.errors < self.guesses).sum()),
            "labels_right": self.labels_right,
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Returns the numbers of each sample."""
        ratios = psnr(self.errors).tolist() if self.images else [None] * len(self.places)
        columns = (self.places.tolist(), self.labels.tolist(), self.errors.tolist(), ratios, self.guesses.tolist())
        names = ("sample", "label", "mse", "psnr", "guess_mse")
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def inverted(
    run: RunFolder,
    round: int,
    client: int,
    message: Message,
    attack: Attack,
    labels: Labels = "known",
    device: torch.device | None = None,
) -> Inverted:
    """Attacks a message.

    Args:
        run: the run, for which :func:`rayfl.runs.attackable.check_attack` raises nothing.
        round: completed rounds, the message's included: 1 is the first.
        client: whose message it is.
        message: see :func:`cluster.replay.sent_message`.
        attack: how to look for samples.
        labels: whether the attacker knows the labels, or infers them from the gradient of the head's bias.
        device: where to compute; None: on the CPU.

    Raises:
        ConfigError: when the message is no change of the whole model, or of too many samples or steps.
        RunError: when the message changes nothing, or the attack diverges.
    """
    device, parts = device or torch.device("cpu"), run.parts
    places, steps = _trained_on(run, round, client)
    if labels == "inferred" and steps > 1:
        raise ConfigError(f"--labels inferred: that needs one local step, and there were {steps}")
    if lacking := [name for name in parts.task.network.parameter_names if name not in message.sent]:
        raise ConfigError(f"invert: {run.config.algorithm.name} sends only a part of the model, without {lacking[0]}")
    own, others = parts.dataset_in(round - 1).load(client)["train"], _others(run, round, client)
    x, y, images = own.x[places], own.y[places], len(parts.dataset.spec.shape) > 1
    low, high = _black_and_white(run) if images else _deviation(others)
    gradient = _gradient(run, message, round, steps)
    if not any(bool(leaf.any()) for leaf in gradient.values()):
        raise RunError(f"{run.uri}: what client {client} sent in round {round} is what it received")
    model, target = ({name: leaf.to(device) for name, leaf in tree.items()} for tree in (message.received, gradient))
    leak = Leak(parts.task, model, target, y.to(device))
    agreement = float(cosine(leak.gradient_of(x.to(device)), list(target.values())))
    shape = parts.dataset.spec.shape
    edges = low.expand(shape).to(device), high.expand(shape).to(device)
    if labels == "inferred":
        leak = replace(leak, labels=_inferred(leak, *edges, images, attack.seed).to(device))
    found, least = attack.found(leak, *edges, images)
    if not np.isfinite(least):
        raise RunError("invert: the attack diverged; try another --seed, or more --restarts")
    true, made, guess = (((part - low) / (high - low)).numpy() for part in (x, found.cpu(), _guesses(others, y)))
    pairs = matched(true, made)
    return Inverted(
        places=places.numpy(),
        originals=true,
        found=made[pairs.places],
        labels=y.numpy(),
        errors=pairs.errors,
        guesses=np.square(true - guess).reshape(len(true), -1).mean(1, dtype=np.float64),
        steps=steps,
        agreement=agreement,
        labels_right=_share_right(y, leak.labels.cpu()),
        images=images,
    )


def _trained_on(run: RunFolder, round: int, client: int) -> tuple[Tensor, int]:
    """Returns which training samples the steps of a round had, in order where there is one step; and the steps."""
    parts = run.parts
    context = replace(parts.context, round=round - 1)
    work, samples = context.work_of(client), parts.dataset_in(round - 1).load(client)
    plan = Client(client, {}, samples, parts.task, context, torch.device("cpu"), work=work).batches()
    places = plan.order if plan.steps == 1 else torch.from_numpy(np.unique(plan.order.numpy()))
    if not len(places):
        raise ConfigError(f"client {client} trained on no sample in round {round}")
    if len(places) > _MOST:
        raise ConfigError(
            f"client {client} trained on {len(places)} samples in round {round}, and invert looks for {_MOST} at most: "
            "set train.max_local_steps=1, or a smaller train.batch_size"
        )
    return places, plan.steps


def _gradient(run: RunFolder, message: Message, round: int, steps: int) -> dict[str, Tensor]:
    """Returns the gradient that explains a message, if it were the same at every step; exact for one step."""
    train, names = run.config.train, run.parts.task.network.parameter_names
    rate = train.lr_in(round - 1) * displacement(train, steps)
    if not rate:
        raise RunError(f"invert: the learning rate of round {round} is 0")
    changes = {name: message.received[name] - message.sent[name] for name in names}
    return {name: leaf / rate - train.weight_decay * message.received[name] for name, leaf in changes.items()}


def displacement(train: TrainConfig, steps: int) -> float:
    """Returns how far steps of SGD go with the learning rate 1 where every gradient is 1."""
    velocity, total = 0.0, 0.0
    for step in range(steps):
        velocity = 1.0 if step == 0 else train.momentum * velocity + 1 - train.dampening
        total += 1 + train.momentum * velocity if train.nesterov else velocity
    return total


def _others(run: RunFolder, round: int, client: int) -> Examples:
    """Returns training samples of other clients (stream ``inspection``)."""
    parts = run.parts
    ids = [other for other in parts.honest(range(parts.num_clients)) if other != client]
    if len(ids) > _OTHERS:
        drawn = parts.streams.generator("inspection").choice(len(ids), _OTHERS, replace=False)
        ids = [ids[place] for place in sorted(drawn)]
    found = [parts.dataset_in(round - 1).load(other)["train"] for other in ids]
    if not sum(map(len, found)):
        raise ConfigError("invert: no other client has samples, so that nothing says what can be guessed")
    return Examples.joined(found)


def _guesses(others: Examples, y: Tensor) -> Tensor:
    """Returns for each label the mean of others' samples of the class, or of all if there are none."""
    everything = others.x.mean(0)
    known = {label: others.x[others.y == label] for label in set(y.tolist())}
    return torch.stack([known[label].mean(0) if len(known[label]) else everything for label in y.tolist()])


def _black_and_white(run: RunFolder) -> tuple[Tensor, Tensor]:
    """Returns what the model sees of pixels of the values 0 and 1, in a shape that fits an image."""
    dataset = run.parts.dataset
    ones = [1] * (len(dataset.spec.shape) - 1)
    if dataset.preprocess is None:
        return torch.zeros(1, *ones), torch.ones(1, *ones)
    black, white = (torch.from_numpy(dataset.preprocess.pixel(value)).reshape(-1, *ones) for value in (0, 1))
    return black, white


def _deviation(others: Examples) -> tuple[Tensor, Tensor]:
    """Returns the mean of each column of others' vectors, and one standard deviation above it."""
    mean, deviation = others.x.mean(0), others.x.std(0, correction=0)
    return mean, mean + torch.where(deviation > 0, deviation, 1.0)


def _share_right(true: Tensor, found: Tensor) -> float:
    """Returns the share of labels that were found, in any order."""
    count = int(torch.cat([true, found]).max()) + 1
    both = torch.minimum(torch.bincount(true, minlength=count), torch.bincount(found, minlength=count))
    return float(both.sum()) / len(true)


def _inferred(leak: Leak, low: Tensor, high: Tensor, images: bool, seed: int) -> Tensor:
    """Returns the labels that the gradient of the head's bias speaks for, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand if images else torch.randn
    unit = draw((_NOISE, *low.shape), generator=generator).to(low.device)
    buffers = {name: leaf.clone() for name, leaf in leak.model.items()}
    with torch.no_grad():
        logits = leak.task.network.logits(buffers, low + unit * (high - low), training=False)
    name = head_bias(leak.task.network)
    assert name is not None
    return inferred_labels(leak.gradient[name], logits.softmax(-1).mean(0), len(leak.labels))
