"""What hosts read of their clients' samples, and what they keep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.hosting.memory import Lookups
from actors.hosting.samples import Samples
from rayfl.data.federated import FederatedDataset, OnDemand
from rayfl.errors import DataError
from rayfl.examples import SPLITS, Examples, InputSpec
from tests.support.counting import World
from tests.support.toys import CPU, random_clients

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
def test_without_room_samples_are_read_again_but_those_that_have_them_keep_them(whole: bool) -> None:
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


def test_samples_that_give_way_are_read_again_and_half_of_them_stay() -> None:
    dataset = Noted(whole=False)
    samples = Samples(dataset, CPU, None)
    for client in range(4):
        samples.of(client)["train"]
    held = samples.of(2)["train"]
    samples.give_way()
    assert len(held) == 30
    dataset.read.clear()
    for client in (0, 1, 3, 0, 1, 2, 3):
        samples.of(client)["train"]
    assert [client for client, _ in dataset.read] == [0, 1, 3, 2, 3]  # 18 of 48 samples stay, 30 do not beside them


class Wrong(Noted):
    """Clients with samples that are not what their data set says."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, spec: InputSpec) -> None:
        super().__init__(whole=False)
        self.spec, self._made = spec, Examples(x, y)

    def load(self, client: int) -> Mapping[str, Examples]:
        return dict.fromkeys(SPLITS, self._made)

    def load_public(self) -> torch.Tensor:
        return self._made.x


VECTOR, TEXT = InputSpec("image", (5,), 3), InputSpec("tokens", (4,), 3, 7)
ROWS, WORDS = torch.rand(6, 5), torch.arange(24).view(6, 4) % 7
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def changed(tensor: torch.Tensor, place: tuple[int, ...], value: int) -> torch.Tensor:
    found = tensor.clone()
    found[place] = value
    return found


@pytest.mark.parametrize(
    ("x", "y", "spec", "wanted"),
    [
        (
            ROWS,
            changed(LABELS, (4,), 3),
            VECTOR,
            "the label of sample 4 is 3, but the data set says that it has 3 classes",
        ),
        (ROWS, changed(LABELS, (2,), -1), VECTOR, "the label of sample 2 is -1, but"),
        (ROWS, LABELS[:5], VECTOR, r"x has the shape \(6, 5\) and y \(5,\)"),
        (
            changed(WORDS, (5, 1), 7),
            LABELS,
            TEXT,
            "a token of sample 5 is 7, but the data set says that it has 7 tokens",
        ),
        (changed(WORDS, (0, 3), -2), LABELS, TEXT, "a token of sample 0 is -2, but"),
    ],
)
def test_indices_out_of_range_are_named_before_they_reach_a_device(
    x: torch.Tensor, y: torch.Tensor, spec: InputSpec, wanted: str
) -> None:
    samples = Samples(Wrong(x, y, spec), torch.device("meta"), None)
    with pytest.raises(DataError, match=rf"^client 2 \(2\), train: {wanted}"):
        samples.of(2)["train"]
    with pytest.raises(DataError, match=rf"^client 0 \(0\), train: {wanted}"):
        samples.of(4)["test"]
    if spec.kind == "tokens":
        with pytest.raises(DataError, match=f"^the public samples: {wanted}"):
            samples.public()


def test_samples_in_range_pass() -> None:
    for x, spec in ((ROWS, VECTOR), (WORDS, TEXT), (ROWS[:0], VECTOR)):
        samples = Samples(Wrong(x, LABELS[: len(x)], spec), CPU, None)
        assert len(samples.of(0)["train"]) == len(x)
        assert len(samples.public()) == len(x)
