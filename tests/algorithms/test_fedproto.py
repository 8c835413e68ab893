"""FedProto: invariants PRO of models, prototypes and messages; both predictions; clients of several architectures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedproto import FedProto
from algorithms.local import Local
from algorithms.parts.aligned_models import nearest_prototype
from algorithms.parts.prototypes import class_means
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, leaves
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.partial_toys import COHORTS, TRAIN, initial, labelled, three_layers, toy_of, vectors
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal

SEVERAL = ([0, 1, 0, 1, 1, 2], [1, 1], [2, 0, 2, 2], [0, 0, 1])


def own(toy: Toy, client: int) -> Tree:
    """v_k."""
    model: Tree = toy.states()[client]["local"]
    return model


def features(toy: Toy, model: Tree, client: int) -> tuple[Tensor, Tensor]:
    """What the head reads of a client's samples, and the labels."""
    part = toy.dataset.load(client)["train"]
    return toy.task.network.head_inputs_and_logits(model, part.x)[0], part.y


@pytest.mark.parametrize("make", [two_layers, three_layers])
@pytest.mark.parametrize("at", ["after", "during"])
def test_inv_pro_1_without_alignment_every_model_is_that_of_local_training(at: Any, make: Any) -> None:
    alone = toy_of(Local(), task=make())
    shared = toy_of(FedProto(alignment_weight=0, prototypes_at=at), task=make())
    for cohort in COHORTS:
        alone.step(cohort)
        shared.step(cohort)
    assert_equal(shared.states(), alone.states())
    assert vectors(shared.scores(), "head") == vectors(alone.scores(), "personalized")


@pytest.mark.parametrize("at", ["after", "during"])
def test_inv_pro_2_round_0_has_no_alignment(at: Any) -> None:
    toys = [toy_of(FedProto(alignment_weight=weight, prototypes_at=at)) for weight in (0.0, 5.0)]
    for toy in toys:
        toy.step(COHORTS[0])
    assert_equal(toys[0].states(), toys[1].states())
    assert_equal(toys[0].server, toys[1].server)
    for toy in toys:
        toy.step(COHORTS[1])
    assert not torch.equal(own(toys[0], 2)["inner.weight"], own(toys[1], 2)["inner.weight"])


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_inv_pro_3_of_one_client_prototypes_are_its_means(weights: Any) -> None:
    toy = Toy(FedProto(prototype_weights=weights), labelled(SEVERAL[0]), two_layers(), TRAIN)
    for _ in range(3):
        prototypes = toy.step([0])["prototypes"]
        expected = class_means(*features(toy, own(toy, 0), 0), 3)[1]
        assert_close(prototypes["means"], expected, 0.0 if weights == "uniform" else 1e-12)
        assert prototypes["exist"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_inv_pro_4_a_class_of_one_client_has_its_mean_and_an_absent_one_keeps_its_own(weights: Any) -> None:
    for forget in (False, True):
        toy = Toy(FedProto(prototype_weights=weights, forget_absent=forget), labelled(*SEVERAL), two_layers(), TRAIN)
        toy.step([2])
        before = toy.server["prototypes"]
        assert before["exist"].tolist() == [1, 0, 1]
        after = toy.step([1, 3])["prototypes"]
        found = {client: class_means(*features(toy, own(toy, client), client), 3) for client in (1, 3)}
        assert_close(after["means"][0], found[3][1][0], 1e-12)
        shares = torch.tensor([2.0, 1.0] if weights == "samples" else [1.0, 1.0], dtype=torch.float64)
        expected = (shares[0] * found[1][1][1] + shares[1] * found[3][1][1]) / shares.sum()
        assert_close(after["means"][1], expected, 1e-12)
        assert after["exist"].tolist() == [1, 1, 0 if forget else 1]
        assert torch.equal(after["means"][2], torch.zeros(7, dtype=torch.float64) if forget else before["means"][2])


def test_inv_pro_5_messages_have_the_size_of_the_prototypes() -> None:
    for task in (two_layers(hidden=7), two_layers(inputs=5, hidden=40)):
        toy = Toy(FedProto(), labelled(*SEVERAL), task, TRAIN)
        width = task.network.head_shape[1]
        for cohort in ([0, 1], [2, 3]):
            toy.step(cohort)
            assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (8 * 3 * (width + 1),) * 2)
        assert {path for path, _ in leaves(toy.server)} == {"prototypes/means", "prototypes/exist"}


