"""Private gradients against plain loops over samples, and the noise against its generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedprox import FedProx
from rayfl.engine.gradients import example_gradients
from rayfl.engine.gradients.counted_normals import keyed_normals
from rayfl.engine.stacks import vectorized
from rayfl.engine.steps import looped
from rayfl.engine.updates.batches import poisson_batches
from rayfl.engine.updates.requests import ExamplePrivacy, TrainRequest
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples, InputSpec
from rayfl.messages.privacy import PrivacyConfig
from rayfl.models.base import Network
from rayfl.models.forward_pass import keys_of
from rayfl.models.zoo import CharLSTM, MobileNet, ReddiCNN, ResNet9, WindowModel
from rayfl.objectives import drawn, line, loss, squared_cosine, squared_distance
from rayfl.optimization.optimizers import Rule
from rayfl.params import Tree, leaves
from rayfl.tasks.classification import Classification
from rayfl.tasks.further_tasks import LanguageModel
from tests.support.bases import inputs
from tests.support.bases import network as adapted
from tests.support.problems import CPU, VECTOR, Dropping, examples, request
from tests.support.toy_networks import DoubleNetwork, TwoLayers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 3, 1)
TRAIN = TrainConfig(rounds=3, clients_per_round="all", local_epochs=2, batch_size=4, lr=0.1, momentum=0.5)
TRAIN = TRAIN.model_copy(update={"weight_decay": 0.01})
NETWORK = DoubleNetwork(lambda: TwoLayers(6, 9, 4))


def by_hand(toy: Toy, method: FedProx, client: int) -> Tree:
    """A client's first local update with clipped gradients, sample by sample, and noise as the streams have it."""
    privacy, train, streams = toy.privacy, toy.train, toy.context.streams
    part, start = toy.dataset.load(client)["train"], toy.server["model"]
    samples = len(part.y)
    size = train.batch_size or samples
    steps = train.local_epochs * -(-samples // size)
    generator = streams.generator("batches", 0, client)
    seed = streams.integer("privacy.example.0", 0, client)
    bound, deviation = privacy.example_clip_norm, privacy.example_noise_multiplier * (privacy.example_clip_norm or 0)
    assert bound is not None
    model = {name: leaf.clone() for name, leaf in start.items()}
    momentum = {name: torch.zeros_like(leaf) for name, leaf in start.items()}
    for step in range(steps):
        chosen = np.flatnonzero(generator.random(samples) < min(size / samples, 1))
        total = {name: torch.zeros_like(leaf) for name, leaf in model.items()}
        for i in chosen:
            own = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
            hidden = torch.relu(part.x[i] @ own["inner.weight"].T + own["inner.bias"])
            value = F.cross_entropy(hidden @ own["head.weight"].T + own["head.bias"], part.y[i])
            made = dict(zip(own, torch.autograd.grad(value, list(own.values())), strict=True))
            norm = torch.cat([gradient.flatten() for gradient in made.values()]).norm()
            for name, gradient in made.items():
                total[name] += gradient * min(1.0, bound / float(norm))
        key = torch.from_numpy(keys_of([seed], [step], 1))[0]
        noise = keyed_normals(key, sum(leaf.numel() for leaf in model.values()), torch.float64)[0]
        for name in sorted(model):
            count = model[name].numel()
            total[name] += deviation * noise[:count].view_as(model[name])
            noise = noise[count:]
        for name in model:
            gradient = total[name] / min(size, samples)
            gradient = gradient + method.proximal_weight * (model[name] - start[name])
            gradient = gradient + train.weight_decay * model[name]
            momentum[name] = train.momentum * momentum[name] + gradient
            model[name] = model[name] - train.lr * momentum[name]
    return model


@pytest.mark.two_cases
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("noise", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
@pytest.mark.parametrize("batch_size", [4, 1, None])
def test_updates_are_those_of_loops_over_samples(mode: str, noise: float, batch_size: int | None) -> None:
    privacy = PrivacyConfig(example_clip_norm=0.8, example_noise_multiplier=noise)
    method, train = FedProx(proximal_weight=0.3), TRAIN.model_copy(update={"batch_size": batch_size})
    data = random_clients(SIZES)
    for client in range(len(SIZES)):
        toy = Toy(method, data, two_layers(double=True), train, privacy=privacy, mode=mode)
        expected = by_hand(toy, method, client)
        assert_close(toy.step([client])["model"], expected, 1e-12)
    toy = Toy(method, data, two_layers(double=True), train, privacy=privacy, mode=mode)
    updates = [by_hand(toy, method, client) for client in range(len(SIZES))]
    mean = {
        name: sum(n * update[name] for n, update in zip(SIZES, updates, strict=True)) / sum(SIZES)
        for name in updates[0]
    }
    assert_close(toy.step([0, 1, 2, 3])["model"], mean, 1e-12)


def private_request(
    data: Examples, model: Tree, seed: int = 0, bound: float = 0.5, noise: float = 0.0, **options: Any
) -> TrainRequest:
    """Four steps on Poisson mini-batches of two samples on average."""
    plan = poisson_batches(len(data), 2, 4, np.random.default_rng(seed))
    one = request(data, model, loss(), client=seed)
    limit = ExamplePrivacy(bound, noise, 2.0, 100 + seed)
    return replace(one, **{"rule": Rule(0.1), "plan": plan, "private": limit, **options})


def in_both_modes(updates: Sequence[TrainRequest], task: Any, tolerance: float) -> list[Tree]:
    found = vectorized.train(updates, task, CPU)
    for one, update in zip(found, updates, strict=True):
        assert_close(one, looped.train(update, task, CPU), tolerance)
    return found


def test_all_losses_of_an_objective_are_clipped_as_one_and_penalties_are_not() -> None:
    task = Classification(NETWORK)
    objective = (
        0.7 * loss(at=line("one", "other", drawn("share")))
        + 2 * loss(at="one")
        + 0.3 * squared_distance("one", "start")
        + 0.2 * squared_cosine("one", "other")
    )
    updates = []
    for seed, size in enumerate((7, 4)):
        trained = {"one": NETWORK.initialize(seed), "other": NETWORK.initialize(seed + 10)}
        share = np.random.default_rng(seed).random(4)
        options = {"objective": objective, "draws": {"share": share}, "frozen": {"start": NETWORK.initialize(5)}}
        updates.append(private_request(examples(size, VECTOR, seed, torch.float64), trained, seed, **options))
    for update, found in zip(updates, in_both_modes(updates, task, 1e-12), strict=True):
        assert update.draws is not None and update.frozen is not None
        model = {path: leaf.clone() for path, leaf in leaves(update.trainable)}
        for step, batch in enumerate(update.plan.batches(CPU)):
            share = float(update.draws["share"][step])

            def ends(tree: dict[str, Tensor]) -> tuple[Tree, Tree]:
                return tuple({n: tree[f"{key}/{n}"] for n in NETWORK.parameter_names} for key in ("one", "other"))  # type: ignore[return-value]

            total = {path: torch.zeros_like(leaf) for path, leaf in model.items()}
            for i in batch:
                own = {path: leaf.clone().requires_grad_() for path, leaf in model.items()}
                one, other = ends(own)
                mixed = {name: (1 - share) * one[name] + share * other[name] for name in one}
                x, y = update.examples.x[i : i + 1], update.examples.y[i : i + 1]
                value = 0.7 * F.cross_entropy(NETWORK.logits(mixed, x), y)
                value = value + 2 * F.cross_entropy(NETWORK.logits(one, x), y)
                made = torch.autograd.grad(value, list(own.values()))
                norm = torch.cat([gradient.flatten() for gradient in made]).norm()
                for path, gradient in zip(own, made, strict=True):
                    total[path] += gradient * min(1.0, 0.5 / float(norm))
            own = {path: leaf.clone().requires_grad_() for path, leaf in model.items()}
            one, other = (torch.cat([leaf.flatten() for leaf in tree.values()]) for tree in ends(own))
            start = torch.cat([leaf.flatten() for leaf in update.frozen["start"].values()])
            cosine = one @ other / (one.norm() * other.norm())
            penalty = 0.3 * (one - start).square().sum() + 0.2 * cosine.square()
            made = torch.autograd.grad(penalty, list(own.values()))
            for path, gradient in zip(own, made, strict=True):
                model[path] = model[path] - update.rule.lr * (total[path] / 2 + gradient)
        assert_close(dict(leaves(found)), model, 1e-12)


WORDS = InputSpec("tokens", (7,), 9, 9)
MODELS: dict[str, Any] = {
    "convolutions": (ReddiCNN(layers=3, dropout=False), InputSpec("image", (1, 9, 9), 4)),
    "group normalization": (ResNet9(norm="group"), InputSpec("image", (3, 9, 9), 4)),
    "depthwise convolutions": (MobileNet(norm="none"), InputSpec("image", (3, 33, 33), 4)),
    "lstm": (CharLSTM(hidden=6), WORDS),
    "next token": (WindowModel(embedding=4, hidden=6), InputSpec("tokens", (7,), 9, 9, "tokens")),
}


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(n, marks=pytest.mark.slow if "normal" in n else ()) for n in MODELS), "adapters"],
)
def test_a_bound_that_binds_no_sample_gives_the_gradient_of_the_mini_batch(name: str) -> None:
    if name == "adapters":
        network: Network = adapted("vit")
        task: Any = Classification(network)
        data = Examples(inputs("vit", 6, 0), torch.arange(6))
    else:
        config, spec = MODELS[name]
        network = DoubleNetwork(lambda: config.build(spec))
        task = LanguageModel(network, spec=spec) if spec.target == "tokens" else Classification(network)
        data = examples(6, spec, 0)
        data = Examples(data.x if spec.kind == "tokens" else data.x.double(), data.y)
        if spec.target == "tokens":
            data = Examples(data.x, data.x.roll(-1, 1))
    model = network.initialize(0)
    usual = request(data, model, loss(), batch_size=3)
    wide = replace(usual, private=ExamplePrivacy(1e6, 0.0, 3.0, 0))
    tolerance = 1e-4 if name == "adapters" else 1e-10
    (found,) = in_both_modes([wide], task, tolerance)
    assert_close(found, looped.train(usual, task, CPU), tolerance)


