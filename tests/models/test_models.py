"""The built-in models and the stateless network around them."""

from __future__ import annotations

import weakref

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.nn.modules import rnn

from rayfl.engine.flat import Layout
from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.zoo import Architecture, CharLSTM, LeafCNN, ModelConfig, TwoCNN, TwoNN
from tests.support.elsewhere import PRETENDED, elsewhere
from tests.support.problems import Gated, SelfNormalized

torch.set_num_threads(1)

DIGITS = InputSpec("image", (1, 28, 28), 10)
FEMNIST = InputSpec("image", (1, 28, 28), 62)
SHAKESPEARE = InputSpec("tokens", (80,), 80, vocabulary=80)
SMALL_IMAGE = InputSpec("image", (3, 8, 9), 4)
SMALL_TEXT = InputSpec("tokens", (5,), 7, vocabulary=7)

SMALL: list[tuple[Architecture, InputSpec]] = [
    (TwoNN(hidden=(6, 5)), SMALL_IMAGE),
    (TwoNN(hidden=(6, 5, 4), bias=False, init="xavier_normal"), SMALL_IMAGE),
    (TwoCNN(), SMALL_IMAGE),
    (LeafCNN(), SMALL_IMAGE),
    (CharLSTM(hidden=6), SMALL_TEXT),
]
SMALL_IDS = ["two_nn", "two_nn_kdd", "two_cnn", "leaf_cnn", "char_lstm"]
IMAGE_MODELS = SMALL[:1] + SMALL[2:4]


class Normalized(ClassificationModel):
    """Linear, batch normalization, linear."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4, momentum=momentum)
        self.head = nn.Linear(4, 2)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)


class OwnNorm(nn.BatchNorm1d):
    """A subclass, which may compute something else."""


class Own(Normalized):
    """Linear, a batch normalization of one's own, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnNorm(4)


class Bidirectional(ClassificationModel):
    """Two stacked bidirectional LSTM layers with projections."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2, batch_first=True)
        self.head = nn.Linear(4, 2)

    def features(self, x: Tensor) -> Tensor:
        steps: Tensor = self.lstm(x)[0]
        return steps[:, -1]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)


class Tied(ClassificationModel):
    """One linear layer applied through two names, then dropout and the head."""

    def __init__(self, dropout: float = 0.0, head: str = "head", classifier: tuple[str, ...] = ("head",)) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(3, 2)
        self.head_module = head
        self.classifier_modules = classifier

    def features(self, x: Tensor) -> Tensor:
        return self.dropout(self.second(self.first(x)))

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)


def batch(spec: InputSpec, size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if spec.kind == "tokens":
        return torch.randint(spec.vocabulary, (size, *spec.shape), generator=generator)
    return torch.rand(size, *spec.shape, generator=generator)


def views(tree: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A flat copy of the tree and the tree of views into it."""
    flat = torch.cat([tensor.flatten() for tensor in tree.values()])
    pieces = flat.split([tensor.numel() for tensor in tree.values()])
    return flat, {name: piece.view_as(tree[name]) for name, piece in zip(tree, pieces, strict=True)}


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


def test_what_cannot_be_vectorized_says_why() -> None:
    for factory, kind in [
        (Gated, "GRU"),
        (Own, "OwnNorm uses batch statistics"),
        (Bidirectional, "LSTM has no batching rule"),
        (SelfNormalized, "AlphaDropout"),
    ]:
        network = Network(factory)
        assert not network.vectorizable
        assert kind in network.why_not_vectorizable


def test_only_active_dropout_is_stochastic() -> None:
    assert Network(lambda: Tied(dropout=0.5)).stochastic
    assert not Network(Tied).stochastic and Network(Tied).vectorizable
    network = Network(lambda: Tied(dropout=0.5))
    tree, x = network.initialize(0), torch.ones(64, 3)
    assert not torch.equal(network.logits(tree, x, training=True), network.logits(tree, x, training=True))
    assert torch.equal(network.logits(tree, x), network.logits(tree, x))


def test_running_statistics_are_written_into_the_bound_buffers() -> None:
    network, x = Network(Normalized), torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    assert network.buffer_names == ("norm.running_mean", "norm.running_var")
    flat, tree = views(network.initialize(3))
    module = Normalized()
    module.load_state_dict({**tree, "norm.num_batches_tracked": torch.tensor(0)})

    before = flat.clone()
    network.logits(tree, x)
    assert torch.equal(flat, before), "evaluation leaves the buffers alone"

    for _ in range(2):
        assert torch.equal(network.logits(tree, x, training=True), module.train()(x))
    assert torch.equal(tree["norm.running_mean"], module.norm.running_mean)
    assert torch.equal(tree["norm.running_var"], module.norm.running_var)
    assert torch.equal(network.logits(tree, x), module.eval()(x))
    parameters = network.num_parameters
    assert torch.equal(flat[:parameters], before[:parameters])
    assert not torch.equal(flat[parameters:], before[parameters:])


def test_a_cumulative_batch_normalization_is_refused() -> None:
    with pytest.raises(ModelError, match="momentum"):
        Network(lambda: Normalized(momentum=None))


def test_a_shared_tensor_appears_once_and_is_bound_everywhere() -> None:
    network, x = Network(Tied), torch.ones(2, 3)
    assert network.parameter_names == ("first.weight", "first.bias", "second.bias", "head.weight", "head.bias")
    tree = network.initialize(0)
    module = Tied()
    module.load_state_dict(tree, strict=False)
    assert torch.equal(network.logits(tree, x), module(x))


