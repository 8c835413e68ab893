"""InclusiveFL: an oracle with loops, its special cases, what travels, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.inclusivefl import InclusiveFL
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.models.networks.perceptron import TwoNN
from rayfl.models.zoo import ResNet9
from rayfl.params import Tree, copy, num_bytes
from rayfl.tasks.classification import Classification
from tests.support.cut_out import COHORTS, SIZES, TRAIN
from tests.support.toy_networks import DoubleNetwork, recurrent_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, random_clients

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
HIDDEN = (6, 6, 6, 6)
STAGES = {1: (4,), 2: (2, 4), 3: (2, 3, 4), 4: (1, 2, 3, 4)}
"""By D how many of the four stages each depth has."""


def deep(method: InclusiveFL | FedAvg, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    """Four hidden layers of 6 units; all but the first are of the same shapes."""
    spec = InputSpec("image", (5,), 3)
    task = Classification(DoubleNetwork(lambda: TwoNN(hidden=HIDDEN).build(spec)), spec=spec)
    return Toy(method, random_clients(SIZES), task, train, **options)


class Sizes:
    """Models of all depths as lists of layers, the server's and their momenta, with loops alone."""

    def __init__(self, toy: Toy, count: int, method: InclusiveFL) -> None:
        self.toy, self.count, self.method = toy, count, method
        self.depths = method.depths or tuple(range(1, count + 1))
        model, exits = toy.server["model"], toy.server["exits"]
        layers = [(model[f"hidden.{i}.weight"], model[f"hidden.{i}.bias"]) for i in range(4)]
        self.models: dict[int, list[list[Tensor]]] = {}
        for depth in range(1, count + 1):
            head = (model["head.weight"], model["head.bias"])
            if depth < count:
                head = (exits[f"{depth}.matrix"], exits[f"{depth}.offset"])
            own = [*layers[: STAGES[count][depth - 1]], head]
            self.models[depth] = [[leaf.clone() for leaf in layer] for layer in own]
        self.momenta = {
            depth: [torch.zeros_like(leaf) for leaf in self.models[depth][-2]] for depth in self.models if depth < count
        }

    def own(self, depth: int, layer: int) -> bool:
        """Whether a layer of the model of a depth is in no other."""
        last = layer == len(self.models[depth]) - 2 and depth < self.count and self.method.own_last
        return last or layer == len(self.models[depth]) - 1

    def trained(self, client: int, depth: int, round: int) -> list[list[Tensor]]:
        data = self.toy.dataset.load(client)["train"]
        layers = [[leaf.clone().requires_grad_() for leaf in layer] for layer in self.models[depth]]
        leaves = [leaf for layer in layers for leaf in layer]
        optimizer = torch.optim.SGD(leaves, 0.1 * 0.9**round, momentum=0.5, weight_decay=0.01)
        steps = 2 * -(-SIZES[client] // 4)
        plan = plan_batches(SIZES[client], 4, steps, self.toy.context.streams.generator("batches", round, client))
        for index in plan.batches(CPU):
            x = data.x[index]
            for weight, bias in layers[:-1]:
                x = F.relu(F.linear(x, weight, bias))
            optimizer.zero_grad()
            F.cross_entropy(F.linear(x, *layers[-1]), data.y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return [[leaf.detach() for leaf in layer] for layer in layers]

    def step(self, cohort: list[int], round: int) -> None:
        by_depth: dict[int, list[tuple[float, list[list[Tensor]]]]] = {}
        for client in cohort:
            depth = self.depths[client % len(self.depths)]
            q = SIZES[client] if self.method.aggregation == "samples" else 1
            by_depth.setdefault(depth, []).append((q, self.trained(client, depth, round)))
        before = {depth: [[*layer] for layer in layers] for depth, layers in self.models.items()}
        means = {
            depth: [
                [mean([(q, layers[i][j]) for q, layers in replies]) for j in range(2)]
                for i in range(len(before[depth]))
            ]
            for depth, replies in by_depth.items()
        }
        for layer in range(4):
            holders = [d for d in self.models if len(self.models[d]) - 1 > layer and not self.own(d, layer)]
            for j in range(2):
                those = [(q, one[layer][j]) for d in holders for q, one in by_depth.get(d, [])]
                for depth in holders:
                    self.models[depth][layer][j] = mean(those) if those else before[depth][layer][j]
        for depth, found in means.items():
            for layer in range(len(found)):
                if self.own(depth, layer):
                    self.models[depth][layer] = [*found[layer]]
            if depth < self.count and self.method.own_last and self.larger(depth) is not None:
                for j in range(2):
                    old, m, beta = before[depth][-2][j], self.momenta[depth][j], self.method.momentum_share
                    self.models[depth][-2][j] = old - (beta * m + (1 - beta) * (old - found[-2][j]))
        for depth in self.momenta:
            larger = self.larger(depth)
            if larger is None or larger not in means:
                continue
            first, last = len(before[depth]) - 2, len(before[larger]) - 2
            like = [i for i in range(first, last + 1) if before[larger][i][0].shape == before[depth][-2][0].shape]
            for j in range(2):
                moved = [before[larger][i][j] - means[larger][i][j] for i in like]
                self.momenta[depth][j] = sum(moved, torch.zeros_like(moved[0])) / len(moved)

    def larger(self, depth: int) -> int | None:
        return min((one for one in self.depths if one > depth), default=None)


def mean(those: list[tuple[float, Tensor]]) -> Tensor:
    total = sum((q * leaf for q, leaf in those), torch.zeros_like(those[0][1]))
    return total / sum(q for q, _ in those)


def layers_of(parts: Any, count: int, depth: int) -> list[list[Tensor]]:
    """The model of a depth as its layers."""
    model, exits = parts["model"], parts["exits"]
    found = [[model[f"hidden.{i}.weight"], model[f"hidden.{i}.bias"]] for i in range(STAGES[count][depth - 1])]
    if depth == count:
        return [*found, [model["head.weight"], model["head.bias"]]]
    return [*found, [exits[f"{depth}.matrix"], exits[f"{depth}.offset"]]]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"classifiers": 3}, 3),
        ({"classifiers": 2, "aggregation": "uniform", "momentum_share": 0.7}, 2),
        ({"depths": (3, 1, 4)}, 4),
        ({"classifiers": 3, "own_last": False}, 3),
    ],
    ids=["three", "two", "some", "shared"],
)
@MODES
def test_inv_inclusivefl_1_rounds_are_those_of_an_oracle_with_loops(
    options: dict[str, Any], count: int, mode: str
) -> None:
    method = InclusiveFL(**options)
    toy = deep(method, mode=mode)
    sizes, exits = Sizes(toy, count, method), method.exits(toy.task)
    for round, cohort in enumerate(COHORTS):
        sizes.step(cohort, round)
        server = toy.step(cohort)
        for depth, layers in sizes.models.items():
            found = layers_of(method.model_of(server, exits, depth), count, depth)
            for expected, layer in zip(layers, found, strict=True):
                for one, other in zip(expected, layer, strict=True):
                    assert_close(one, other, 1e-12)


