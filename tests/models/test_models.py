"""The built-in models and the stateless network around them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.models.zoo import Architecture, CharLSTM, LeafCNN, TwoCNN, TwoNN
from tests.support.small_models import SMALL, SMALL_IMAGE, SMALL_TEXT, Bidirectional, batch, views

torch.set_num_threads(1)

DIGITS = InputSpec("image", (1, 28, 28), 10)
FEMNIST = InputSpec("image", (1, 28, 28), 62)
SHAKESPEARE = InputSpec("tokens", (80,), 80, vocabulary=80)

SMALL_IDS = ["two_nn", "two_nn_kdd", "two_cnn", "leaf_cnn", "char_lstm"]
IMAGE_MODELS = SMALL[:1] + SMALL[2:4]


@pytest.mark.parametrize(
    ("config", "spec", "count"),
    [
        (TwoNN(), DIGITS, 199_210),
        (TwoNN(hidden=(200, 200, 200), bias=False, init="xavier_normal"), DIGITS, 238_800),
        (TwoCNN(), DIGITS, 1_663_370),
        (TwoCNN(padding=0), DIGITS, 582_026),
        (TwoCNN(padding=0), InputSpec("image", (3, 32, 32), 10), 878_538),
        (TwoCNN(padding=0), InputSpec("image", (3, 32, 32), 100), 924_708),
        (TwoCNN(padding=0), InputSpec("image", (3, 64, 64), 200), 5_694_600),
        (LeafCNN(), FEMNIST, 6_603_710),
        (CharLSTM(), SHAKESPEARE, 819_920),
    ],
)
def test_parameter_counts_are_those_of_the_papers(config: Architecture, spec: InputSpec, count: int) -> None:
    network = config.network(spec)
    assert network.num_parameters == count
    assert sum(tensor.numel() for tensor in network.initialize(0).values()) == count


@pytest.mark.parametrize(("config", "spec"), SMALL, ids=SMALL_IDS)
def test_groups_partition_the_parameters(config: Architecture, spec: InputSpec) -> None:
    network = config.network(spec)
    names = network.parameter_names
    assert names == tuple(name for name, _ in config.build(spec).named_parameters())
    assert sorted(network.body_names + network.head_names) == sorted(names)
    assert not set(network.body_names) & set(network.head_names)
    assert set(network.head_names) <= set(network.classifier_names) < set(names)
    assert tuple(name for layer in network.layers for name in layer) == names
    assert tuple(name for layer in network.unstacked_layers for name in layer) == names
    assert network.head_weight == "head.weight"
    assert network.initialize(0)["head.weight"].shape[0] == spec.num_classes


def test_layers_and_classifier_blocks() -> None:
    lstm = CharLSTM(hidden=6).network(SMALL_TEXT)
    assert [layer[0].partition(".")[0] for layer in lstm.layers] == ["embedding", "lstm", "head"]
    assert lstm.classifier_names == ("head.weight", "head.bias")
    mlp = TwoNN(hidden=(6, 5, 4), bias=False).network(SMALL_IMAGE)
    assert mlp.layers == (("hidden.0.weight",), ("hidden.1.weight",), ("hidden.2.weight",), ("head.weight",))
    assert mlp.classifier_names == ("hidden.2.weight", "head.weight")
    assert TwoNN(hidden=(6,)).network(SMALL_IMAGE).classifier_names == ("head.weight", "head.bias")
    assert len(TwoCNN().network(SMALL_IMAGE).classifier_names) == 4


def test_unstacked_layers_take_stacked_recurrent_layers_apart() -> None:
    lstm = CharLSTM(hidden=6, layers=3).network(SMALL_TEXT)
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    stack = tuple(tuple(f"lstm.{kind}_l{level}" for kind in kinds) for level in range(3))
    assert lstm.layers == (("embedding.weight",), sum(stack, ()), ("head.weight", "head.bias"))
    assert lstm.unstacked_layers == (lstm.layers[0], *stack, lstm.layers[2])
    for config, spec in IMAGE_MODELS:
        assert config.network(spec).unstacked_layers == config.network(spec).layers


def test_both_directions_of_a_recurrent_layer_are_one_layer() -> None:
    network = Network(Bidirectional)
    assert [len(layer) for layer in network.layers] == [20, 2]
    assert [len(layer) for layer in network.unstacked_layers] == [10, 10, 2]
    assert {name.rpartition("_l")[2] for name in network.unstacked_layers[1]} == {"1", "1_reverse"}


@pytest.mark.parametrize(("config", "spec"), SMALL, ids=SMALL_IDS)
def test_logits_equal_an_ordinary_module(config: Architecture, spec: InputSpec) -> None:
    network, x = config.network(spec), batch(spec)
    module = config.build(spec)
    for seed in (1, 2):
        tree = network.initialize(seed)
        module.load_state_dict(tree)
        expected = module(x)
        assert torch.equal(network.logits(tree, x), expected)
        features, logits = network.features_and_logits(tree, x)
        assert torch.equal(logits, expected)
        assert torch.equal(features, module.features(x))
        inputs, same = network.head_inputs_and_logits(tree, x)
        assert torch.equal(same, expected)
        assert torch.equal(module.get_submodule(module.head_module)(inputs), expected)
        assert torch.equal(network.features(tree, x), features)
        assert torch.equal(network.classify(tree, features), logits)
        assert features.shape[0] == len(x) and features.ndim == 2


@pytest.mark.parametrize(("config", "spec"), SMALL, ids=SMALL_IDS)
def test_views_of_a_vector_are_bound_in_place(config: Architecture, spec: InputSpec) -> None:
    network, x = config.network(spec), batch(spec)
    flat, tree = views(network.initialize(1))
    network.logits(tree, x)
    flat.mul_(1.5)
    scaled = {name: 1.5 * tensor for name, tensor in network.initialize(1).items()}
    assert torch.equal(network.logits(tree, x), network.logits(scaled, x))


def test_widths_of_features() -> None:
    def width(config: Architecture, spec: InputSpec) -> int:
        network = config.network(spec)
        return network.features_and_logits(network.initialize(0), batch(spec))[0].shape[1]

    assert width(TwoNN(hidden=(6, 5)), SMALL_IMAGE) == 5
    assert width(TwoCNN(), SMALL_IMAGE) == 64 * 2 * 2
    assert width(CharLSTM(hidden=6), SMALL_TEXT) == 6


def test_recurrent_features_are_the_last_hidden_state() -> None:
    model, x = CharLSTM(hidden=6).build(SMALL_TEXT), batch(SMALL_TEXT)
    assert torch.equal(model.features(x), model.lstm(model.embedding(x))[1][0][-1])


@pytest.mark.parametrize(("config", "spec"), SMALL, ids=SMALL_IDS)
def test_gradients_flow_through_a_mixed_tree(config: Architecture, spec: InputSpec) -> None:
    network, x = config.network(spec), batch(spec)
    ends = [{n: t.requires_grad_() for n, t in network.initialize(seed).items()} for seed in (1, 2)]
    mixed = {name: 0.25 * ends[0][name] + 0.75 * ends[1][name] for name in ends[0]}
    network.logits(mixed, x).square().sum().backward()

    module = config.build(spec)
    module.load_state_dict({name: tensor.detach() for name, tensor in mixed.items()})
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0
        torch.testing.assert_close(ends[0][name].grad, 0.25 * parameter.grad, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(ends[1][name].grad, 0.75 * parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("config", "spec"), IMAGE_MODELS, ids=["two_nn", "two_cnn", "leaf_cnn"])
def test_vmap_equals_a_loop(config: Architecture, spec: InputSpec) -> None:
    network, x = config.network(spec), batch(spec)
    assert network.vectorizable and network.why_not_vectorizable == ""
    trees = [network.initialize(seed) for seed in range(3)]
    stacked = {name: torch.stack([tree[name] for tree in trees]) for name in network.parameter_names}
    inputs = torch.stack([x, 1 - x, x / 2])

    def loss(tree: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return network.logits(tree, inputs, training=True).square().mean()

    differentiate = torch.func.grad_and_value(loss)
    gradients, values = torch.func.vmap(differentiate)(stacked, inputs)
    for k, tree in enumerate(trees):
        expected, value = differentiate(tree, inputs[k])
        torch.testing.assert_close(values[k], value, rtol=1e-5, atol=1e-5)
        for name in tree:
            torch.testing.assert_close(gradients[name][k], expected[name], rtol=1e-5, atol=1e-5)
    assert torch.isfinite(network.logits(trees[0], x)).all(), "a plain call works after a batched one"
