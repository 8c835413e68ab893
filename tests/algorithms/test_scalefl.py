"""ScaleFL: an oracle of networks that are cut out, its special cases, what travels, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.heterofl import HeteroFL
from algorithms.scalefl import ScaleFL
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.models.zoo import ResNet9
from rayfl.params import Tree, copy
from rayfl.tasks.classification import Classification
from tests.support.cut_out import COHORTS, SIZES, TRAIN
from tests.support.toy_networks import DoubleNetwork, four_layers, recurrent_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, random_clients

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
UNITS = (7, 6, 5)
At = tuple[str, str]


def deep(method: ScaleFL | HeteroFL, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    """Three hidden layers of 7, 6 and 5 units; depth 3 has the network's own classifier."""
    return Toy(method, random_clients(SIZES), four_layers(), train, **options)


def sizes_of(method: ScaleFL) -> list[tuple[int, float]]:
    levels = len(method.widths)
    depths = method.depths or [math.ceil(3 * (level + 1) / levels) for level in range(levels)]
    return list(zip(depths, method.widths, strict=True))


def places(at: At, depth: int, width: float) -> tuple[slice, ...] | None:
    """Which entries of a tensor a client has; None for none of them."""
    part, name = at
    units = [math.ceil(width * size - 1e-9) for size in UNITS]
    everything = slice(None)
    if part == "exits":
        number = int(name[0])
        own: tuple[slice, ...] = (everything, slice(units[number - 1])) if "matrix" in name else (everything,)
        return own if number <= depth else None
    if name.startswith("head"):
        own = (everything, slice(units[2])) if "weight" in name else (everything,)
        return own if depth == 3 else None
    layer = int(name.split(".")[1])
    inputs = everything if layer == 0 else slice(units[layer - 1])
    own = (slice(units[layer]), inputs) if "weight" in name else (slice(units[layer]),)
    return own if layer < depth else None


def classified(own: dict[At, Tensor], x: Tensor, depth: int, divisor: float) -> list[Tensor]:
    """The outputs of the classifiers up to a depth, with functions of PyTorch alone."""
    found = []
    for i in range(depth):
        weight, bias = own["model", f"hidden.{i}.weight"], own["model", f"hidden.{i}.bias"]
        x = F.relu(F.linear(x, weight, bias) / divisor)
        if i < 2:
            found.append(F.linear(x, own["exits", f"{i + 1}.matrix"], own["exits", f"{i + 1}.offset"]))
    return found if depth < 3 else [*found, F.linear(x, own["model", "head.weight"], own["model", "head.bias"])]


def expected(toy: Toy, server: Any, cohort: list[int], round: int, method: ScaleFL) -> Any:
    """One round with loops and ``torch.optim`` on cut-out networks."""
    everything = {(part, name): leaf for part in ("model", "exits") for name, leaf in server[part].items()}
    sums = {at: torch.zeros_like(leaf) for at, leaf in everything.items()}
    weights = {at: torch.zeros_like(leaf) for at, leaf in everything.items()}
    for k in cohort:
        depth, width = sizes_of(method)[k % len(method.widths)]
        data, divisor = toy.dataset.load(k)["train"], width if method.scaler else 1.0
        where = {at: places(at, depth, width) for at in everything}
        leaves = {at: everything[at][own].clone().requires_grad_() for at, own in where.items() if own is not None}
        optimizer = torch.optim.SGD(leaves.values(), 0.1 * 0.9**round, momentum=0.5, weight_decay=0.01)
        taught = method.distillation_weight if round >= method.distillation_start * TRAIN.rounds else 0
        plan = plan_batches(SIZES[k], 4, 2 * -(-SIZES[k] // 4), toy.context.streams.generator("batches", round, k))
        for index in plan.batches(CPU):
            outputs, heat = classified(leaves, data.x[index], depth, divisor), method.temperature
            value = torch.tensor(0.0, dtype=torch.float64)
            for number, one in enumerate(outputs, 1):
                value = value + number * F.cross_entropy(one, data.y[index])
                if number < depth:
                    target = (outputs[-1].detach() / heat).softmax(1)
                    kl = F.kl_div((one / heat).log_softmax(1), target, reduction="batchmean")
                    value = value + number * taught * heat**2 * kl
            optimizer.zero_grad()
            (2 * value / (depth * (depth + 1))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        q = SIZES[k] if method.aggregation == "samples" else 1
        for at, leaf in leaves.items():
            sums[at][where[at]] += q * leaf.detach()
            weights[at][where[at]] += q
    found = copy(server)
    for (part, name), leaf in everything.items():
        at = (part, name)
        found[part][name] = torch.where(weights[at] > 0, sums[at] / weights[at].clamp(min=1), leaf)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"widths": (0.5, 0.7, 1.0), "distillation_weight": 0.8},
        {
            "widths": (1.0, 0.4, 0.8),
            "depths": (2, 3, 1),
            "aggregation": "samples",
            "scaler": False,
            "distillation_weight": 0.5,
            "temperature": 2.0,
            "distillation_start": 0.0,
        },
        {"distillation_weight": 0},
    ],
    ids=["paper", "samples", "labels"],
)
@MODES
def test_inv_scalefl_1_rounds_are_those_of_an_oracle_of_cut_out_networks(options: dict[str, Any], mode: str) -> None:
    method = ScaleFL(**options)
    toy = deep(method, mode=mode)
    server = copy(toy.server)
    for round, cohort in enumerate(COHORTS):
        server = expected(toy, server, cohort, round, method)
        found = toy.step(cohort)
        for part in ("model", "exits"):
            assert_close(found[part], server[part], 1e-12)