def test_dropout_drops_other_features_of_each_sample_and_the_same_in_both_modes() -> None:
    network = DoubleNetwork(Dropping)
    task = Classification(network)
    data = [examples(n, VECTOR, n, torch.float64) for n in (6, 5)]
    updates = [private_request(one, network.initialize(n), n, noise=0.3) for n, one in enumerate(data)]
    in_both_modes(updates, task, 1e-12)
    same = Examples(data[0].x[:1].repeat(2, 1), data[0].y[:1].repeat(2))
    both = request(same, network.initialize(0), loss(), batch_size=2)
    alone = replace(both, plan=replace(both.plan, order=both.plan.order[:1], bounds=(0, 1)))
    both = replace(both, plan=replace(both.plan, order=both.plan.order[:2], bounds=(0, 2)))
    limit = ExamplePrivacy(1e6, 0.0, 1.0, 0)
    start = network.initialize(0)
    one, two = (looped.train(replace(r, private=limit), task, CPU)["head.weight"] for r in (alone, both))
    change, twice = one - start["head.weight"], two - start["head.weight"]
    assert (twice - 2 * change).abs().max() > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"rule": Rule(0.1, "adam", weight_decay=0.1)},
        {"rule": Rule(0.1, momentum=0.9, nesterov=True)},
        {"max_grad_norm": 0.05},
    ],
    ids=["adam", "nesterov", "max_grad_norm"],
)
def test_what_follows_the_noise_is_as_without_privacy(options: dict[str, Any]) -> None:
    task = Classification(NETWORK)
    data = [examples(n, VECTOR, n, torch.float64) for n in (6, 5)]
    updates = [private_request(one, NETWORK.initialize(n), n, noise=0.3, **options) for n, one in enumerate(data)]
    found = in_both_modes(updates, task, 1e-10)
    if "max_grad_norm" in options:
        moved = [found[0][name] - leaf for name, leaf in updates[0].trainable.items()]
        assert torch.cat([leaf.flatten() for leaf in moved]).norm() <= 4 * updates[0].rule.lr * 0.05 * (1 + 1e-9)


