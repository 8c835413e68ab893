"""FedZO: an oracle in plain loops, the gradient as its limit and mean, batch normalization and dropout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from algorithms.decomfl import DeComFL
from algorithms.fedkseed import FedKSeed
from algorithms.fedzo import FedZO
from algorithms.feedsign import FeedSign
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.engine.gradients.counted_normals import drawn_keys
from rayfl.errors import ConfigError
from rayfl.experiment.checks import precision_remarks, statistics_remarks
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.both_modes import assert_modes_agree
from tests.support.plain_steps import slopes
from tests.support.toy_networks import two_layers
from tests.support.toys import assert_close, assert_equal
from tests.support.zeroth_order_toys import (
    COHORTS,
    NAMES,
    SIZES,
    TRAIN,
    batches,
    direction,
    loss,
    normalized_toys,
    rate,
    shares,
    shifted,
    slope,
    toy_of,
)


@pytest.mark.parametrize("difference", ["forward", "central"])
@pytest.mark.parametrize("distribution", ["sphere", "gaussian"])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_fedzo_1_rounds_are_those_of_plain_loops(difference: Any, distribution: Any, mode: str) -> None:
    """With momentum and weight decay, which see the estimate as any optimizer sees a gradient."""
    mu, train = 0.01, TRAIN.model_copy(update={"momentum": 0.5, "weight_decay": 0.1})
    method = FedZO(directions=3, perturbation=mu, difference=difference, distribution=distribution)
    toy = toy_of(method, train, mode=mode)
    w = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    d = sum(leaf.numel() for leaf in w.values())
    for round, cohort in enumerate(COHORTS):
        mean = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
        for client, share in shares(cohort, "samples").items():
            data = batches(toy, round, client)
            keys = drawn_keys(toy.context.streams.generator("mix", round, client), len(data), 3)
            model = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
            optimizer = torch.optim.SGD(model.values(), lr=rate(round), momentum=0.5, weight_decay=0.1)
            for (x, y), own in zip(data, keys, strict=True):
                at = {name: leaf.detach() for name, leaf in model.items()}
                for leaf in model.values():
                    leaf.grad = torch.zeros_like(leaf)
                for key in own:
                    z = direction(key, at)
                    if distribution == "sphere":
                        length = sum(float(leaf.square().sum()) for leaf in z.values()) ** 0.5
                        z = {name: leaf / length for name, leaf in z.items()}
                    g = slope(at, z, mu, difference == "central", x, y)
                    for name in NAMES:
                        model[name].grad += (d if distribution == "sphere" else 1) * g * z[name] / 3  # type: ignore[operator]
                optimizer.step()
            mean = {name: leaf + share * model[name].detach() for name, leaf in mean.items()}
        w = mean
        toy.step(cohort)
        assert_close(toy.server["model"], w, 1e-12)
    start = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    assert max(float((w[name] - start[name]).abs().max()) for name in NAMES) > 1e-2


def test_inv_fedzo_2_a_slope_tends_to_the_gradient_along_the_direction() -> None:
    """Central differences err by mu^2, forward ones by mu."""
    toy = toy_of(FedZO())
    model = toy.server["model"]
    data = toy.dataset.load(1)["train"]
    gradient = slopes(toy.task.network, model, data.x, data.y)
    key = drawn_keys(np.random.default_rng(0), 1)
    along = direction(key[0], model)
    exact = sum(float((gradient[name] * along[name]).sum()) for name in NAMES)

    def error(difference: Any, mu: float) -> float:
        method = FedZO(difference=difference, perturbation=mu)
        found, total = method.estimated(model, Batch(data.x, data.y), toy.task, torch.from_numpy(key))
        assert_close(total, {name: found[0] * along[name] for name in NAMES}, 1e-12)
        return abs(float(found[0]) - exact)

    assert error("central", 1e-4) < 1e-6 * abs(exact)
    assert error("central", 1e-3) < 0.02 * error("forward", 1e-3)
    assert 1.8 < error("forward", 2e-4) / error("forward", 1e-4) < 2.2


@pytest.mark.parametrize("distribution", ["sphere", "gaussian"])
def test_inv_fedzo_3_the_mean_of_estimates_is_the_gradient(distribution: Any) -> None:
    """The deviation of a mean of M estimates is about sqrt(d / M) of the gradient's length."""
    toy, count = toy_of(FedZO()), 3000
    model, data = toy.server["model"], toy.dataset.load(1)["train"]
    gradient = torch.cat([leaf.flatten() for leaf in slopes(toy.task.network, model, data.x, data.y).values()])
    keys = torch.from_numpy(drawn_keys(np.random.default_rng(1), count))
    method = FedZO(difference="central", perturbation=1e-4, distribution=distribution)
    _, mean = method.estimated(model, Batch(data.x, data.y), toy.task, keys, unit=distribution == "sphere")
    found = torch.cat([mean[name].flatten() for name in model])
    assert float((found - gradient).norm() / gradient.norm()) < 1.5 * (len(gradient) / count) ** 0.5


