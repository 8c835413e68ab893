"""Sub-FedAvg: invariants SUB, rounds against plain loops, when clients prune, and what travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.subfedavg import SubFedAvg, distance
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes
from tests.support.subnetwork_toys import COHORTS, TRAIN, WEIGHTS, PlainSubnetworks, after, logits_of, toy_of
from tests.support.toy_networks import normalized_layers
from tests.support.toys import assert_close, assert_equal

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "far": {"prune_share": 0.3, "target": 0.8, "distance_threshold": 0.04, "accuracy_threshold": 0.0},
    "exact": {"prune_share": 0.4, "target": 0.7, "distance_threshold": None, "accuracy_threshold": 0.6},
    "samples": {"prune_share": 0.9, "target": 1, "distance_threshold": 0, "aggregation": "samples"},
    "population": {"prune_share": 0.5, "aggregation": "population", "select_on": "train", "target": 0.6},
}


class Plain(PlainSubnetworks):
    def update(self, client: int, round: int) -> tuple[Tree, dict[str, np.ndarray]]:
        mask = self.mask_of(client)
        first, last = self.epochs(self.cut(self.server, mask), mask, client, round)
        one, other = self.fewer(mask, first), self.fewer(mask, last)
        apart = np.mean([(one[name] != other[name]).mean() for name in WEIGHTS])
        limit = self.method.distance_threshold
        lighter = self.cut(last, other)
        if (limit is None or apart > limit) and self.accuracy(client, lighter) > self.method.accuracy_threshold:
            return lighter, other
        return last, mask


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("name", SETTINGS)
def test_inv_sub_1_rounds_are_those_of_plain_loops(name: str, mode: str) -> None:
    method = SubFedAvg(**SETTINGS[name])
    toy = toy_of(method, mode=mode)
    plain = Plain(method, toy)
    for round, cohort in enumerate(COHORTS):
        toy.step(cohort)
        plain.round(round, cohort)
        assert_close(toy.server["model"], plain.server, 1e-12)
        for client, state in toy.states().items():
            assert {key: mask.tolist() for key, mask in state["mask"].items()} == {
                key: mask.tolist() for key, mask in plain.masks[client].items()
            }
    assert any(not mask.all() for masks in plain.masks.values() for mask in masks.values()), "somebody prunes"
    for client, rows in toy.scores().items():
        examples = toy.dataset.load(client)["test"]
        for row, model in (("global", plain.server), ("personalized", plain.cut(plain.server, plain.mask_of(client)))):
            expected = float(F.cross_entropy(logits_of(model, examples.x), examples.y))
            assert rows[row].loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
@pytest.mark.parametrize(
    "nothing", [{"prune_share": 0}, {"target": 0}, {"accuracy_threshold": 1.0}, {"distance_threshold": 1.0}]
)
def test_inv_sub_2_if_nobody_prunes_it_is_fedavg(nothing: dict[str, Any], policy: Any, mode: str) -> None:
    toy = after(SubFedAvg(aggregation=policy, **nothing), mode=mode)
    plain = after(FedAvg(aggregation=policy), mode=mode)
    assert_equal(toy.server["model"], plain.server["model"])
    assert toy.federation.traffic.by_client == plain.federation.traffic.by_client
    for rows in toy.scores().values():
        assert rows["personalized"].vector.tolist() == rows["global"].vector.tolist()


def test_inv_sub_3_masks_lose_a_share_of_what_they_have_until_the_target() -> None:
    toy = toy_of(SubFedAvg(prune_share=0.3, target=0.55, accuracy_threshold=0.0, distance_threshold=None))
    gone = dict.fromkeys(WEIGHTS, 0)
    before: Tree = {}
    for _ in range(5):
        toy.step([0, 1, 2])
        masks = toy.states()[1]["mask"]
        for name, mask in masks.items():
            size = mask.numel()
            gone[name] = min(gone[name] + int(0.3 * (size - gone[name])), int(0.55 * size))
            assert size - int(mask.sum()) == gone[name]
            assert not before or not (mask & ~before[name]).any(), "no element comes back"
        before = masks
    assert set(masks) == set(WEIGHTS), "biases are whole"


def test_inv_sub_4_the_server_keeps_what_nobody_keeps_and_clients_have_zeros_there() -> None:
    toy = toy_of(SubFedAvg(prune_share=0.5, target=0.9, accuracy_threshold=0.0, distance_threshold=None))
    for _ in range(3):
        before = dict(toy.server["model"])
        toy.step([0, 1, 2])
        states, model = toy.states(), toy.server["model"]
        for name in WEIGHTS:
            nobody = ~torch.stack([states[client]["mask"][name] for client in range(3)]).any(0)
            assert torch.equal(model[name][nobody], before[name][nobody])
    assert nobody.any()


def test_masks_differ_by_the_mean_over_tensors() -> None:
    one = {"a": torch.tensor([True, True, False, False]), "b": torch.tensor([[True]])}
    other = {"a": torch.tensor([True, False, False, True]), "b": torch.tensor([[True]])}
    assert distance(one, other) == 0.25 and distance(one, one) == 0


def test_pruned_elements_do_not_travel_up_and_their_bytes_do_not_count() -> None:
    toy = toy_of(SubFedAvg(prune_share=0.5, target=0.5, accuracy_threshold=0.0, distance_threshold=None))
    size = num_bytes(toy.server["model"])
    toy.step([0, 1, 2])
    masks = toy.states()[0]["mask"]
    pruned = sum(int((~mask).sum()) for mask in masks.values())
    bits = sum(-(-mask.numel() // 8) for mask in masks.values())
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 1, 2), (size, size - 8 * pruned + bits))


@pytest.mark.parametrize("private", [False, True])
def test_buffers_and_private_layers_have_no_masks(private: bool) -> None:
    train = TRAIN.model_copy(update={"private_norm": "all"}) if private else TRAIN
    task = normalized_layers()
    method = SubFedAvg(prune_share=0.4, accuracy_threshold=0.0, distance_threshold=None)
    toys = [after(method, task=task, train=train, mode=mode) for mode in ("looped", "vectorized")]
    weights = {name for name in task.network.parameter_names if not name.endswith("bias")}
    assert set(toys[0].states()[0]["mask"]) == weights - (set(task.network.norm_names) if private else set())
    assert_close(*(toy.server for toy in toys), 1e-10)


def test_one_epoch_and_a_distance_are_refused() -> None:
    train = TRAIN.model_copy(update={"local_epochs": 1})
    toy = toy_of(SubFedAvg(), train=train)
    with pytest.raises(ConfigError, match=r"train\.local_epochs is 1.*algorithm\.distance_threshold=null"):
        toy.algorithm.check(toy.task, toy.context)
    for method in (SubFedAvg(distance_threshold=None), SubFedAvg(target=0)):
        method.check(toy.task, toy.context)


def test_accuracies_need_validation_samples() -> None:
    toy = toy_of(SubFedAvg())
    sizes = np.array([[4, 0, 2], [3, 0, 1]])
    with pytest.raises(ConfigError, match=r"holdout\.validation .* subfedavg .* algorithm\.select_on=train"):
        SubFedAvg().check_data(toy.task, sizes, 0)
    SubFedAvg(select_on="train").check_data(toy.task, sizes, 0)
    SubFedAvg(prune_share=0).check_data(toy.task, sizes, 0)
    SubFedAvg().check_data(toy.task, np.array([[4, 1, 2], [3, 0, 1]]), 0)


def test_a_straggler_without_a_whole_epoch_does_not_prune() -> None:
    train = TRAIN.model_copy(update={"max_local_steps": 1})
    toy = toy_of(SubFedAvg(accuracy_threshold=0.0, distance_threshold=0), train=train)
    toy.step([0, 1, 2])
    assert all(mask.all() for state in toy.states().values() for mask in state["mask"].values())