def test_a_step_moves_by_the_bound_times_its_samples_at_most() -> None:
    task, data = Classification(NETWORK), examples(6, VECTOR, 0, torch.float64)
    data = Examples(data.x * 1e4, data.y)
    one = private_request(data, NETWORK.initialize(0), bound=0.01)
    one = replace(one, plan=replace(one.plan, order=torch.arange(6), bounds=(0, 6)))
    moved = [looped.train(one, task, CPU)[name] - leaf for name, leaf in one.trainable.items()]
    assert 0 < torch.cat([leaf.flatten() for leaf in moved]).norm() <= one.rule.lr * 6 * 0.01 / 2 * (1 + 1e-9)


def test_few_samples_at_a_time_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    network = DoubleNetwork(Dropping)
    task, data = Classification(network), examples(9, VECTOR, 0, torch.float64)
    one = private_request(data, network.initialize(0), noise=0.3)
    one = replace(one, plan=replace(one.plan, order=torch.arange(9).repeat(2), bounds=(0, 9, 9, 18)))
    whole = looped.train(one, task, CPU)
    monkeypatch.setattr(example_gradients, "_AT_A_TIME", 2 * network.num_parameters)
    (found,) = in_both_modes([one], task, 1e-12)
    assert_close(found, whole, 1e-12)


