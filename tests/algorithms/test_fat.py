"""FAT: an oracle in plain PyTorch, where attacks may go, limits that are federated averaging, the attacked row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fat import FAT
from algorithms.fedavg import FedAvg
from rayfl.engine.gradients.counted_normals import drawn_keys
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch, begin_step
from tests.support.attack_oracles import COHORTS, STRONG, TRAIN, Oracle, attack, stepped, toy_of
from tests.support.toy_networks import normalized_layers, recurrent_layers, softmax_regression, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, random_clients

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


@MODES
@pytest.mark.parametrize(
    "options",
    [{}, {"attacked_share": 0.5}, {"attacked_share": 0.6, "keep_clean": False, "unit": "input", "steps": 2}],
)
def test_inv_fat_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any], mode: str) -> None:
    method = FAT(**{**STRONG, **options})
    toy = toy_of(method, mode=mode)
    server = copy(toy.server["model"])

    def value(model: nn.Module, x: Tensor, y: Tensor, data: Any) -> Tensor:
        count = int(method.attacked_share * len(y))
        moved = attack(method, model, x[:count], y[:count], data.x) if count else x[:0]
        rest = slice(0 if method.keep_clean else count, None)
        return F.cross_entropy(model(torch.cat([moved, x[rest]])), torch.cat([y[:count], y[rest]]))

    for cohort in COHORTS:
        server = stepped(toy, server, cohort, value)
        assert_close(toy.step(cohort)["model"], server, 1e-12)
    scores = toy.scores()
    for k in range(4):
        test, model = toy.dataset.load(k)["test"], Oracle(server)
        moved = attack(method, model, test.x, model(test.x).argmax(1), test.x)
        for row, x in (("global", test.x), ("attacked", moved)):
            expected = float(F.cross_entropy(model(x), test.y).detach())
            assert scores[k][row].loss == pytest.approx(expected, abs=1e-12)


@MODES
@pytest.mark.parametrize("options", [{"radius": 0.0}, {"attacked_share": 0.0}])
def test_inv_fat_2_without_attacks_it_is_fedavg(options: dict[str, Any], mode: str) -> None:
    one, other = (toy_of(a, mode=mode) for a in (FAT(**options), FedAvg()))
    for _ in range(TRAIN.rounds):
        assert_equal(one.step(), other.step())
    assert set(one.scores()[0]) == ({"global"} if "radius" in options else {"global", "attacked"})


def limits_of(method: FAT, x: Tensor) -> Tree:
    """What attacks read where a client's samples are x."""
    client: Any = SimpleNamespace(examples=lambda: SimpleNamespace(x=x))
    return method.limits(client)


def test_inv_fat_3_attacks_stay_in_the_ball_and_the_range_and_raise_the_loss() -> None:
    task, data = two_layers(), random_clients([40]).load(0)["train"]
    model, batch = task.network.initialize(0), Batch(data.x[:12], data.y[:12])
    keys = torch.from_numpy(drawn_keys(np.random.default_rng(0), 12))
    for draw in (None, {"keys": keys}):
        for unit in ("range", "input"):
            method = FAT(**STRONG, unit=unit)
            limits = limits_of(method, data.x)
            moved = method.attacked(model, batch, task, limits, draw)
            assert ((moved - batch.x).abs() <= 0.2 * limits["unit"] + 1e-12).all()
            assert (moved >= limits["low"]).all() and (moved <= limits["high"]).all()
            assert task.loss(model, Batch(moved, batch.y)) > task.loss(model, batch) + 0.05


def test_inv_fat_4_of_a_linear_model_one_long_step_is_the_corner_of_the_ball() -> None:
    """The slope of a linear model of two classes has the same signs everywhere."""
    task, data = softmax_regression(classes=2), random_clients([20], classes=2).load(0)["train"]
    model, method = task.network.initialize(0), FAT(radius=0.1, step=5.0, steps=3)
    limits = limits_of(method, data.x)
    apart = model["head.weight"][1] - model["head.weight"][0]
    towards = torch.where(data.y == 0, 1, -1)[:, None] * apart.sign()
    corner = (data.x + 0.1 * limits["unit"] * towards).clamp(limits["low"], limits["high"])
    assert_close(method.attacked(model, Batch(data.x, data.y), task, limits), corner, 1e-12)


def test_inv_fat_5_attacks_follow_other_units_of_the_inputs() -> None:
    """A network that takes back what images are normalized by is attacked at the same images."""
    task, data, method = two_layers(), random_clients([20]).load(0)["train"], FAT(**STRONG)
    model, y = task.network.initialize(0), data.y
    mean, std = torch.tensor([0.3, -1.0, 0.0, 2.0, 0.5]).double(), torch.tensor([0.2, 3.0, 1.0, 0.5, 0.1]).double()
    normalized = {
        **model,
        "inner.weight": model["inner.weight"] * std,
        "inner.bias": model["inner.bias"] + model["inner.weight"] @ mean,
    }
    x = (data.x - mean) / std
    plain = method.attacked(model, Batch(data.x, y), task, limits_of(method, data.x))
    assert_close(method.attacked(normalized, Batch(x, y), task, limits_of(method, x)) * std + mean, plain, 1e-12)


