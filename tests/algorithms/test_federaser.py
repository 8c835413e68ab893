"""FedEraser: an oracle in plain PyTorch, models that clients never touched, lengths of changes, what is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.federaser import FedEraser
from rayfl.data.partitions.joining import ClientStages
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 5, 10, 7)
TRAIN = TrainConfig(rounds=6, clients_per_round=3, local_epochs=3, batch_size=4, lr=0.1, weight_decay=0.01)
STAGES = ClientStages(count=2, rounds=3, course="leave")
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def toy_of(method: Any, stages: ClientStages = STAGES, task: Any = None, **options: Any) -> Toy:
    return Toy(method, random_clients(SIZES), task or two_layers(), TRAIN, stages=stages, **options)


def leaving(toy: Toy) -> list[int]:
    """The clients that leave at the first end of a stage."""
    return np.flatnonzero(~STAGES.there(len(SIZES), toy.context.streams)[:, 1]).tolist()


def trained(toy: Toy, x: Tree, client: int, round: int, epochs: int = 3, stream: str = "") -> Tree:
    """The client's model after its local steps from x."""
    part, own = toy.dataset.load(client)["train"], copy(x)
    generator = toy.context.streams.generator(f"batches{stream}", round, client)
    for index in plan_batches(SIZES[client], 4, epochs * -(-SIZES[client] // 4), generator).batches(CPU):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in own.items()}
        loss = F.cross_entropy(toy.task.network.logits(leaves, part.x[index]), part.y[index])
        for name, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            own[name] = own[name] - 0.1 * (g + 0.01 * own[name])
    return own


def mean(trees: dict[int, Tree], weights: dict[int, int]) -> Tree:
    total = sum(weights[k] for k in trees)
    names = next(iter(trees.values()))
    return {name: sum(weights[k] / total * tree[name] for k, tree in trees.items()) for name in names}  # type: ignore[misc]


def minus(one: Tree, other: Tree) -> Tree:
    return {name: one[name] - other[name] for name in one}


@MODES
@pytest.mark.parametrize(("every", "share", "epochs"), [(1, 0.5, 2), (2, 0.3, 1)])
def test_inv_eraser_1_rounds_are_those_of_an_oracle_in_plain_pytorch(
    every: int, share: float, epochs: int, mode: Any
) -> None:
    toy = toy_of(FedEraser(keep_every=every, calibration_share=share), mode=mode)
    gone = leaving(toy)
    stay = [k for k in range(5) if k not in gone]
    cohorts = [[gone[0], *stay], [*gone, stay[1]], [gone[-1], *stay], stay, stay[:1]]
    start = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    x, kept, weights = start, dict[int, dict[int, Tree]](), dict(enumerate(SIZES))
    for round, cohort in enumerate(cohorts):
        if round == 3:
            x, again = start, dict[int, dict[int, Tree]]()
            for number, changes in kept.items():
                own = {k: change for k, change in changes.items() if k in stay}
                if again:
                    for k in own:
                        new = minus(trained(toy, x, k, 3, epochs, f".calibrate.{number}"), x)
                        own[k] = {name: leaf * own[k][name].norm() / leaf.norm() for name, leaf in new.items()}
                step = mean(own, weights)
                x, again[number] = {name: x[name] + step[name] for name in x}, own
            kept = again
        models = {k: trained(toy, x, k, round) for k in cohort}
        if round % every == 0:
            kept[round] = {k: minus(model, x) for k, model in models.items()}
        x = mean(models, weights)
        toy.step(sorted(cohort))
        assert_close(toy.server["model"], x, 1e-12)
    found = {int(t): {int(k): one["change"] for k, one in own.items()} for t, own in toy.server["kept"].items()}
    assert found.keys() == kept.keys()
    for number, own in kept.items():
        assert found[number].keys() == own.keys()
        for k, change in own.items():
            assert_close(found[number][k], change, 1e-12)
    assert toy.server["left"].nonzero()[:, 0].tolist() == gone


def test_inv_eraser_2_begun_again_a_model_never_has_seen_those_who_leave() -> None:
    toy, other = toy_of(FedEraser(unlearning="retrain")), toy_of(FedAvg())
    gone = leaving(toy)
    stay = [k for k in range(5) if k not in gone]
    for cohort in ([*gone, stay[0]], [gone[0], stay[1]], stay[:2]):
        toy.step(sorted(cohort))
    other.round = 3
    for cohort in (stay, stay[1:]):
        toy.step(cohort)
        other.step(cohort)
    assert_equal(toy.server["model"], other.server["model"])
    assert not toy.server["kept"]


@MODES
def test_inv_eraser_3_as_long_as_nobody_leaves_it_is_federated_averaging(mode: Any) -> None:
    forever = ClientStages(count=2, rounds=9, course="leave")
    toy, other = (toy_of(method, forever, mode=mode) for method in (FedEraser(), FedAvg()))
    for cohort in ([0, 1], [2, 4], [1, 3], [0, 1, 2, 3, 4]):
        toy.step(cohort)
        other.step(cohort)
        assert_equal(toy.server["model"], other.server["model"])


def test_inv_eraser_4_those_who_have_never_taken_part_leave_nothing_to_forget() -> None:
    toy, other = toy_of(FedEraser()), toy_of(FedAvg())
    stay = [k for k in range(5) if k not in leaving(toy)]
    for cohort in (stay, stay[:2], stay[1:], stay, stay):
        toy.step(cohort)
        other.step(cohort)
    assert_equal(toy.server["model"], other.server["model"])


def test_inv_eraser_5_changes_have_the_lengths_of_before_and_buffers_are_averaged() -> None:
    toy = toy_of(FedEraser(keep_every=1), task=normalized_layers())
    gone = leaving(toy)
    stay = [k for k in range(5) if k not in gone]
    for _ in range(3):
        toy.step(sorted([gone[0], *stay]))
    before = toy.server["kept"]
    toy.step(stay)
    after, names = toy.server["kept"], toy.task.network.parameter_names
    assert len(names) < len(toy.server["model"])
    for round in ("1", "2"):
        assert after[round].keys() == {str(k) for k in stay}
        for k in after[round]:
            old, new = before[round][k]["change"], after[round][k]["change"]
            for name in names:
                assert float(new[name].norm()) == pytest.approx(float(old[name].norm()), rel=1e-6)
            assert any(not torch.equal(new[name], old[name]) for name in names)


def test_without_clients_that_leave_it_says_that_it_is_federated_averaging() -> None:
    method = FedEraser()
    assert not method.remarks(toy_of(method).context)
    joining = toy_of(method, ClientStages(count=2, rounds=3)).context
    assert "nobody leaves" in method.remarks(joining)[0]
    assert method.kept_bytes(two_layers(), toy_of(method).context, 0) == 3 * 3 * 8 * sum(
        leaf.numel() for leaf in two_layers().network.initialize(0).values()
    )
