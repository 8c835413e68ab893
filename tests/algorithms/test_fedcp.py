"""FedCP: invariants CP of policy, heads and discrepancy, a step by hand, noise, and clients that label differently."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedavg import FedAvg
from algorithms.fedcp import BANDWIDTHS, FedCP, both_heads, context_of, gumbel, policy_shares
from algorithms.fedper import FedPer
from algorithms.parts.transfer import fixed_kernel_discrepancy
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch
from tests.support.partial_toys import (
    COHORTS,
    TRAIN,
    held_out_accuracy,
    initial,
    partly_fixed,
    planted_clients,
    take,
    toy_of,
    vectors,
)
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

HEAD = ("head.weight", "head.bias")
ONE_STEP = TrainConfig(rounds=3, clients_per_round=1, local_epochs=1, batch_size=None, lr=0.1)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def policy_of(seed: int, dtype: torch.dtype = torch.float64) -> Tree:
    shapes = {"matrix": (14, 7), "offset": (14,), "norm_gain": (14,), "norm_offset": (14,)}
    return {name: drawn(seed + i, *shape, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def test_inv_cp_1_shares_sum_to_one() -> None:
    for noise in (None, drawn(9, 50, 2, 7, dtype=torch.float32)):
        shares = policy_shares(policy_of(1, torch.float32), drawn(5, 50, 7, dtype=torch.float32), 0.7, noise)
        assert shares.shape == (50, 2, 7) and (shares >= 0).all()
        assert (shares.sum(1) - 1).abs().max() <= 1e-6
        assert shares.std() > 0.05


def test_the_policy_is_the_papers() -> None:
    tensors, read = policy_of(1), drawn(5, 6, 7)
    layer, norm = nn.Linear(7, 14).double(), nn.LayerNorm(14).double()
    layer.weight.data, layer.bias.data = tensors["matrix"], tensors["offset"]
    norm.weight.data, norm.bias.data = tensors["norm_gain"], tensors["norm_offset"]
    pairs = torch.relu(norm(layer(read))).view(6, 2, 7).detach()
    assert_close(policy_shares(tensors, read, 2.0, None), (pairs / 2).softmax(1), 1e-12)
    noise = drawn(3, 6, 2, 7)
    assert_close(policy_shares(tensors, read, 2.0, noise), ((pairs + noise) / 2).softmax(1), 1e-12)


def example(weight: float = 2.0) -> tuple[FedCP, Toy, Tree, Batch, Tree]:
    """A method, its toy, what is trained, a mini-batch and what is frozen."""
    method = FedCP(alignment_weight=weight)
    toy = toy_of(method, task=two_layers())
    part = toy.dataset.load(1)["train"]
    received = toy.task.network.initialize(8)
    model = toy.task.network.initialize(9)
    frozen = {"received": received, "context": context_of(model["head.weight"])}
    return method, toy, {"model": model, "policy": policy_of(1)}, Batch(part.x, part.y), frozen


def test_inv_cp_2_of_equal_heads_the_policy_does_not_matter() -> None:
    _, toy, trained, batch, frozen = example()
    same = {"received": {**frozen["received"], **take(trained["model"], HEAD)}, "context": frozen["context"]}
    features, logits = toy.task.network.head_inputs_and_logits(trained["model"], batch.x)
    for seed in (1, 20):
        shares = policy_shares(policy_of(seed), features, 1.0, None)
        found = both_heads(toy.task, trained["model"], same["received"], features, shares)
        assert_close(found, logits + trained["model"]["head.bias"], 1e-12)
    policy = {name: leaf.clone().requires_grad_() for name, leaf in policy_of(1).items()}
    value = FedCP(alignment_weight=0).objective({**trained, "policy": policy}, batch, toy.task, same)
    for slope in torch.autograd.grad(value, list(policy.values())):
        assert slope.abs().max() < 1e-12


def test_inv_cp_3_the_discrepancy_is_zero_where_features_agree_and_that_of_the_codes_elsewhere() -> None:
    batch = Batch(drawn(1, 6, 5), torch.zeros(6, dtype=torch.int64))
    left, right = 3 * drawn(2, 6, 7), 3 * drawn(3, 6, 7)
    moved = left.clone().requires_grad_()
    value = fixed_kernel_discrepancy(moved, left, batch, BANDWIDTHS)
    assert abs(float(value.detach())) < 1e-12
    assert torch.autograd.grad(value, moved)[0].abs().max() < 1e-12

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        squares = (x[:, None] - y[None]).square().sum(-1)
        return sum((torch.exp(-0.5 * squares / a) for a in (10, 15, 20, 50)), torch.zeros_like(squares))

    expected = kernel(left, left).mean() + kernel(right, right).mean() - 2 * kernel(left, right).mean()
    assert_close(fixed_kernel_discrepancy(left, right, batch, BANDWIDTHS), expected, 1e-12)
    # of one sample a side, and with padding that would overflow
    first = Batch(batch.x[:1], batch.y[:1])
    single = fixed_kernel_discrepancy(left[:1], right[:1], first, BANDWIDTHS)
    assert_close(single, (8 - 2 * kernel(left[:1], right[:1])).sum(), 1e-12)
    mask = torch.tensor([1.0] * 6 + [0.0] * 2, dtype=torch.float64)
    junk = torch.full((2, 7), 1e200, dtype=torch.float64)
    padded = Batch(batch.x, batch.y, mask)
    found = fixed_kernel_discrepancy(torch.cat([left, junk]), torch.cat([right, -junk]), padded, BANDWIDTHS)
    assert_close(found, expected, 1e-12)


def test_inv_cp_4_without_weight_the_received_body_does_not_matter() -> None:
    method, toy, trained, batch, frozen = example(0.0)
    garbage = {name: leaf if name in HEAD else leaf + 1e3 for name, leaf in frozen["received"].items()}
    both = [{**frozen, "received": model} for model in (frozen["received"], garbage)]
    values = [method.objective(trained, batch, toy.task, one) for one in both]
    assert torch.equal(values[0], values[1])
    other = FedCP(alignment_weight=2.0)
    pulled = [other.objective(trained, batch, toy.task, one) for one in both]
    assert abs(float(pulled[0] - pulled[1])) > 1e-3
    features = toy.task.network.head_inputs_and_logits(trained["model"], batch.x)[0]
    received = toy.task.network.head_inputs_and_logits(frozen["received"], batch.x)[0]
    apart = fixed_kernel_discrepancy(features, received, batch, BANDWIDTHS)
    assert_close(pulled[0] - values[0], 2 * apart, 1e-12)


def test_inv_cp_5_the_mean_of_both_heads_is_sent() -> None:
    toy = Toy(FedCP(), random_clients([12]), two_layers(), TRAIN)
    for _ in range(3):
        before = copy(toy.server["head"])
        toy.step([0])
        own = toy.states()[0]["personal"]
        assert_close(toy.server["head"], {name: (own[name] + before[name]) / 2 for name in HEAD}, 1e-15)
        assert (own["head.weight"] - toy.server["head"]["head.weight"]).abs().max() > 1e-4


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_cp_6_the_received_head_stays_while_training(mode: str) -> None:
    train = TRAIN.model_copy(update={"momentum": 0.9, "weight_decay": 0.3})
    seen: list[tuple[Tree, Tree]] = []

    class Watched(FedCP):
        async def split_update(self, client: Any, shared: Tree, head: Tree, policy: Tree) -> Any:
            before = copy(head)
            found = await super().split_update(client, shared, head, policy)
            seen.append((before, copy(head)))
            return found

    toy = toy_of(Watched(), train, two_layers(), mode=mode)
    for cohort in COHORTS:
        toy.step(cohort)
    assert len(seen) == 8
    for before, after in seen:
        assert_equal(after, before)


def test_inv_cp_7_with_everything_to_the_personal_head_it_is_fedper() -> None:
    toy = toy_of(FedCP(alignment_weight=0, policy_lr=0.0), task=two_layers())
    toy.server["policy"]["norm_gain"].zero_()
    toy.server["policy"]["norm_offset"].copy_(torch.tensor([60.0] * 7 + [0.0] * 7))
    plain = toy_of(FedPer(), task=two_layers())
    for cohort in COHORTS:
        toy.server["head"] = {**toy.server["head"], "head.bias": torch.zeros(3, dtype=torch.float64)}
        assert_close(toy.step(cohort)["shared"], plain.step(cohort)["shared"], 1e-6)
        assert_close(toy.states(), plain.states(), 1e-6)


@pytest.mark.parametrize("noise", ["train", "none", "always"])
def test_inv_cp_8_evaluation_gives_the_same_bits_again(noise: Any) -> None:
    toy = toy_of(FedCP(policy_noise=noise), task=two_layers())
    for cohort in COHORTS:
        toy.step(cohort)
    first, second = toy.scores(), toy.scores()
    for row in ("personalized", "global"):
        assert vectors(first, row) == vectors(second, row)
    for client in range(4):
        part, server = toy.dataset.load(client)["test"], toy.server
        own = toy.states()[client]["personal"] if client < 3 else take(initial(toy), HEAD)
        model = {**server["shared"], **own}
        features = toy.task.network.head_inputs_and_logits(model, part.x)[0]
        weight = own["head.weight"].sum(0)
        shares = policy_shares(server["policy"], features * weight / weight.norm(), 1.0, None)
        logits = (features * shares[:, 0]) @ own["head.weight"].T + own["head.bias"]
        logits = logits + (features * shares[:, 1]) @ server["head"]["head.weight"].T + server["head"]["head.bias"]
        quiet = abs(first[client]["personalized"].loss - float(F.cross_entropy(logits, part.y))) < 1e-10
        assert quiet == (noise != "always")
        generic = toy.task.network.logits({**server["shared"], **server["head"]}, part.x)
        assert abs(first[client]["global"].loss - float(F.cross_entropy(generic, part.y))) < 1e-12


@pytest.mark.parametrize("noise", ["train", "none"])
def test_a_step_by_hand(noise: Any) -> None:
    algorithm = FedCP(alignment_weight=3.0, policy_noise=noise, policy_lr=0.03, policy_temperature=0.5)
    toy = toy_of(algorithm, ONE_STEP, two_layers())
    toy.step([1])
    toy.step([0])
    # by training alone the rows of both heads keep one sum, see below
    toy.server["head"]["head.weight"] = toy.server["head"]["head.weight"] * torch.arange(1.0, 4.0)[:, None]
    received = copy(toy.server)
    own, part = toy.states()[1]["personal"], toy.dataset.load(1)["train"]
    order = plan_batches(12, None, 1, toy.context.streams.generator("batches", 2, 1)).order
    batch = Batch(part.x[order], part.y[order])
    generator = toy.context.streams.generator("mix", 2, 1)
    added = torch.from_numpy(gumbel(generator, (1, 12, 2, 7)))[0].double() if noise == "train" else None
    model = {n: leaf.clone().requires_grad_() for n, leaf in {**received["shared"], **own}.items()}
    policy = {n: leaf.clone().requires_grad_() for n, leaf in received["policy"].items()}
    features = toy.task.network.head_inputs_and_logits(model, batch.x)[0]
    frozen = toy.task.network.head_inputs_and_logits({**received["shared"], **own}, batch.x)[0]
    context = own["head.weight"].sum(0) / own["head.weight"].sum(0).norm()
    shares = policy_shares(policy, features * context, 0.5, added)
    logits = (features * shares[:, 0]) @ model["head.weight"].T + model["head.bias"]
    logits = logits + (features * shares[:, 1]) @ received["head"]["head.weight"].T + received["head"]["head.bias"]
    value = F.cross_entropy(logits, batch.y)
    value = value + 3.0 * fixed_kernel_discrepancy(features, frozen, batch, BANDWIDTHS)
    slopes = torch.autograd.grad(value, [*model.values(), *policy.values()])
    moved = {n: leaf.detach() - 0.1 * g for (n, leaf), g in zip(model.items(), slopes, strict=False)}
    toy.step([1])
    assert_close({**toy.server["shared"], **toy.states()[1]["personal"]}, moved, 1e-10)
    expected = {n: leaf.detach() - 0.03 * g for (n, leaf), g in zip(policy.items(), slopes[len(model) :], strict=True)}
    assert_close(toy.server["policy"], expected, 1e-10)


def test_the_cross_entropy_leaves_the_context_as_it_is() -> None:
    """Its gradient sums to zero over classes: the rows of each head keep the sum, but for weight decay's factor."""
    toy = toy_of(FedCP(), TRAIN, two_layers())
    first = toy.server["head"]["head.weight"]
    for cohort in ([0, 1], [1, 2]):
        toy.step(cohort)
    heads = [toy.server["head"]["head.weight"], *(state["personal"]["head.weight"] for state in toy.states().values())]
    for head in heads:
        assert not torch.equal(head, first)
        assert_close(context_of(head), context_of(first), 1e-12)


