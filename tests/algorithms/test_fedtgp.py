"""FedTGP: invariants TGP of the margin, the server's loss and steps, whole rounds, messages, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedproto import FedProto
from algorithms.fedtgp import FedTGP, made
from algorithms.local import Local
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.partial_toys import COHORTS, TRAIN, initial, labelled, three_layers, toy_of, vectors
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

SEVERAL = ([0, 1, 0, 1, 1, 2], [1, 1], [2, 0, 2, 2], [0, 0, 1])
MEANS = torch.tensor([[[0.0, 0], [3, 4], [9, 9]], [[0, 2], [9, 9], [0, 6]]], dtype=torch.float64)
EXIST = torch.tensor([[True, True, False], [True, False, True]])
"""Classes 0, 1 and 2 have the centres (0, 1), (3, 4) and (0, 6): distances 18^(1/2), 5 and 13^(1/2)."""


def several(algorithm: Any, **options: Any) -> Toy:
    return Toy(algorithm, labelled(*SEVERAL), **{"task": two_layers(), "train": TRAIN, **options})


def own(toy: Toy, client: int) -> Tree:
    """v_k."""
    model: Tree = toy.states()[client]["local"]
    return model


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_tgp_1_without_alignment_every_model_is_that_of_local_training(make: Any) -> None:
    alone, shared = toy_of(Local(), task=make()), toy_of(FedTGP(alignment_weight=0, server_epochs=2), task=make())
    for cohort in COHORTS:
        alone.step(cohort)
        shared.step(cohort)
    assert_equal(shared.states(), alone.states())
    assert vectors(shared.scores(), "head") == vectors(alone.scores(), "personalized")


def test_inv_tgp_2_a_local_update_is_fedprotos_for_the_same_prototypes() -> None:
    ours, theirs = several(FedTGP(alignment_weight=2.0, distance="samples")), several(FedProto(alignment_weight=2.0))
    means = ours.server["prototypes"]
    assert (means != 0).all()
    theirs.server = {"prototypes": {"means": means, "exist": torch.ones(3, dtype=torch.float64)}}
    for toy in (ours, theirs):
        toy.step([0, 2])
    assert_equal(ours.states(), theirs.states())


@pytest.mark.parametrize("still", [{"server_epochs": 0}, {"server_lr": 0.0}])
def test_inv_tgp_3_without_a_server_step_prototypes_stay(still: Any) -> None:
    toy = several(FedTGP(**still))
    before = toy.server
    for cohort in ([0, 1], [2, 3]):
        assert_equal(toy.step(cohort), before)


@pytest.mark.parametrize(
    ("margin", "limit", "expected"),
    [
        ("farthest", 100.0, 5.0),
        ("nearest", 100.0, 18**0.5),
        ("fixed", 100.0, 100.0),
        ("farthest", 2.0, 2.0),
        ("nearest", 2.0, 2.0),
        ("farthest", 0.0, 0.0),
    ],
)
def test_inv_tgp_4_the_margin_is_the_distance_of_centres_up_to_its_limit(
    margin: Any, limit: float, expected: float
) -> None:
    algorithm = FedTGP(margin=margin, margin_limit=limit)
    assert_close(algorithm.delta(MEANS, EXIST), torch.tensor(expected, dtype=torch.float64), 1e-12)
    one_class = torch.tensor([[True, False, False]] * 2)
    assert float(algorithm.delta(MEANS, one_class)) == (limit if margin == "fixed" else 0.0)


def problem(seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Class means (5, 4), their classes, and vectors (3, 4)."""
    generator = np.random.default_rng(seed)
    return generator.standard_normal((5, 4)), np.array([0, 2, 1, 0, 2]), generator.standard_normal((3, 4))


def test_inv_tgp_5_the_servers_loss_is_equation_10_and_without_margin_equation_6() -> None:
    means, labels, prototypes = problem()
    batch = Batch(torch.from_numpy(means), torch.from_numpy(labels))
    for delta in (0.0, 1.5):
        total = 0.0
        for mu, y in zip(means, labels, strict=True):
            far = np.linalg.norm(mu - prototypes, axis=1)
            near = np.exp(-(far[y] + delta))
            total -= np.log(near / (near + sum(np.exp(-far[j]) for j in range(3) if j != y)))
        frozen = {"delta": torch.tensor(delta, dtype=torch.float64)}
        found = FedTGP().contrast({"vectors": torch.from_numpy(prototypes)}, batch, None, frozen, None)  # type: ignore[arg-type]
        assert abs(float(found) - total / 5) < 1e-12


