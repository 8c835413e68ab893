"""What hosts read of their clients' samples, and what they keep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.memory import Lookups
from actors.samples import Samples
from rayfl.data.federated import Examples, FederatedDataset, OnDemand
from tests.actors.test_federation import World
from tests.toys import CPU, random_clients

SIZES = [5, 9, 30, 4]


class Noted(FederatedDataset):
    """Random clients that note what is read of them: a split at a time, or all at once."""

    def __init__(self, whole: bool) -> None:
        self.whole, self.inner = whole, random_clients(SIZES)
        self.spec, self.names = self.inner.spec, self.inner.names
        self.read: list[tuple[int, str]] = []

    def sizes(self) -> np.ndarray:
        return self.inner.sizes()

    def load(self, client: int) -> Mapping[str, Examples]:
        def read(split: str) -> Examples:
            self.read.append((client, split))
            return self.inner.load(client)[split]

        parts = OnDemand(read)
        return dict(parts) if self.whole else parts


def test_only_what_is_asked_for_is_read_and_once() -> None:
    dataset = Noted(whole=False)
    samples = Samples(dataset, CPU, None)
    for _ in range(2):
        assert len(samples.of(1)["train"]) == 9
        samples.of(2)["test"]
    assert dataset.read == [(1, "train"), (2, "test")]
    assert samples.lookups == Lookups(hits=2, misses=2)


def test_what_comes_as_a_whole_is_read_once_too() -> None:
    dataset = Noted(whole=True)
    samples = Samples(dataset, CPU, None)
    for split in ("test", "train", "validation", "test"):
        samples.of(1)[split]
    assert dataset.read == [(1, "train"), (1, "validation"), (1, "test")]


@pytest.mark.parametrize("whole", [False, True])
def test_without_room_samples_are_read_again_but_whoever_has_them_keeps_them(whole: bool) -> None:
    dataset = Noted(whole)
    samples = Samples(dataset, CPU, 1)
    parts = samples.of(0)
    first = parts["train"]
    samples.of(1)["train"]
    assert parts["train"] is first
    before = len(dataset.read)
    again = samples.of(0)["train"]
    assert len(dataset.read) > before
    assert torch.equal(again.x, first.x)


def test_the_client_after_the_last_has_everybodys_samples() -> None:
    dataset = Noted(whole=False)
    assert len(Samples(dataset, CPU, None).of(len(SIZES))["train"]) == sum(SIZES)
    assert dataset.read == [(client, "train") for client in range(len(SIZES))]


def test_there_are_three_splits() -> None:
    parts = random_clients(SIZES).load(0)
    assert list(parts) == ["train", "validation", "test"]
    with pytest.raises(KeyError):
        Samples(Noted(whole=False), CPU, None).of(0)["official"]


def test_an_evaluation_reads_nothing_that_it_does_not_score(tmp_path: Path) -> None:
    world, dataset = World(tmp_path, 1), Noted(whole=False)
    world.hosts[0]._samples = Samples(dataset, CPU, None)
    world.federation.evaluate({"model": world.model}, ("test",), final=False, clients=range(len(SIZES)))
    assert dataset.read == [(client, "test") for client in range(len(SIZES))]
