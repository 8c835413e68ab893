"""What the page on models says of each model is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import TypeAdapter
from torch import nn

from rayfl.examples import InputSpec, Target
from rayfl.models.base import ClassificationModel
from rayfl.models.zoo import ModelConfig

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MODELS: TypeAdapter[Any] = TypeAdapter(ModelConfig)


def table() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| `model`")) + 2
    rows = [line for line in lines[start:] if line.startswith("|") or not line]
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in rows[: rows.index("")]]


ROWS = table()


def parsed(text: str) -> Any:
    content = yaml.safe_load(text.strip("`"))
    return MODELS.validate_python({"name": content} if isinstance(content, str) else content)


def spec_of(inputs: str, classes: int) -> InputSpec:
    sides, _, every = inputs.partition(", ")
    words = sides.split()
    targets: dict[str, Target] = {"the next": "tokens", "each pixel": "mask", "each item": "ranking"}
    if every.endswith(" times ahead"):
        horizon = int(every.split()[0])
        shape = tuple(map(int, sides.split("x")))
        return InputSpec("image", shape, classes, target="forecast", horizon=horizon)
    target = targets.get(every, "class")
    if words[1:3] == ["graph", "nodes"]:
        nodes = int(words[0])
        return InputSpec("graph", (nodes, nodes + 1 + int(words[4])), classes)
    if words[-1] == "tokens":
        return InputSpec("tokens", (int(words[0]),), classes, int(words[2]), target)
    return InputSpec("image", tuple(map(int, sides.split("x"))), classes, target=target)


def widths(model: ClassificationModel, modules: tuple[str, ...]) -> str:
    layers = [
        child for name in modules for child in model.get_submodule(name).modules() if isinstance(child, nn.Linear)
    ]
    return ", ".join(f"{layer.in_features}-{layer.out_features}" for layer in layers)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row[0].strip('`')} {row[2]} {row[3]}", marks=pytest.mark.slow if place % 3 else ())
        for place, row in enumerate(ROWS)
    ],
)
def test_a_row_is_true(row: list[str]) -> None:
    text, _, inputs, classes, parameters, head, block, features, norm = row
    config, spec = parsed(text), spec_of(inputs, int(classes))
    with torch.device("meta"):
        model = config.build(spec).eval()
        made = model.features(torch.zeros(2, *spec.shape, dtype=torch.int64 if spec.kind == "tokens" else None))
        logits = model.classify(made)
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,}" == parameters
    assert widths(model, (model.head_module,)) == head
    assert widths(model, model.classifier_modules) == block
    maps = model.feature_channels
    assert f"{made.shape[-1]:,}" + (f" ({maps} maps)" if maps not in (None, made.shape[-1]) else "") == features
    assert logits.shape == (2, *made.shape[1:-1], int(head.partition("-")[2]))
    normalized = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert (config.norm if normalized else "-") == norm


def test_every_model_has_a_row() -> None:
    names = {parsed(row[0]).name for row in ROWS}
    mapping = MODELS.json_schema()["discriminator"]["mapping"]
    assert names | {"custom", "candidates", "pretrained"} == set(mapping)