def served(algorithm: FedTGP, trained: Tree, means: np.ndarray, labels: np.ndarray, delta: float) -> Tree:
    """What the server's training makes of trainable values, in one mini-batch an epoch."""
    toy = several(algorithm, train=TRAIN.model_copy(update={"batch_size": None}))
    toy.federation.begin_round(0)
    given = {"trained": trained, "means": torch.from_numpy(means), "labels": torch.from_numpy(labels)}
    found: Tree = toy.federation.on_server(algorithm.fit, {**given, "delta": torch.tensor(delta, dtype=torch.float64)})[
        "trained"
    ]
    return found


def test_inv_tgp_6_a_step_of_the_server_without_network_in_closed_form() -> None:
    means, labels, prototypes = problem()
    apart = means[:, None] - prototypes
    far = np.linalg.norm(apart, axis=2)
    own = np.eye(3)[labels]
    scores = np.exp(-far - 1.5 * own)
    errors = scores / scores.sum(1, keepdims=True) - own
    slopes = np.einsum("kj,kjd->jd", errors, apart / far[..., None]) / 5
    algorithm = FedTGP(processing="none", server_epochs=1, server_lr=0.3)
    found = served(algorithm, {"vectors": torch.from_numpy(prototypes)}, means, labels, 1.5)
    assert_close(found["vectors"], torch.from_numpy(prototypes - 0.3 * slopes), 1e-12)


def test_a_prototype_that_is_a_class_mean_has_a_finite_slope() -> None:
    means, labels, _ = problem()
    found = served(
        FedTGP(processing="none", server_epochs=2), {"vectors": torch.from_numpy(means[:3])}, means, labels, 1
    )
    assert found["vectors"].isfinite().all()


def network_of(trained: Tree) -> tuple[nn.Parameter, nn.Sequential]:
    """The trainable vectors, and F as modules of PyTorch."""
    layers = trained["network"]
    network = nn.Sequential(nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 7)).double()
    network.load_state_dict(
        {f"{place}.{name}": layers[key][name] for place, key in ((0, "first"), (2, "second")) for name in layers[key]}
    )
    return nn.Parameter(trained["vectors"].clone()), network


def steps(parameters: Any, loss: Any, plan: Any, **options: Any) -> None:
    """Takes steps of SGD on a loss of the samples with the given numbers."""
    optimizer = torch.optim.SGD(parameters, **options)
    for index in plan.batches(CPU):
        optimizer.zero_grad()
        loss(index).backward()
        optimizer.step()


