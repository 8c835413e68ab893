"""Which methods can keep their clients' samples private by noised training, and that they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch

from algorithms.base import Averaging
from algorithms.fedavg import FedAvg
from algorithms.fedrep import FedRep
from algorithms.floco import Floco
from algorithms.pfedme import PFedMe
from algorithms.registry import METHODS
from algorithms.scaffold import Scaffold
from algorithms.superfed import SuPerFed
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ClientError
from rayfl.examples import Examples
from rayfl.messages.privacy import PrivacyConfig
from rayfl.objectives import loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch
from tests.support.cases import ALGORITHMS, TRAIN, of_kinds, toy_of
from tests.support.cases.base import Case
from tests.support.toys import assert_close, assert_equal, ragged_toy

PRIVATE = {name: case for name, case in ALGORITHMS.items() if not case.algorithm.why_no_example_privacy()}
SMALL = TRAIN.model_copy(update={"batch_size": 3})
NOISY = PrivacyConfig(example_clip_norm=0.3, example_noise_multiplier=0.5)
EVERY = of_kinds(PRIVATE)


def test_methods_are_refused_unless_they_themselves_say_that_they_can() -> None:
    allowed = {name for name, method in METHODS.items() if vars(method).get("no_example_privacy") == ""}
    assert {"fedavg", "scaffold", "ditto", "fedrep", "apfl", "pfedme", "superfed", "floco"} <= allowed
    assert not {"fedlc", "fedproto", "fedsam", "per_fedavg", "moon", "feddf", "qfedavg", "floco_plus"} & allowed
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    named = page.partition("Possible: ")[2].partition(". Of these")[0].split(",")
    assert len(named) == len(allowed)
    assert allowed - {"floco"} <= {case.algorithm.name for case in PRIVATE.values()}


def test_options_decide_too() -> None:
    assert "without noise" in Scaffold(control_update="option1").why_no_example_privacy()
    assert "products" in SuPerFed(adapters="products").why_no_example_privacy()
    assert "adapters" in Floco(simplex_over="adapters").why_no_example_privacy()


@pytest.mark.two_cases
@EVERY
def test_stacked_clients_get_what_single_ones_get_and_hosts_make_no_difference(case: Case) -> None:
    looped, stacked, several = (
        toy_of(case, train=SMALL, privacy=NOISY, **how) for how in ({}, {"mode": "vectorized"}, {"hosts": 3})
    )
    for _ in range(3):
        found = looped.step()
        assert_close(found, stacked.step(), 1e-10)
        assert_equal(found, several.step())
    assert_close(looped.states(), stacked.states(), 1e-10)
    assert_equal(looped.states(), several.states())


@EVERY
def test_what_counts_is_what_is_drawn(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Client] = []
    train = Client.train

    async def noted(self: Client, *args: Any, **options: Any) -> Tree:
        seen.append(self)
        return await train(self, *args, **options)

    monkeypatch.setattr(Client, "train", noted)
    toy = toy_of(case, train=SMALL, privacy=NOISY)
    toy.run(3)
    drawn = []
    for client in dict.fromkeys(seen):
        own: Counter[int] = Counter()
        for steps, batches in client.noised:
            own[steps] += batches
        drawn.append((own, toy.algorithm.noised_batches(toy.train, client.num_samples)))
    assert all(own <= Counter(counted) for own, counted in drawn)
    assert any(own == Counter(counted) for own, counted in drawn)


class Own(Averaging):
    """A method of a user's own, whose clients train in one of several ways."""

    name: Literal["own"] = "own"
    no_example_privacy: ClassVar[str] = ""
    way: str = "plain"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        options: dict[str, Any] = {}
        if self.way == "examples":
            options["examples"] = Examples(client.examples().x, client.examples().y)
        if self.way == "settings":
            options["settings"] = client.context.train
        if self.way == "gradient":
            await client.gradient(model, loss())
        trained = await client.train(model, self.chosen, **options)
        if self.way == "twice":
            trained = await client.train(trained, loss())
        return self.weighted(client, trained)

    @property
    def chosen(self) -> Any:
        return self.function if self.way == "function" else loss()

    @staticmethod
    def function(model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> torch.Tensor:
        found: torch.Tensor = task.loss(model, batch)
        return found


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("examples", "this pass has `examples` or `settings` of its own"),
        ("settings", "this pass has `examples` or `settings` of its own"),
        ("gradient", "Client.gradient has no noise"),
        ("function", "this one is another function"),
        ("twice", "a client has drawn 8 mini-batches for 1 steps on each, but Own.noised_batches counts 4"),
    ],
)
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_ways_of_which_epsilon_is_not_known_are_refused(way: str, message: str, mode: str) -> None:
    with pytest.raises(ClientError, match=message):
        ragged_toy(mode, algorithm=Own(way=way), privacy=NOISY).step([0])
    ragged_toy(mode, algorithm=Own(way=way)).step([0])


def test_a_class_that_derives_from_a_private_one_has_not_been_checked() -> None:
    class Derived(FedAvg):
        """Says nothing about its samples."""

    assert "nobody has checked" in Derived().why_no_example_privacy()
    assert not FedAvg().why_no_example_privacy()


def test_passes_of_one_stream_have_different_noise() -> None:
    """Two passes that a method gives the same stream by mistake; equal noise would cancel out."""

    class Twice(Own):
        def noised_batches(self, train: TrainConfig, samples: int) -> Mapping[int, int]:
            return {1: 2 * train.steps_of(samples)}

        async def local_update(self, client: Client, model: Tree) -> Weighted:
            one, other = [await client.train(model, loss()) for _ in range(2)]
            assert not torch.equal(one["head.weight"], other["head.weight"])
            return self.weighted(client, one)

    ragged_toy("looped", algorithm=Twice(), privacy=NOISY).step([0])


def test_counts_of_methods_with_passes_of_their_own() -> None:
    train = TrainConfig(local_epochs=2, batch_size=4)
    assert FedRep(head_epochs=3, body_epochs=None).noised_batches(train, 10) == {1: 9 + 6}
    assert PFedMe(inner_steps=5).noised_batches(train, 10) == {5: 6}
    assert PFedMe(inner_steps=5, local_iterations=7).noised_batches(train, 10) == {5: 7}
    assert [Floco(assignment_round=2).rounds_of_everybody(rounds) for rounds in (1, 2, 3, 9)] == [0, 0, 1, 1]
