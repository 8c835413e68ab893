"""The models that forecast against plain formulas in numpy, alone and stacked, and what they do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.func import vmap
from torch.nn import functional

from rayfl.engine.stacks import vectorized
from rayfl.engine.steps import looped
from rayfl.errors import ModelError
from rayfl.examples import Examples, InputSpec
from rayfl.models.networks.forecasters import DLinear, LSTMForecaster, NLinear
from rayfl.models.networks.patches import PatchTransformer
from rayfl.models.networks.perceptron import TwoNN
from rayfl.objectives import TRAINED, loss
from rayfl.tasks.base import Batch
from rayfl.tasks.forecasting import Forecasting, ForecastingSection
from tests.support.problems import CPU, request
from tests.support.toy_networks import DoubleNetwork
from tests.support.toys import assert_close

torch.set_num_threads(1)
TIMES, HORIZON = 10, 3


def spec_of(targets: int = 1, series: int | None = None) -> InputSpec:
    shape = (targets if series is None else series, 1, TIMES)
    return InputSpec("image", shape, targets * HORIZON, target="forecast", horizon=HORIZON)


def with_quantiles(spec: InputSpec) -> InputSpec:
    return ForecastingSection(loss="quantile", quantiles=(0.1, 0.5, 0.9)).of_model(spec)


def drawn(model: Any, spec: InputSpec, seed: int = 1) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    """A network, and a tree and inputs in float64 that are all drawn."""
    network, generator = DoubleNetwork(lambda: model.whole(spec)), torch.Generator().manual_seed(seed)
    tree = {
        name: torch.randn(leaf.shape, dtype=torch.float64, generator=generator)
        for name, leaf in network.initialize(0).items()
    }
    return network, tree, torch.randn(4, *spec.shape, dtype=torch.float64, generator=generator)


def averaged(window: np.ndarray, kernel: int) -> np.ndarray:
    half = kernel // 2
    return np.array(
        [
            np.mean([window[min(max(time + step, 0), len(window) - 1)] for step in range(-half, half + 1)])
            for time in range(len(window))
        ]
    )


@pytest.mark.parametrize("kernel", [1, 5, 25])
@pytest.mark.parametrize(("targets", "individual"), [(1, False), (1, True), (2, False), (2, True)])
def test_dlinear_is_a_linear_map_of_the_moving_average_and_one_of_the_rest(
    kernel: int, targets: int, individual: bool
) -> None:
    network, tree, x = drawn(DLinear(kernel=kernel, individual=individual), spec_of(targets))
    found = network.logits(tree, x).numpy()
    assert found.shape == (4, targets * HORIZON)
    for row, sample in enumerate(x.numpy()):
        for k, window in enumerate(sample[:, 0]):
            own = (k,) if individual and targets > 1 else ()
            weight, bias = (tree[f"head.{name}"].numpy()[own] for name in ("weight", "bias"))
            trend = averaged(window, kernel)
            wanted = weight[:, :TIMES] @ (window - trend) + weight[:, TIMES:] @ trend + bias
            np.testing.assert_allclose(found[row, k * HORIZON : (k + 1) * HORIZON], wanted, rtol=1e-5, atol=1e-5)


def test_dlinear_begins_like_two_layers() -> None:
    tree = DLinear().network(spec_of()).initialize(0)
    assert 0.9 * TIMES**-0.5 < tree["head.weight"].abs().max() <= TIMES**-0.5


@pytest.mark.parametrize(("targets", "individual"), [(1, False), (2, False), (2, True)])
def test_nlinear_is_a_linear_map_of_differences_from_the_last_value(targets: int, individual: bool) -> None:
    network, tree, x = drawn(NLinear(individual=individual), spec_of(targets))
    found = network.logits(tree, x).numpy()
    for row, sample in enumerate(x.numpy()):
        for k, window in enumerate(sample[:, 0]):
            own = (k,) if individual else ()
            weight, bias = (tree[f"head.{name}"].numpy()[own] for name in ("weight", "bias"))
            wanted = weight @ (window - window[-1]) + bias + window[-1]
            np.testing.assert_allclose(found[row, k * HORIZON : (k + 1) * HORIZON], wanted, rtol=1e-10)
    moved = network.logits(tree, x + 7).numpy()
    np.testing.assert_allclose(moved, found + 7, rtol=1e-9)


def test_the_lstm_is_that_of_its_equations() -> None:
    network, tree, x = drawn(LSTMForecaster(hidden=5), spec_of(1, 2))

    def sigmoid(value: np.ndarray) -> np.ndarray:
        return np.asarray(1 / (1 + np.exp(-value)))

    given = {name: leaf.numpy() for name, leaf in tree.items()}
    h = c = np.zeros((4, 5))
    for time in range(TIMES):
        gates = x[:, :, 0, time].numpy() @ given["lstm.weight_ih_l0"].T + given["lstm.bias_ih_l0"]
        gates = gates + h @ given["lstm.weight_hh_l0"].T + given["lstm.bias_hh_l0"]
        enters, stays, candidate, leaves = np.split(gates, 4, 1)
        c = sigmoid(stays) * c + sigmoid(enters) * np.tanh(candidate)
        h = sigmoid(leaves) * np.tanh(c)
    np.testing.assert_allclose(network.features(tree, x).numpy(), h, rtol=1e-9)
    wanted = h @ given["head.weight"].T + given["head.bias"]
    np.testing.assert_allclose(network.logits(tree, x).numpy(), wanted, rtol=1e-9)


def test_the_patch_transformer_is_attention_over_patches() -> None:
    sizes = PatchTransformer(patch=4, stride=3, width=6, heads=2, layers=1, hidden=5)
    network, tree, x = drawn(sizes, spec_of())
    window = x[:, 0, 0]
    mean, deviation = window.mean(1, keepdim=True), (window.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    normal = (window - mean) / deviation
    padded = torch.cat([normal, normal[:, -1:].repeat(1, 3)], 1)
    patches = torch.stack([padded[:, start : start + 4] for start in range(0, 10, 3)], 1)
    assert patches.shape == (4, 4, 4) and tree["positions"].shape == (4, 6)

    def linear(name: str, value: torch.Tensor) -> torch.Tensor:
        return value @ tree[f"{name}.weight"].T + tree[f"{name}.bias"]

    def norm(name: str, value: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(value, (6,), tree[f"{name}.weight"], tree[f"{name}.bias"])

    vectors = linear("embed", patches) + tree["positions"]
    q, k, v = (linear(f"layers.0.{name}", vectors) for name in ("queries", "keys", "values"))
    heads = [
        (q[..., own] @ k[..., own].transpose(1, 2) / 3**0.5).softmax(-1) @ v[..., own]
        for own in (slice(0, 3), slice(3, 6))
    ]
    vectors = norm("layers.0.after_attention", vectors + linear("layers.0.joined", torch.cat(heads, -1)))
    added = linear("layers.0.narrow", functional.gelu(linear("layers.0.wide", vectors)))
    vectors = norm("layers.0.after_perceptron", vectors + added)
    wanted = linear("head", vectors.flatten(1)) * deviation + mean
    torch.testing.assert_close(network.logits(tree, x), wanted, rtol=1e-9, atol=1e-9)


SMALL_PATCHES = {"patch": 4, "stride": 2, "width": 4, "heads": 2, "layers": 2, "hidden": 5}
MODELS: dict[str, Any] = {
    "dlinear": DLinear(kernel=5),
    "dlinear_individual": DLinear(kernel=5, individual=True),
    "nlinear": NLinear(),
    "lstm": LSTMForecaster(hidden=4, layers=2),
    "patches": PatchTransformer(**SMALL_PATCHES),
    "patches_dropout": PatchTransformer(**SMALL_PATCHES, dropout=0.3, individual=True),
}


def windows(n: int, spec: InputSpec, seed: int) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    return Examples(
        torch.randn(n, *spec.shape, generator=generator), torch.randn(n, *spec.target_shape, generator=generator)
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("quantiles", [(), (0.1, 0.5, 0.9)])
@pytest.mark.two_cases
def test_stacked_clients_learn_what_they_do_one_by_one(name: str, targets: int, quantiles: tuple[float, ...]) -> None:
    spec = spec_of(targets)
    section = ForecastingSection(loss="quantile" if quantiles else "squared", quantiles=quantiles)
    network = MODELS[name].network(section.of_model(spec))
    task = section.task([network], spec)
    updates = [
        request(windows(size, spec, k), network.initialize(k), loss(TRAINED), client=k, batch_size=4)
        for k, size in enumerate((9, 4, 6))
    ]
    for stacked, update in zip(vectorized.train(updates, task, CPU), updates, strict=True):
        assert_close(stacked, looped.train(update, task, CPU), 1e-5)
    assert network.vectorizable and not network.batch_statistics and not network.buffer_names
    assert network.head_names and set(network.head_names) <= set(network.classifier_names)


@pytest.mark.parametrize("name", MODELS)
def test_features_are_what_the_head_turns_into_forecasts(name: str) -> None:
    for targets in (1, 2):
        spec = spec_of(targets)
        network = MODELS[name].network(spec)
        tree, x = network.initialize(0), windows(5, spec, 0).x
        features = network.features(tree, x)
        assert features.shape[0] == 5 and features.dim() == (2 if targets == 1 or name == "lstm" else 3)
        torch.testing.assert_close(network.classify(tree, features), network.logits(tree, x))
        both = {key: torch.stack([leaf, leaf]) for key, leaf in tree.items()}
        stacked = vmap(lambda own, network=network, x=x: network.logits(own, x))(both)
        torch.testing.assert_close(stacked[1], network.logits(tree, x), rtol=1e-5, atol=1e-5)
        one_vector = targets == 1 or name == "lstm"
        assert Forecasting(network, (), spec).traits == (frozenset({"features"}) if one_vector else frozenset())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", [1, 2])
def test_quantiles_of_a_number_are_outputs_that_follow_each_other(name: str, targets: int) -> None:
    """A model of three quantiles whose weights are those of one number three times says the number three times."""
    spec, section = spec_of(targets), ForecastingSection(loss="quantile", quantiles=(0.1, 0.5, 0.9))
    one, three = MODELS[name].network(spec), MODELS[name].network(with_quantiles(spec))
    tree, x = one.initialize(0), windows(5, spec, 0).x
    axis = 1 if "head.weight" in tree and tree["head.weight"].dim() == 3 else 0
    wide = {key: leaf.repeat_interleave(3, axis) if key.startswith("head") else leaf for key, leaf in tree.items()}
    wanted = one.logits(tree, x).repeat_interleave(3, 1)
    torch.testing.assert_close(three.logits(wide, x), wanted)
    task = section.task([three], spec)
    batch = Batch(x, windows(5, spec, 0).y)
    e = batch.y[:, 0] - one.logits(tree, x)
    expected = torch.stack([torch.where(e > 0, q * e, (q - 1) * e) for q in (0.1, 0.5, 0.9)]).mean()
    torch.testing.assert_close(task.loss_of(three.logits(wide, x), batch), expected)
    assert task.traits == Forecasting(one, (), spec).traits


def test_crossing_quantiles_are_sorted_and_those_of_several_models_averaged() -> None:
    spec = spec_of()
    section = ForecastingSection(loss="quantile", quantiles=(0.1, 0.5, 0.9))
    task = section.task([NLinear().network(section.of_model(spec))], spec)
    assert task.predicted(torch.tensor([[3.0, 1, 2, 4, 5, 6]])).tolist() == [[1, 2, 3, 4, 5, 6]]
    crossing, batch = torch.randn(50, 9), Batch(torch.zeros(50, 1), torch.randn(50, 3, 3))
    for row in range(50):
        own = Batch(batch.x[row : row + 1], batch.y[row : row + 1])
        said = crossing[row : row + 1]
        assert task.loss_of(task.predicted(said), own) <= task.loss_of(said, own) + 1e-6
    outputs = [torch.tensor([[3.0, 1, 2]]), torch.tensor([[4.0, 4, 10]])]
    assert task.mixed([task.predicted(one) for one in outputs]).tolist() == [[2.5, 3, 6.5]]


@pytest.mark.parametrize("model", [DLinear(), NLinear(), LSTMForecaster(), PatchTransformer(patch=4)])
def test_what_is_no_window_is_refused(model: Any) -> None:
    with pytest.raises(ModelError, match=r"needs windows of series \(dataset=series, task=forecasting\), but the data"):
        model.network(InputSpec("image", (9, 1, 128), 6))
    if not isinstance(model, LSTMForecaster):
        with pytest.raises(
            ModelError, match=r"leave out dataset.covariates.* has windows of 10 times of 3 series with 3"
        ):
            model.network(spec_of(1, 3))
    assert TwoNN(hidden=(4,)).network(spec_of(1, 3)).head_shape == (HORIZON, 4)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match=r"needs windows of at least 16 times, or a smaller model.patch"):
        PatchTransformer().network(spec_of())
    with pytest.raises(ValidationError, match=r"width=6 cannot be divided among heads=4"):
        PatchTransformer(width=6)
    with pytest.raises(ValidationError, match=r"kernel=4 has no time in its middle: make it odd"):
        DLinear(kernel=4)