@pytest.mark.parametrize("distance", ["class_means", "samples"])
def test_inv_tgp_7_rounds_are_those_of_an_oracle_in_plain_pytorch(distance: Any) -> None:
    toy = several(FedTGP(alignment_weight=0.7, distance=distance, server_epochs=3, server_lr=0.05, margin_limit=1.5))
    streams, network = toy.context.streams, toy.task.network
    vector, processing = network_of(toy.server["trained"])
    models: dict[int, Tree] = {}
    for round, cohort in enumerate(([0, 1, 2, 3], [0, 2], [1, 3])):
        prototypes = processing(vector).detach()
        means, labels = [], []
        for client in cohort:
            part = toy.dataset.load(client)["train"]
            model = {k: v.clone().requires_grad_() for k, v in models.get(client, initial(toy)).items()}

            def loss(index: Tensor, model: Any = model, part: Any = part, prototypes: Tensor = prototypes) -> Tensor:
                f, z = network.head_inputs_and_logits(model, part.x[index])
                y = part.y[index]
                if distance == "samples":
                    return F.cross_entropy(z, y) + 0.7 * F.mse_loss(f, prototypes[y])
                lengths = [torch.linalg.vector_norm(f[y == c].mean(0) - prototypes[c]) for c in set(y.tolist())]
                return F.cross_entropy(z, y) + 0.7 * torch.stack(lengths).mean()

            batches = plan_batches(
                len(part.y), 4, 2 * -(-len(part.y) // 4), streams.generator("batches", round, client)
            )
            steps(model.values(), loss, batches, lr=0.1, momentum=0.5, weight_decay=0.01)
            models[client] = {k: v.detach() for k, v in model.items()}
            f = network.head_inputs_and_logits(models[client], part.x)[0]
            for y in sorted(set(part.y.tolist())):
                means.append(f[part.y == y].mean(0))
                labels.append(y)
        x, y = torch.stack(means), torch.tensor(labels)
        centres = torch.stack([x[y == c].mean(0) for c in set(labels)])
        delta = min(1.5, max(float((a - b).norm()) for a in centres for b in centres))

        def server_loss(index: Tensor, x: Tensor = x, y: Tensor = y, delta: float = delta) -> Tensor:
            far = (x[index][:, None] - processing(vector)).square().sum(-1).sqrt()
            return F.cross_entropy(-(far + delta * F.one_hot(y[index], 3).double()), y[index])

        batches = plan_batches(len(y), 4, 3 * -(-len(y) // 4), streams.generator("batches", round, -1))
        steps([vector, *processing.parameters()], server_loss, batches, lr=0.05)
        toy.step(cohort)
        assert_close(toy.server["prototypes"], processing(vector).detach(), 1e-10)
        assert_close(toy.server["trained"]["vectors"], vector.detach(), 1e-10)
    for client, model in models.items():
        assert_close(own(toy, client), model, 1e-10)


def test_without_a_rate_of_its_own_the_server_has_that_of_the_round() -> None:
    train = TRAIN.model_copy(update={"lr_decay": 0.5})
    implied, given = (several(FedTGP(server_epochs=2, server_lr=rate), train=train) for rate in (None, train.lr_in(1)))
    for toy in (implied, given):
        toy.round = 1
        toy.step([0, 2])
    assert train.lr_in(1) == 0.5 * train.lr
    assert_equal(implied.server, given.server)


def test_inv_tgp_8_messages_have_the_size_of_the_prototypes_and_the_network_stays() -> None:
    for task in (two_layers(hidden=7), two_layers(inputs=5, hidden=40)):
        toy, width = several(FedTGP(server_epochs=1), task=task), task.network.head_shape[1]
        for cohort in ([0, 1], [2, 3]):
            toy.step(cohort)
            assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (8 * 3 * width, 8 * 3 * (width + 1)))
        assert (
            set(toy.algorithm.sent(toy.server))
            == set(toy.algorithm.served(toy.server, toy.context)[0])
            == {"prototypes"}
        )


def test_inv_tgp_9_the_margin_separates_prototypes() -> None:
    means, labels, _ = problem()
    found = {}
    for delta in (0.0, 4.0):
        trained = several(FedTGP()).server["trained"]
        wide = np.concatenate([means, np.zeros((5, 3))], 1)
        prototypes = made(served(FedTGP(server_epochs=60, server_lr=0.2), trained, wide, labels, delta))
        found[delta] = float(torch.pdist(prototypes).min())
    assert found[4.0] > 1.3 * found[0.0], found


@pytest.mark.parametrize("inference", ["prototypes", "head"])
def test_rows(inference: Any) -> None:
    toy = several(FedTGP(inference=inference, server_epochs=5))
    first, second = ("personalized", "head") if inference == "prototypes" else ("prototypes", "personalized")
    for step in (False, True):
        if step:
            toy.step([1, 2])
        scores = toy.scores()
        for client in range(4):
            model = own(toy, client) if step and client in (1, 2) else initial(toy)
            part = toy.dataset.load(client)["test"]
            f, z = toy.task.network.head_inputs_and_logits(model, part.x)
            apart = (f[:, None] - toy.server["prototypes"]).square().sum(-1)
            loss = float(F.cross_entropy(-apart / 7, part.y))
            assert abs(scores[client][first].loss - loss) < 1e-10
            assert abs(scores[client][second].loss - float(F.cross_entropy(z, part.y))) < 1e-12


def test_clients_of_several_architectures_share_prototypes_of_one_width() -> None:
    single = two_layers()
    pair = Classification(single.network, [single, normalized_layers()])
    toy = Toy(FedTGP(server_epochs=2), labelled(*SEVERAL, *SEVERAL), pair, TRAIN)
    FedTGP().check(pair, toy.context)
    for _ in range(2):
        toy.step(list(range(8)))
    assert len({tuple(own(toy, client)) for client in range(8)}) == 2
    wide = Classification(single.network, [single, two_layers(hidden=9)])
    with pytest.raises(ConfigError, match=r"FedTGP's clients share features, .* read \[7, 9\]"):
        FedTGP().check(wide, toy.context)
    with pytest.raises(ConfigError, match=r"algorithm\.initial is own"):
        FedTGP(initial="own").check(pair, toy.context)


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
def test_vectorized_agrees_with_looped_also_where_classes_are_missing(
    optimizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), **optimizer})
    looped, stacked = (several(FedTGP(server_epochs=3), train=train, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 1, 2, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-9)
    assert_close(looped.states(), stacked.states(), 1e-9)
    assert "failed together" not in caplog.text