def test_inv_pro_6_equal_clients_have_their_means_and_the_term_is_the_scatter_within_classes() -> None:
    part = labelled(SEVERAL[0]).load(0)["train"]
    train = TrainConfig(rounds=2, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.1)
    toy = Toy(FedProto(), ListDataset([(part.x, part.y)] * 3), two_layers(), train)
    prototypes = toy.step([0, 1, 2])["prototypes"]
    model = own(toy, 0)
    for client in (1, 2):
        assert_close(own(toy, client), model, 1e-12)
    f, y = features(toy, model, 0)
    means = class_means(f, y, 3)[1]
    assert_close(prototypes["means"], means, 1e-12)
    batch = Batch(part.x, part.y)
    found = FedProto(alignment_weight=2.0).objective({"model": model}, batch, toy.task, {"prototypes": prototypes})
    scatter = sum((f[y == c] - means[c]).square().sum() for c in range(3)) / f.numel()
    assert_close(found, toy.task.loss(model, batch) + 2.0 * scatter, 1e-12)


def test_inv_pro_7_moving_features_and_prototypes_together_changes_no_prediction() -> None:
    task = two_layers()
    model = task.network.initialize(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    # features of the moved model: ReLU of large positive numbers is the identity, so that a shift adds to each
    high = {**model, "inner.bias": model["inner.bias"] + 100}
    shifted = {**model, "inner.bias": model["inner.bias"] + 107}
    means = task.network.head_inputs_and_logits(high, x[:3])[0]
    marks = torch.ones(3, dtype=torch.float64)
    first = nearest_prototype([high, {"means": means, "exist": marks}], x, task)
    second = nearest_prototype([shifted, {"means": means + 7, "exist": marks}], x, task)
    assert_close(first, second, 1e-9)
    assert first[:3].argmax(1).tolist() == [0, 1, 2]
    assert len(set(first.argmax(1).tolist())) == 3


@pytest.mark.parametrize("at", ["after", "during"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_inv_pro_8_more_samples_move_weighted_prototypes_alone(weights: Any, at: Any) -> None:
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.1)
    parts = [labelled(*SEVERAL).load(client)["train"] for client in (0, 2)]
    pairs = [(part.x, part.y) for part in parts]
    doubled = [(pairs[0][0].repeat(2, 1), pairs[0][1].repeat(2)), pairs[1]]
    algorithm = FedProto(prototype_weights=weights, prototypes_at=at)
    once, twice = (Toy(algorithm, ListDataset(data), two_layers(), train) for data in (pairs, doubled))
    for toy in (once, twice):
        toy.step([0, 1])
    apart = (once.server["prototypes"]["means"] - twice.server["prototypes"]["means"]).abs().max()
    assert apart < 1e-12 if weights == "uniform" else apart > 1e-4


def test_while_training_features_are_taken_before_their_own_step() -> None:
    toy = Toy(FedProto(prototypes_at="during"), labelled(*SEVERAL), two_layers(), TRAIN)
    model, part = initial(toy), toy.dataset.load(0)["train"]
    moved = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    optimizer = torch.optim.SGD(moved.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
    plan = plan_batches(6, 4, 4, toy.context.streams.generator("batches", 0, 0))
    seen, labels = [], []
    for index in plan.batches(CPU):
        f, logits = toy.task.network.head_inputs_and_logits(moved, part.x[index])
        seen.append(f.detach())
        labels.append(part.y[index])
        optimizer.zero_grad()
        F.cross_entropy(logits, part.y[index]).backward()
        optimizer.step()
    toy.step([0])
    assert_close(own(toy, 0), {name: leaf.detach() for name, leaf in moved.items()}, 1e-12)
    expected = class_means(torch.cat(seen), torch.cat(labels), 3)[1]
    assert_close(toy.server["prototypes"]["means"], expected, 1e-12)


def test_clipped_gradients_are_refused_where_steps_add_up() -> None:
    clipped = TRAIN.model_copy(update={"max_grad_norm": 1.0})
    toy = toy_of(FedProto(), clipped)
    FedProto().check(toy.task, toy.context)
    with pytest.raises(ConfigError, match=r"prototypes_at=during .*train\.max_grad_norm=null"):
        FedProto(prototypes_at="during").check(toy.task, toy.context)


@pytest.mark.parametrize("inference", ["prototypes", "head"])
@pytest.mark.parametrize("candidates", ["all", "own"])
def test_rows(inference: Any, candidates: Any) -> None:
    toy = Toy(FedProto(inference=inference, candidates=candidates), labelled(*SEVERAL), two_layers(), TRAIN)
    first, second = ("personalized", "head") if inference == "prototypes" else ("prototypes", "personalized")
    for rows in toy.scores().values():
        # there is no prototype yet
        assert set(rows) == {first, second}
        assert rows[first].vector.tolist() == rows[second].vector.tolist()
    toy.step([1, 2])
    toy.step([2])
    exist, scores = [0, 1, 2], toy.scores()
    for client in range(4):
        model = own(toy, client) if client in (1, 2) else initial(toy)
        f, y = features(toy, model, client)
        known = exist if candidates == "all" else sorted(set(y.tolist()))
        apart = (f[:, None] - toy.server["prototypes"]["means"]).square().sum(-1)
        expected = torch.full((len(y), 3), math.log(1e-12), dtype=torch.float64)
        expected[:, known] = (-apart[:, known] / 7).log_softmax(1)
        loss = float(-expected.gather(1, y[:, None]).mean())
        assert abs(scores[client][first].loss - loss) < 1e-10
        nearest = torch.tensor(known)[apart[:, known].argmin(1)]
        assert abs(scores[client][first].top1 - float((nearest == y).double().mean())) < 1e-12
        logits = toy.task.network.logits(model, toy.dataset.load(client)["test"].x)
        assert abs(scores[client][second].loss - float(F.cross_entropy(logits, y))) < 1e-12


def test_clients_of_several_architectures_share_prototypes_of_one_width() -> None:
    single = two_layers()
    pair = Classification(single.network, [single, normalized_layers()])
    data = labelled(*SEVERAL, *SEVERAL)
    toy = Toy(FedProto(), data, pair, TRAIN)
    FedProto().check(pair, toy.context)
    for cohort in (range(8), range(8)):
        toy.step(list(cohort))
    shapes = {tuple(own(toy, client)) for client in range(8)}
    assert len(shapes) == 2
    assert all(set(rows) == {"personalized", "head"} for rows in toy.scores().values())
    wide = Classification(single.network, [single, two_layers(hidden=9)])
    with pytest.raises(ConfigError, match=r"read \[7, 9\]"):
        FedProto().check(wide, toy.context)
    with pytest.raises(ConfigError, match=r"algorithm\.initial is own"):
        FedProto(initial="own").check(pair, toy.context)


@pytest.mark.slow
def test_alignment_brings_features_of_a_class_together_across_clients() -> None:
    train = TrainConfig(rounds=20, clients_per_round="all", local_epochs=3, batch_size=6, lr=0.1)
    generator = torch.Generator().manual_seed(2)
    centres = 2 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    y = torch.arange(24) % 3
    data = [(centres[y] + torch.randn(24, 5, generator=generator, dtype=torch.float64), y) for _ in range(4)]
    apart = {}
    for weight in (0.0, 3.0):
        toy = Toy(FedProto(alignment_weight=weight, initial="own"), ListDataset(data), two_layers(), train)
        toy.run()
        means = torch.stack([class_means(*features(toy, own(toy, client), client), 3)[1] for client in range(4)])
        apart[weight] = float((means - means.mean(0)).square().mean() / means.var())
    assert apart[3.0] < 0.3 * apart[0.0], apart


def test_vectorized_agrees_with_looped_also_where_classes_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    for at in ("after", "during"):
        algorithm = FedProto(prototypes_at=at)
        looped, stacked = (
            Toy(algorithm, labelled(*SEVERAL), two_layers(), TRAIN, mode=mode) for mode in ("looped", "vectorized")
        )
        for cohort in ([0, 1, 2, 3], [1, 3], [0, 1, 2, 3]):
            assert_close(looped.step(cohort), stacked.step(cohort), 1e-10)
        assert_close(looped.states(), stacked.states(), 1e-10)
    assert "failed together" not in caplog.text
