"""CCVR: invariants CCVR of moments and Gaussians, drawn features, whole rounds, messages, rows, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.ccvr import CCVR
from algorithms.fedavg import FedAvg
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.randomness import RandomStreams
from rayfl.tasks.classification import Classification
from tests.algorithms.test_ccvr_moments import equations_3_and_4
from tests.support.partial_toys import TRAIN, initial, labelled, partly_fixed, three_layers, vectors
from tests.support.toy_networks import DoubleNetwork, SoftmaxRegression, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

THREE = TRAIN.model_copy(update={"rounds": 3})
WIDTH, CLASSES = 7, 3
UNEQUAL = ([0, 1] * 9, [1] * 7 + [2] * 4, [2, 0, 2, 2, 1] * 2, [0, 0, 1])
"""Clients of 18, 11, 10 and 3 samples, of which two lack a class and one has a single sample of one."""


def several(algorithm: Any, **options: Any) -> Toy:
    return Toy(algorithm, labelled(*UNEQUAL), **{"task": two_layers(), "train": THREE, **options})


def trained(model: Tree, part: Any, epochs: int, batches: Any) -> Tree:
    """A client's local training, in plain PyTorch."""
    inner, head = nn.Linear(5, WIDTH).double(), nn.Linear(WIDTH, CLASSES).double()
    network = nn.Sequential(inner, nn.ReLU(), head)
    network.load_state_dict(dict(zip(network.state_dict(), model.values(), strict=True)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    for index in plan_batches(len(part.y), 4, epochs * -(-len(part.y) // 4), batches).batches(CPU):
        optimizer.zero_grad()
        F.cross_entropy(network(part.x[index]), part.y[index]).backward()
        optimizer.step()
    return dict(zip(model, (leaf.detach() for leaf in network.state_dict().values()), strict=True))


def calibrated(model: Tree, parts: Any, round: int, streams: RandomStreams, lr: float) -> Tree:
    """The paper's calibration in plain PyTorch: 6 features of each class, 3 epochs of mini-batches of 5."""
    known = [
        (F.linear(one.x, model["inner.weight"], model["inner.bias"]).relu().numpy(), one.y.numpy()) for one in parts
    ]
    generator, features = streams.generator("virtual", round), []
    for label in range(CLASSES):
        mu, covariance = equations_3_and_4(known, label)
        pooled = np.concatenate([z[y == label] for z, y in known])
        _, singular, directions = np.linalg.svd(pooled - pooled.mean(0), full_matrices=False)
        # the symmetric root, from the samples themselves, so that it is exact where the covariance is singular
        root = (directions.T * singular / np.sqrt(len(pooled) - 1)) @ directions
        assert np.abs(root @ root - covariance).max() < 1e-12
        features.append(mu + generator.standard_normal((6, WIDTH)) @ root)
    x, y = torch.from_numpy(np.concatenate(features)), torch.arange(CLASSES).repeat_interleave(6)
    head = nn.Linear(WIDTH, CLASSES).double()
    head.load_state_dict({"weight": model["head.weight"], "bias": model["head.bias"]})
    optimizer = torch.optim.SGD(head.parameters(), lr=lr)
    for index in plan_batches(18, 5, 3 * 4, streams.generator("batches.calibration", round, -1)).batches(CPU):
        optimizer.zero_grad()
        F.cross_entropy(head(x[index]), y[index]).backward()
        optimizer.step()
    return {f"head.{name}": leaf.detach() for name, leaf in head.state_dict().items()}


@pytest.mark.parametrize(("aggregation", "rate"), [("samples", 0.3), ("uniform", None)])
def test_inv_ccvr_4_rounds_are_those_of_an_oracle_in_plain_pytorch(aggregation: Any, rate: float | None) -> None:
    train = THREE.model_copy(update={"lr_decay": 1.0})
    algorithm = CCVR(
        aggregation=aggregation,
        virtual_features=6,
        server_epochs=3,
        server_lr=rate,
        server_batch_size=5,
        calibrate_every=2,
    )
    toy = several(algorithm, train=train)
    streams, parts = toy.context.streams, [toy.dataset.load(client)["train"] for client in range(4)]
    model = initial(toy)
    for round, cohort in enumerate(([0, 1, 3], [0, 2], [1, 3])):
        replies = [trained(model, parts[k], 2, streams.generator("batches", round, k)) for k in cohort]
        sizes = [len(parts[k].y) if aggregation == "samples" else 1 for k in cohort]
        model = {
            name: sum(size * reply[name] for size, reply in zip(sizes, replies, strict=True)) / sum(sizes)
            for name in model
        }
        toy.step(cohort)
        assert_close(toy.server["model"], model, 1e-12)
        expected = {} if round == 0 else calibrated(model, parts, round, streams, 0.1 if rate is None else rate)
        assert_close(toy.server["calibrated"], expected, 1e-12)


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_ccvr_5_training_is_that_of_federated_averaging(make: Any) -> None:
    """Whatever is calibrated in between: no round begins from it."""
    data = random_clients((8, 12, 6, 10))
    plain, ours = (Toy(one, data, make(), TRAIN) for one in (FedAvg(), CCVR(virtual_features=9, calibrate_every=1)))
    for cohort in ([0, 2], [1, 2], [0, 1], [1, 2]):
        plain.step(cohort)
        ours.step(cohort)
        assert_equal(ours.server["model"], plain.server["model"])
        assert vectors(ours.scores(), "global") == vectors(plain.scores(), "global")
        assert vectors(ours.scores(), "calibrated") != vectors(plain.scores(), "global")


@pytest.mark.parametrize("still", [{"virtual_features": 0}, {"server_lr": 0.0}])
def test_inv_ccvr_6_without_virtual_features_or_a_rate_it_is_federated_averaging(still: dict[str, Any]) -> None:
    plain, ours = several(FedAvg()), several(CCVR(**still, calibrate_every=1))
    for cohort in ([0, 1], [2, 3]):
        plain.step(cohort)
        ours.step(cohort)
        if not still.get("virtual_features", 1):
            assert ours.federation.traffic.by_client == plain.federation.traffic.by_client
        assert vectors(ours.scores(), "calibrated") == vectors(plain.scores(), "global")


def test_the_loss_on_drawn_features_falls_and_only_the_last_layer_moves() -> None:
    toy = several(CCVR(virtual_features=200, server_epochs=20, server_lr=0.5))
    for cohort in ([0], [0], [0]):  # a client without a class, so that the last layer forgets it
        toy.step(cohort)
    scores = toy.scores()
    loss = {row: sum(scores[k][row].loss * scores[k][row].n for k in range(4)) for row in ("global", "calibrated")}
    assert loss["calibrated"] < 0.9 * loss["global"]
    assert set(toy.server["calibrated"]) == {"head.weight", "head.bias"}


@pytest.mark.parametrize(("every", "expected"), [(None, [2]), (1, [0, 1, 2]), (2, [1, 2]), (3, [2]), (9, [2])])
def test_a_round_has_the_row_calibrated_if_it_ends_with_a_calibration(every: int | None, expected: list[int]) -> None:
    algorithm = CCVR(virtual_features=4, calibrate_every=every)
    toy = several(algorithm)
    assert all(set(rows) == {"global"} for rows in toy.scores().values())
    for round in range(3):
        toy.step([0, 1])
        found = {"global", "calibrated"} if round in expected else {"global"}
        assert all(set(rows) == found for rows in toy.scores().values())
        assert set(algorithm.global_predictors(toy.server, toy.task)) == found
        assert algorithm.course(round, 3) == (round in expected)
    assert algorithm.course(2, 6) == (every in (1, 3)), "a run of more rounds would not have calibrated there"
    said = algorithm.remarks(toy.context)
    assert len(said) == (every in (3, 9)) and all("algorithm.calibrate_every is" in one for one in said)


def test_inv_ccvr_7_a_calibration_asks_all_clients_for_sums_in_float64() -> None:
    task = two_layers(hidden=6)
    toy = several(CCVR(virtual_features=4, calibrate_every=2), task=task)
    model = 8 * task.network.num_parameters
    sums = 8 * CLASSES * (1 + 6 + 6 * 7 // 2)
    toy.step([0, 2])
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 2), (model, model))
    toy.step([0, 2])
    sent = dict.fromkeys(range(4), (model, sums)) | dict.fromkeys((0, 2), (2 * model, model + sums))
    assert toy.federation.traffic.by_client == sent
    assert set(toy.algorithm.sent(toy.server)) == {"model"}


def test_fine_tuning_begins_from_the_calibrated_model() -> None:
    toy = several(CCVR(virtual_features=4, finetune_epochs=1, finetune_lr=0.0), train=TRAIN.model_copy(
        update={"rounds": 2, "weight_decay": 0.0}))  # fmt: skip
    toy.run()
    rows = toy.scores(final=True)
    assert vectors(rows, "finetuned") == vectors(rows, "calibrated") != vectors(rows, "global")


def test_newcomers_get_the_calibrated_model_and_are_not_asked() -> None:
    ours, alone = (
        Toy(CCVR(virtual_features=4), labelled(*labels), two_layers(), THREE, unseen=unseen)
        for labels, unseen in (([*UNEQUAL, [0, 1, 2]], 1), (UNEQUAL, 0))
    )
    for toy in (ours, alone):
        for cohort in ([0, 1], [2, 3], [0, 3]):
            toy.step(cohort)
    assert_equal(ours.server, alone.server)
    assert set(ours.scores(final=True, newcomers=True)[4]) == {"global", "calibrated"}


def test_two_calibrations_draw_other_features() -> None:
    toy = several(CCVR(virtual_features=4, calibrate_every=1), train=THREE.model_copy(update={"local_epochs": 0}))
    first, second = (toy.step([0, 1])["calibrated"] for _ in range(2))
    assert any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("double", "tolerance"),
    [(True, 1e-9), (False, 1e-5)],
)
@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
def test_vectorized_agrees_with_looped(
    optimizer: Any, double: bool, tolerance: float, caplog: pytest.LogCaptureFixture
) -> None:
    train = TrainConfig.model_validate({**THREE.model_dump(), **optimizer})
    dtype = torch.float64 if double else torch.float32
    looped, stacked = (
        Toy(
            CCVR(virtual_features=30, calibrate_every=1),
            random_clients((9, 12, 6, 10), dtype=dtype),
            two_layers(double=double),
            train,
            hosts,
            mode,
        )
        for mode, hosts in (("looped", 1), ("vectorized", 2))
    )
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 2]):
        assert_close(looped.step(cohort), stacked.step(cohort), tolerance)
    assert looped.server["calibrated"]["head.weight"].dtype == dtype
    assert "failed together" not in caplog.text


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (
            Classification(DoubleNetwork(SoftmaxRegression)),
            "CCVR retrains the last layer on features, .* no layer before",
        ),
        (partly_fixed("head.weight"), r"CCVR needs the last layer's weight .* 'head\.weight'"),
        (partly_fixed("head.bias"), r"CCVR trains the last layer, .* 'head\.bias'"),
    ],
    ids=["one-layer", "fixed-weight", "fixed-bias"],
)
def test_models_without_a_head_to_train_on_a_body_are_refused(task: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CCVR().check(task, several(CCVR()).context)


def test_a_last_round_without_anybody_is_refused() -> None:
    train = THREE.model_copy(update={"sampling": "poisson", "clients_per_round": 1})
    contexts = [several(CCVR(), train=train, seed=seed).context for seed in range(12)]
    empty = [context for context in contexts if not context.cohort(2)]
    assert 0 < len(empty) < len(contexts)
    for context in contexts:
        if context in empty:
            with pytest.raises(ConfigError, match="nobody takes part in round 3"):
                CCVR().check(two_layers(), context)
        else:
            CCVR().check(two_layers(), context)


def test_a_fixed_body_is_a_body() -> None:
    task = partly_fixed("inner.weight", "inner.bias")
    toy = Toy(CCVR(virtual_features=5), random_clients((9, 12), dtype=torch.float32), task, THREE)
    CCVR().check(task, toy.context)
    toy.run()
    assert set(toy.scores()[0]) == {"global", "calibrated"}


class NoBias(SoftmaxRegression):
    """A body, and a last layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def features(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()  # type: ignore[no-any-return]


def test_a_last_layer_without_a_bias_is_calibrated_without_one() -> None:
    toy = several(CCVR(virtual_features=5), task=Classification(DoubleNetwork(NoBias)))
    toy.algorithm.check(toy.task, toy.context)
    for cohort in ([0], [1], [2]):
        toy.step(cohort)
    assert set(toy.server["calibrated"]) == {"head.weight"}
    assert not torch.equal(toy.server["calibrated"]["head.weight"], toy.server["model"]["head.weight"])


@pytest.mark.parametrize("wrong", [{"server_epochs": 0}, {"calibrate_every": 0}, {"virtual_features": -1}])
def test_numbers_that_mean_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="greater than or equal"):
        CCVR(**wrong)
