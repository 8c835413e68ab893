"""FedNH: an oracle in plain PyTorch, prototypes in closed form, what stays, personalization, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fednh import FedNH, scaled_cosines, smoothed
from algorithms.parts.replaced_heads import orthogonal_directions
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch
from tests.support.fedetf_toys import SKEWED, TRAIN
from tests.support.partial_toys import held_out_accuracy, labelled, planted_clients, vectors
from tests.support.toy_networks import normalized_layers, softmax_regression, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
SIZES = [len(SKEWED.load(client)["train"]) for client in range(4)]
COHORTS = ([0, 2], [1], [1, 2, 3], [0, 1, 2, 3])


def toy_of(algorithm: FedNH, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": SKEWED, "task": two_layers(), **options}, train=train)


class Oracle(nn.Module):
    """The model in modules of PyTorch, from the paper's formulas."""

    def __init__(self, server: Tree) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7).double()
        self.inner.load_state_dict({name.partition(".")[2]: leaf for name, leaf in server["shared"].items()})
        self.scale = nn.Parameter(server["scale"].clone())
        self.w = server["prototypes"].clone()

    def directions(self, x: Tensor) -> Tensor:
        f = self.inner(x).relu()
        r: Tensor = f / f.square().sum(1, keepdim=True).sqrt()
        return r

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.scale * self.directions(x) @ self.w.T
        return z


def steps(toy: Toy, model: Oracle, client: int, stream: str, epochs: int, trained: list[nn.Parameter]) -> None:
    """Steps of SGD with momentum and weight decay on the cross-entropy."""
    part = toy.dataset.load(client)["train"]
    rule = torch.optim.SGD(trained, lr=0.1, momentum=0.5, weight_decay=0.01)
    # personalization is part of the evaluation of the round that is over
    generator = toy.context.streams.generator(stream, toy.round - ("." in stream), client)
    for index in plan_batches(len(part), 4, epochs * -(-len(part) // 4), generator).batches(CPU):
        rule.zero_grad()
        F.cross_entropy(model(part.x[index]), part.y[index]).backward()
        rule.step()


OPTIONS: list[dict[str, Any]] = [
    {"smoothing": 0.6, "scale": 4.0},
    {"smoothing": 0.0, "aggregation": "samples", "prototype_weights": "uniform"},
    {"smoothing": 0.3, "aggregation": "population", "train_scale": False},
    {"smoothing": 0.8, "prototype_weights": "uniform", "initial": "simplex"},
]


@MODES
@pytest.mark.parametrize("options", OPTIONS)
def test_inv_nh_1_runs_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any], mode: str) -> None:
    """Rounds of unequal clients, some of which lack classes; then the personalization of all."""
    method = FedNH(finetune_epochs=3, **options)
    toy = toy_of(method, mode=mode)
    server, rho = copy(toy.server), method.smoothing
    for cohort in COHORTS:
        counted = cohort if method.aggregation == "samples" else range(4)
        q = {k: SIZES[k] / sum(SIZES[j] for j in counted) for k in cohort}
        if method.aggregation == "uniform":
            q = dict.fromkeys(cohort, 1 / len(cohort))
        rest = 1 - sum(q.values())
        shared = {name: rest * leaf for name, leaf in server["shared"].items()}
        scale, sums, missing = rest * server["scale"], torch.zeros(3, 7).double(), set(range(3))
        for k in cohort:
            model, part = Oracle(server), SKEWED.load(k)["train"]
            trained = [*model.inner.parameters(), *([model.scale] if method.train_scale else [])]
            steps(toy, model, k, "batches", 2, trained)
            for name, leaf in model.inner.named_parameters():
                shared[f"inner.{name}"] = shared[f"inner.{name}"] + q[k] * leaf.detach()
            scale = scale + q[k] * model.scale.detach()
            for c in set(part.y.tolist()):
                mean = model.directions(part.x[part.y == c]).mean(0).detach()
                weight = int((part.y == c).sum()) if method.prototype_weights == "samples" else 1
                sums[c] += weight * mean / mean.norm()
                missing.discard(c)
        w = server["prototypes"].clone()
        for c in set(range(3)) - missing:
            moved = rho * w[c] + (1 - rho) * sums[c] / sums[c].norm()
            w[c] = moved / moved.norm()
        server = {"shared": shared, "scale": scale, "prototypes": w}
        assert_close(toy.step(cohort), server, 1e-12)
        assert_close(w.norm(dim=1), torch.ones(3).double(), 1e-14)
    scores = toy.scores(final=True)
    for client in range(4):
        model, test = Oracle(server), SKEWED.load(client)["test"]
        assert abs(scores[client]["global"].loss - float(F.cross_entropy(model(test.x), test.y).detach())) < 1e-12
        trained = [*model.inner.parameters(), *([model.scale] if method.train_scale else [])]
        steps(toy, model, client, "batches.finetune", 3, trained)
        found = float(F.cross_entropy(model(test.x), test.y).detach())
        assert abs(scores[client]["finetuned"].loss - found) < 1e-11


