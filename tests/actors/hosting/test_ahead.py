"""Samples of the next clients are read while those before are at work: in which order, how often, and to which bits."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rayfl
from actors.hosting.samples import Samples
from rayfl.data.federated import FederatedDataset, OnDemand
from rayfl.data.files.natural_file import write_natural
from rayfl.data.images import images as decoding
from rayfl.data.sources.natural import NaturalDataset
from rayfl.errors import DataError
from rayfl.examples import Examples
from rayfl.randomness import RandomStreams
from tests.data.files.test_encoded_images import CLIENTS, HEADER, TEST, TRAIN, groups
from tests.support.experiments import assert_same, outcome
from tests.support.toys import CPU, random_clients

SIZES = [5, 9, 30, 4]
LONG = 60.0
"""Seconds after which a test fails in place of waiting for ever; nothing depends on it."""


class Watched(FederatedDataset):
    """Random clients whose every read split is noted, with the thread that read it."""

    reads_ahead = True

    def __init__(self) -> None:
        self.inner = random_clients(SIZES)
        self.spec, self.names = self.inner.spec, self.inner.names
        self.read: list[tuple[int, str, str]] = []
        self.begun = threading.Semaphore(0)
        self.wrong: set[int] = set()

    def sizes(self) -> np.ndarray:
        return self.inner.sizes()

    def load(self, client: int) -> Mapping[str, Examples]:
        def read(split: str) -> Examples:
            ahead = threading.current_thread().name.startswith("rayfl-ahead")
            self.read.append((client, split, "ahead" if ahead else "in turn"))
            self.begun.release()
            if client in self.wrong:
                raise DataError(f"client {client} cannot be read")
            return self.part(client, split)

        return OnDemand(read)

    def part(self, client: int, split: str) -> Examples:
        """A split as data sets of rayfl's own have it: numbers of 32 bits."""
        found = self.inner.load(client)[split]
        return Examples(found.x.float(), found.y)

    def wait(self, reads: int) -> None:
        for _ in range(reads):
            assert self.begun.acquire(timeout=LONG), f"no thread reads ahead: {self.read}"


def test_the_next_clients_are_read_while_those_before_are_at_work() -> None:
    dataset = Watched()
    samples = Samples(dataset, CPU, None)
    samples.expect([0, 1], [2, 3])
    for client in (0, 1):
        assert all(how == "in turn" for _, _, how in dataset.read)  # those at work come first
        samples.of(client)["train"]
    dataset.wait(4)  # those at work, and meanwhile both that come next; nobody has asked for these
    in_turn, ahead = [(0, "train", "in turn"), (1, "train", "in turn")], [(2, "train", "ahead"), (3, "train", "ahead")]
    assert dataset.read == [*in_turn, *ahead]
    samples.expect([2, 3], [])
    for client in (2, 3):
        found = samples.of(client)["train"]
        torch.testing.assert_close(found.x, dataset.part(client, "train").x, rtol=0, atol=0)
    samples.of(2)["test"]  # what nobody before has asked for is read in turn
    assert dataset.read[4:] == [(2, "test", "in turn")]
    assert samples.lookups.misses == 5


def test_without_it_or_with_data_of_ones_own_nothing_is_read_ahead() -> None:
    for ahead, allowed in ((False, True), (True, False)):
        dataset = Watched()
        dataset.reads_ahead = allowed
        samples = Samples(dataset, CPU, None, ahead=ahead)
        samples.expect([0], [1])
        samples.of(0)["train"]
        samples.expect([1], [])
        samples.of(1)["train"]
        assert dataset.read == [(0, "train", "in turn"), (1, "train", "in turn")]


def test_an_error_waits_until_the_client_asks() -> None:
    dataset = Watched()
    dataset.wrong = {1}
    samples = Samples(dataset, CPU, None)
    samples.expect([0], [1, 2])
    samples.of(0)["train"]
    dataset.wait(3)
    samples.expect([1], [2])
    with pytest.raises(DataError, match="client 1 cannot be read"):
        samples.of(1)["train"]
    samples.expect([2], [])
    assert len(samples.of(2)["train"]) == SIZES[2]


