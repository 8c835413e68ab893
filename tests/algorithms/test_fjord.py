"""FjORD: an oracle of cut-out networks, one width for all, gradients of nested widths, self-distillation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fjord import FjORD
from algorithms.heterofl import HeteroFL
from algorithms.parts.widths import narrowed
from rayfl.params import Tree, copy
from tests.support.both_modes import assert_modes_agree
from tests.support.cut_out import COHORTS, SIZES, TRAIN, expected_round, logits_of, toy_of
from tests.support.toys import assert_close, assert_equal

WIDTHS = (0.5, 1.0, 0.25)
COUNTS = {0.25: 2, 0.5: 4, 1.0: 7}


@pytest.mark.parametrize(
    "taught",
    [None, (1.0, 1.0), (0.3, 2.0), (0.0, 1.0)],
    ids=["alone", "code", "mixed", "labels"],
)
def test_inv_fjord_1_rounds_are_those_of_an_oracle_of_cut_out_networks(taught: tuple[float, float] | None) -> None:
    """A step computes with the first units of the width that it draws, among those up to the client's own."""
    options: dict[str, Any] = {}
    if taught is not None:
        options = {"self_distillation": True, "distillation_weight": taught[0], "temperature": taught[1]}
    toy = toy_of(FjORD(widths=WIDTHS, **options))
    model = copy(toy.server["model"])
    seen = set()
    for round, cohort in enumerate(COHORTS):
        draws = {}
        for k in cohort:
            allowed = sorted(p for p in WIDTHS if p <= WIDTHS[k % 3])
            generator = toy.context.streams.generator("mix", round, k)
            draws[k] = [allowed[i] for i in generator.integers(len(allowed), size=2 * -(-SIZES[k] // 4))]
            seen |= {(WIDTHS[k % 3], p) for p in draws[k]}

        def loss(small: Tree, x: Tensor, y: Tensor, client: int, step: int, draws: Any = draws) -> Tensor:
            first = COUNTS[draws[client][step]]
            part = {
                "inner.weight": small["inner.weight"][:first],
                "inner.bias": small["inner.bias"][:first],
                "head.weight": small["head.weight"][:, :first],
                "head.bias": small["head.bias"],
            }
            narrow = logits_of(part, x)
            if taught is None:
                return F.cross_entropy(narrow, y)
            (alpha, heat), whole = taught, logits_of(small, x)
            target = (whole.detach() / heat).softmax(1)
            divergence = F.kl_div((narrow / heat).log_softmax(1), target, reduction="batchmean")
            return F.cross_entropy(whole, y) + (1 - alpha) * F.cross_entropy(narrow, y) + alpha * heat**2 * divergence

        model = expected_round(toy, model, cohort, round, lambda k: [*range(COUNTS[WIDTHS[k % 3]])], loss)
        assert_close(toy.step(cohort)["model"], model, 1e-12)
    assert seen == {(r, p) for r in WIDTHS for p in WIDTHS if p <= r}


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_fjord_2_one_width_is_heterofl_without_a_scaler_and_whole_federated_averaging(mode: str) -> None:
    for method, other in (
        (FjORD(widths=(1.0,)), FedAvg()),
        (FjORD(widths=(0.5,)), HeteroFL(widths=(0.5,), scaler=False)),
    ):
        one, two = toy_of(method, mode=mode), toy_of(other, mode=mode)
        for cohort in COHORTS:
            assert_equal(one.step(cohort)["model"], two.step(cohort)["model"])


def test_inv_fjord_3_the_narrowest_clients_draw_nothing() -> None:
    """A client of the smallest width trains as in HeteroFL."""
    one, two = toy_of(FjORD(widths=WIDTHS)), toy_of(HeteroFL(widths=WIDTHS, scaler=False))
    assert_close(one.step([2])["model"], two.step([2])["model"], 1e-14)


def test_units_beyond_the_drawn_width_have_no_gradient() -> None:
    task = toy_of(FjORD()).task
    units = task.network.units
    leaves = {name: leaf.requires_grad_() for name, leaf in task.network.initialize(0).items()}
    logits = task.network.logits(narrowed(leaves, torch.tensor([3]), units), torch.randn(4, 5, dtype=torch.float64))
    slopes = dict(zip(leaves, torch.autograd.grad(logits.square().sum(), list(leaves.values())), strict=True))
    assert not slopes["inner.weight"][3:].any() and not slopes["inner.bias"][3:].any()
    assert not slopes["head.weight"][:, 3:].any() and slopes["head.weight"][:, :3].any()


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("options", [{}, {"self_distillation": True, "distillation_weight": 0.4, "temperature": 2.0}])
def test_vectorized_agrees_with_looped(options: dict[str, Any], double: bool) -> None:
    assert_modes_agree(FjORD(widths=WIDTHS, **options), SIZES, TRAIN, double, 1e-10 if double else 1e-5)


def test_only_what_a_client_has_travels() -> None:
    toy = toy_of(FjORD(widths=WIDTHS))
    toy.step([0, 1, 2])
    assert toy.federation.traffic.by_client == {k: (8 * n, 8 * n) for k, n in enumerate((39, 66, 21))}
