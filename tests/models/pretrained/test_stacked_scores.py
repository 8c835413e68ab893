"""Models over a base are scored in stacks: what clients and models differ in, and the rows that a pass may have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rayfl.engine.scoring.evaluation import evaluate
from rayfl.engine.scoring.evaluation_together import ScoringRequest, evaluate_together
from rayfl.engine.scoring.mixtures import Mixture
from rayfl.examples import Examples
from rayfl.metrics import Statistics
from rayfl.metrics.language import IGNORED
from rayfl.models.pretrained import output_layer
from rayfl.models.pretrained.mixing import mixed_by_rows, side_by_side
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.tasks.base import Predictor
from rayfl.tasks.classification import Classification
from rayfl.tasks.further_tasks import LanguageModel
from tests.support.bases import (
    NEXT,
    inputs,
    language_network,
    language_section,
    network,
    passes_of_networks,
    texts,
    trained,
    write_base,
)

HALVES = torch.tensor([[0.5, 0.5]])
POINTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def assert_close(
    asked: Sequence[ScoringRequest],
    found: Sequence[dict[str, Statistics]],
    task: Any,
    names: set[str],
    tolerance: float = 1e-5,
) -> None:
    """The statistics of some predictors, and of no others, are those of scoring client by client."""
    for one, scores in zip(asked, found, strict=True):
        assert set(scores) == names & set(one.predictors)
        for name, expected in evaluate(one.predictors, one.examples, task, 4).items():
            if name in names:
                vector = expected.vector
                np.testing.assert_allclose(scores[name].vector, vector, rtol=tolerance, atol=tolerance, err_msg=name)
                whole = vector == vector.round()
                assert scores[name].vector[whole].tolist() == vector[whole].tolist()


def mixer(net: AdaptedNetwork, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {site: torch.randn(2, width, generator=generator) for site, width in net.sites.items()}


@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-3)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.two_cases
def test_rows_of_all_kinds_of_texts_and_models_agree(family: str, precision: torch.dtype, tolerance: float) -> None:
    net = language_network(family)
    net.compute_in(precision)
    task, shared = LanguageModel(net, (), NEXT), trained(net, 9, 0.5)
    kinds = []
    for k, n in enumerate((7, 3, 11, 5)):
        x, y = texts(n, k)
        if k == 1:
            y = torch.full_like(y, IGNORED)  # prompts alone
        if k == 2:
            x[:, 4:], y[:, 4:] = 0, IGNORED  # short ones, whose columns are cut off where they are alone
        own, other = trained(net, k, 0.5), trained(net, 20 + k, 0.5)
        rows = {
            "own": Predictor.of(own),
            "shared": Predictor.of(shared),
            "even": Predictor.of(side_by_side([own, shared], HALVES)),  # FedDPA
            "mixed": Predictor.of(mixed_by_rows(own, shared, mixer(net, k))),  # FedALT
            "both": Predictor.of(own, other),
            "combined": Predictor.of(own, combine=lambda models, x, task: task.predictions(list(models), x)),
        }
        kinds.append(ScoringRequest(rows, Examples(x, y)))
    found = evaluate_together(kinds, task, 4)
    assert_close(kinds, found, task, {"own", "shared", "even", "mixed"}, tolerance)
    assert found[1]["own"].vector.tolist() == [3, 0, 0, 0, 0, 0]


def test_a_client_without_samples_is_left_to_others() -> None:
    net = language_network("llama")
    task, tree = LanguageModel(net, (), NEXT), trained(net, 0, 0.5)
    x, y = texts(5, 0)
    asked = [ScoringRequest({"own": Predictor.of(tree)}, Examples(x[:n], y[:n])) for n in (0, 5)]
    empty, full = evaluate_together(asked, task, 4)
    assert not empty and set(full) == {"own"}
    assert not any(evaluate_together(asked[:1], task, 4))


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("shared_by", [2, 3])
def test_models_of_one_row_may_have_other_tensors_for_each_client(flipped: bool, shared_by: int) -> None:
    """As of a method whose clients have one adapter before they are sampled, and two after."""
    net = network("vit")
    task, asked = Classification(net), []
    for k in range(4):
        models = [trained(net, 10 * k + i) for i in range(shared_by)]
        mixed = side_by_side(models, torch.full((1, shared_by), 1 / shared_by))
        tree = mixed if (k % 2 == 1) != flipped else models[0]
        labels = torch.randint(10, (6,), generator=torch.Generator().manual_seed(k))
        asked.append(ScoringRequest({"personalized": Predictor.of(tree)}, Examples(inputs("vit", 6, k), labels)))
    assert_close(asked, evaluate_together(asked, task, 4), task, {"personalized"})


@pytest.mark.parametrize(("rows", "most"), [(None, 60), (100, 20), (33, 5), (20, 5), (1, 5)])
def test_a_pass_has_no_more_rows_than_it_may(rows: int | None, most: int) -> None:
    """Of a sweep every point has the samples once more; one sample of each is the least that there can be."""
    net = network("vit")
    assert net.rows_per_sample == 5
    task, asked = Classification(net), []
    for k, n in enumerate((11, 6, 9)):
        start, end = trained(net, k), trained(net, 10 + k)
        points = {f"lambda={c}": Predictor.of(Mixture(start, end, c, task)) for c in POINTS}
        labels = torch.randint(10, (n,), generator=torch.Generator().manual_seed(k))
        asked.append(ScoringRequest(points, Examples(inputs("vit", n, k), labels)))
    with passes_of_networks() as passes:
        found = evaluate_together(asked, task, 4, rows)
    assert max(len(x) for x in passes) == most
    assert_close(asked, found, task, {f"lambda={c}" for c in POINTS})


def assert_parts_agree(net: AdaptedNetwork, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """However many rows of logits are computed at a time, statistics are the same."""
    task, examples = LanguageModel(net, (), NEXT), Examples(*texts(9, 5))
    one, other = ({n: leaf.to(dtype) for n, leaf in trained(net, k, 0.5).items()} for k in (0, 1))
    predictors = {"one": Predictor.of(one), "mean": Predictor.of(one, other)}
    whole = evaluate(predictors, examples, task, 4)
    for rows in (1, 5):
        monkeypatch.setattr(output_layer, "LOGITS", rows * net.head_shape[0])
        for name, found in evaluate(predictors, examples, task, 4).items():
            np.testing.assert_allclose(found.vector, whole[name].vector, rtol=1e-12, atol=0)


def test_parts_are_summed_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 logits are nearly the same however many rows are multiplied at a time, and so must be statistics."""
    net = language_network("llama")
    net.compute_in(torch.float64)
    assert_parts_agree(net, monkeypatch, torch.float64)


def test_parts_agree_in_float32_where_products_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each logit is one number that the output layer reads, so that multiplying rounds nothing."""
    file = write_base("llama", tmp_path / "base", causal=True) / "model.safetensors"
    tensors = load_file(file)
    vocabulary, width = tensors["lm_head.weight"].shape
    tensors["lm_head.weight"] = torch.eye(width).repeat(2, 1)[:vocabulary]
    save_file(tensors, file, {"format": "pt"})
    net = language_section("llama", folder=str(file.parent)).network(NEXT)
    assert_parts_agree(net, monkeypatch, torch.float32)
