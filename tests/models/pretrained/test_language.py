"""Language models over a base: what transformers computes, in folds, and with few logits in memory at a time."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayfl.engine.gradients.stacked_gradients import StackedGradients
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.engine.scoring.evaluation_together import ScoringRequest, evaluate_together
from rayfl.errors import ModelError
from rayfl.examples import Examples, InputSpec
from rayfl.metrics.language import IGNORED
from rayfl.models.pretrained import output_layer
from rayfl.models.pretrained.section import PretrainedModel
from rayfl.tasks.base import Batch, Predictor
from rayfl.tasks.further_tasks import LanguageModel
from tests.support.bases import (
    CAUSAL,
    NEXT,
    base,
    language_network,
    language_section,
    merged,
    passes_of_networks,
    texts,
    trained,
)

FAMILIES = sorted(CAUSAL)
VOCABULARY = 50
WEIGHT = (32, VOCABULARY)


def whole_loss(task: LanguageModel, tree: Any, batch: Batch) -> Tensor:
    """The loss by all logits at once."""
    return task.loss_of(task.logits(tree, batch), batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_transformers_own_loss_of_the_merged_weights(family: str) -> None:
    """Whose code shifts labels by one itself."""
    net = language_network(family)
    tree, (x, y) = trained(net, 3), texts(5, 0)
    assert not net.groups["head"] and not net.head_names and net.parameter_names == net.groups["adapters"]
    assert not net.fixed_parameters and net.head_shape == (VOCABULARY, 32)
    with torch.no_grad():
        model = merged(family, net, tree)
        torch.testing.assert_close(net.logits(tree, x), model(input_ids=x).logits, rtol=2e-5, atol=2e-5)
        last = y[:, -1:].where(y[:, -1:] != IGNORED, 0)
        shifted = torch.cat([torch.full_like(y[:, :1], IGNORED), y], 1)
        expected = model(input_ids=torch.cat([x, last], 1), labels=shifted).loss
        found = LanguageModel(net).loss(tree, Batch(x, y))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


class LargestLogits(TorchDispatchMode):
    """Notes the largest tensor whose rows are as long as the vocabulary, apart from the layer's own weight."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and one.dtype.is_floating_point and one.shape[-1:] == (VOCABULARY,):
                self.most = max(self.most, 0 if one.shape == WEIGHT else one.numel())
        return found


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.two_cases
def test_parts_of_the_output_layer_are_the_whole_and_no_more_than_they_is_in_memory(
    family: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = language_network(family)
    task, tree, batch = LanguageModel(net, (), NEXT), trained(net, 1), Batch(*texts(6, 1))
    leaves = {name: leaf.requires_grad_() for name, leaf in tree.items()}
    expected = whole_loss(task, leaves, batch)
    gradients = torch.autograd.grad(expected, list(leaves.values()))
    monkeypatch.setattr(output_layer, "LOGITS", rows * VOCABULARY)
    assert net.output_rows == rows
    with LargestLogits() as seen:
        found = task.loss(leaves, batch)
        own = torch.autograd.grad(found, list(leaves.values()))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for one, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))
    asked = int((batch.y != IGNORED).sum())
    assert 0 < seen.most <= min(rows, asked) * VOCABULARY < batch.y.numel() * VOCABULARY
    examples = Examples(batch.x, batch.y)
    with LargestLogits() as seen:
        evaluate({"one": Predictor.of(tree), "two": Predictor.of(tree, trained(net, 2))}, examples, task, 4)
    # two models and their mixture are two rows of logits each
    assert seen.most <= 2 * min(rows, asked) * VOCABULARY


