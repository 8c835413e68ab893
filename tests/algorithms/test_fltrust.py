"""FLTrust: an oracle in plain PyTorch, what trust ignores and what it bounds, attacks that it withstands, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fltrust import FLTrust, trusted_shares
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.poisoned import WithWrongLabels
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ClientError, ConfigError, DataError, MethodError
from rayfl.experiment.parts import Parts
from rayfl.messages.aggregators import Median
from rayfl.messages.attack import AttackConfig
from rayfl.params import Tree, copy, num_bytes, subtract
from tests.support.experiments import small_experiment
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 1, 10)
ROOT = 7
TRAIN = TrainConfig(rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, weight_decay=0.01)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def toy_of(algorithm: Any = None, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    settings = {"dataset": random_clients(SIZES, public=ROOT), "task": two_layers(), **options}
    return Toy(algorithm or FLTrust(), train=train, **settings)


def flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in tree.values()])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("root_steps", [None, 3])
def test_inv_ft_1_rounds_are_those_of_an_oracle_in_plain_pytorch(root_steps: Any, momentum: float) -> None:
    alpha = 0.7
    train = TRAIN.model_copy(update={"lr_decay": 0.8, "momentum": momentum})
    toy = toy_of(FLTrust(server_lr=alpha, root_steps=root_steps), train)
    network, streams = toy.task.network, toy.context.streams
    w, ignored = network.initialize(streams.integer("init.global")), 0

    def update(round: int, client: int, x: Tensor, y: Tensor, steps: int) -> Tensor:
        own, velocity = copy(w), {name: torch.zeros_like(leaf) for name, leaf in w.items()}
        for index in plan_batches(len(y), 4, steps, streams.generator("batches", round, client)).batches(CPU):
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in own.items()}
            value = F.cross_entropy(network.logits(leaves, x[index]), y[index])
            for name, g in zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True):
                velocity[name] = momentum * velocity[name] + g + 0.01 * own[name]
                own[name] = own[name] - 0.1 * 0.8**round * velocity[name]
        return flat(subtract(own, w))

    root = toy.dataset.load_public(), torch.from_numpy(toy.dataset.public_labels())
    for round, cohort in enumerate(COHORTS):
        g0 = update(round, -1, *root, root_steps or 2 * -(-ROOT // 4))
        total, trust = torch.zeros_like(g0), 0.0
        for k in cohort:
            part = toy.dataset.load(k)["train"]
            g = update(round, k, part.x, part.y, 2 * -(-SIZES[k] // 4))
            score = max(0.0, float(g @ g0 / (g.norm() * g0.norm())))
            ignored += score == 0
            total, trust = total + score * g0.norm() / g.norm() * g, trust + score
        moved, first = (alpha * total / trust if trust else total), 0
        for name, leaf in w.items():
            last = first + leaf.numel()
            w[name], first = leaf + moved[first:last].reshape(leaf.shape), last
        assert_close(toy.step(cohort)["model"], w, 1e-12)
    assert ignored, "the test needs an update that points away"


@MODES
def test_inv_ft_2_the_length_of_an_update_makes_no_difference(mode: str) -> None:
    scaled = AttackConfig(clients=[0, 2], message="scaled", strength=50)
    honest, attacked = toy_of(mode=mode), toy_of(mode=mode, attack=scaled)
    for cohort in COHORTS:
        assert_close(attacked.step(cohort)["model"], honest.step(cohort)["model"], 1e-12)


def test_inv_ft_3_updates_that_point_away_might_as_well_not_be_there() -> None:
    scores = {k: trusted_of(k) for k in range(4)}
    trusted = [k for k, score in scores.items() if score > 0]
    assert 0 < len(trusted) < 4
    assert_equal(toy_of().step([0, 1, 2, 3]), toy_of().step(trusted))
    flip = AttackConfig(clients=trusted[:1], message="sign_flip", strength=9)
    assert_equal(toy_of(attack=flip).step([0, 1, 2, 3]), toy_of().step(trusted[1:]))


def trusted_of(client: int) -> float:
    """The cosine of a client's first update with the server's, from what one round of either alone moves."""
    alone, root = toy_of(FedAvg()), toy_of(FedAvg(), dataset=as_client(random_clients(SIZES, public=ROOT)))
    start = alone.server["model"]
    g, g0 = (flat(subtract(toy.step([k])["model"], start)) for toy, k in ((alone, client), (root, 0)))
    return float(F.cosine_similarity(g, g0, 0))


def as_client(data: ListDataset) -> ListDataset:
    return ListDataset([(data.load_public(), torch.from_numpy(data.public_labels()))])


def test_inv_ft_4_a_round_moves_the_model_by_the_servers_step_at_most() -> None:
    """Whatever is sent; and by exactly that where every client moves as the server."""
    x, y = random_clients([8], public=8).load(0)["train"].x, torch.arange(8) % 3
    full = TRAIN.model_copy(update={"batch_size": None})
    same = toy_of(train=full, dataset=ListDataset([(x, y)] * 3, public=x, public_labels=y))
    plain = toy_of(FedAvg(), train=full, dataset=ListDataset([(x, y)]))
    start = copy(same.server["model"])
    assert_close(same.step([0, 1, 2])["model"], plain.step([0])["model"], 1e-12)
    length = flat(subtract(plain.server["model"], start)).norm()
    noise = AttackConfig(clients=[0, 1], message="gaussian", strength=1e3)
    attacked = toy_of(train=full, dataset=same.dataset, attack=noise)
    assert flat(subtract(attacked.step([0, 1, 2])["model"], start)).norm() <= length * (1 + 1e-12)


def test_trust_is_zero_where_nobody_moves() -> None:
    still = {"a": torch.ones(3)}
    assert trusted_shares([still, still], still, still).tolist() == [0, 0]
    away = {"a": torch.zeros(3)}
    assert trusted_shares([still, away], away, still).tolist() == [0, 1]
    assert trusted_shares([{"a": torch.full((3,), 2.0)}], away, still).tolist() == [0]
    toy = toy_of(train=TRAIN.model_copy(update={"lr": 0.0}))
    before = copy(toy.server)
    assert_equal(toy.step([0, 1]), before)


def shared_rule(clients: int) -> ListDataset:
    """Clients and a root set of 100 samples with the same linear rule."""
    generator = torch.Generator().manual_seed(3)
    rule = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    inputs = [torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in [30] * clients + [100]]
    *own, root = [(x, (x @ rule).argmax(1)) for x in inputs]
    return ListDataset(own, public=root[0], public_labels=root[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(AttackConfig(clients=[0, 3, 5, 8], message=name, strength=strength), id=name)
        for name, strength in (("sign_flip", 2), ("gaussian", 10), ("ipm", 4))
    ],
)
def test_two_fifths_of_the_clients_do_not_stop_it_as_they_stop_federated_averaging(attack: AttackConfig) -> None:
    train = TrainConfig(rounds=12, clients_per_round="all", local_epochs=2, batch_size=10, lr=0.2)

    def accuracy(method: Any, **options: Any) -> float:
        toy = toy_of(method, train, dataset=shared_rule(10), **options)
        toy.run()
        rows = [one["global"].metrics()["top1"] for k, one in toy.scores().items() if k not in attack.clients]
        return float(np.mean(rows))

    free = accuracy(FedAvg())
    trusting, averaging = accuracy(FLTrust(), attack=attack), accuracy(FedAvg(), attack=attack)
    assert free > 0.9
    assert trusting > free - 0.05
    assert averaging < 0.6


def test_wrong_labels_of_clients_are_none_of_the_servers() -> None:
    """The root set is clean: labels of public samples are those of the data set, though clients are malicious."""
    inner = random_clients(SIZES, public=ROOT)
    poisoned = WithWrongLabels(inner, frozenset(range(4)), "flipped", toy_of().context.streams)
    assert (poisoned.public_labels() == inner.public_labels()).all()
    assert (poisoned.load(0)["train"].y != inner.load(0)["train"].y).any()


@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(double: bool) -> None:
    toys = [
        toy_of(mode=mode, dataset=random_clients(SIZES, public=ROOT, dtype=torch.float64 if double else torch.float32),
               task=two_layers(double=double))
        for mode in ("looped", "vectorized")
    ]  # fmt: skip
    for cohort in COHORTS:
        one, other = (toy.step(cohort)["model"] for toy in toys)
        assert_close(one, other, 1e-10 if double else 1e-5)


def test_running_statistics_are_the_servers() -> None:
    clients, train = random_clients((8, 12, 6), public=ROOT), TRAIN.model_copy(update={"batch_size": None})
    attack = AttackConfig(clients=[0], message="gaussian", strength=100)
    toy = Toy(FLTrust(), clients, normalized_layers(), train, attack=attack)
    alone = Toy(FedAvg(), as_client(clients), normalized_layers(), train)
    found, expected = toy.step([0, 1])["model"], alone.step([0])["model"]
    assert toy.task.network.buffer_names
    for name in toy.task.network.buffer_names:
        assert_close(found[name], expected[name], 1e-12)


@MODES
def test_mini_batches_of_one_and_clients_of_one_class_stay_finite(mode: str) -> None:
    x, y = random_clients([8]).load(0)["train"].x, torch.zeros(8, dtype=torch.int64)
    data = ListDataset([(x, y), (x[:1], y[:1] + 2), (x, torch.arange(8) % 3)], public=x[:1], public_labels=y[:1] + 1)
    toy = toy_of(train=TRAIN.model_copy(update={"batch_size": 1}), dataset=data, mode=mode)
    for cohort in ([0, 1, 2], [0, 1], [1]):
        assert all(bool(leaf.isfinite().all()) for leaf in toy.step(cohort)["model"].values())


def test_one_model_goes_down_and_its_parameters_up_and_nobody_keeps_anything() -> None:
    toy = toy_of()
    size = num_bytes(toy.server["model"])
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
    assert not any(toy.states().values()) and set(toy.server) == {"model"}


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holdout\.public is 0, but in fltrust.*set holdout\.public=100"):
        FLTrust().check_data(toy_of().task, np.ones((4, 3)), 0)
    FLTrust().check_data(toy_of().task, np.ones((4, 3)), 100)
    with pytest.raises(MethodError, match=r"aggregator=median: Clients\.each gives messages that the method weighs"):
        toy_of(aggregator=Median()).step([0, 1])
    large = AttackConfig(clients=[1], message="scaled", strength=1e308)
    attacked = toy_of(attack=large, train=TRAIN.model_copy(update={"lr": 10.0}))
    with pytest.raises(ClientError, match=r"what client 1 sends is not finite any more: lower attack\.strength"):
        attacked.step([0, 1])
    mislabelled = random_clients(SIZES, public=ROOT)
    mislabelled._public_labels = torch.arange(ROOT)
    with pytest.raises((DataError, ClientError), match="the public samples"):
        toy_of(dataset=mislabelled).step([0, 1])
    for values in ({"server_lr": 0.0}, {"root_steps": 0}):
        with pytest.raises(ValueError, match=next(iter(values))):
            FLTrust(**values)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"holdout": {"public": 0}}, r"holdout\.public is 0.*set holdout\.public=100"),
        ({"aggregator": "median"}, r"aggregator=median: fltrust has a rule of its own: it weighs each message"),
        ({"privacy": {"clip_norm": 1.0}}, r"privacy: fltrust cannot be made private.*reads the direction"),
        ({"compression": {"name": "secure_aggregation", "clip": 1.0}}, r"secure_aggregation: .*fltrust needs every"),
        ({"train": {"private_norm": "all"}}, r"private_norm.*fltrust"),
        ({"attack": {"share": 0.4, "message": "sign_flip"}}, ""),
        ({"attack": {"share": 0.4, "labels": "flipped"}, "compression": "top_k"}, ""),
    ],
)
def test_sections_beside_it(sections: dict[str, Any], words: str, tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "run", "fltrust")
    train = {**content["train"], **sections.get("train", {})}
    parts = Parts(load_config(Experiment, {**content, **sections, "train": train}, {}))
    if not words:
        parts.check()
        return
    with pytest.raises(ConfigError, match=words):
        parts.check()