def test_steps_without_samples_are_noise_alone_of_the_promised_size() -> None:
    network = DoubleNetwork(lambda: TwoLayers(60, 90, 40))
    task = Classification(network)
    data = Examples(torch.zeros(0, 60, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    start = network.initialize(0)
    bound, noise, expected = 0.4, 1.5, 8.0
    base = private_request(examples(3, InputSpec("image", (60,), 40), 0, torch.float64), start)
    changes = []
    for steps, seed in ((1, 0), (2, 0), (1, 1)):
        plan = replace(base.plan, order=torch.zeros(0, dtype=torch.int64), bounds=(0,) * (steps + 1))
        limit = ExamplePrivacy(bound, noise, expected, seed)
        one = replace(base, examples=data, plan=plan, private=limit, rule=Rule(1.0))
        (found,) = in_both_modes([one], task, 1e-12)
        changes.append(torch.cat([(found[name] - leaf).flatten() for name, leaf in start.items()]))
    first, second, other = changes[0], changes[1] - changes[0], changes[2]
    count = len(first)
    deviation = noise * bound / expected
    for change in (first, second, other):
        assert float(change.std()) == pytest.approx(deviation, rel=4 / (2 * count) ** 0.5)
        assert abs(float(change.mean())) < 4 * deviation / count**0.5
        assert float((change.abs() > 2 * deviation).double().mean()) == pytest.approx(0.0455, abs=0.01)
    for one, two in ((first, second), (first, other), (second, other)):
        assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 4 / count**0.5


def test_pieces_of_an_update_have_the_noise_of_the_whole() -> None:
    task, data = Classification(NETWORK), examples(6, VECTOR, 0, torch.float64)
    whole = private_request(data, NETWORK.initialize(0), noise=0.3)
    tree = whole.trainable
    for piece in whole.pieces(3):
        tree = looped.train(replace(piece, trainable=tree), task, CPU)
    assert_equal(tree, looped.train(whole, task, CPU))