@MODES
def test_inv_scalefl_2_one_depth_is_heterofl(mode: str) -> None:
    widths = (1.0, 0.5, 0.3)
    left = deep(ScaleFL(classifiers=1, widths=widths), mode=mode)
    right = deep(HeteroFL(widths=widths, aggregation="uniform"), mode=mode)
    for cohort in COHORTS:
        assert_close(left.step(cohort)["model"], right.step(cohort)["model"], 1e-12)
    assert left.server["exits"] == {}


def test_inv_scalefl_3_what_nobody_in_the_cohort_has_stays_as_it_is() -> None:
    method = ScaleFL(widths=(0.5, 0.7, 1.0))
    toy = deep(method)
    before = copy(toy.server)
    after = toy.step([0, 1, 3, 4])  # levels 1 and 2
    for part in ("model", "exits"):
        for name, leaf in after[part].items():
            trained = torch.zeros_like(leaf, dtype=torch.bool)
            for depth, width in sizes_of(method)[:2]:
                if (own := places((part, name), depth, width)) is not None:
                    trained[own] = True
            assert torch.equal(leaf[~trained], before[part][name][~trained]), name
            assert not trained.any() or not torch.equal(leaf[trained], before[part][name][trained]), name


def test_inv_scalefl_4_only_what_a_client_has_travels() -> None:
    method = ScaleFL(widths=(0.5, 0.7, 1.0))
    toy = deep(method)
    sizes = []
    for depth, width in sizes_of(method):
        own = [
            leaf[where].numel()
            for part in ("model", "exits")
            for name, leaf in toy.server[part].items()
            if (where := places((part, name), depth, width)) is not None
        ]
        sizes.append(8 * sum(own))
    toy.step([0, 1, 2, 3])
    assert toy.federation.traffic.by_client == {k: (sizes[k % 3], sizes[k % 3]) for k in range(4)}


def test_inv_scalefl_5_predictions_are_of_the_deepest_classifier() -> None:
    method = ScaleFL(widths=(0.5, 0.7, 1.0), score_classifiers=True)
    toy = deep(method)
    toy.step([0, 1, 2])
    rows = method.global_predictors(toy.server, toy.task)
    assert [*rows] == ["global", "classifier=1", "classifier=2", "classifier=3"]
    x = torch.randn(6, 5, dtype=torch.float64)
    everything = {(part, name): leaf for part in ("model", "exits") for name, leaf in toy.server[part].items()}
    logits = classified(everything, x, 3, 1.0)
    for predictor, one in zip(rows.values(), [logits[-1], *logits], strict=True):
        assert_close(predictor.predictions(predictor.built(), x, toy.task), one.log_softmax(1), 1e-12)
    test = toy.dataset.load(1)["test"]
    cut = {at: leaf[own] for at, leaf in everything.items() if (own := places(at, 2, 0.7)) is not None}
    right = classified(cut, test.x, 2, 0.7)[-1].argmax(1) == test.y
    assert toy.scores()[1]["submodel"].top1 == pytest.approx(float(right.double().mean()))