def test_initialization_is_a_function_of_the_seed() -> None:
    network = TwoCNN(init="xavier_normal").network(SMALL_IMAGE)
    state = torch.get_rng_state()
    first, again, other = network.initialize(5), network.initialize(5), network.initialize((1 << 63) - 1)
    assert torch.equal(torch.get_rng_state(), state)
    TwoCNN().network(SMALL_IMAGE)
    assert torch.equal(torch.get_rng_state(), state), "building a network draws nothing from the global generator"
    for name, tensor in first.items():
        assert tensor.dtype == torch.float32 and tensor.is_leaf and not tensor.requires_grad
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, other[name]) == name.endswith("bias")
    first["head.weight"].zero_()
    assert torch.equal(network.initialize(5)["head.weight"], again["head.weight"])


def test_initialization_equals_seeding_pytorch() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        expected = TwoNN().build(DIGITS).state_dict()
    tree = TwoNN().network(DIGITS).initialize(11)
    assert all(torch.equal(tree[name], expected[name]) for name in expected)


def test_xavier_normal_has_its_variance_and_zero_biases() -> None:
    tree = TwoNN(init="xavier_normal").network(DIGITS).initialize(0)
    weight = tree["hidden.0.weight"]
    assert weight.std().item() == pytest.approx((2 / (784 + 200)) ** 0.5, rel=0.01)
    assert all(not tensor.any() for name, tensor in tree.items() if name.endswith("bias"))


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (TwoNN(), SHAKESPEARE),
        (TwoCNN(), SHAKESPEARE),
        (LeafCNN(), SHAKESPEARE),
        (TwoCNN(), InputSpec("image", (1, 3, 28), 10)),
        (LeafCNN(), InputSpec("image", (784,), 10)),
        (CharLSTM(), DIGITS),
        (CharLSTM(), InputSpec("tokens", (80,), 80)),
    ],
)
def test_a_model_that_does_not_fit_names_itself_and_the_inputs(config: Architecture, spec: InputSpec) -> None:
    with pytest.raises(ModelError) as error:
        config.network(spec)
    assert config.name in str(error.value) and all(str(size) in str(error.value) for size in spec.shape)


def test_a_tree_that_does_not_fit_is_refused() -> None:
    network, x = TwoNN(hidden=(6,)).network(SMALL_IMAGE), batch(SMALL_IMAGE)
    tree = network.initialize(0)
    bias = tree.pop("head.bias")
    with pytest.raises(ModelError, match=r"missing \['head.bias'\]"):
        network.logits(tree, x)
    with pytest.raises(ModelError, match=r"unknown \['other'\]"):
        network.logits({**tree, "other": bias}, x)
    with pytest.raises(ModelError, match=r"missing \[\], unknown \['other'\]"):
        network.features_and_logits({**tree, "head.bias": bias, "other": bias}, x)
    assert network.logits({**tree, "head.bias": bias}, x).shape == (4, 4)


@pytest.mark.parametrize(
    ("head", "classifier", "complaint"),
    [
        ("tail", ("tail",), "no such linear layer"),
        ("head", ("first", "third"), "no parameters"),
        ("head", ("first",), "must contain the head"),
    ],
)
def test_wrong_group_names_are_refused(head: str, classifier: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        Network(lambda: Tied(head=head, classifier=classifier))


def test_configurations_are_told_apart_by_name() -> None:
    adapter: TypeAdapter[Architecture] = TypeAdapter(ModelConfig)
    assert adapter.validate_python({"name": "two_nn", "hidden": [3]}) == TwoNN(hidden=(3,))
    for config in (TwoNN(), TwoCNN(), LeafCNN(), CharLSTM()):
        assert adapter.validate_json(config.model_dump_json()) == config
    for wrong in ({"name": "three_nn"}, {"name": "two_nn", "hidden": []}, {"name": "two_cnn", "depth": 3}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


@PRETENDED
@pytest.mark.parametrize(
    "network",
    [CharLSTM(hidden=6, layers=3, biases=biases).network(SMALL_TEXT) for biases in (0, 1, 2)]
    + [Network(Bidirectional)],
    ids=["no bias", "one bias", "two biases", "bidirectional"],
)
def test_recurrent_weights_lie_on_a_gpu_as_cudnn_reads_them(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[Tensor]] = []
    lstm = rnn._VF.lstm

    def noting(x: Tensor, state: object, weights: list[Tensor], *rest: object) -> object:
        given.append(weights)
        return lstm(x, state, weights, *rest)

    monkeypatch.setattr(rnn._VF, "lstm", noting)
    x = torch.zeros(2, 5, dtype=torch.int64) if "embedding.weight" in network.parameter_names else torch.rand(2, 5, 3)
    with elsewhere() as device:
        flat = Layout.of(network.initialize(0)).pack(network.initialize(0), device)
        tree = Layout.of(network.initialize(0)).views(flat)
        found = network.logits(tree, x.to(device)).cpu()
        (weights,) = given
        block = weights[0].here.untyped_storage()  # type: ignore[attr-defined]
        end = 0
        for weight in sorted(weights, key=lambda one: one.dim() == 1):  # matrices before biases
            here = weight.here  # type: ignore[attr-defined]
            assert here.untyped_storage().data_ptr() == block.data_ptr()
            assert here.storage_offset() == end
            assert here.is_contiguous()
            end += here.numel()
        assert block.nbytes() == 4 * end
    torch.testing.assert_close(found, network.logits(network.initialize(0), x))


def test_a_network_lets_go_of_the_last_tree() -> None:
    for config, spec in SMALL:
        network = config.network(spec)
        tree = network.initialize(0)
        x = torch.zeros(2, *spec.shape, dtype=torch.int64 if spec.kind == "tokens" else torch.float32)
        before = network.logits(tree, x)
        held = [weakref.ref(tensor) for tensor in tree.values()]
        network.release()
        del tree
        assert not any(one() is not None for one in held)
        assert torch.equal(network.logits(network.initialize(0), x), before)