@MODES
def test_inv_inclusivefl_2_one_depth_is_federated_averaging(mode: str) -> None:
    left, right = deep(InclusiveFL(classifiers=1), mode=mode), deep(FedAvg(), mode=mode)
    for cohort in COHORTS:
        assert_close(left.step(cohort)["model"], right.step(cohort)["model"], 1e-12)
    assert set(left.server) == {"model", "exits"} and left.server["exits"] == {}


def test_inv_inclusivefl_3_models_share_all_but_their_last_stage_and_classifier() -> None:
    method = InclusiveFL(classifiers=3)
    toy = deep(method)
    exits = method.exits(toy.task)
    for cohort in COHORTS:
        toy.step(cohort)
    small, middle, whole = (method.model_of(toy.server, exits, depth)["model"] for depth in (1, 2, 3))
    same = [{n for n in one if torch.equal(one[n], other[n])} for one, other in ((small, whole), (middle, whole))]
    first, second = ({f"hidden.{i}.{kind}" for kind in ("weight", "bias")} for i in (0, 1))
    assert same == [first, first | second]


def test_inv_inclusivefl_4_only_the_model_of_a_clients_depth_travels() -> None:
    method = InclusiveFL(classifiers=3)
    toy = deep(method)
    exits = method.exits(toy.task)
    sizes = [num_bytes(method.model_of(toy.server, exits, depth)) for depth in (1, 2, 3)]
    assert sizes == [8 * (6 * 6 + 6 * 7 * (stages - 1) + 7 * 3) for stages in (2, 3, 4)]
    toy.step([0, 1, 2, 3])
    assert toy.federation.traffic.by_client == {k: (sizes[k % 3], sizes[k % 3]) for k in range(4)}