@pytest.mark.two_cases
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_fold_of_ragged_clients_has_the_gradients_of_each_alone(family: str, checkpointing: bool) -> None:
    net = language_network(family, checkpointing=checkpointing)
    task = LanguageModel(net, (), NEXT)
    trees, data, sizes = [trained(net, k) for k in range(4)], [texts(3, 10 + k) for k in range(4)], (3, 2, 1, 3)
    stack = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
    x, y = (torch.stack(column) for column in zip(*data, strict=True))
    mask = torch.stack([(torch.arange(3) < size).float() for size in sizes])

    def loss(tree: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return task.loss(tree, Batch(x, y, mask))

    found = StackedGradients(loss, task)(stack, list(stack), None, x, y, mask)
    for k, size in enumerate(sizes):
        own = {name: leaf.clone().requires_grad_() for name, leaf in trees[k].items()}
        alone = torch.autograd.grad(whole_loss(task, own, Batch(x[k, :size], y[k, :size])), list(own.values()))
        for one, other in zip(found, alone, strict=True):
            assert float((one[k] - other).abs().max()) <= 1e-5 * max(float(other.abs().max()), 1e-3)


def test_all_positions_are_computed_where_nobody_may_ask_which_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = language_network("llama")
    task, tree, batch = LanguageModel(net, (), NEXT), trained(net, 1), Batch(*texts(6, 1))
    leaves = {name: leaf.requires_grad_() for name, leaf in tree.items()}
    values = []
    for recording in (False, True):
        monkeypatch.setattr(output_layer, "is_recorded", lambda tensor, found=recording: found)
        value = task.loss(leaves, batch)
        values.append([value.detach(), *torch.autograd.grad(value, list(leaves.values()))])
    for one, other in zip(*values, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_padding_on_the_right_changes_nothing() -> None:
    net = language_network("llama")
    tree, (x, y) = trained(net, 0), texts(4, 3)
    wider = torch.cat([x, torch.zeros_like(x)], 1), torch.cat([y, torch.full_like(y, IGNORED)], 1)
    with torch.no_grad():
        losses = net.token_losses(tree, *wider)
        torch.testing.assert_close(losses[:, :12], net.token_losses(tree, x, y), rtol=0, atol=1e-6)
        assert not losses[:, 12:].any() and not losses[:, :12][y == IGNORED].any()


def test_a_token_that_only_fills_rows_up_may_be_one_more_than_the_base_knows() -> None:
    net = language_section("llama").network(replace(NEXT, vocabulary=51, num_classes=51, padding=50))
    same, tree, (x, y) = language_network("llama"), trained(language_network("llama"), 0), texts(4, 3)
    filled = x.where(x != 0, 50)
    with torch.no_grad():
        assert torch.equal(net.token_losses(tree, filled, y), same.token_losses(tree, x, y))


def averaged(models: Any, x: Tensor, task: Any) -> Tensor:
    """A method's own prediction, which is asked for all positions."""
    found: Tensor = task.predictions(models, x)
    return found


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_statistics_are_those_of_all_logits_whatever_the_parts_are(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net = language_network("llama")
    task, examples = LanguageModel(net, (), NEXT), Examples(*texts(9, 5))
    examples.y[4] = IGNORED
    one, other = trained(net, 0, 0.5), trained(net, 1, 0.5)
    predictors = {
        "one": Predictor.of(one),
        "mean": Predictor.of(one, other),
        "own": Predictor.of(one, other, combine=averaged),
    }
    with torch.no_grad():
        expected = {
            name: task.measures.statistics(found.predictions(list(found.models), examples.x, task), examples.y)
            for name, found in predictors.items()
        }
    monkeypatch.setattr(output_layer, "LOGITS", rows * VOCABULARY)
    found = evaluate(predictors, examples, task, 4)
    for name, vector in expected.items():
        counts = [0, 1, 3, 4, 5]
        assert found[name].vector[counts].tolist() == vector[counts].tolist()
        assert found[name].vector[2] == pytest.approx(float(vector[2]), rel=1e-6)
    assert found["one"].vector[[0, 4]].tolist() == [9, 8]


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_clients_are_scored_in_stacks(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net = language_network(family)
    task, shared = LanguageModel(net, (), NEXT), trained(net, 9, 0.5)
    asked = [
        ScoringRequest(
            {"own": Predictor.of(trained(net, k, 0.5)), "shared": Predictor.of(shared)}, Examples(*texts(n, k))
        )
        for k, n in enumerate((7, 3, 11))
    ]
    monkeypatch.setattr(output_layer, "LOGITS", rows * VOCABULARY)
    with passes_of_networks() as passes:
        found = evaluate_together(asked, task, 4)
    assert max(len(x) for x in passes if not x.is_floating_point()) == 12, "three clients of four texts in a pass"
    for one, scores in zip(asked, found, strict=True):
        for name, expected in evaluate(one.predictors, one.examples, task, 4).items():
            np.testing.assert_allclose(scores[name].vector, expected.vector, rtol=1e-5, atol=1e-5)
            assert scores[name].vector[[0, 1, 4]].tolist() == expected.vector[[0, 1, 4]].tolist()


def test_exact_match_is_greedy_decoding() -> None:
    net = language_network("gpt2")
    task, tree = LanguageModel(net, (), NEXT), trained(net, 4, 0.5)
    x, y = texts(12, 6)
    decoded = x.clone()
    with torch.no_grad():
        for row, targets in enumerate(y):
            for place in (targets != IGNORED).nonzero()[:, 0].tolist():
                if row % 2 and place + 1 < x.shape[1]:  # every second response is what the model itself would say
                    said = int(net.logits(tree, decoded[row : row + 1])[0, place].argmax())
                    y[row, place] = decoded[row, place + 1] = said
        exact = 0
        for row, targets in enumerate(y):
            own, right = decoded[row : row + 1].clone(), True
            for place in (targets != IGNORED).nonzero()[:, 0].tolist():
                said = int(net.logits(tree, own)[0, place].argmax())
                right &= said == int(targets[place])
                if place + 1 < own.shape[1]:
                    own[0, place + 1] = said
            exact += right
    found = evaluate({"model": Predictor.of(tree)}, Examples(decoded, y), task, 5)["model"]
    assert 0 < exact < 12 and found.metrics()["exact_match"] == exact / 12


def test_bfloat16_bases_compute_the_same_up_to_rounding() -> None:
    net = language_network("llama")
    task, tree, batch = LanguageModel(net, (), NEXT), trained(net, 1), Batch(*texts(6, 1))
    with torch.no_grad():
        exact = task.loss(tree, batch)
        net.compute_in(torch.bfloat16)
        torch.testing.assert_close(task.loss(tree, batch), whole_loss(task, tree, batch), rtol=1e-5, atol=1e-5)
    leaves = {name: leaf.requires_grad_() for name, leaf in tree.items()}
    value = task.loss(leaves, batch)
    assert value.dtype == torch.float32 and float(value.detach()) == pytest.approx(float(exact), rel=0.02)
    assert all(found.dtype == torch.float32 for found in torch.autograd.grad(value, list(leaves.values())))


def test_a_class_that_scores_otherwise_is_asked_for_all_outputs() -> None:
    class Smoothed(LanguageModel):
        def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
            return 2 * super().loss_of(outputs, batch)

    net = language_network("llama")
    tree, batch = trained(net, 1), Batch(*texts(3, 1))
    torch.testing.assert_close(Smoothed(net).loss(tree, batch), 2 * LanguageModel(net).loss(tree, batch))


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not trained: set model\.head\.train=false"):
        language_network("llama", head={"train": True})
    with pytest.raises(ModelError, match="a language model needs one of llama, mistral, qwen2, qwen3, gpt2"):
        language_section("llama", folder=str(base("bert"))).network(NEXT)
    with pytest.raises(ModelError, match=r"texts of at most 64 tokens: set dataset\.length=64"):
        language_section("llama").network(replace(NEXT, shape=(65,)))
    with pytest.raises(ModelError, match=r"texts of at most 62 tokens: set dataset\.length=62"):
        PretrainedModel(folder=str(base("roberta"))).network(InputSpec("tokens", (63,), 4, 50))
    with pytest.raises(ModelError, match="tokens below 50: use the tokenizer of the base"):
        language_section("llama").network(replace(NEXT, vocabulary=51))
    classifier = language_section("llama", folder=str(base("llama"))).network(NEXT)
    with pytest.raises(ModelError, match=r"lacks weights that its config\.json asks for.*lm_head\.weight"):
        classifier.logits(classifier.initialize(0), texts(1, 0)[0])
    folder = tmp_path / "quantised"
    shutil.copytree(base("llama", causal=True), folder)
    config = json.loads((folder / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (folder / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ModelError, match=r"quantised \(bitsandbytes\).*engine\.precision=bfloat16"):
        language_section("llama", folder=str(folder)).network(NEXT)
