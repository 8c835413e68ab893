"""DENSE: rounds in plain PyTorch, several architectures, limits, what it learns in one round, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.dense import DENSE
from algorithms.fedavg import FedAvg
from algorithms.parts.architectures import architecture
from algorithms.parts.inversion import Inversion
from algorithms.parts.synthesis import draw_generator, generated, statistics_apart
from rayfl.data.partitions.stage import NoStages
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.params import Tree, num_bytes
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.fedme_toys import two_architectures
from tests.support.made_samples import Rows, kl, made_rows
from tests.support.partial_toys import initial, labelled
from tests.support.staged_toys import COHORTS, DATA, cross_entropy, descended, logits_of, samples_of, staged_toy
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

SMALL: dict[str, Any] = {"draws": 3, "made_per_draw": 6, "generator_steps": 3, "noise_dim": 4, "generator_width": 5}
SMALL |= {"generator_lr": 0.02, "noise_lr": 0.1, "student_lr": 0.05}
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "samples": {"aggregation": "samples", "student_epochs": 2, "temperature": 3.0, "label_weight": 0.3},
    "no-boundary": {"boundary_weight": 0},
}


def toy_of(method: Any, **options: Any) -> Toy:
    """Four clients whose samples stay."""
    return staged_toy(method, stages=NoStages(), **options)


def fused(method: DENSE, toy: Toy, round: int, w: Tree, models: list[Tree], cohort: list[int]) -> Tree:
    """The server's part of a round, with PyTorch's own layers and optimizers."""
    streams, inputs = toy.context.streams, torch.cat([DATA.load(k)["train"].x for k in cohort])
    low, high = inputs.amin(0), inputs.amax(0)
    sizes = [len(DATA.load(k)["train"].y) if method.aggregation == "samples" else 1 for k in cohort]
    drawn = streams.generator("synthesis", round, -1)
    student = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
    pool = torch.zeros(0, 5, dtype=torch.float64)

    def said(x: Tensor) -> Tensor:
        return sum(size / sum(sizes) * logits_of(model, x) for size, model in zip(sizes, models, strict=True))

    for number in range(method.draws):
        network = Rows(draw_generator((5,), 4, 5, low, drawn))
        z, y = torch.from_numpy(drawn.standard_normal((6, 4))), torch.from_numpy(drawn.choice(3, 6))
        known = {name: leaf.detach().clone() for name, leaf in student.items()}

        def value(x: Tensor, y: Tensor = y, known: Tree = known) -> Tensor:
            teacher, own = said(x), logits_of(known, x)
            differ = (own.argmax(1) != teacher.argmax(1)).double()
            apart = (differ * kl(teacher, own)).mean()
            return method.label_weight * F.cross_entropy(teacher, y) - method.boundary_weight * apart

        pool = torch.cat([pool, made_rows(method, network, z, low, high, value)])
        sgd = torch.optim.SGD(student.values(), lr=method.student_lr, momentum=0.9)
        steps = method.student_epochs * -(-len(pool) // 6)
        batches = streams.generator(f"batches.student.{number}", round, -1)
        for index in plan_batches(len(pool), 6, steps, batches).batches(CPU):
            sgd.zero_grad()
            apart = kl(said(pool[index]), logits_of(student, pool[index]), method.temperature).mean()
            (method.temperature**2 * apart).backward()  # type: ignore[no-untyped-call]
            sgd.step()
    return {name: leaf.detach() for name, leaf in student.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_dense_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = DENSE(**{**SMALL, **SETTINGS[name]})
    toy = toy_of(method)
    w = initial(toy)
    for round, cohort in enumerate(COHORTS[:2]):
        models = [descended(toy, round, k, w, samples_of(k, 2, "all"), cross_entropy) for k in cohort]
        w = fused(method, toy, round, w, models, cohort)
        assert_close(toy.step(cohort)["models"]["0"], w, 1e-12)
    assert not any(toy.states().values())


def test_inv_dense_2_a_server_that_does_not_move_keeps_its_model_and_clients_train_as_in_fedavg() -> None:
    ours, plain = toy_of(DENSE(**{**SMALL, "student_lr": 0})), toy_of(FedAvg())
    first = initial(ours)
    assert_equal(ours.step([1])["models"]["0"], first)
    ours.step([1])
    plain.step([1])
    size = num_bytes(first)
    assert ours.federation.traffic.by_client == {1: (size, size + 2 * 5 * 8)}
    assert plain.federation.traffic.by_client == {1: (size, size)}


def test_inv_dense_3_what_goes_downhill_is_a_mean_over_models_of_several_architectures() -> None:
    """Each model with its own layers, where one of them normalizes."""
    one, two = normalized_layers(), two_layers()
    task = Classification(one.network, candidates=(one, two))
    numbers = torch.Generator().manual_seed(1)
    models = {"4": one.network.initialize(0), "7": two.network.initialize(1), "9": one.network.initialize(2)}
    models["9"] |= {"norm.running_mean": torch.randn(7, generator=numbers, dtype=torch.float64)}
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    low, high = -torch.ones(5).double(), torch.ones(5).double()
    inversion = Inversion(6, 1, 0.1, 0.1, 4, 5, 0.7, 0.4, 0.9, False, {"4": 0, "7": 1, "9": 0})
    drawn = np.random.default_rng(0)
    network, y = inversion.network(low, drawn), torch.tensor([0, 1, 2, 0, 1, 2])
    trained = {"generator": network, "noise": torch.from_numpy(drawn.standard_normal((6, 4)))}
    student = one.network.initialize(5)
    frozen = {"models": models, "weights": weights, "student": student, "low": low, "high": high, "labels": y}
    found = inversion.value(trained, Batch(low[:0], low[:0]), task, frozen, {})
    x, mine = generated(network, trained["noise"], low, high), {"4": one, "7": two, "9": one}
    each = [mine[name].network.logits(model, x, training=False) for name, model in models.items()]
    teacher = 0.5 * each[0] + 0.2 * each[1] + 0.3 * each[2]
    own = one.network.logits(student, x, training=False)
    differ = (teacher.argmax(1) != own.argmax(1)).double()
    apart = 0.5 * statistics_apart(models["4"], x, one) + 0.3 * statistics_apart(models["9"], x, one)
    expected = 0.7 * F.cross_entropy(teacher, y) + 0.4 * apart - 0.9 * (differ * kl(teacher, own)).mean()
    assert differ.any() and apart > 0
    assert_close(found, expected, 1e-12)


def test_inv_dense_4_clients_of_several_architectures_teach_each_of_them() -> None:
    looped, stacked = (toy_of(DENSE(**SMALL), task=two_architectures(), mode=mode) for mode in ("looped", "vectorized"))
    drawn = [architecture(k, 2, looped.context) for k in range(4)]
    assert set(drawn) == {0, 1}
    first = looped.server["models"]
    for cohort in ([0, 1, 2, 3], [drawn.index(1)]):
        before, after = looped.server["models"], looped.step(cohort)["models"]
        assert_close(stacked.step(cohort)["models"], after, 1e-8)
        for number in ("0", "1"):
            assert {name: leaf.shape for name, leaf in after[number].items()} == {
                name: leaf.shape for name, leaf in first[number].items()
            }
            assert any((after[number][name] != leaf).any() for name, leaf in before[number].items())
    assert set(looped.scores()[0]) == {"global"}


@pytest.mark.slow
def test_one_round_teaches_what_clients_know_of_different_classes() -> None:
    """Two clients with two of three classes each, far from each other: their ensemble knows all, and so does w."""
    numbers, centres = torch.Generator().manual_seed(0), 2 * torch.eye(3, 5).double()
    data = labelled([0, 1] * 30, [1, 2] * 30)
    for k in range(2):
        for part in data.load(k).values():
            part.x.copy_(centres[part.y] + 0.2 * torch.randn(part.x.shape, generator=numbers, dtype=torch.float64))
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=20, batch_size=10, lr=0.2)
    method = DENSE(draws=12, made_per_draw=30, noise_dim=4, generator_width=8, generator_lr=0.02, student_lr=0.02)
    toy = Toy(method, data, two_layers(), train)
    toy.step([0, 1])
    x = centres + 0.2 * torch.randn(50, 3, 5, generator=numbers, dtype=torch.float64)
    said = logits_of(toy.server["models"]["0"], x.flatten(0, 1)).argmax(1).view(50, 3)
    assert (said == torch.arange(3)).double().mean() > 0.9


def test_more_than_one_round_is_said() -> None:
    context = toy_of(DENSE()).context
    assert "is made for one round" in DENSE().remarks(context)[0]
    assert not DENSE().remarks(replace(context, rounds=1))


@pytest.mark.parametrize(("kind", "what"), [("tokens", "rows of tokens"), ("graph", "graphs")])
def test_what_is_no_array_of_numbers_is_refused(kind: Any, what: str) -> None:
    task = Classification(two_layers().network, spec=InputSpec(kind, (5,), 3))
    with pytest.raises(ConfigError, match=f"dense cannot learn task=classification from {what}.* such as fedavg"):
        DENSE().check_task(task)
