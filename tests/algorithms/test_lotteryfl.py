"""LotteryFL: invariants LOT, rounds against plain loops, what begins again, and what travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.lotteryfl import LotteryFL
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes
from tests.support.subnetwork_toys import COHORTS, TRAIN, WEIGHTS, PlainSubnetworks, after, logits_of, toy_of
from tests.support.toy_networks import normalized_layers
from tests.support.toys import assert_close, assert_equal

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "always": {"prune_share": 0.4, "target": 0.7, "accuracy_threshold": 0.0},
    "seldom": {"prune_share": 0.3, "accuracy_threshold": 0.5, "select_on": "train"},
    "samples": {"prune_share": 0.9, "target": 1, "aggregation": "samples"},
    "population": {"prune_share": 0.5, "aggregation": "population", "target": 0.6, "accuracy_threshold": 0.4},
}


class Plain(PlainSubnetworks):
    def update(self, client: int, round: int) -> tuple[Tree, dict[str, np.ndarray]]:
        mask = self.mask_of(client)
        start = self.cut(self.server, mask)
        fewer = self.fewer(mask, start)
        changes = any((fewer[name] != mask[name]).any() for name in WEIGHTS)
        if changes and self.accuracy(client, start) > self.method.accuracy_threshold:
            mask, start = fewer, self.cut(self.initial, fewer)
        return self.epochs(start, mask, client, round)[-1], mask


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("name", SETTINGS)
def test_inv_lot_1_rounds_are_those_of_plain_loops(name: str, mode: str) -> None:
    method = LotteryFL(**SETTINGS[name])
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


@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
@pytest.mark.parametrize("nothing", [{"prune_share": 0}, {"target": 0}, {"accuracy_threshold": 1.0}])
def test_inv_lot_2_if_nobody_prunes_it_is_fedavg(nothing: dict[str, Any], policy: Any) -> None:
    toy = after(LotteryFL(aggregation=policy, **nothing))
    plain = after(FedAvg(aggregation=policy))
    assert_equal(toy.server["model"], plain.server["model"])
    assert toy.federation.traffic.by_client == plain.federation.traffic.by_client
    for rows in toy.scores().values():
        assert rows["personalized"].vector.tolist() == rows["global"].vector.tolist()


def test_inv_lot_3_a_round_of_pruning_forgets_what_it_has_received_but_for_the_mask() -> None:
    """What a client sends after it has pruned depends on the received model through its mask and its magnitudes."""
    method = LotteryFL(prune_share=0.5, target=0.5, accuracy_threshold=0.0)
    toys = [toy_of(method), toy_of(method)]
    moved = {name: 1.5 * leaf for name, leaf in toys[0].server["model"].items()}
    toys[1].server = {"model": moved}
    for toy in toys:
        toy.step([0, 2])
    masks = [{str(client): state["mask"] for client, state in toy.states().items()} for toy in toys]
    assert_equal(*masks)
    for name in WEIGHTS:
        kept = torch.stack([masks[0][str(client)][name] for client in (0, 2)]).any(0)
        one, other = (toy.server["model"][name] for toy in toys)
        assert torch.equal(one[kept], other[kept])
        assert torch.equal(other[~kept], 1.5 * one[~kept]), "what nobody keeps stays as it was"
    for name in ("inner.bias", "head.bias"):
        assert torch.equal(*(toy.server["model"][name] for toy in toys))


def test_inv_lot_4_masks_stay_once_the_target_is_reached_and_training_goes_on() -> None:
    toy = toy_of(LotteryFL(prune_share=0.5, target=0.5, accuracy_threshold=0.0))
    toy.step([0, 1, 2])
    before, model = {client: state["mask"] for client, state in toy.states().items()}, toy.server["model"]
    toy.step([0, 1, 2])
    for client, masks in before.items():
        assert all(int(mask.sum()) == mask.numel() - mask.numel() // 2 for mask in masks.values())
        assert_equal(toy.states()[client]["mask"], masks)
    assert not torch.equal(toy.server["model"]["head.weight"], model["head.weight"])


def test_pruned_elements_do_not_travel_up_and_their_bytes_do_not_count() -> None:
    toy = toy_of(LotteryFL(prune_share=0.5, accuracy_threshold=0.0))
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
    method = LotteryFL(prune_share=0.4, accuracy_threshold=0.0)
    toys = [after(method, task=task, train=train, mode=mode) for mode in ("looped", "vectorized")]
    weights = {name for name in task.network.parameter_names if not name.endswith("bias")}
    assert set(toys[0].states()[0]["mask"]) == weights - (set(task.network.norm_names) if private else set())
    assert_close(*(toy.server for toy in toys), 1e-10)


def test_accuracies_need_validation_samples() -> None:
    toy = toy_of(LotteryFL())
    sizes = np.array([[4, 0, 2], [3, 0, 1]])
    with pytest.raises(ConfigError, match=r"holdout\.validation .* lotteryfl .* algorithm\.select_on=train"):
        LotteryFL().check_data(toy.task, sizes, 0)
    LotteryFL(select_on="train").check_data(toy.task, sizes, 0)
