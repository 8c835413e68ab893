"""The section model.factorize: which models offer it, what travels, what is exported, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.func import vmap
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli import app
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, ModelError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts
from rayfl.models.layers.factors import Factorized
from rayfl.models.networks.convolutional import TwoCNN
from rayfl.models.networks.perceptron import TwoNN
from rayfl.models.networks.recurrent import CharLSTM
from rayfl.models.networks.torchvision_models import TorchvisionModel
from rayfl.models.zoo import CustomModel, ModelConfig
from rayfl.params import num_bytes
from tests.support.experiments import small_experiment

SECTIONS: dict[str, dict[str, Any]] = {
    "fedpara": {"name": "fedpara", "gamma": 0.5},
    "pfedpara": {"name": "pfedpara", "gamma": 0.1, "layers": "hidden"},
    "low_rank": {"name": "low_rank", "gamma": 0.0, "layers": "all"},
}
IMAGES = InputSpec("image", (1, 28, 28), 10)


def own(spec: InputSpec) -> nn.Module:
    """A user's model: a convolution and linear layers, some of which have factors."""
    layers = (nn.Conv2d(spec.shape[0], 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(64, 48))
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(48, spec.num_classes))


def config(folder: Path, method: str = "fedavg", model: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    chosen = model or {"name": "two_nn", "hidden": [24, 48], "factorize": "fedpara"}
    return {
        **small_experiment(folder, "run", "fedavg", backend="inline"),
        "algorithm": method,
        "model": chosen,
        **changes,
    }


@pytest.mark.two_cases
@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("method", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow), "fedper"])
def test_messages_hold_factors_and_a_model_can_be_exported(method: str, name: str, tmp_path: Path) -> None:
    model = {"name": "two_nn", "hidden": [24, 48], "factorize": SECTIONS[name]}
    extra = {"train": {"rounds": 2, "clients_per_round": 3, "local_epochs": 1, "batch_size": 16, "lr": 0.05}}
    result = rayfl.run(config(tmp_path, method, model, **extra))
    parts = Parts(load_config(Experiment, tmp_path / "run" / "config.yaml", []))
    network = parts.task.network
    tree = network.initialize(0)
    assert "hidden.1.weight" not in tree
    assert ("hidden.1.weight_x2" in tree) == (name != "low_rank")
    size = num_bytes(tree) * (2 if method == "scaffold" else 1)
    if method == "fedper":
        size -= num_bytes({key: tree[key] for key in network.head_names})
    assert set(result.rounds.column("bytes_up").to_pylist()[-1:]) == {2 * 3 * size}

    file = tmp_path / "model.safetensors"
    made = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--client", "1", "--out", str(file)])
    assert made.exit_code == 0, made.output
    section: Any = parts.config.model
    module = section.whole(parts.dataset.spec)
    assert any(isinstance(layer, Factorized) for layer in module.modules())
    module.load_state_dict(safetensors.torch.load_file(file))
    test = parts.dataset.load(1)["test"]
    accuracy = float((module(test.x).argmax(1) == test.y).float().mean())
    rows = [row for row in result.clients.to_pylist() if row["client"] == 1 and row["split"] == "test"]
    assert accuracy in [pytest.approx(row["top1"]) for row in rows]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_convolutional_network_is_the_same_alone_and_in_a_stack(name: str) -> None:
    network = TwoCNN(padding=0, factorize=SECTIONS[name]).network(IMAGES)  # type: ignore[arg-type]
    assert network.vectorizable, network.why_not_vectorizable
    trees = [network.initialize(seed) for seed in range(3)]
    x = torch.rand(3, 4, *IMAGES.shape)

    def slopes(tree: dict[str, Tensor], inputs: Tensor) -> Any:
        found = torch.func.grad(lambda t: network.logits(t, inputs, training=True).square().mean())
        return found(tree)

    together = vmap(slopes)({key: torch.stack([tree[key] for tree in trees]) for key in trees[0]}, x)
    for place, tree in enumerate(trees):
        for key, slope in slopes(tree, x[place]).items():
            assert torch.allclose(together[key][place], slope, rtol=1e-3, atol=1e-5), key


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.slow
def test_a_users_model_has_factors_too(mode: str, tmp_path: Path) -> None:
    model = {"name": f"{__name__}:own", "head": "6", "factorize": {"name": "pfedpara", "gamma": 1}}
    rayfl.run(config(tmp_path, "pfedpara", model, engine={"mode": mode}))
    network = Parts(load_config(Experiment, tmp_path / "run" / "config.yaml", [])).task.network
    layers = {name.rpartition(".")[0] for name in network.groups["own_factors"]}
    assert layers == {"body.0", "body.4", "head"}