def test_limits_of_images_are_by_channel_and_of_what_never_changes_0() -> None:
    x = torch.zeros(3, 2, 2, 2)
    x[0, 0, 1, 1], x[2, 1] = 4.0, 1.0
    found = limits_of(FAT(), x)
    assert {leaf.shape for leaf in found.values()} == {(2, 2, 2)}
    assert found["high"][:, 0, 0].tolist() == [4, 1] and found["unit"][:, 1, 0].tolist() == [4, 1]
    flat = limits_of(FAT(), torch.tensor([[1.0, 2.0], [1.0, 5.0]]))
    assert flat["unit"].tolist() == [0, 3]
    assert limits_of(FAT(unit="input"), x)["unit"].unique().tolist() == [1]
    assert limits_of(FAT(), x[:0])["unit"].unique().tolist() == [0]


def test_the_attacked_row_can_be_left_out() -> None:
    assert set(toy_of(FAT(score_attacked=False)).scores()[0]) == {"global"}
    assert set(toy_of(FAT(score_attacked=True)).scores()[0]) == {"global", "attacked"}


def test_random_starts_fill_the_ball_evenly() -> None:
    method = FAT(radius=1.0, step=1e-12, steps=1, start="ball", unit="input")
    task = softmax_regression(inputs=5)
    x = torch.zeros(2000, 5, dtype=torch.float64)
    limits = {"low": x[0] - 9, "high": x[0] + 9, "unit": torch.ones_like(x[0])}
    draw = {"keys": torch.from_numpy(drawn_keys(np.random.default_rng(0), 2000))}
    batch = Batch(x, torch.zeros(2000, dtype=torch.int64))
    moved = method.attacked(task.network.initialize(0), batch, task, limits, draw).flatten()
    quantiles = torch.quantile(moved, torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9]).double())
    assert_close(quantiles, torch.tensor([-0.8, -0.5, 0.0, 0.5, 0.8]).double(), 0.03)
    assert moved.abs().max() <= 1


def test_running_statistics_are_those_of_samples_as_they_are() -> None:
    task, data = normalized_layers(), random_clients([8]).load(0)["train"]
    first, batch, method = task.network.initialize(0), Batch(data.x, data.y), FAT(**STRONG)
    found = []
    for objective in (method.objective, FedAvg().objective):
        model = copy(first)
        begin_step(task, torch.tensor(3))
        objective(model, batch, task, limits_of(method, data.x), {})
        found.append({name: model[name] for name in task.network.buffer_names})
    assert_equal(*found)


@pytest.mark.parametrize(
    "task", [lambda: normalized_layers(0.4), pytest.param(recurrent_layers, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("options", [{"start": "ball"}, {"keep_clean": False, "attacked_share": 0.3}])
def test_vectorized_agrees_with_looped(options: dict[str, Any], task: Any) -> None:
    looped, stacked = (toy_of(FAT(**STRONG, **options), task=task(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(stacked.step(cohort), looped.step(cohort), 1e-12)
    assert stacked.scores()[1]["attacked"].loss == pytest.approx(looped.scores()[1]["attacked"].loss, abs=1e-12)


def test_training_on_attacked_samples_makes_attacks_fail() -> None:
    """One number says the class strongly, twenty more say it weakly: these an attack can turn around."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(4):
        y = torch.randint(2, (100,), generator=generator)
        sign = (2 * y - 1).double()[:, None]
        weak = 0.3 * sign + 0.3 * torch.randn(100, 20, generator=generator, dtype=torch.float64)
        strong = sign + 0.55 * torch.randn(100, 1, generator=generator, dtype=torch.float64)
        clients.append((torch.cat([strong, weak], 1), y))
    train = TrainConfig(rounds=3, clients_per_round="all", local_epochs=1, batch_size=20, lr=0.3)
    top1 = {}
    for share in (0.0, 1.0):
        method = FAT(radius=0.45, step=0.2, steps=3, unit="input", attacked_share=share, keep_clean=False)
        toy = Toy(method, ListDataset(clients, 2), softmax_regression(inputs=21, classes=2), train)
        for _ in range(3):
            toy.step([0, 1, 2, 3])
        rows = toy.scores().values()
        top1[share] = [float(np.mean([row[name].top1 for row in rows])) for name in ("global", "attacked")]
    assert top1[0.0][0] > 0.97 and top1[1.0][0] < top1[0.0][0]
    assert top1[1.0][1] > top1[0.0][1] + 0.2


@pytest.mark.parametrize(
    ("kind", "said"),
    [("tokens", "from tokens: the number of a token cannot be changed"), ("graph", "from graphs: an edge, .* cannot")],
)
def test_inputs_that_cannot_change_a_little_are_refused(kind: Any, said: str) -> None:
    task = two_layers()
    task.spec = InputSpec(kind, (5,), 3, vocabulary=9)
    with pytest.raises(ConfigError, match=said):
        FAT().check_task(task)


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"attacked_share": 0.0, "score_attacked": False}, ["radius", "steps", "start"]),
        ({"attacked_share": 0.0}, ["start"]),
        ({"score_attacked": False}, []),
    ],
)
def test_options_of_attacks_that_nothing_makes_are_idle(options: dict[str, Any], idle: list[str]) -> None:
    said = FAT(radius=0.2, steps=3, start="ball", **options).idle_settings()
    assert [line.split()[0] for line in said] == [f"algorithm.{name}" for name in idle]
