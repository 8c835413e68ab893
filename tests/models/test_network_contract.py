"""Initialization, shared tensors, and models that do not fit the contract."""

from __future__ import annotations

import weakref

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.nn.modules import rnn

from rayfl.engine.updates.flat import Layout
from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.zoo import Architecture, CharLSTM, LeafCNN, ModelConfig, TwoCNN, TwoNN
from tests.support.elsewhere import PRETENDED, elsewhere
from tests.support.problems import Gated, SelfNormalized
from tests.support.small_models import SMALL, SMALL_IMAGE, SMALL_TEXT, Bidirectional, batch, views

DIGITS = InputSpec("image", (1, 28, 28), 10)

SHAKESPEARE = InputSpec("tokens", (80,), 80, vocabulary=80)


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
