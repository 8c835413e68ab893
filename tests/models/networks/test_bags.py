"""Gated attention over bags: the equation, what fills bags up, stacked models, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.networks.bags import AttentionPooling

torch.set_num_threads(1)
SPEC = InputSpec("image", (6, 5), 3)


def bags(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, *SPEC.shape, generator=torch.Generator().manual_seed(seed))


def test_the_features_are_means_weighted_by_the_equation() -> None:
    network = AttentionPooling(embedding=4, attention=3, hidden=(2,)).network(SPEC)
    model, x = network.initialize(0), bags(2)
    assert network.vectorizable and not network.stochastic and network.head_shape == (3, 2)
    features, logits = network.features_and_logits(model, x)

    def layer(name: str, rows: torch.Tensor) -> torch.Tensor:
        return rows @ model[f"{name}.weight"].T + model[f"{name}.bias"]

    for bag, found in zip(x, features, strict=True):
        instances = [layer("embed", row) for row in bag]
        scores = [layer("weigh", layer("values", h).tanh() * layer("gates", h).sigmoid()).exp() for h in instances]
        expected = sum(s * h for s, h in zip(scores, instances, strict=True)) / sum(scores)
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logits, layer("head", layer("hidden.0", features).relu()))


def test_what_fills_a_bag_up_changes_nothing_nor_does_the_order() -> None:
    network = AttentionPooling(embedding=4, attention=3, hidden=()).network(SPEC)
    model, x = network.initialize(0), bags(3)
    x[:, 4:] = 0
    expected = network.logits(model, x[:, :4])
    torch.testing.assert_close(network.logits(model, x), expected)
    torch.testing.assert_close(network.logits(model, x.flip(1)), expected)
    slopes = grad(lambda rows: network.logits(model, rows).square().sum())(x)
    assert slopes[:, 4:].abs().max() == 0 < slopes[:, :4].abs().max()
    x[0] = 0
    assert network.logits(model, x).isfinite().all(), "a bag without instances"


def test_stacked_models_have_the_gradients_of_each() -> None:
    network = AttentionPooling(embedding=4, attention=3, hidden=(4, 2)).network(SPEC)
    models, x = [network.initialize(seed) for seed in (0, 1)], torch.stack([bags(3, 1), bags(3, 2)])
    x[0, 1, 3:] = 0

    def loss(model: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return network.logits(model, x, training=True).log_softmax(-1)[..., 0].square().mean()

    stacked = vmap(grad(loss))({name: torch.stack([one[name] for one in models]) for name in models[0]}, x)
    for place, model in enumerate(models):
        for name, value in grad(loss)(model, x[place]).items():
            torch.testing.assert_close(stacked[name][place], value)


@pytest.mark.parametrize(
    "spec",
    [InputSpec("image", (1, 6, 5), 3), InputSpec("image", (5,), 3), InputSpec("tokens", (6,), 3, vocabulary=9)],
)
def test_other_inputs_are_refused(spec: InputSpec) -> None:
    with pytest.raises(ModelError, match=r"attention_pooling needs bags of shape \(instances, numbers\)"):
        AttentionPooling().network(spec)