def test_noise_is_gumbels() -> None:
    found = gumbel(np.random.default_rng(0), (200_000,))
    assert found.dtype == np.float32 and np.isfinite(found).all()
    assert abs(found.mean() - 0.5772) < 0.01 and abs(found.var() - np.pi**2 / 6) < 0.03


def test_a_model_without_body_or_head_is_refused() -> None:
    toy = toy_of(FedCP(), task=two_layers())
    with pytest.raises(ConfigError, match="FedCP needs the last layer's weight"):
        FedCP().check(partly_fixed("head.weight"), toy.context)
    with pytest.raises(ConfigError, match="no body is left"):
        FedCP().check(partly_fixed("inner.weight", "inner.bias"), toy.context)


@pytest.mark.parametrize("batch_size", [4, None])
def test_vectorized_agrees_with_looped(batch_size: int | None) -> None:
    train = TRAIN.model_copy(update={"batch_size": batch_size})
    looped, stacked = (toy_of(FedCP(), train, two_layers(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 1, 2]):
        assert_close(looped.step(cohort), stacked.step(cohort))
    assert_close(looped.states(), stacked.states())


@pytest.mark.slow
def test_personal_heads_serve_clients_that_label_differently() -> None:
    train = TRAIN.model_copy(update={"rounds": 15, "clients_per_round": 6, "local_epochs": 3, "batch_size": 10})
    accuracy = {}
    for algorithm, row in ((FedCP(), "personalized"), (FedAvg(), "global")):
        toy = Toy(algorithm, planted_clients("head"), two_layers(12, 8), train, mode="vectorized")
        toy.run()
        accuracy[algorithm.name] = held_out_accuracy(toy, row)
    assert accuracy["fedcp"] > accuracy["fedavg"] + 0.1, accuracy
