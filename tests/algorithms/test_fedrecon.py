"""FedRecon: an oracle in plain PyTorch, clients without memory, sets of samples, the server, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.fedbabu import FedBABU
from algorithms.fedopt import FedAdam
from algorithms.fedrecon import FedRecon
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.augmentation import Augmentation
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, num_bytes
from tests.support.both_modes import assert_modes_agree
from tests.support.partial_toys import TRAIN
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 1, 10)
COHORTS = ([0, 2], [1, 3], [2], [0, 1, 2, 3])
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
BODY, HEAD = ("inner.weight", "inner.bias"), ("head.weight", "head.bias")


def toy_of(algorithm: Any, train: Any = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, **options)


def heads(toy: Toy) -> dict[int, Tree]:
    """What each client reconstructs at the server's body, by the oracle."""
    return {i: Oracle(toy).fitted(i, 3, 0.05, None, ".reconstruct", toy.round - 1) for i in range(len(SIZES))}


class Oracle:
    """The passes of a client, with PyTorch's SGD."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self.network = toy, toy.task.network
        self.streams = toy.context.streams
        initial = self.network.initialize(self.streams.integer("init.global"))
        self.head = {name: initial[name] for name in HEAD}
        self.body = {name: toy.server["shared"][name] for name in BODY}

    def samples(self, client: int) -> tuple[Any, Any]:
        """The support set and the query set."""
        if SIZES[client] == 1:
            return [0], [0]
        order = self.streams.generator("support", client=client).permutation(SIZES[client])
        first = round(0.4 * SIZES[client])
        return order[:first], order[first:]

    def passed(
        self, client: int, moving: Tree, resting: Tree, rows: Any, epochs: int, lr: float, stream: str, round: int
    ) -> Tree:
        part = self.toy.dataset.load(client)["train"]
        x, y = (part.x, part.y) if rows is None else (part.x[rows], part.y[rows])
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in moving.items()}
        optimizer = torch.optim.SGD(leaves.values(), lr, TRAIN.momentum, weight_decay=TRAIN.weight_decay)
        steps = epochs * -(-len(y) // 4)
        for index in plan_batches(len(y), 4, steps, self.streams.generator(f"batches{stream}", round, client)).batches(
            CPU
        ):
            optimizer.zero_grad()
            F.cross_entropy(self.network.logits({**leaves, **resting}, x[index]), y[index]).backward()
            optimizer.step()
        return {name: leaf.detach() for name, leaf in leaves.items()}

    def fitted(self, client: int, epochs: int, lr: float, rows: Any, stream: str, round: int) -> Tree:
        return self.passed(client, self.head, self.body, rows, epochs, lr, stream, round)

    def updated(self, client: int, round: int) -> Tree:
        support, query = self.samples(client)
        head = self.fitted(client, 3, 0.05, support, "", round)
        return self.passed(client, self.body, head, query, 2, TRAIN.lr, ".1", round)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_inv_recon_1_rounds_are_those_of_an_oracle_in_plain_pytorch(weights: Any) -> None:
    toy = toy_of(
        FedRecon(reconstruction_epochs=3, reconstruction_lr=0.05, support_share=0.4, server_lr=0.7, aggregation=weights)
    )
    for round, cohort in enumerate(COHORTS):
        oracle = Oracle(toy)
        mass = {i: 1 if weights == "uniform" else len(oracle.samples(i)[1]) for i in cohort}
        ends = {i: oracle.updated(i, round) for i in cohort}
        before = oracle.body
        expected = {
            name: before[name]
            + 0.7 * sum(mass[i] * (ends[i][name] - before[name]) for i in cohort) / sum(mass.values())
            for name in BODY
        }
        toy.step(cohort)
        assert_close(toy.server["shared"], expected, 1e-12)
    scores, task = toy.scores(), toy.task
    for client, head in heads(toy).items():
        part = toy.dataset.load(client)["test"]
        logits = task.network.logits({**toy.server["shared"], **head}, part.x)
        assert scores[client]["personalized"].loss == pytest.approx(float(F.cross_entropy(logits, part.y)), rel=1e-6)


@MODES
def test_inv_recon_2_without_a_head_and_with_all_samples_it_is_federated_averaging(mode: str) -> None:
    recon = toy_of(FedRecon(head_group="none", support_share=None), mode=mode)
    plain = toy_of(FedAvg(), mode=mode)
    for cohort in COHORTS:
        assert_equal(recon.step(cohort)["shared"], plain.step(cohort)["model"])


@MODES
def test_inv_recon_3_without_reconstruction_it_is_fedbabu(mode: str) -> None:
    """The head then is the initial one, and the first pass that of the body."""
    recon = toy_of(FedRecon(reconstruction_epochs=0, support_share=None), mode=mode)
    babu = toy_of(FedBABU(), mode=mode)
    for cohort in COHORTS:
        assert_equal(recon.step(cohort)["shared"], babu.step(cohort)["shared"])


def test_inv_recon_4_clients_keep_nothing_so_that_newcomers_are_like_them() -> None:
    """A client held out scores as it does among those that train, at the same body."""
    method = FedRecon(reconstruction_epochs=3)
    inside = toy_of(method)
    outside = Toy(method, random_clients(SIZES), two_layers(), TRAIN, unseen=1)
    for cohort in ([0], [1, 2], [0, 1]):
        inside.step(cohort)
        outside.step(cohort)
    assert not any(inside.states().values())
    found, new = inside.scores(), outside.scores(newcomers=True)
    assert found[3]["personalized"].loss == new[3]["personalized"].loss
    assert not any(inside.states().values())


def test_inv_recon_5_the_server_steps_as_fedopt_does() -> None:
    """With no head, and clients that train on everything, it is that method."""
    options: dict[str, Any] = {"server_lr": 0.05, "adaptivity": 0.01}
    recon = toy_of(FedRecon(head_group="none", support_share=None, server_optimizer="adam", **options))
    plain = toy_of(FedAdam(**options))
    for cohort in COHORTS:
        assert_equal(recon.step(cohort)["shared"], plain.step(cohort)["model"])


@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(double: bool) -> None:
    method = FedRecon(reconstruction_epochs=3, server_momentum=0.5)
    assert_modes_agree(method, (9, 12, 1, 10), TRAIN, double, 1e-10 if double else 1e-5)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_both_sets_have_samples_and_none_is_in_both(share: float) -> None:
    toy, method = toy_of(FedRecon()), FedRecon(support_share=share)

    class Known:
        """What the division asks a client for."""

        context = toy.context

        def __init__(self, id: int) -> None:
            self.id, self.num_samples = id, SIZES[id]

        def examples(self) -> Any:
            return toy.dataset.load(self.id)["train"]

    for client, size in enumerate(SIZES):
        support, query = method.divided(Known(client))  # type: ignore[arg-type]
        if size == 1:
            assert support is None and query is None
            continue
        assert support is not None and query is not None
        assert len(support) == min(max(round(share * size), 1), size - 1)
        rows = torch.cat([support.x, query.x])
        assert len(rows) == size and len(torch.unique(rows, dim=0)) == size
        assert_equal(method.divided(Known(client))[0].x, support.x)  # type: ignore[arg-type, union-attr]


def test_buffers_are_averaged_and_reconstructions_record_nothing() -> None:
    toy = Toy(FedRecon(reconstruction_epochs=3, body_epochs=0), random_clients((8, 12, 6)), normalized_layers(), TRAIN)
    before = copy(toy.server["shared"])
    assert_equal(toy.step([0, 1])["shared"], before)
    assert not set(toy.server["moments"]["first"]) & set(toy.task.network.buffer_names)
    moving = Toy(FedRecon(), random_clients((8, 12, 6)), normalized_layers(), TRAIN)
    before = copy(moving.server["shared"])
    moving.step([0, 1])
    assert all(
        not torch.equal(moving.server["shared"][name], before[name]) for name in moving.task.network.buffer_names
    )


def test_the_body_travels_alone() -> None:
    toy = toy_of(FedRecon(server_momentum=0.9))
    size = num_bytes(toy.server["shared"])
    assert set(toy.server["shared"]) == set(BODY)
    toy.step([0, 1])
    assert toy.federation.traffic.by_client == dict.fromkeys([0, 1], (size, size))


def test_what_is_undefined_is_refused() -> None:
    toy = toy_of(FedRecon())
    FedRecon().check(toy.task, toy.context)
    with pytest.raises(ConfigError, match=r"algorithm\.head_group is all.*set last_layer"):
        FedRecon(head_group="all").check(toy.task, toy.context)
    kept = toy_of(FedRecon(), TRAIN.model_copy(update={"persist_optimizer": True}))
    with pytest.raises(ConfigError, match=r"set train\.persist_optimizer=false"):
        FedRecon().check(toy.task, kept.context)
    augmented = toy_of(FedRecon(), augmentation=Augmentation(AugmentConfig(), torch.zeros(1))).context
    with pytest.raises(ConfigError, match=r"drop augment, or set algorithm\.support_share=null"):
        FedRecon().check(toy.task, augmented)
    FedRecon(support_share=None).check(toy.task, augmented)


def test_what_says_how_long_newcomers_train() -> None:
    assert FedRecon().joins_for == "train.local_epochs"
    assert FedRecon(reconstruction_epochs=2).joins_for == "algorithm.reconstruction_epochs"
