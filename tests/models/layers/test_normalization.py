"""What stands in the place of batch normalization."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.models.layers.normalization import FrozenStatisticsNorm, Normalization, normalize_by
from rayfl.models.zoo import ResNet9

torch.set_num_threads(1)

IMAGE = InputSpec("image", (3, 9, 9), 4)
X = torch.rand(3, 3, 9, 9, generator=torch.Generator().manual_seed(0))


def network(norm: Normalization) -> Network:
    return ResNet9(norm=norm).network(IMAGE)


def filled(channels: int = 6) -> nn.BatchNorm2d:
    """A batch normalization whose every value is its own."""
    norm = nn.BatchNorm2d(channels, eps=0.01)
    generator = torch.Generator().manual_seed(1)
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
        assert tensor is not None
        tensor.copy_(torch.rand(channels, generator=generator) + 0.5)
    return norm


@pytest.mark.parametrize("norm", ["batch", "batch_no_stats", "group", "frozen", "none"])
def test_what_travels_and_what_can_be_vectorized(norm: Normalization) -> None:
    made, plain = network(norm), network("batch")
    assert bool(made.buffer_names) == (norm in ("batch", "frozen"))
    assert made.vectorizable
    assert made.batch_predictions == (norm == "batch_no_stats")
    scales = sum(2 * module.num_features for module in ResNet9().build(IMAGE).modules() if _is_batch(module))
    assert plain.num_parameters - made.num_parameters == (scales if norm == "none" else 0)


def _is_batch(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm2d)


@pytest.mark.parametrize("norm", ["batch", "batch_no_stats", "group", "frozen", "none"])
def test_which_statistics_are_used(norm: Normalization) -> None:
    made = network(norm)
    tree = made.initialize(0)
    before = {name: tree[name].clone() for name in made.buffer_names}
    trained, evaluated = made.logits(tree, X, training=True), made.logits(tree, X)
    changed = any(not torch.equal(tree[name], before[name]) for name in made.buffer_names)
    assert changed == (norm == "batch")
    assert torch.allclose(trained, evaluated) == (norm != "batch")
    alone = made.logits(tree, X[:2])
    assert torch.allclose(alone, evaluated[:2], atol=1e-5) == (norm != "batch_no_stats")


def test_values_are_kept() -> None:
    x = torch.rand(2, 6, 4, 4, generator=torch.Generator().manual_seed(2))
    old = filled()
    frozen, without = nn.Sequential(filled()), nn.Sequential(filled())
    assert normalize_by(frozen, "frozen") == normalize_by(without, "batch_no_stats") == 1
    assert isinstance(frozen[0], FrozenStatisticsNorm)
    torch.testing.assert_close(frozen.train()(x), old.eval()(x))
    torch.testing.assert_close(without.eval()(x), old.train()(x))
    groups = nn.Sequential(filled(48))
    normalize_by(groups, "group")
    assert isinstance(groups[0], nn.GroupNorm) and groups[0].num_groups == 16
    assert torch.equal(groups[0].weight, filled(48).weight)
    assert normalize_by(groups, "none") == 0


def test_frozen_statistics_stay_under_vmap() -> None:
    made = network("frozen")
    trees = [made.initialize(seed) for seed in (1, 2)]
    stack = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}

    def loss(tree: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return made.logits(tree, x, training=True).square().mean()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(stack, X)
    for k, tree in enumerate(trees):
        expected = torch.func.grad(loss)(tree, X)
        for name in made.parameter_names:
            torch.testing.assert_close(gradients[name][k], expected[name], rtol=1e-3, atol=1e-5)


def test_a_single_value_a_channel_can_be_normalized() -> None:
    x = torch.rand(1, 6, 1, 1, generator=torch.Generator().manual_seed(2))
    tracked, without = nn.Sequential(filled()), nn.Sequential(filled())
    normalize_by(tracked, "batch")
    normalize_by(without, "batch_no_stats")
    before = {name: value.clone() for name, value in tracked.state_dict().items()}
    torch.testing.assert_close(tracked.train()(x), filled().eval()(x))
    assert all(torch.equal(value, before[name]) for name, value in tracked.state_dict().items())
    for mode in (True, False):
        torch.testing.assert_close(without.train(mode)(x).flatten(), filled().bias)
    with pytest.raises(ValueError, match="more than 1 value"):
        filled()(x)
    two = torch.cat([x, 2 * x])
    assert torch.equal(tracked.train()(two), filled().train()(two))
    assert torch.equal(tracked[0].running_var, _after(filled(), two).running_var)


def _after(norm: nn.BatchNorm2d, x: torch.Tensor) -> nn.BatchNorm2d:
    norm.train()(x)
    return norm