def test_inv_inclusivefl_5_the_last_stage_moves_by_what_a_deeper_model_has_moved_by() -> None:
    toy = deep(InclusiveFL(classifiers=2, momentum_share=1.0))
    before = copy(toy.server)
    after = copy(toy.step([1]))  # of depth 2, alone
    assert_equal(after["last"], before["last"])
    stages = [f"hidden.{i}.weight" for i in (1, 2, 3)]
    moved = sum((before["model"][name] - after["model"][name] for name in stages), torch.zeros(6, 6)) / 3
    assert_close(after["momentum"]["1.hidden.1.weight"], moved, 1e-12)
    last = toy.step([0])["last"]  # of depth 1
    assert_close(last["1.hidden.1.weight"], before["last"]["1.hidden.1.weight"] - moved, 1e-12)


def test_inv_inclusivefl_6_predictions_are_of_the_model_of_each_depth() -> None:
    method = InclusiveFL(classifiers=3, score_sizes=True)
    toy = deep(method)
    toy.step([0, 1, 2])
    rows, exits = method.global_predictors(toy.server, toy.task), method.exits(toy.task)
    assert [*rows] == ["global", "size=1", "size=2", "size=3"]
    x = torch.randn(6, 5, dtype=torch.float64)
    for predictor, depth in zip(rows.values(), (3, 1, 2, 3), strict=True):
        *hidden, head = layers_of(method.model_of(toy.server, exits, depth), 3, depth)
        h = x
        for weight, bias in hidden:
            h = F.relu(F.linear(h, weight, bias))
        found = predictor.predictions(predictor.built(), x, toy.task)
        assert_close(found, F.linear(h, *head).log_softmax(1), 1e-12)
    assert toy.scores()[1]["submodel"].top1 == toy.scores()[1]["size=2"].top1


def test_running_statistics_of_a_last_stage_are_its_own() -> None:
    spec = InputSpec("image", (3, 16, 16), 3)
    network = DoubleNetwork(lambda: ResNet9(norm="batch").build(spec))
    parts = [random_clients((6, 6), inputs=3 * 16 * 16).load(client)["train"] for client in range(2)]
    clients = ListDataset([(part.x.view(-1, 3, 16, 16), part.y) for part in parts])
    task = Classification(network, spec=spec)
    toy = Toy(InclusiveFL(classifiers=2), clients, task, TRAIN.model_copy(update={"local_epochs": 1}))
    before: dict[str, Tree] = copy(toy.server)
    after = toy.step([0])
    statistics = [key for key in after["last"] if "running" in key]
    assert statistics and not set(statistics) & set(after["momentum"])
    for key in statistics:
        assert not torch.equal(after["last"][key], before["last"][key])
        assert torch.equal(after["model"][key.partition(".")[2]], before["model"][key.partition(".")[2]])


def test_without_a_deeper_model_there_is_no_momentum() -> None:
    toy = deep(InclusiveFL(classifiers=3, depths=(1,)))
    assert "momentum" not in toy.server
    before = copy(toy.server)
    after = toy.step([0])
    assert "momentum" not in after and not torch.equal(
        after["last"]["1.hidden.1.weight"], before["last"]["1.hidden.1.weight"]
    )


@pytest.mark.parametrize(
    ("method", "task", "message"),
    [
        (InclusiveFL(classifiers=5), None, "into 4 depths at most"),
        (InclusiveFL(classifiers=2, depths=(3,)), None, "depths from 1 to 2"),
        (InclusiveFL(), recurrent_layers(), "can be cut by depth"),
    ],
)
def test_what_cannot_be_is_refused(method: InclusiveFL, task: Any, message: str) -> None:
    toy = deep(InclusiveFL())
    with pytest.raises(ConfigError, match=message):
        method.check(task or toy.task, toy.context)


def test_two_layers_are_one_depth() -> None:
    toy = Toy(InclusiveFL(), random_clients(SIZES), two_layers(), TRAIN)
    assert InclusiveFL().exits(toy.task).count == 1
    assert_equal(toy.step([0])["exits"], {})