def test_channels_of_maps_and_residual_blocks_are_cut_with_the_classifiers_that_read_them() -> None:
    spec = InputSpec("image", (3, 16, 16), 3)
    network = DoubleNetwork(lambda: ResNet9(norm="group").build(spec))
    parts = [random_clients((6, 6), inputs=3 * 16 * 16).load(client)["train"] for client in range(2)]
    clients = ListDataset([(part.x.view(-1, 3, 16, 16), part.y) for part in parts])
    method = ScaleFL(widths=(0.5, 1.0), depths=(2, 4))
    toy = Toy(method, clients, Classification(network, spec=spec), TRAIN.model_copy(update={"local_epochs": 1}))
    before: dict[str, Tree] = copy(toy.server)
    after = toy.step([0])
    for number in ("1", "2"):
        moved = (after["exits"][f"{number}.matrix"] != before["exits"][f"{number}.matrix"]).any(0)
        assert moved.tolist() == [True] * (len(moved) // 2) + [False] * (len(moved) - len(moved) // 2)
    assert torch.equal(after["exits"]["3.matrix"], before["exits"]["3.matrix"])
    assert not torch.equal(toy.step([1])["exits"]["3.matrix"], before["exits"]["3.matrix"])


def test_teaching_begins_after_a_share_of_the_rounds() -> None:
    method = ScaleFL(distillation_weight=0.3)
    assert [method.course(round, 8) for round in range(4)] == [0, 0, 0.3, 0.3]
    assert ScaleFL(distillation_weight=0).course(5, 8) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, False),
        ({"widths": (0.5, 0.9)}, True),
        ({"widths": (1.0, 0.5), "classifiers": 3}, True),
        ({"widths": (0.5, 1.0), "classifiers": 3}, False),
        ({"widths": (0.5, 1.0), "depths": (1, 2), "classifiers": 3}, True),
    ],
)
def test_what_no_level_has_is_said(options: dict[str, Any], said: bool) -> None:
    found = [line for line in ScaleFL(**options).remarks(deep(ScaleFL()).context) if "stays as it is drawn" in line]
    assert len(found) == said


@pytest.mark.parametrize(
    ("method", "task", "message"),
    [
        (ScaleFL(classifiers=4), None, "into 3 depths at most"),
        (ScaleFL(classifiers=2, widths=(1.0,), depths=(3,)), None, "depths from 1 to 2"),
        (ScaleFL(), recurrent_layers(), "can be cut by depth"),
    ],
)
def test_what_cannot_be_is_refused(method: ScaleFL, task: Any, message: str) -> None:
    toy = deep(ScaleFL())
    with pytest.raises(ConfigError, match=message):
        method.check(task or toy.task, toy.context)


def test_running_statistics_are_refused() -> None:
    spec = InputSpec("image", (3, 16, 16), 3)
    task = Classification(DoubleNetwork(lambda: ResNet9(norm="batch").build(spec)), spec=spec)
    with pytest.raises(ConfigError, match=r"model\.norm=group"):
        ScaleFL().check(task, deep(ScaleFL()).context)


def test_levels_have_a_width_a_depth_and_a_share_each() -> None:
    for options in ({"depths": (1, 2)}, {"shares": (1, 2)}, {"shares": (0, 0, 0, 0)}):
        with pytest.raises(ValueError, match="4 levels"):
            ScaleFL(level_choice="drawn", **options)
    assert ScaleFL().sizes(4) == [(1, 0.7), (2, 0.7), (3, 0.75), (4, 1.0)]
    assert [depth for depth, _ in ScaleFL().sizes(2)] == [1, 1, 2, 2]


def test_levels_are_drawn_once_for_a_run() -> None:
    method = ScaleFL(widths=(0.5, 1.0), level_choice="drawn", shares=(1, 3))
    context = deep(ScaleFL()).context
    drawn = [method.level(k, context) for k in range(400)]
    assert drawn == [method.level(k, context) for k in range(400)]
    assert 250 < drawn.count(1) < 350 and drawn.count(0) + drawn.count(1) == 400
