"""What the host waits for on a device: as often for many clients of a stack as for few."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.scaffold import Scaffold
from algorithms.superfed import SuPerFed
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.aggregation.magnitudes import NonFiniteError, check_finite, extremes_of
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.augmentation import Augmentation
from rayfl.data.images.variations import Variations
from rayfl.engine import transfers
from rayfl.engine.transfers import move_trees
from rayfl.engine.updates.feed import Feed
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples, InputSpec
from rayfl.messages.compressors import Quantize, RandomK, SecureAggregation, Sign, TopK
from rayfl.messages.privacy import PrivacyConfig
from rayfl.params import copies
from rayfl.tasks.base import Batch
from rayfl.tasks.further_tasks import Multilabel
from tests.support.elsewhere import PRETENDED, elsewhere
from tests.support.launches import Launches
from tests.support.problems import CPU, examples, request
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_equal, random_clients

pytestmark = PRETENDED
METHODS = {"fedavg": FedAvg, "superfed": lambda: SuPerFed(start=0.0), "ditto": Ditto, "scaffold": Scaffold}


def counted(method: Any, clients: int, network: Any = two_layers, train: Any = None, **sections: Any) -> Launches:
    """Of the third round, with all clients in one stack, and of an evaluation after it."""
    settings = {"rounds": 4, "clients_per_round": "all", "local_epochs": 1, "batch_size": 5, "lr": 0.1, **(train or {})}
    with elsewhere() as device:
        data = random_clients([6 + k % 3 for k in range(clients)], seed=1)
        toy = Toy(method(), data, network(), TrainConfig(**settings), mode="vectorized", device=device, **sections)
        toy.client_hosts[0].engine.width = 32
        toy.run(2)
        with Launches() as found:
            toy.step()
            toy.scores()
    return found


def waits(method: Any, clients: int, network: Any = two_layers) -> dict[str, int]:
    return dict(counted(method, clients, network).waits)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.first_case
def test_the_host_waits_no_oftener_for_more_clients(method: Any) -> None:
    # more than 16, which are added to a sum at a time
    few, many = waits(method, 4), waits(method, 20)
    assert few == many
    assert sum(few.values()) <= 60


@pytest.mark.slow
def test_running_statistics_are_compared_once_a_stack() -> None:
    """What clients receive has running statistics, of which values tell whether a client has changed them."""
    few, many = (waits(FedAvg, clients, normalized_layers) for clients in (4, 20))
    assert few == many
    assert sum(few.values()) <= 60


@pytest.mark.slow
def test_private_steps_wait_for_nothing() -> None:
    """A pass of more steps has no more transfers than one of fewer."""
    found = []
    for epochs in (1, 5):
        train = TrainConfig(rounds=2, clients_per_round="all", local_epochs=epochs, batch_size=5, lr=0.1)
        privacy = PrivacyConfig(example_clip_norm=1.0, example_noise_multiplier=1.0)
        with elsewhere() as device:
            data = random_clients([12, 13, 14], seed=1)
            toy = Toy(FedAvg(), data, two_layers(), train, mode="vectorized", device=device, privacy=privacy)
            toy.step()
            with Launches() as counted:
                toy.step()
        found.append(dict(counted.waits))
    assert found[0] == found[1]


def test_trees_are_moved_together() -> None:
    shared = torch.rand(3)
    trees = [
        {"a": torch.rand(2, 2) + k, "n": k, "inner": {"b": torch.arange(3) + k, "shared": shared}} for k in range(3)
    ]
    with elsewhere() as device:
        with Launches() as there:
            moved = move_trees(trees, device)
        assert there.waits == {"to device": 2}  # one for each type
        assert all(moved[k]["inner"]["shared"] is moved[0]["inner"]["shared"] for k in range(3))
        moved[0]["a"].zero_()
        with Launches() as back:
            found = move_trees(moved, CPU)
        assert back.waits == {"from device": 2}
        trees[0]["a"].zero_()
        assert_equal(dict(enumerate([dict(one) for one in found])), dict(enumerate(trees)))
        kept = found[1]["a"]
        assert kept.untyped_storage().nbytes() == kept.nbytes
        assert move_trees(found, CPU)[1]["a"] is kept


def test_many_bytes_are_moved_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "MOVE_BYTES", 100)
    trees = [{"a": torch.rand(10), "big": torch.rand(60)} for _ in range(2)]
    with elsewhere() as device, Launches() as counted:
        found = move_trees(move_trees(trees, device), CPU)
        assert counted.waits == {"to device": 4, "from device": 4}
    assert_equal(dict(enumerate(found)), dict(enumerate(trees)))


def test_what_is_known_of_leaves_is_not_looked_at_again() -> None:
    trees = [{"a": torch.rand(4) - k, "n": 2, "none": torch.zeros(0)} for k in range(3)]
    trees[2]["a"][1] = float("nan")
    expected = ExactSum()
    with elsewhere() as device:
        there = move_trees(trees, device)
        with Launches() as counted:
            known = extremes_of(there)
        assert counted.waits == {"from device": 1}
        total = ExactSum()
        with Launches() as counted:
            for tree in there[:2]:
                check_finite(tree, known)
                total.add(Weighted(tree, 3), known)
            with pytest.raises(NonFiniteError, match="'a'"):
                check_finite(there[2], known)
        assert not counted.waits
        mean = total.mean()
    for tree in trees[:2]:
        expected.add(Weighted(tree, 3))
    assert_equal(mean, expected.mean())


def test_what_all_summands_agree_on_is_asked_for_once() -> None:
    found = []
    with elsewhere() as device:
        trees = move_trees([{"a": torch.ones(200_000)}] * 48, device)
        known = extremes_of(trees)
        for count in (8, 48):  # 16 are added at a time
            total = ExactSum()
            with Launches() as counted:
                for tree in trees[:count]:
                    total.add(Weighted(tree, 1), known)
                total.mean()
            found.append(dict(counted.waits))
    assert found[0] == found[1]


def test_augmented_mini_batches_are_not_waited_for() -> None:
    augmentation = Augmentation(AugmentConfig(crop=1, flip=True), torch.rand(3))
    one = request(examples(25, InputSpec("image", (3, 5, 5), 2), 0), two_layers().network.initialize(0))
    drawn = augmentation.draw(np.random.default_rng(0), len(one.plan.order))
    masks = Augmentation(augmentation.config, augmentation.black, of_masks=True)
    with elsewhere() as device:
        x, y = torch.rand(4, 3, 5, 5).to(device), torch.ones(4, 5, 5, dtype=torch.int64).to(device)
        numbers = {name: values[:4].to(device) for name, values in drawn.items()}
        there = replace(one, examples=Examples(one.examples.x.to(device), one.examples.y.to(device)))
        feed = Feed([replace(there, variations=Variations(augmentation, drawn))], device)
        masks = masks.on(device)
        with Launches() as counted:
            for step in range(one.plan.steps):
                feed.batch(step, 1)
            masks.both(x, y, numbers)
        assert counted.launches and not counted.waits


def test_positive_weights_are_not_waited_for() -> None:
    outputs, labels = torch.randn(4, 3), (torch.rand(4, 3) > 0.5).float()
    task = Multilabel(two_layers(), positive_weight=(1.0, 2.0, 5.0))
    with elsewhere() as device:
        there = move_trees([{"outputs": outputs, "labels": labels}], device)[0]
        with Launches() as counted:
            found = task.loss_of(there["outputs"], Batch(there["labels"], there["labels"]))
        assert not counted.waits
        back = move_trees([{"loss": found}], CPU)[0]["loss"]
    torch.testing.assert_close(back, task.loss_of(outputs, Batch(labels, labels)))


def launches(method: Any, clients: int) -> int:
    """Of the third round, with all clients in one stack and no scores."""
    train = TrainConfig(rounds=4, clients_per_round="all", local_epochs=1, batch_size=5, lr=0.1)
    with elsewhere() as device:
        toy = Toy(
            method(), random_clients([6] * clients, seed=1), two_layers(), train, mode="vectorized", device=device
        )
        toy.client_hosts[0].engine.width = clients
        toy.run(2)
        toy.federation.begin_round(toy.round, ())
        with Launches() as counted:
            toy.algorithm.round(toy.server, toy.cohort(toy.round), toy.federation)
    return sum(counted.launches.values())


@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in ("superfed", "ditto"))]
)
def test_launches_around_the_steps_hardly_grow_with_the_clients(method: str) -> None:
    few, many = (launches(METHODS[method], clients) for clients in (32, 64))
    assert (many - few) / 32 <= 1.5


def test_copies_share_no_memory_and_keep_types() -> None:
    originals = [torch.rand(2, 3), torch.arange(4), torch.rand(5, dtype=torch.float64), torch.zeros(0, 2)]
    with elsewhere() as device:
        there = [tensor.to(device) for tensor in originals]
        with Launches() as counted:
            found = copies(there)
        assert sum(counted.launches.values()) == 3  # one for each type
        there[0].zero_()
        assert_equal(dict(enumerate(tensor.cpu() for tensor in found)), dict(enumerate(originals)))


SECTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"privacy": PrivacyConfig(clip_norm=0.1)},
    "central noise": {"privacy": PrivacyConfig(clip_norm=0.1, noise_multiplier=1)},
    "moving norm": {"privacy": PrivacyConfig(clip_norm=0.1, noise_multiplier=1, target_quantile=0.5, count_noise=5)},
    "local noise": {"privacy": PrivacyConfig(clip_norm=0.1, noise_multiplier=1, noise_at="clients")},
    "top_k": {"compression": TopK()},
    "random_k": {"compression": RandomK()},
    "quantize": {"compression": Quantize()},
    "sign": {"compression": Sign()},
    "secure": {"compression": SecureAggregation()},
    "momentum": {"train": {"persist_optimizer": True, "momentum": 0.9, "dampening": 0.1}},
    "adam": {"train": {"persist_optimizer": True, "optimizer": "adam"}},
}


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            sections,
            id=name,
            marks=() if name in ("clipped", "local noise", "top_k", "secure", "adam") else pytest.mark.slow,
        )
        for name, sections in SECTIONS.items()
    ],
)
@pytest.mark.first_case
def test_sections_make_the_host_wait_no_oftener_for_more_clients(sections: dict[str, Any]) -> None:
    method = partial(FedAvg, aggregation="uniform")
    few, many = (counted(method, clients, **sections).waits for clients in (4, 20))
    assert few == many


@pytest.mark.slow
def test_integers_of_noise_are_waited_for_together() -> None:
    """Once for all roundings of a stack, and once more for those that were too long."""
    privacy = PrivacyConfig(clip_norm=0.1, noise_multiplier=1, mechanism="skellam")
    method, rule = partial(FedAvg, aggregation="uniform"), SecureAggregation()
    few, many = (sum(counted(method, n, privacy=privacy, compression=rule).waits.values()) for n in (4, 20))
    assert many - few <= 6


@pytest.mark.slow
def test_messages_are_clipped_and_noised_together() -> None:
    """More clients are more launches for what is done to each alone, which is none of it."""
    method = partial(FedAvg, aggregation="uniform")
    plain, noisy = (
        [sum(counted(method, clients, **one).launches.values()) for clients in (4, 12)]
        for one in ({}, SECTIONS["local noise"])
    )
    assert noisy[1] - noisy[0] == plain[1] - plain[0]