def test_a_perceptron_with_factors_is_no_chain_of_weights() -> None:
    """Steps of such chains are computed by formulas, without autograd."""
    network = TwoNN(factorize="fedpara").network(IMAGES)  # type: ignore[arg-type]
    assert network.chain(network.initialize(0)) is None
    plain = TwoNN(hidden=(8,), factorize={"layers": "hidden", "name": "low_rank", "gamma": 0})  # type: ignore[arg-type]
    assert plain.network(IMAGES).num_parameters < TwoNN(hidden=(8,)).network(IMAGES).num_parameters


def test_which_layers_have_factors() -> None:
    def layers(name: str, chosen: str | None) -> list[str]:
        section = {"name": name, "gamma": 0, "layers": chosen}
        model = TwoCNN(factorize=section).whole(IMAGES)  # type: ignore[arg-type]
        return [one for one, module in model.named_modules() if isinstance(module, Factorized)]

    hidden = ["conv1", "conv2", "fc"]
    assert layers("fedpara", "convolutions") == hidden[:2]
    assert layers("fedpara", None) == layers("fedpara", "hidden") == layers("low_rank", None) == hidden
    assert layers("fedpara", "all") == layers("pfedpara", None) == [*hidden, "head"]
    assert layers("pfedpara", "hidden") == hidden


def test_what_cannot_have_factors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model char_lstm: model\.factorize finds no layer whose factors are smaller"):
        CharLSTM(factorize="fedpara").network(InputSpec("tokens", (8,), 20, 20))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"choose a larger model, model\.factorize\.layers=all"):
        TwoNN(hidden=(3,), factorize="fedpara").network(InputSpec("image", (4,), 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="factors are drawn and take the place of weights: set weights to null"):
        TorchvisionModel(architecture="resnet18", weights="imagenet", factorize="fedpara")  # type: ignore[arg-type]
    for changes in ({"model.factorize.gamma": 1.5}, {"model.factorize.name": "tucker"}, {"model": "pretrained"}):
        with pytest.raises(ConfigError):
            load_config(Experiment, config(tmp_path), changes)
    with pytest.raises(ConfigError, match=r"needs the last layer's weight, .* set model\.factorize\.layers=hidden"):
        rayfl.run(config(tmp_path, "fedpac", model={"name": "two_nn", "hidden": [24, 48], "factorize": "pfedpara"}))
    with pytest.raises(ConfigError, match=r"FedNH needs the last layer's weight"):
        rayfl.run(config(tmp_path, "fednh", model={"name": "two_nn", "hidden": [24, 48], "factorize": "pfedpara"}))


def test_every_model_of_layers_offers_it_and_candidates_have_their_own(tmp_path: Path) -> None:
    factors = {"name": "two_nn", "hidden": [24, 48], "factorize": {"name": "low_rank"}}
    candidates = {"candidates": [factors, {"name": "two_nn", "hidden": [12]}]}
    found = load_config(Experiment, config(tmp_path, "fedproto", candidates), {})
    small, plain = found.model.networks(InputSpec("image", (1, 8, 8), 10))
    assert any(name.endswith("weight_x1") for name in small.parameter_names)
    assert all(name.endswith((".weight", ".bias")) for name in plain.parameter_names)
    assert CustomModel(factory="own:model").factorize is None


PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SIZES = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
SIZES = SIZES[next(i for i, line in enumerate(SIZES) if "gamma 0 |" in line) + 2 :][:4]


@pytest.mark.parametrize("row", SIZES, ids=[row.partition(" | ")[0].strip("| `") for row in SIZES])
def test_numbers_of_the_page_on_models_are_true(row: str) -> None:
    chosen, inputs, classes, weights, *sizes = (cell.strip() for cell in row[1:-1].split("|"))
    text, _, option = chosen.replace("`", "").partition("}, ")
    content = yaml.safe_load(f"{text}}}" if option else text)
    model = {"name": content} if isinstance(content, str) else content
    spec = InputSpec("image", tuple(map(int, inputs.split("x"))), int(classes))

    def shown(section: dict[str, Any] | None) -> str:
        config = TypeAdapter[Any](ModelConfig).validate_python({**model, "factorize": section})
        return f"{sum(tensor.numel() for tensor in config.whole(spec).parameters()):,}"

    options = yaml.safe_load(f"{{{option}}}") if option else {}
    assert [weights, *sizes] == [shown(None), *(shown({"gamma": g, **options}) for g in (0, 0.1, 0.5, 1))]


def test_show_tells_how_many_numbers_there_are() -> None:
    arguments = ["show", "model=two_nn", "dataset=digits", "model.factorize.gamma=0", "--methods", "fedavg", "--json"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    network = TwoNN(factorize={"gamma": 0}).network(InputSpec("image", (1, 8, 8), 10))  # type: ignore[arg-type]
    assert f'"parameters": {network.num_parameters}' in json.dumps(json.loads(shown.output))
