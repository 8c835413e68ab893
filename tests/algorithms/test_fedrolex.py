"""FedRolex: an oracle of cut-out networks, HeteroFL and federated averaging as special cases, every unit's turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedrolex import FedRolex
from algorithms.heterofl import HeteroFL
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from tests.support.both_modes import assert_modes_agree
from tests.support.cut_out import COHORTS, HIDDEN, SIZES, TRAIN, expected_round, logits_of, toy_of
from tests.support.toys import assert_close, assert_equal

WIDTHS = (0.5, 1.0, 0.25)
COUNTS = (4, 7, 2)


@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scaler", [False, True])
def test_inv_fedrolex_1_rounds_are_those_of_an_oracle_of_cut_out_networks(
    scaler: bool, masked: bool, shift: int
) -> None:
    """The window of round t begins at unit t times the shift, and goes on at unit 0 after the last one."""
    toy = toy_of(FedRolex(widths=WIDTHS, scaler=scaler, masked_loss=masked, shift=shift))
    model = copy(toy.server["model"])

    def classes(client: int) -> list[int]:
        return sorted(set(toy.dataset.load(client)["train"].y.tolist())) if masked else [0, 1, 2]

    def loss(small: Tree, x: Tensor, y: Tensor, client: int, step: int) -> Tensor:
        logits = logits_of(small, x, WIDTHS[client % 3] if scaler else 1.0)
        kept = torch.tensor([c in classes(client) for c in range(3)])
        return F.cross_entropy(torch.where(kept, logits, 0), y)

    for round, cohort in enumerate(COHORTS * 2):

        def units(client: int, begin: int = round * shift) -> list[int]:
            return [(begin + i) % HIDDEN for i in range(COUNTS[client % 3])]

        model = expected_round(toy, model, cohort, round, units, loss, classes)
        assert_close(toy.step(cohort)["model"], model, 1e-12)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_fedrolex_2_whole_widths_are_federated_averaging_to_the_bit(mode: str) -> None:
    rolling, plain = (toy_of(method, mode=mode) for method in (FedRolex(widths=(1.0,)), FedAvg()))
    for cohort in COHORTS:
        assert_equal(rolling.step(cohort)["model"], plain.step(cohort)["model"])


@pytest.mark.parametrize("options", [{}, {"masked_loss": True}, {"scaler": False, "width_choice": "each_round"}])
def test_inv_fedrolex_3_without_a_shift_it_is_heterofl_to_the_bit(options: dict[str, Any]) -> None:
    rolling, first = (toy_of(method) for method in (FedRolex(shift=0, **options), HeteroFL(**options)))
    for cohort in COHORTS:
        assert_equal(rolling.step(cohort), first.step(cohort))
    assert_equal(rolling.federation.traffic.by_client, first.federation.traffic.by_client)
    # and with a shift of all units
    again = toy_of(FedRolex(shift=HIDDEN, **options))
    for cohort in COHORTS:
        again.step(cohort)
    assert_equal(again.server, first.server)


def test_inv_fedrolex_4_every_unit_has_its_turn_although_nobody_has_all() -> None:
    rolling, first = (
        toy_of(method, TRAIN.model_copy(update={"rounds": HIDDEN}))
        for method in (FedRolex(widths=(0.25,)), HeteroFL(widths=(0.25,)))
    )
    begun = copy(rolling.server["model"])["inner.weight"]
    for t in range(HIDDEN):
        before = copy(rolling.server["model"])["inner.weight"]
        moved = (rolling.step([0, 1])["model"]["inner.weight"] != before).any(1)
        assert sorted(moved.nonzero()[:, 0].tolist()) == sorted({t, (t + 1) % HIDDEN})
        first.step([0, 1])
    assert (rolling.server["model"]["inner.weight"] != begun).any(1).all()
    assert (first.server["model"]["inner.weight"] != begun).any(1).tolist() == [True] * 2 + [False] * 5


@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(double: bool) -> None:
    assert_modes_agree(FedRolex(widths=WIDTHS), SIZES, TRAIN, double, 1e-10 if double else 1e-5)


def test_an_optimizer_that_goes_on_is_refused_while_the_window_moves() -> None:
    toy = toy_of(FedRolex(), TRAIN.model_copy(update={"persist_optimizer": True}))
    with pytest.raises(ConfigError, match=r"fedrolex needs train\.persist_optimizer=false"):
        FedRolex().check(toy.task, toy.context)
    FedRolex(shift=0).check(toy.task, toy.context)
