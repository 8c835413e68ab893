"""DepthFL: an oracle in plain PyTorch, its special cases, what travels, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.depthfl import DepthFL
from algorithms.fedavg import FedAvg
from algorithms.feddyn import FedDyn
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.models.zoo import ResNet9
from rayfl.params import Tree, copy, num_bytes
from rayfl.tasks.classification import Classification
from tests.support.cut_out import COHORTS, SIZES, TRAIN
from tests.support.toy_networks import DoubleNetwork, four_layers, recurrent_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, random_clients

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def deep(method: DepthFL | FedAvg | FedDyn, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    """Three hidden layers; depth 1 has the first, depth 2 the second, depth 3 all and the network's classifier."""
    return Toy(method, random_clients(SIZES), four_layers(), train, **options)


def classified(parts: dict[str, Tree], x: Tensor, depth: int) -> list[Tensor]:
    """The outputs of the classifiers up to a depth, with functions of PyTorch alone."""
    found = []
    for i in range(depth):
        x = F.relu(F.linear(x, parts["model"][f"hidden.{i}.weight"], parts["model"][f"hidden.{i}.bias"]))
        if i < 2:
            found.append(F.linear(x, parts["exits"][f"{i + 1}.matrix"], parts["exits"][f"{i + 1}.offset"]))
    if depth == 3:
        found.append(F.linear(x, parts["model"]["head.weight"], parts["model"]["head.bias"]))
    return found


def level(part: str, name: str) -> int:
    if part == "exits":
        return int(name[0])
    return 3 if name.startswith("head") else int(name.split(".")[1]) + 1


def expected(toy: Toy, server: Any, kept: Any, cohort: list[int], round: int, method: DepthFL) -> tuple[Any, Any]:
    """One round with loops and ``torch.optim``; ``kept`` are the displacements of clients and of the server."""
    own: dict[int, Any] = {}
    for k in cohort:
        depth, data = k % 3 + 1, toy.dataset.load(k)["train"]
        start = {(p, n): leaf for p in ("model", "exits") for n, leaf in server[p].items() if level(p, n) <= depth}
        leaves = {at: leaf.clone().requires_grad_() for at, leaf in start.items()}
        optimizer = torch.optim.SGD(leaves.values(), 0.1 * 0.9**round, momentum=0.5, weight_decay=0.01)
        phase = 1 - min(round / method.ramp_up, 1) if method.ramp_up else 0
        taught = method.distillation_weight * math.exp(-5 * phase**2)
        plan = plan_batches(SIZES[k], 4, 2 * -(-SIZES[k] // 4), toy.context.streams.generator("batches", round, k))
        for index in plan.batches(CPU):
            parts: dict[str, Tree] = {"model": {}, "exits": {}}
            for (part, name), leaf in leaves.items():
                parts[part][name] = leaf
            outputs, heat = classified(parts, data.x[index], depth), method.temperature
            value = sum((F.cross_entropy(one, data.y[index]) for one in outputs), torch.tensor(0.0))
            for one in outputs:
                for other in outputs:
                    if other is not one:
                        target = (other.detach() / heat).softmax(1)
                        kl = F.kl_div((one / heat).log_softmax(1), target, reduction="batchmean")
                        value = value + taught / (depth - 1) * heat**2 * kl
            for at, leaf in leaves.items() if method.alpha else ():
                drift = leaf - start[at] + kept[k].get(at, 0)
                value = value + method.alpha / 2 * drift.square().sum()
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        own[k] = {at: leaf.detach() for at, leaf in leaves.items()}
        for at, leaf in own[k].items():
            kept[k][at] = kept[k].get(at, 0) + leaf - start[at]
    found = copy(server)
    for part in ("model", "exits"):
        for name, old in server[part].items():
            having = [k for k in cohort if (part, name) in own[k]]
            if not having:
                continue
            q = [SIZES[k] if method.aggregation == "samples" else 1 for k in having]
            mean = sum(w * own[k][part, name] for w, k in zip(q, having, strict=True)) / sum(q)
            if method.alpha:
                shift = kept["server"].get((part, name), 0) + len(having) / len(SIZES) * (mean - old)
                kept["server"][part, name] = shift
                mean = mean + shift
            found[part][name] = mean
    return found, kept


@pytest.mark.parametrize(
    "options",
    [
        {"ramp_up": 3},
        {"alpha": 0, "aggregation": "samples", "ramp_up": 0, "temperature": 2.0, "distillation_weight": 0.5},
        {"distillation_weight": 0, "alpha": 0.3},
    ],
    ids=["paper", "averages", "labels"],
)
@MODES
def test_inv_depthfl_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any], mode: str) -> None:
    method = DepthFL(**options)
    toy = deep(method, mode=mode)
    server, kept = copy(toy.server), {**{k: {} for k in range(5)}, "server": {}}
    for round, cohort in enumerate(COHORTS):
        server, kept = expected(toy, server, kept, cohort, round, method)
        found = toy.step(cohort)
        for part in ("model", "exits"):
            assert_close(found[part], server[part], 1e-12)


@MODES
def test_inv_depthfl_2_one_depth_is_feddyn_or_federated_averaging(mode: str) -> None:
    for one, other in ((DepthFL(classifiers=1), FedDyn(alpha=0.1)), (DepthFL(classifiers=1, alpha=0), None)):
        reference = FedAvg(aggregation="uniform") if other is None else other
        left, right = deep(one, mode=mode), deep(reference, mode=mode)
        for cohort in COHORTS:
            assert_close(left.step(cohort)["model"], right.step(cohort)["model"], 1e-12)
        assert left.server["exits"] == {}


