"""FedKD: invariants KD, the losses by hand, compression, two architectures, and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedkd import FedKD
from algorithms.local import Local
from algorithms.parts.low_rank import compressed, rank, restored
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, from_leaves, leaves, map_leaves, num_bytes, subtract
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import DoubleNetwork, TwoLayers, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
SILENT = {"distillation_weight": 0, "hidden_weight": 0}


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def matrix(rows: int = 8, columns: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_values(*values: float, rows: int = 12, columns: int = 10) -> Tensor:
    """A matrix with these singular values."""
    left, right = (torch.linalg.qr(matrix(n, len(values), seed))[0] for n, seed in ((rows, 1), (columns, 2)))
    return left * torch.tensor(values, dtype=torch.float64) @ right.T


def models(seed: int) -> Tree:
    network = two_layers().network
    return {
        "mentor": network.initialize(seed),
        "mentee": network.initialize(seed + 1),
        "projection": {"weight": matrix(7, 7, seed)},
    }


def some_batch() -> Batch:
    examples = random_clients([6], seed=3).load(0)["train"]
    return Batch(examples.x, examples.y)


def gradients(algorithm: FedKD, tree: Tree) -> Tree:
    pairs = [(path, leaf.clone().requires_grad_()) for path, leaf in leaves(tree)]
    value = algorithm.objective(from_leaves(dict(pairs)), some_batch(), two_layers(), None, None)
    parts = torch.autograd.grad(value, [leaf for _, leaf in pairs], allow_unused=True)
    return from_leaves(
        {p: torch.zeros_like(leaf) if g is None else g for (p, leaf), g in zip(pairs, parts, strict=True)}
    )


def test_inv_kd_1_all_energy_is_the_whole_matrix() -> None:
    found = matrix()
    values = torch.linalg.svdvals(found)
    assert rank(values, 1.0) == 6
    assert_close(restored(compressed({"w": found}, 1.0), {"w": found})["w"], found, 1e-12)
    low = of_values(3, 2)
    assert set(compressed({"w": low}, 1 - 1e-12)["w"]) == {"left", "values", "right"}
    assert_close(restored(compressed({"w": low}, 1 - 1e-12), {"w": low})["w"], low, 1e-10)


@pytest.mark.parametrize("energy", [0.1, 0.5, 0.9, 0.95, 0.98, 1.0])
def test_inv_kd_2_enough_is_kept_and_no_more(energy: float) -> None:
    for seed in range(5):
        values = torch.linalg.svdvals(matrix(seed=seed))
        total = float(values.square().sum())
        r = rank(values, energy)
        assert float(values[:r].square().sum()) >= energy * total * (1 - 1e-12)
        assert float(values[: r - 1].square().sum()) < energy * total
    # ten equal values: public code keeps none of them
    assert rank(torch.ones(10), 0.95) == 10
    assert rank(torch.ones(1), 0.95) == 1


@MODES
def test_inv_kd_3_without_teaching_they_are_federated_averaging_and_local_training(mode: str) -> None:
    both, average, alone = (
        toy_of(a, mode=mode) for a in (FedKD(compress="none", **SILENT), FedAvg(aggregation="uniform"), Local())
    )
    for _ in range(TRAIN.rounds):
        assert_equal(both.step(), average.step())
        alone.step()
        for client, state in alone.states().items():
            assert_equal(both.states()[client]["mentor"], state["local"])


def test_inv_kd_4_equal_models_teach_each_other_nothing() -> None:
    network = two_layers().network
    equal = {
        "mentor": network.initialize(1),
        "mentee": network.initialize(1),
        "projection": {"weight": torch.eye(7, dtype=torch.float64)},
    }
    for mutual in ("joint", "separate"):
        taught, silent = (gradients(FedKD(mutual=mutual, **options), equal) for options in ({}, SILENT))  # type: ignore[arg-type]
        assert_close(taught, silent, 1e-12)
        assert_close(taught["mentor"], taught["mentee"], 1e-12)


def test_inv_kd_5_no_change_is_sent_as_nothing() -> None:
    zeros = {"w": torch.zeros(6, 4), "b": torch.zeros(6)}
    sent = compressed(zeros, 0.95)
    assert num_bytes(sent["w"]) == 0
    assert_equal(restored(sent, zeros), zeros)
    toy = toy_of(FedKD(), TRAIN.model_copy(update={"local_epochs": 0}))
    before = copy(toy.server)
    assert_equal(toy.step(), before)


def test_inv_kd_6_bytes_are_those_of_the_factors_or_of_the_matrix_if_fewer() -> None:
    for values, dense in (((5, 4), False), ((5, 4, 3, 3, 3, 3, 3, 3), True)):
        found = of_values(*values).float()
        sent = compressed({"w": found}, 0.999)
        r = rank(torch.linalg.svdvals(found), 0.999)
        assert num_bytes(sent) == (4 * 120 if dense else 4 * r * (12 + 10 + 1))
    kernel = torch.randn(4, 2, 3, 3)
    assert restored(compressed({"k": kernel}, 0.1), {"k": kernel})["k"].shape == kernel.shape


def test_inv_kd_6_traffic_is_what_is_sent() -> None:
    toy = toy_of(FedKD(energy_start=0.3, energy_end=0.3), task=two_layers(hidden=30))
    start = copy(toy.server["model"])
    toy.step([0, 1])
    sent = [
        num_bytes(reply)
        for reply in toy.federation.map(
            toy.algorithm.compressed_update,  # type: ignore[attr-defined]
            [2, 3],
            {"model": start},
        ).values()
    ]
    assert max(sent) < num_bytes(start)
    assert toy.federation.traffic.up < 4 * num_bytes(start)


def test_inv_kd_7_more_energy_takes_no_smaller_rank() -> None:
    values = torch.linalg.svdvals(matrix())
    ranks = [rank(values, step / 50) for step in range(1, 51)]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize("compress", ["updates", "parameters", "none"])
def test_inv_kd_8_mentor_and_projection_are_never_sent(compress: Any) -> None:
    toy = toy_of(FedKD(compress=compress, energy_start=1, energy_end=1))
    for _ in range(2):
        toy.step([0, 1])
        whole = num_bytes(toy.server["model"])
        assert toy.federation.traffic.down == toy.federation.traffic.up == 2 * whole
        assert set(toy.server) == {"model"}
        assert set(toy.states()[0]) == {"mentor", "projection"}


@pytest.mark.parametrize("reduction", ["batch", "elements"])
def test_the_joint_objective_by_hand(reduction: Any) -> None:
    tree, batch, task = models(4), some_batch(), two_layers()
    high, mentor = task.head_inputs_and_logits(tree["mentor"], batch)
    low, mentee = task.head_inputs_and_logits(tree["mentee"], batch)
    p, q = mentor.softmax(-1), mentee.softmax(-1)
    known = task.cross_entropy(mentor, batch) + task.cross_entropy(mentee, batch)
    divergence = ((p * (p / q).log()).sum(-1) + (q * (q / p).log()).sum(-1)).mean() / (3 if reduction != "batch" else 1)
    distance = (high - low @ tree["projection"]["weight"].T).square().mean()
    expected = known + (0.7 * divergence + 2 * 0.3 * distance) / known
    algorithm = FedKD(distillation_weight=0.7, hidden_weight=0.3, kl_reduction=reduction)
    assert_close(algorithm.objective(tree, batch, task, None, None), expected, 1e-12)


def test_separately_each_goes_down_its_own_loss() -> None:
    """The mentor's gradient is that of L_t with everything of the mentee held."""
    tree, batch, task = models(4), some_batch(), two_layers()
    separate, joint = (gradients(FedKD(mutual=mutual), tree) for mutual in ("separate", "joint"))  # type: ignore[arg-type]
    model = {name: leaf.clone().requires_grad_() for name, leaf in tree["mentor"].items()}
    high, mentor = task.head_inputs_and_logits(model, batch)
    low, mentee = task.head_inputs_and_logits(tree["mentee"], batch)
    p, q = mentor.softmax(-1), mentee.softmax(-1)
    own = task.cross_entropy(mentor, batch)
    distance = (high - low @ tree["projection"]["weight"].T).square().mean()
    value = own + ((q * (q / p).log()).sum(-1).mean() + distance) / (own + task.cross_entropy(mentee, batch))
    expected = dict(zip(model, torch.autograd.grad(value, list(model.values())), strict=True))
    assert_close(separate["mentor"], expected, 1e-12)

    # the mentee's, and the projection's with it, is that of L_w with everything of the mentor held
    model = {name: leaf.clone().requires_grad_() for name, leaf in tree["mentee"].items()}
    projection = tree["projection"]["weight"].clone().requires_grad_()
    low, logits = task.head_inputs_and_logits(model, batch)
    own, p, q = task.cross_entropy(logits, batch), mentor.detach().softmax(-1), logits.softmax(-1)
    distance = (high.detach() - low @ projection.T).square().mean()
    value = own + ((p * (p / q).log()).sum(-1).mean() + distance) / (own + task.cross_entropy(mentor.detach(), batch))
    slopes = torch.autograd.grad(value, [*model.values(), projection])
    assert_close(separate["mentee"], dict(zip(model, slopes, strict=False)), 1e-12)
    assert_close(separate["projection"]["weight"], slopes[-1], 1e-12)
    assert float((joint["mentor"]["head.weight"] - expected["head.weight"]).abs().max()) > 1e-3


