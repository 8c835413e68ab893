"""Losses of training samples, by which clients are chosen: of which model, and in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.hosting.scoring import Scorer
from rayfl.examples import Examples, InputSpec
from rayfl.tasks.base import Predictor
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import two_layers

SAMPLES = 10


def scorer() -> tuple[Scorer, Classification, Examples]:
    toy = two_layers()
    task = Classification(toy.network)
    source = torch.Generator().manual_seed(3)
    x = torch.rand(SAMPLES, 5, generator=source, dtype=torch.float64)
    y = torch.randint(3, (SAMPLES,), generator=source)
    return Scorer(task, torch.device("cpu"), InputSpec("image", (5,), 3), 8), task, Examples(x, y)


def test_losses_are_of_the_global_model_or_of_the_clients_own() -> None:
    scored, task, examples = scorer()
    one, other = (Predictor.of(task.network.initialize(seed)) for seed in (1, 2))
    expected = F.cross_entropy(task.network.logits(one.models[0], examples.x, training=False).double(), examples.y)
    for predictors in ({"a": other, "global": one}, {"a": other, "own": one}, {"first": one, "b": other}):
        ((name, found),) = scored.losses(predictors, "own", examples)["train"].items()
        assert predictors[name] is one
        assert found.n == SAMPLES
        assert found.loss == pytest.approx(float(expected), rel=1e-6)


def test_losses_are_found_in_pieces_where_memory_is_short() -> None:
    scored, task, examples = scorer()
    model, sizes = task.network.initialize(1), list[int]()

    def short(models: Sequence[Any], x: Tensor, task: Any) -> Tensor:
        sizes.append(len(x))
        if len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        found: Tensor = task.predictions(models, x)
        return found

    whole = scored.losses({"global": Predictor.of(model)}, "global", examples)["train"]["global"]
    parts = scored.losses({"global": Predictor.of(model, combine=short)}, "global", examples)["train"]["global"]
    assert max(sizes) > 3 >= min(sizes)
    assert parts.vector == pytest.approx(whole.vector, rel=1e-6)