@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(double: bool) -> None:
    """In float32 a slope has the rounding of two losses, divided by mu."""
    method = FedZO(directions=2, distribution="gaussian")
    assert_modes_agree(method, SIZES, TRAIN, double, 1e-10 if double else 1e-3)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_dropout_is_off_and_running_statistics_stay(mode: str) -> None:
    toys = normalized_toys(FedZO(directions=2), mode)
    for toy in toys:
        assert any("in evaluation mode" in remark for remark in statistics_remarks(toy.algorithm, toy.task))
        buffers, before = toy.task.network.buffer_names, dict(toy.server["model"])
        assert buffers
        for cohort in COHORTS:
            toy.step(cohort)
        assert_equal({name: toy.server["model"][name] for name in buffers}, {name: before[name] for name in buffers})
        assert not torch.equal(toy.server["model"]["inner.weight"], before["inner.weight"])
    assert_equal(toys[0].server["model"], toys[1].server["model"])


@pytest.mark.parametrize(
    ("method", "precision", "said"), [("fedzo", "bfloat16", 1), ("fedzo", "float32", 0), ("fedavg", "bfloat16", 0)]
)
def test_bfloat16_is_warned_of(method: str, precision: str, said: int) -> None:
    config = load_config(Experiment, None, [f"algorithm={method}", f"engine.precision={precision}"])
    found = precision_remarks(config)
    assert len(found) == said and all("differences of two losses" in remark for remark in found)


def test_no_layer_of_the_network_is_recorded_for_autograd() -> None:
    """Of a local step's objective it is the product with the estimate, and the loss falls."""
    seen: set[str] = set()

    class Watched(FedZO):
        def objective(self, model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Any:
            value = super().objective(model, batch, task, frozen, draw)
            known, waiting = set(), [value.grad_fn]
            while waiting:
                node = waiting.pop()
                if node is not None and node not in known:
                    known.add(node)
                    waiting += [following for following, _ in node.next_functions]
            seen.update(type(node).__name__.rstrip("0123456789") for node in known)
            return value

    toy = toy_of(Watched(directions=10), TRAIN.model_copy(update={"lr_decay": 1.0}))
    parts = [toy.dataset.load(client)["train"] for client in range(len(SIZES))]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    before = loss(toy.server["model"], x, y)
    for _ in range(15):
        toy.step(range(len(SIZES)))
    assert loss(toy.server["model"], x, y) < 0.9 * before
    layers = ("Mm", "Addmm", "Relu", "Softmax", "Nll")
    assert any("Dot" in name for name in seen)
    assert not [name for name in seen if any(layer in name for layer in layers)]


@pytest.mark.parametrize("method", [FedZO(), FedKSeed(), DeComFL(), FeedSign()])
def test_a_task_whose_loss_has_no_evaluation_mode_is_refused(method: Any) -> None:
    class OwnLoss(Classification):
        def loss(self, model: Any, batch: Any) -> Any:  # type: ignore[override]
            return self.loss_of(self.logits(model, batch), batch)

    task = two_layers()
    method.check_task(task)
    with pytest.raises(ConfigError, match=r"losses in evaluation mode.*loss_of"):
        method.check_task(OwnLoss(task.network))


def test_a_gradient_step_does_not_depend_on_the_order_in_which_the_server_keeps_tensors() -> None:
    """Directions belong to names, so a tree in another order has the same ones."""
    toy = toy_of(FedZO())
    model, data = toy.server["model"], toy.dataset.load(1)["train"]
    keys = torch.from_numpy(drawn_keys(np.random.default_rng(2), 3))
    batch = Batch(data.x, data.y)
    one = FedZO().estimated(model, batch, toy.task, keys)
    other = FedZO().estimated(dict(reversed(model.items())), batch, toy.task, keys)
    assert_equal(one[1], other[1])
    assert torch.equal(one[0], other[0])
    assert_close(shifted(model, one[1], 0.0), model, 0.0)