def test_the_server_adds_the_compressed_mean_of_compressed_changes() -> None:
    options: dict[str, Any] = {"energy_start": 0.4, "energy_end": 0.4}
    toy, plain = toy_of(FedKD(**options), task=two_layers(hidden=30)), toy_of(FedKD(), task=two_layers(hidden=30))
    start = copy(toy.server["model"])
    trained = plain.federation.map(plain.algorithm.mutual_update, [0, 1], {"model": start})  # type: ignore[attr-defined]
    changes = [restored(compressed(subtract(w, start), 0.4), start) for w in trained.values()]
    mean = map_leaves(lambda a, b: (a + b) / 2, *changes)
    expected = map_leaves(torch.add, start, restored(compressed(mean, 0.4), start))
    assert_close(toy.step([0, 1])["model"], expected, 1e-12)


def test_parameters_may_be_compressed_instead() -> None:
    toy = toy_of(FedKD(compress="parameters", energy_start=0.5, energy_end=0.5), task=two_layers(hidden=30))
    model = toy.step([0, 1])["model"]
    assert torch.linalg.matrix_rank(model["inner.weight"]) < 5


def test_the_energy_grows() -> None:
    toy = toy_of(FedKD(energy_start=0.5, energy_end=0.8))
    found = []
    for _ in range(3):
        toy.federation.begin_round(toy.round, ("test",))
        found.append(FedKD(energy_start=0.5, energy_end=0.8).energy(toy.federation.context))
        toy.step()
    assert found == pytest.approx([0.6, 0.7, 0.8])