def test_inv_depthfl_3_what_nobody_in_the_cohort_has_stays_as_it_is() -> None:
    toy = deep(DepthFL())
    before = copy(toy.server)
    after = toy.step([0, 3])  # both of depth 1
    for part in ("model", "exits"):
        for name, leaf in after[part].items():
            assert torch.equal(leaf, before[part][name]) == (level(part, name) > 1), name


def test_inv_depthfl_4_only_what_a_client_has_travels() -> None:
    toy = deep(DepthFL())
    sizes = [num_bytes(toy.algorithm.exits(toy.task).cut(toy.server, depth)) for depth in (1, 2, 3)]
    first, second = 8 * (6 * 7 + 8 * 3), 8 * (7 * 6 + 6 + 7 * 3)
    assert sizes == [first, first + second, first + second + 8 * (7 * 5 + 6 * 3)]
    toy.step([0, 1, 2, 3])
    assert toy.federation.traffic.by_client == {k: (sizes[k % 3], sizes[k % 3]) for k in range(4)}


def test_inv_depthfl_5_predictions_are_of_the_mean_logits_and_each_classifier_has_a_row() -> None:
    toy = deep(DepthFL(score_classifiers=True))
    toy.step([0, 1, 2])
    x = torch.randn(6, 5, dtype=torch.float64)
    rows = toy.algorithm.global_predictors(toy.server, toy.task)
    logits = classified(toy.server, x, 3)
    assert [*rows] == ["global", "classifier=1", "classifier=2", "classifier=3"]
    for predictor, one in zip(rows.values(), [torch.stack(logits).mean(0), *logits], strict=True):
        assert_close(predictor.predictions(predictor.built(), x, toy.task), one.log_softmax(1), 1e-12)


def test_the_weight_of_teaching_grows_until_a_round() -> None:
    method = DepthFL(ramp_up=10, distillation_weight=2)
    assert [method._teaching(t) for t in (0, 5, 10, 50)] == pytest.approx([2 * math.exp(-5), 2 * math.exp(-1.25), 2, 2])
    assert DepthFL(ramp_up=0)._teaching(0) == 1


def test_stages_are_divided_evenly_and_residual_blocks_stay_whole() -> None:
    network = ResNet9(norm="group").network(InputSpec("image", (3, 32, 32), 4))
    task = Classification(network)
    levels = DepthFL().exits(task).levels({"model": network.initialize(0), "exits": {}})["model"]
    assert {level for name, level in levels.items() if name.startswith("body.5.")} == {2}
    assert sorted(set(levels.values())) == [1, 2, 3, 4] and levels[network.head_weight] == 4


def test_batch_statistics_of_deeper_layers_are_averaged_over_those_who_have_them() -> None:
    spec = InputSpec("image", (3, 16, 16), 3)
    network = DoubleNetwork(lambda: ResNet9(norm="batch").build(spec))
    parts = [random_clients((6, 6), inputs=3 * 16 * 16).load(client)["train"] for client in range(2)]
    clients = ListDataset([(part.x.view(-1, 3, 16, 16), part.y) for part in parts])
    toy = Toy(DepthFL(classifiers=2, depths=(1, 2)), clients, Classification(network, spec=spec), TRAIN)
    before = copy(toy.server["model"])
    after = toy.step([0])["model"]
    deeper = [name for name in network.buffer_names if torch.equal(after[name], before[name])]
    assert 0 < len(deeper) < len(network.buffer_names)
    after = toy.step([1])["model"]
    assert not any(torch.equal(after[name], before[name]) for name in network.buffer_names)


@pytest.mark.parametrize(
    ("method", "task", "message"),
    [
        (DepthFL(classifiers=4), None, "into 3 depths at most"),
        (DepthFL(classifiers=2, depths=(3,)), None, "depths from 1 to 2"),
        (DepthFL(aggregation="samples"), None, "algorithm.alpha=0"),
        (DepthFL(), recurrent_layers(), "can be cut by depth"),
    ],
)
def test_what_cannot_be_is_refused(method: DepthFL, task: Any, message: str) -> None:
    toy = deep(DepthFL())
    with pytest.raises(ConfigError, match=message):
        method.check(task or toy.task, toy.context)


def test_shares_need_depths() -> None:
    for options in ({"shares": (1, 2)}, {"shares": (1,), "depths": (1, 2)}, {"shares": (0, 0), "depths": (1, 2)}):
        with pytest.raises(ValueError, match="shares"):
            DepthFL(depth_choice="drawn", **options)


def test_depths_are_drawn_once_for_a_run() -> None:
    method = DepthFL(depths=(1, 3), depth_choice="drawn", shares=(1, 3))
    context = deep(DepthFL()).context
    drawn = [method.depth(k, context, 3) for k in range(400)]
    assert drawn == [method.depth(k, context, 3) for k in range(400)]
    assert 250 < drawn.count(3) < 350 and drawn.count(1) + drawn.count(3) == 400


def test_two_layers_are_one_depth() -> None:
    toy = Toy(DepthFL(), random_clients(SIZES), two_layers(), TRAIN)
    assert toy.algorithm.exits(toy.task).count == 1
    assert_equal(toy.step([0])["exits"], {})
