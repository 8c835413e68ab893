"""The papers' models: sizes, parts, initial values, and one step of each in the engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.steps import looped
from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.networks.residual import ResidualBlock
from rayfl.models.zoo import (
    M5,
    TFCNN,
    VGG,
    VGG9,
    Architecture,
    Candidates,
    CharLSTM,
    DLinear,
    FastText,
    GCNModel,
    GINModel,
    HarCNN,
    LSTMForecaster,
    MobileNet,
    ModelConfig,
    NLinear,
    PatchTransformer,
    ReddiCNN,
    ResNet9,
    ResNet18,
    SimpleCNN,
    SqueezeNet,
    StructuralGIN,
    SuPerFedCNN,
    SuPerFedTwoCNN,
    TabularMLP,
    TwoNN,
)
from rayfl.tasks.classification import Classification
from tests.support.problems import CPU, examples, request
from tests.support.toys import assert_close
from tests.support.zoo_inputs import image

torch.set_num_threads(1)


GRAPHS = InputSpec("graph", (6, 9), 4)
WINDOWS = InputSpec("image", (1, 1, 12), 4, horizon=4)
TEXT = InputSpec("tokens", (5,), 7, vocabulary=7)
SMALL: dict[str, tuple[Architecture, InputSpec]] = {
    "superfed_cnn": (SuPerFedCNN(), image(1, 28, 4)),
    "superfed_two_cnn": (SuPerFedTwoCNN(), image(3, 9, 4)),
    "vgg9": (VGG9(), image(1, 16, 4)),
    "resnet9": (ResNet9(), image(3, 9, 4)),
    "resnet9 group": (ResNet9(norm="group"), image(3, 9, 4)),
    "resnet9 frozen": (ResNet9(norm="frozen"), image(3, 9, 4)),
    "mobilenet": (MobileNet(norm="batch"), image(3, 33, 4)),
    "mobilenet none": (MobileNet(norm="none"), image(3, 33, 4)),
    "simple_cnn cifar": (SimpleCNN(), image(3, 24, 4)),
    "simple_cnn femnist": (SimpleCNN(), image(1, 16, 4)),
    "tf_cnn": (TFCNN(), image(3, 8, 4)),
    "tf_cnn tutorial": (TFCNN(form="tutorial"), image(3, 18, 4)),
    "reddi_cnn": (ReddiCNN(layers=3), image(1, 9, 4)),
    "reddi_cnn dry": (ReddiCNN(layers=4, dropout=False), image(1, 10, 4)),
    "char_lstm one bias": (CharLSTM(hidden=6, biases=1), TEXT),
    "char_lstm no bias": (CharLSTM(hidden=6, biases=0, vocabulary=9, init="xavier_normal"), TEXT),
    "har_cnn": (HarCNN(kernel=3, hidden=(8,)), InputSpec("image", (2, 1, 18), 4)),
    "m5": (M5(width=3), InputSpec("image", (1, 1, 900), 4)),
    "m5 group": (M5(width=3, norm="group"), InputSpec("image", (2, 1, 640), 4)),
    "squeezenet": (SqueezeNet(), image(1, 20, 4)),
    "gcn": (GCNModel(hidden=6), GRAPHS),
    "gin": (GINModel(hidden=6, norm="layer"), GRAPHS),
    "structural_gin": (StructuralGIN(hidden=6, layers=1, walks=3, degrees=3), GRAPHS),
    "dlinear": (DLinear(kernel=3), WINDOWS),
    "nlinear": (NLinear(), WINDOWS),
    "lstm_forecaster": (LSTMForecaster(hidden=6), WINDOWS),
    "patch_transformer": (PatchTransformer(patch=4, stride=2, width=8, heads=2, layers=1, hidden=8), WINDOWS),
}
LARGE: dict[str, tuple[Architecture, InputSpec]] = {
    "vgg": (VGG(depth=11), image(3, 32, 4)),
    "vgg fedphp": (VGG(depth=11, form="fedphp"), image(3, 32, 4)),
    "resnet18": (ResNet18(), image(1, 32, 4)),
}
EVERY = pytest.mark.parametrize(
    ("config", "spec"), [*SMALL.values(), *LARGE.values()], ids=[*SMALL.keys(), *LARGE.keys()]
)
EACH_SMALL = pytest.mark.parametrize(("config", "spec"), SMALL.values(), ids=SMALL.keys())


@EVERY
def test_groups_partition_the_parameters(config: Architecture, spec: InputSpec) -> None:
    network = config.network(spec)
    names = set(network.parameter_names)
    head, body, block = set(network.head_names), set(network.body_names), set(network.classifier_names)
    assert head | body == names and not head & body
    assert head <= block and (block < names or config.name in ("dlinear", "nlinear"))
    assert tuple(name for layer in network.layers for name in layer) == network.parameter_names
    tree = network.initialize(0)
    features, logits = network.features_and_logits(tree, examples(2, spec, 0).x)
    assert torch.equal(logits, network.logits(tree, examples(2, spec, 0).x))
    assert tree[network.head_weight].ndim == 2 and len(tree[network.head_weight]) == logits.shape[1] >= spec.num_classes
    assert features.ndim == 2 and features.shape[1] % (network.feature_channels or features.shape[1]) == 0


def test_every_model_can_be_vectorized() -> None:
    networks = {name: config.network(spec) for name, (config, spec) in SMALL.items()}
    assert all(network.vectorizable for network in networks.values())
    assert {name for name, network in networks.items() if network.stochastic} == {"reddi_cnn", "squeezenet"}
    assert {name for name, network in networks.items() if network.batch_statistics} == {"resnet9", "mobilenet", "m5"}
    assert {name for name, network in networks.items() if network.batch_predictions} == {"resnet9"}


@EACH_SMALL
def test_one_step_in_the_engine(config: Architecture, spec: InputSpec) -> None:
    network = config.network(spec)
    task, shared = Classification(network), network.initialize(0)
    requests = [request(examples(n, spec, k), shared, client=k, epochs=1) for k, n in enumerate((3, 2))]
    looped_results = [looped.train(each, task, CPU) for each in requests]
    for result in looped_results:
        moved = {name for name in shared if not torch.equal(result[name], shared[name])}
        assert set(network.head_names) <= moved
        assert all(torch.isfinite(tensor).all() for tensor in result.values())
    if not network.batch_statistics:  # two samples magnify round-off: tests/engine/stacks/test_stacked_layers.py
        stacked = Engine(task, CPU, EngineConfig(mode="vectorized")).execute(requests)
        for result, expected in zip(stacked, looped_results, strict=True):
            assert not isinstance(result, Exception), result
            assert_close(result, expected, 1e-4)


def test_one_bias_computes_what_two_of_which_one_is_zero_do() -> None:
    one, two = (CharLSTM(hidden=6, biases=biases).network(TEXT) for biases in (1, 2))
    tree, x = one.initialize(3), examples(4, TEXT, 0).x
    zeros = {name: torch.zeros(24) for name in ("lstm.bias_hh_l0", "lstm.bias_hh_l1")}
    assert set(two.parameter_names) - set(one.parameter_names) == set(zeros)
    assert torch.equal(one.logits(tree, x), two.logits({**tree, **zeros}, x))
    module = CharLSTM(hidden=6, biases=1).build(TEXT)
    module.load_state_dict(tree)
    assert torch.equal(module(x), one.logits(tree, x))


def test_the_vocabulary_can_be_larger_than_the_data_sets_but_not_smaller() -> None:
    labels = InputSpec("tokens", (5,), 3, vocabulary=7)
    assert CharLSTM(vocabulary=9).network(TEXT).initialize(0)["head.weight"].shape[0] == 9
    tree = CharLSTM(vocabulary=9).network(labels).initialize(0)
    assert tree["embedding.weight"].shape[0] == 9 and tree["head.weight"].shape[0] == 3
    words = r"vocabulary is 6, but the data set has 7 tokens \(of its tokenizer.*leave model.vocabulary out or raise it"
    with pytest.raises(ModelError, match=words):
        CharLSTM(vocabulary=6).network(TEXT)


def test_initial_values() -> None:
    tree = VGG(depth=11).network(image(3, 32, 10)).initialize(0)
    weight, bias = tree["body.11.weight"], tree["body.11.bias"]
    assert weight.shape == (512, 256, 3, 3)
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 512)), rel=0.01)
    assert not bias.any() and tree["head.bias"].any()
    for name, tensor in ResNet9().network(image(3, 28, 10)).initialize(0).items():
        if tensor.ndim > 1:
            inputs, outputs = (tensor[0].numel(), tensor[:, 0].numel())
            assert tensor.std().item() == pytest.approx((2 / (inputs + outputs)) ** 0.5, rel=0.05), name


def test_a_residual_block_of_one_shape_has_no_shortcut() -> None:
    assert ResidualBlock(4, 4, 1).shortcut is None
    assert ResidualBlock(4, 8, 1).shortcut is not None and ResidualBlock(4, 4, 2).shortcut is not None
    block, x = ResidualBlock(4, 4, 1), torch.rand(2, 4, 3, 3)
    assert torch.equal(block(x), torch.relu(block.main(x)))


def test_dropout_is_behind_the_features() -> None:
    spec = image(1, 9, 4)
    network = ReddiCNN().network(spec)
    tree, x = network.initialize(0), examples(4, spec, 0).x
    evaluated, trained = (network.features_and_logits(tree, x, training=training) for training in (False, True))
    assert torch.equal(evaluated[0], trained[0])
    assert not torch.equal(evaluated[1], trained[1])


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        *((config, TEXT) for config, spec in [*SMALL.values(), *LARGE.values()] if spec.kind == "image"),
        (SuPerFedCNN(), image(3, 30, 10)),
        (SuPerFedCNN(), InputSpec("image", (3, 28, 32), 10)),
        (SuPerFedTwoCNN(), image(3, 2, 10)),
        (VGG9(), image(1, 15, 10)),
        (VGG(), image(1, 28, 10)),
        (MobileNet(), image(3, 32, 10)),
        (SimpleCNN(), image(2, 28, 10)),
        (SimpleCNN(), image(3, 10, 10)),
        (TFCNN(), image(3, 7, 10)),
        (ReddiCNN(), InputSpec("image", (784,), 10)),
        (ReddiCNN(layers=4), image(1, 8, 10)),
        (ResNet18(), image(2, 32, 10)),
    ],
)
def test_a_model_that_does_not_fit_names_itself_and_the_inputs(config: Architecture, spec: InputSpec) -> None:
    with pytest.raises(ModelError) as error:
        config.network(spec)
    assert config.name in str(error.value) and spec.words() in str(error.value)


def test_configurations_survive_a_round_trip_and_wrong_ones_are_refused() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ModelConfig)
    for config, _ in [*SMALL.values(), *LARGE.values()]:
        assert adapter.validate_json(config.model_dump_json()) == config
    for wrong in (
        {"name": "vgg", "depth": 12},
        {"name": "vgg", "form": "fedphp", "dropout": 0.1},
        {"name": "vgg", "dropout": 1},
        {"name": "reddi_cnn", "layers": 5},
        {"name": "char_lstm", "biases": 3},
        {"name": "resnet9", "norm": "batchnorm"},
        {"name": "torchvision"},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


def test_candidates_may_be_of_any_kind() -> None:
    content = {"name": "candidates", "candidates": [{"name": "tf_cnn"}, {"name": "vgg", "depth": 11, "form": "fedphp"}]}
    config = TypeAdapter(ModelConfig).validate_python(content)
    assert config == Candidates(candidates=(TFCNN(), VGG(depth=11, form="fedphp")))
    with torch.device("meta"):
        assert [type(candidate.build(image(3, 32, 10))) for candidate in config.candidates]


def test_buffers_outside_of_the_tree_follow_its_device() -> None:
    network = CharLSTM(hidden=6, biases=1).network(TEXT)
    tree, x = network.initialize(0), examples(2, TEXT, 0).x
    expected: Tensor = network.logits(tree, x)
    meta = {name: tensor.to("meta") for name, tensor in tree.items()}
    assert network.logits(meta, x.to("meta")).device.type == "meta"
    assert torch.equal(network.logits(tree, x), expected), "and they come back with their values"


def test_a_model_says_in_words_what_it_needs_and_what_there_is() -> None:
    table = InputSpec("image", (5,), 2, categories=((0, 4),))
    words = (
        r"fasttext needs texts \(tokens\).*the data set has vectors of 5 numbers with one of 2 classes each: a column"
    )
    with pytest.raises(ModelError, match=rf"{words} of text becomes tokens with dataset.tokenizer"):
        FastText().network(table)
    text = InputSpec("tokens", (9,), 3, vocabulary=7, target="values", padding=0)
    with pytest.raises(
        ModelError, match="texts of 9 tokens, of 7 distinct ones, filled up with token 0, with 3 numbers"
    ):
        TwoNN().network(text)


def test_a_projection_stands_between_the_lstm_and_the_head() -> None:
    """The next-word model of Reddi et al. (2021), whose appendix counts 4,050,748 parameters layer by layer."""
    spec = InputSpec("tokens", (20,), 10_004, vocabulary=10_004, target="tokens", padding=0)
    network = CharLSTM(embedding=96, hidden=670, layers=1, biases=1, projection=96).network(spec)
    assert sum(leaf.numel() for leaf in network.initialize(0).values()) == 4_050_748
    small = InputSpec("tokens", (6,), 5, vocabulary=5, target="tokens", padding=0)
    network = CharLSTM(embedding=3, hidden=4, layers=1, projection=2).network(small)
    tree, x = network.initialize(0), torch.tensor([[1, 2, 3, 4, 0, 0], [4, 3, 2, 1, 1, 2]])
    features = network.features(tree, x)
    assert features.shape == (2, 6, 2)
    plain = CharLSTM(embedding=3, hidden=4, layers=1).network(small)
    states = plain.features({name: leaf for name, leaf in tree.items() if "projection" not in name} | {
        "head.weight": torch.zeros(5, 4), "head.bias": torch.zeros(5)}, x)  # fmt: skip
    torch.testing.assert_close(features, states @ tree["projection.weight"].T + tree["projection.bias"])


def test_without_hidden_layers_a_table_has_a_linear_model() -> None:
    spec = InputSpec("image", (5,), 2)
    network = TabularMLP(hidden=()).network(spec)
    tree, x = network.initialize(0), torch.randn(3, 5)
    assert set(tree) == {"head.weight", "head.bias"}
    torch.testing.assert_close(network.logits(tree, x), x @ tree["head.weight"].T + tree["head.bias"])


@pytest.mark.parametrize("hidden", [10**13, 10**17, 10**20])  # more than any machine's, than 64 bits count, or hold
def test_a_model_larger_than_the_memory_is_refused_by_name(hidden: int) -> None:
    with pytest.raises(ModelError, match=r"model two_nn for images of .* does not fit into this machine's"):
        TwoNN(hidden=(hidden,)).network(image(1, 8, 4))