def test_the_mentees_rate() -> None:
    toy, still = toy_of(FedKD(compress="none")), toy_of(FedKD(compress="none", mentee_lr=0))
    before = copy(still.server)
    assert_equal(still.step([0, 1]), before)
    toy.step([0, 1])
    assert not torch.equal(toy.server["model"]["head.weight"], before["model"]["head.weight"])


def two_architectures() -> Classification:
    mentee, mentor = (Classification(DoubleNetwork(lambda h=h: TwoLayers(hidden=h))) for h in (4, 9))
    return Classification(mentee.network, (mentee, mentor))


@MODES
def test_the_mentor_may_be_larger(mode: str) -> None:
    toy = toy_of(FedKD(), task=two_architectures(), mode=mode)
    toy.run()
    assert toy.server["model"]["inner.weight"].shape == (4, 5)
    for client, state in toy.states().items():
        assert state["mentor"]["inner.weight"].shape == (9, 5)
        assert state["projection"]["weight"].shape == (9, 4)
        assert {"global", "personalized"} == set(toy.scores()[client])


def test_more_than_two_architectures_are_refused() -> None:
    parts = two_architectures().candidates
    task = Classification(parts[0].network, (*parts, parts[0]))
    with pytest.raises(ConfigError, match="FedKD has two models"):
        FedKD().check(task, toy_of(FedKD()).context)
    FedKD().check(two_architectures(), toy_of(FedKD()).context)


@pytest.mark.parametrize("mutual", ["joint", "separate"])
def test_vectorized_agrees_with_looped(mutual: Any) -> None:
    looped, stacked = (toy_of(FedKD(mutual=mutual, compress="none"), mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())
    assert_close(looped.states(), stacked.states())


def test_buffers_change_with_the_mentee() -> None:
    toy = toy_of(FedKD(), task=normalized_layers())
    before = copy(toy.server["model"])
    toy.step([0, 1])
    for name in toy.task.network.buffer_names:
        assert not torch.equal(toy.server["model"][name], before[name])