@pytest.mark.parametrize(("classes", "dim"), [(1, 4), (3, 3), (3, 7), (10, 64), (6, 4), (5, 1)])
def test_inv_nh_2_first_prototypes_are_unit_vectors_and_orthogonal_where_that_is_possible(
    classes: int, dim: int
) -> None:
    w = orthogonal_directions(classes, dim, np.random.default_rng(3)).numpy()
    assert w.shape == (classes, dim)
    np.testing.assert_allclose((w * w).sum(1), 1, atol=1e-14)
    if classes <= dim:
        np.testing.assert_allclose(w @ w.T, np.eye(classes), atol=1e-14)
    other = orthogonal_directions(classes, dim, np.random.default_rng(4)).numpy()
    assert dim == 1 or np.abs(w - other).max() > 1e-2


def test_inv_nh_3_first_prototypes_are_the_seeds() -> None:
    one, again, other = (toy_of(FedNH(), seed=seed).server["prototypes"] for seed in (0, 0, 1))
    assert_equal(one, again)
    assert (one != other).all()
    assert one.is_contiguous(), "a commit gives back a tensor of these strides, and products must have the same bits"
    assert_close(one @ one.T, torch.eye(3).double(), 1e-14)
    simplex = toy_of(FedNH(initial="simplex")).server["prototypes"]
    assert_close(simplex @ simplex.T, 1.5 * torch.eye(3).double() - 0.5, 1e-14)


@MODES
def test_inv_nh_4_with_a_smoothing_of_one_prototypes_stay_to_the_bit(mode: str) -> None:
    toy = toy_of(FedNH(smoothing=1.0), mode=mode)
    before = copy(toy.server)
    for cohort in COHORTS:
        toy.step(cohort)
        assert torch.equal(toy.server["prototypes"], before["prototypes"])
    assert (toy.server["shared"]["inner.weight"] != before["shared"]["inner.weight"]).all()


@MODES
@pytest.mark.parametrize("smoothing", [0.0, 0.9])
def test_inv_nh_5_a_class_that_nobody_has_keeps_its_prototype_to_the_bit(smoothing: float, mode: str) -> None:
    toy = toy_of(FedNH(smoothing=smoothing), mode=mode)
    before = copy(toy.server)["prototypes"]
    after = toy.step([1])["prototypes"]  # lacks class 0
    assert torch.equal(after[0], before[0])
    assert (after[1:] != before[1:]).any(1).all()


def test_inv_nh_6_prototypes_move_on_the_sphere_towards_class_means() -> None:
    w, mean = torch.eye(3).double()[:2], torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    found = smoothed(w, mean, 0.8)
    assert_close(found, torch.tensor([[0.8, 0.2, 0.0], [0, 0.68**0.5, 0]], dtype=torch.float64) / 0.68**0.5, 1e-15)
    assert_equal(smoothed(w, mean, 1.0), w)
    assert_equal(smoothed(w, mean, 0.0), torch.tensor([[0.0, 1, 0], [0, 1, 0]], dtype=torch.float64))
    cosine = 0.0
    for _ in range(40):
        w = smoothed(w, mean, 0.9)
        assert float(w[0] @ mean[0]) / 5 > cosine
        cosine = float(w[0] @ mean[0]) / 5
    assert cosine > 0.999


def test_inv_nh_7_logits_are_cosines_times_the_scale_whatever_the_length_of_features() -> None:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(6, 7, generator=generator, dtype=torch.float64)
    w, s = orthogonal_directions(3, 7, np.random.default_rng(0)), torch.tensor(2.5, dtype=torch.float64)
    z = scaled_cosines(f, w, s)
    assert_close(z, scaled_cosines(1e3 * f, w, s), 1e-12)
    for row, feature in zip(z, f, strict=True):
        for found, vector in zip(row, w, strict=True):
            assert abs(float(found) - 2.5 * float(feature @ vector / feature.norm())) < 1e-12
    assert scaled_cosines(torch.zeros_like(f), w, s).tolist() == [[0, 0, 0]] * 6


