"""LEAF's choice of clients and samples: how much of the data, who has too little, and what is kept for tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rayfl.data.sources.leaf.codec import Split
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

Plan = dict[str, dict[Split, np.ndarray]]
"""By client and split, which samples: int64 places in the samples of all clients one after the other."""

# 0.29 * 100 is 28.999999999999996 in binary floating point, and 29 samples are meant.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Sampling:
    """LEAF's options, with LEAF's letters for them.

    Attributes:
        sample_fraction: fraction of all samples to keep, in (0, 1] (``--sf``). Clients are taken in random order until
            there are enough samples; the last one may be cut short.
        iid: deal the kept samples at random to new clients "0", "1", ... (``-s iid``).
        iid_clients: with ``iid``, how many clients, as a fraction of their original number (``--iu``); None: 0.01.
        min_samples: clients with fewer samples are left out. LEAF's ``-k n`` keeps clients with more than n samples.
        train_fraction: fraction of a client's samples, or of the clients, for the train part, in (0, 1) (``--tf``).
        by: ``sample`` divides every client's samples, ``user`` the clients (``-t``).
        seed: seed of all draws.

    Raises:
        DataError: a value out of its range.
    """

    sample_fraction: float = 1.0
    iid: bool = False
    iid_clients: float | None = None
    min_samples: int = 0
    train_fraction: float = 0.9
    by: Literal["sample", "user"] = "sample"
    seed: int = 0

    def __post_init__(self) -> None:
        share = self.iid_clients
        checks = {
            "--sample-fraction": (self.sample_fraction, 0 < self.sample_fraction <= 1, "above 0 and at most 1"),
            "--iid-clients": (share, share is None or 0 < share <= 1, "above 0 and at most 1"),
            "--min-samples": (self.min_samples, self.min_samples >= 0, "at least 0"),
            "--train-fraction": (self.train_fraction, 0 < self.train_fraction < 1, "above 0 and below 1"),
            "--seed": (self.seed, self.seed >= 0, "at least 0"),
        }
        for name, (value, allowed, says) in checks.items():
            if not allowed:
                raise DataError(f"{name} is {value}; it must be {says}")
        if share is not None and not self.iid:
            raise DataError("--iid-clients is for --iid only; leave it out or add --iid")


def plan(sizes: Mapping[str, int], sampling: Sampling, gap: int | None = None) -> tuple[Plan, list[str]]:
    """Choose samples and divide them, and say what was left out.

    By sample, a client with n samples keeps max(1, floor(train_fraction * n)) for its train part, drawn at random, and
    the others for its test part; of two samples it keeps one. Clients of which a part would be empty are left out.

    Args:
        sizes: the number of samples of every client; the order of the clients fixes the places in the plan.
        sampling: what to choose.
        gap: None, or for samples that overlap with their neighbours: the first samples are the train part, the next
            ``gap`` are left out, and the rest is the test part.

    Returns:
        The plan, and sentences on what was left out.

    Raises:
        DataError: nobody is left.
    """
    streams = RandomStreams(sampling.seed)
    chosen = _chosen(sizes, sampling, streams.generator("leaf.sample"))
    few = [client for client, samples in chosen.items() if len(samples) < sampling.min_samples]
    chosen = {client: samples for client, samples in chosen.items() if client not in set(few)}
    said = [f"{len(few)} clients have fewer than {sampling.min_samples} samples and are left out"] if few else []
    generator = streams.generator("leaf.split")
    # Dealt samples have no neighbours that a gap could keep apart.
    if sampling.by == "user":
        result = _by_user(chosen, sampling, generator)
        tested = sum("test" in parts for parts in result.values())
        if tested:
            said.append(f"{tested} clients have a test part only; they are in the file, but runs take no part of them")
    else:
        result = _by_sample(chosen, sampling, None if sampling.iid else gap, generator)
        if len(result) < len(chosen):
            said.append(f"{len(chosen) - len(result)} clients have too few samples for a train and a test part")
    if not any("train" in parts for parts in result.values()):
        raise DataError(
            "no client is left to train on; lower --min-samples, or raise --sample-fraction or --train-fraction"
        )
    return result, said


def _chosen(sizes: Mapping[str, int], sampling: Sampling, generator: np.random.Generator) -> dict[str, np.ndarray]:
    names = list(sizes)
    counts = np.array([sizes[name] for name in names], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    wanted = _share(sampling.sample_fraction, int(counts.sum()))
    if sampling.iid:
        fraction = 0.01 if sampling.iid_clients is None else sampling.iid_clients
        dealt = generator.permutation(int(counts.sum()))[:wanted]
        parts = np.array_split(dealt, max(1, round(fraction * len(names))))
        return {str(client): part for client, part in enumerate(parts) if len(part)}
    order = np.arange(len(names)) if sampling.sample_fraction == 1 else generator.permutation(len(names))
    taken = {}
    for client in order.tolist():
        size = min(int(counts[client]), wanted)
        if size:
            taken[names[client]] = np.arange(starts[client], starts[client] + size)
        wanted -= size
    return taken


def _by_user(chosen: Mapping[str, np.ndarray], sampling: Sampling, generator: np.random.Generator) -> Plan:
    order = generator.permutation(len(chosen)).tolist()
    training = set(order[: _share(sampling.train_fraction, len(chosen))])
    return {
        client: {("train" if rank in training else "test"): samples}
        for rank, (client, samples) in enumerate(chosen.items())
    }


def _by_sample(
    chosen: Mapping[str, np.ndarray], sampling: Sampling, gap: int | None, generator: np.random.Generator
) -> Plan:
    result: Plan = {}
    for client, samples in chosen.items():
        num_train = 1 if len(samples) == 2 else max(1, _share(sampling.train_fraction, len(samples)))
        if gap is None:
            drawn = generator.permutation(len(samples))
            train, test = np.sort(drawn[:num_train]), np.sort(drawn[num_train:])
        else:
            train, test = np.arange(num_train), np.arange(num_train + gap, len(samples))
        if len(samples) >= 2 and len(test):
            result[client] = {"train": samples[train], "test": samples[test]}
    return result


def _share(fraction: float, size: int) -> int:
    return math.floor(fraction * size + _ROUNDING)