def test_what_is_read_ahead_counts_within_the_limit() -> None:
    dataset = Watched()
    one = dataset.part(0, "train").nbytes // SIZES[0]
    samples = Samples(dataset, CPU, one * (SIZES[0] + SIZES[1]))
    samples.expect([0], [1, 2])
    samples.of(0)["train"]
    samples.expect([1], [])
    samples.of(1)["train"]
    # client 1 has room beside client 0, client 2 has not
    assert [client for client, _, how in dataset.read if how == "ahead"] == [1]
    assert samples.held_bytes <= one * (SIZES[0] + SIZES[1])
    samples.expect([1], [0])
    samples.of(1)["train"]
    assert (0, "train") in samples._loaded and dataset.read[-1][0] != 0  # still there: not read again


def test_room_is_made_before_the_thread_reads() -> None:
    dataset = Watched()
    one = dataset.part(0, "train").nbytes // SIZES[0]
    samples = Samples(dataset, CPU, one * (SIZES[0] + SIZES[1]))
    samples.of(0)["train"]
    samples.of(1)["train"]  # the memory is full
    samples.expect([3], [0])
    samples.of(3)["train"]
    assert (0, "train") not in samples._loaded
    dataset.wait(3)
    # client 3 is at work, client 0 is to come: client 1 has left for them
    assert list(samples._loaded) == [(3, "train")] and dataset.read[-1] == (0, "train", "ahead")


def test_every_image_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = decoding.decode_images

    def counting(count: int, *more: Any) -> np.ndarray:
        decoded.append(count)
        return decode(count, *more)

    monkeypatch.setattr("rayfl.data.files.natural_file.decode_images", counting)
    path = tmp_path / "many.parquet"
    write_natural(path, HEADER.arrow_schema(), groups())
    samples = Samples(NaturalDataset(path, 0.0, RandomStreams(0)), CPU, None)
    for _ in range(2):  # rounds
        for client in range(CLIENTS):
            samples.expect([client], [client + 1] if client + 1 < CLIENTS else [])
            samples.of(client)["train"]
        for client in range(CLIENTS):
            samples.expect([client], [client + 1] if client + 1 < CLIENTS else [])
            samples.of(client)["test"]
    assert sorted(decoded) == [TEST] * CLIENTS + [TRAIN] * CLIENTS


@pytest.mark.parametrize("mode", ["looped", pytest.param("vectorized", marks=pytest.mark.slow)])
def test_runs_have_the_same_bits_with_and_without(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "many.parquet"
    write_natural(path, HEADER.arrow_schema(), groups())
    threads: set[str] = set()
    decode = decoding.decode_images

    def noting(*given: Any) -> np.ndarray:
        threads.add(threading.current_thread().name.partition("_")[0])
        return decode(*given)

    monkeypatch.setattr("rayfl.data.files.natural_file.decode_images", noting)
    left = []
    for ahead in (True, False):
        threads.clear()
        rayfl.run(
            {
                "name": str(ahead),
                "storage_path": str(tmp_path),
                "dataset": {"name": "leaf", "path": str(path)},
                "partition": "natural",
                "model": {"name": "two_nn", "hidden": [8]},
                "algorithm": "ditto",
                "train": {"rounds": 2, "clients_per_round": 6, "batch_size": 2, "lr": 0.1},
                "engine": {"mode": mode, **({"width": 2} if mode == "vectorized" else {})},
                "cluster": {"backend": "inline", "read_ahead": ahead, "data_memory": 4000},
            }
        )
        assert ("rayfl-ahead" in threads) == ahead
        left.append(outcome(tmp_path / str(ahead)))
    assert_same(*left)