@MODES
def test_inv_nh_8_weights_do_not_count_where_all_clients_have_the_same_number_of_each_class(mode: str) -> None:
    data = labelled([0, 1, 1, 2], [2, 1, 1, 0], [1, 1, 2, 0])
    one, other = (toy_of(FedNH(prototype_weights=how), dataset=data, mode=mode) for how in ("samples", "uniform"))
    means = toy_of(FedNH(aggregation="samples"), dataset=data, mode=mode)
    for cohort in ([0, 1], [1, 2], [0, 1, 2]):
        expected = one.step(cohort)
        assert_close(other.step(cohort), expected, 1e-13)
        assert_close(means.step(cohort), expected, 1e-13)


def test_inv_nh_9_without_epochs_the_fine_tuned_model_is_the_global_one() -> None:
    toy = toy_of(FedNH(finetune_epochs=0))
    toy.step([0, 1])
    scores = toy.scores(final=True)
    assert vectors(scores, "finetuned") == vectors(scores, "global")
    assert all(set(rows) == {"global"} for rows in toy.scores().values())


@pytest.mark.parametrize("train_scale", [True, False])
def test_inv_nh_10_messages_have_the_size_of_what_is_sent_and_clients_keep_nothing(train_scale: bool) -> None:
    toy = toy_of(FedNH(train_scale=train_scale, scale=3.0))
    body, prototypes = 7 * 5 + 7, 3 * 7
    for cohort in ([0, 1], [2, 3]):
        toy.step(cohort)
        sizes = 8 * (body + 1 + prototypes), 8 * (body + train_scale + prototypes)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, sizes)
        assert (float(toy.server["scale"]) != 3.0) == train_scale
    assert not any(toy.states().values())


def test_the_loss_knows_nothing_of_padding() -> None:
    toy, part = toy_of(FedNH()), SKEWED.load(0)["train"]
    trained = {"model": toy.server["shared"], "scale": toy.server["scale"]}
    head = {"head.weight": torch.zeros(3, 7).double(), "head.bias": torch.zeros(3).double()}
    frozen = {"head": head, "scale": torch.tensor(0.0), "prototypes": toy.server["prototypes"]}
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)
    found = toy.algorithm.objective(trained, Batch(part.x, part.y, mask), toy.task, frozen, None)
    expected = F.cross_entropy(Oracle(toy.server)(part.x[:4]), part.y[:4])
    assert abs(float(found) - float(expected.detach())) < 1e-14


@MODES
def test_running_statistics_are_part_of_the_body(mode: str) -> None:
    toy = toy_of(FedNH(), TRAIN.model_copy(update={"batch_size": 3}), task=normalized_layers(), mode=mode)
    before = copy(toy.server["shared"])
    toy.step([0, 3])
    assert (toy.server["shared"]["norm.running_mean"] != before["norm.running_mean"]).all()
    after = copy(toy.server)
    toy.scores(final=True)
    assert_equal(toy.server, after)


@pytest.mark.parametrize("changes", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}], ids=["sgd", "adam"])
def test_vectorized_agrees_with_looped_on_ragged_mini_batches(changes: dict[str, Any]) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), **changes})
    looped, stacked = (toy_of(FedNH(smoothing=0.5), train, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-12)
    ours, theirs = (vectors(toy.scores(final=True), "finetuned") for toy in (looped, stacked))
    for client, found in ours.items():
        assert found == pytest.approx(theirs[client], abs=1e-10)


def test_refused() -> None:
    toy = toy_of(FedNH())
    wide = two_layers(hidden=2)
    with pytest.raises(ConfigError, match=r"initial is simplex, .* inputs \(2\), but there are 3"):
        FedNH(initial="simplex").check(wide, toy.context)
    FedNH().check(wide, toy.context)
    with pytest.raises(ConfigError, match="FedNH trains all layers but the last"):
        FedNH().check(softmax_regression(), toy.context)
    said = FedNH(smoothing=1, prototype_weights="uniform").idle_settings()
    assert len(said) == 1 and said[0].startswith("algorithm.prototype_weights has no effect")


def test_own_models_serve_clients_with_few_of_the_classes() -> None:
    train = TRAIN.model_copy(update={"rounds": 15, "clients_per_round": 6, "local_epochs": 2, "batch_size": 10})
    toy = Toy(FedNH(), planted_clients("classes"), two_layers(12, 8), train, mode="vectorized")
    toy.run()
    shared, own = (held_out_accuracy(toy, row, final=True) for row in ("global", "finetuned"))
    assert shared > 0.6 and own > shared, (shared, own)
