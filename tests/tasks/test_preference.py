"""Preferences from texts to scores: a step against transformers, looped and stacked, and passes over the base."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor
from torch.func import vmap

from rayfl.engine.scoring.evaluation import evaluate, samples_at_a_time
from rayfl.engine.scoring.evaluation_together import ScoringRequest, evaluate_together
from rayfl.engine.stack_sizes import clients_for_rows
from rayfl.examples import Examples, InputSpec
from rayfl.metrics.language import IGNORED
from rayfl.metrics.preference import PreferenceLoss
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.tasks.base import Batch, Predictor
from rayfl.tasks.preference import Preference, PreferenceSection
from rayfl.tasks.texts import trimmer_of
from tests.support.bases import language_network, merged, passes_of_networks, texts, trained
from tests.support.elsewhere import elsewhere
from tests.support.toys import assert_equal

torch.set_num_threads(1)
SPEC = InputSpec("tokens", (2, 12), 50, 50, "preference", padding=0)
LOSSES = {
    kind: PreferenceLoss(kind, beta)  # type: ignore[arg-type]
    for kind, beta in (("dpo", 0.5), ("ipo", 0.5), ("simpo", 2.0), ("orpo", 1.0))
}
KINDS = pytest.mark.parametrize("kind", list(LOSSES))


def task_of(net: AdaptedNetwork, kind: str = "dpo") -> Preference:
    return Preference(net, (), SPEC, LOSSES[kind])


def pairs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pairs of ragged texts, and the next tokens of their answers."""
    x, y = texts(2 * count, seed)
    return x.view(count, 2, 12), y.view(count, 2, 12)


def by_transformers(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The log-probability of each answer of n pairs, shape (n, 2), text by text, without padding."""
    found = []
    for text, target in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        places = (target != IGNORED).nonzero()[:, 0]
        read = text[: int(places[-1]) + 1][None]
        logs = model(input_ids=read).logits[0].log_softmax(-1)
        found.append(logs[places, target[places]].sum())
    return torch.stack(found).view(-1, 2)


def test_a_step_of_dpo_is_that_of_a_loop_over_the_texts_with_transformers() -> None:
    """A loop of its own with two whole models: one is trained, with the adapters' products added, and one is not."""
    net = language_network("llama")
    task, tree = task_of(net), trained(net, 1)
    x, y = pairs(3, 0)
    own, reference = merged("llama", net, tree), merged("llama", net, dict(net.initialize(0)))
    policy = by_transformers(own, x, y)
    with torch.no_grad():
        known = by_transformers(reference, x, y)
    margins = 0.5 * ((policy[:, 0] - known[:, 0]) - (policy[:, 1] - known[:, 1]))
    expected = -F.logsigmoid(margins).mean()
    expected.backward()
    variables = {name: leaf.requires_grad_() for name, leaf in tree.items()}
    found = task.loss(variables, Batch(x, y))
    assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    gradients = dict(zip(tree, torch.autograd.grad(found, list(variables.values())), strict=True))
    weights = dict(own.named_parameters())
    for site in net.sites:
        whole = weights[f"{site.removeprefix('model.')}.weight"].grad
        b, a = (tree[f"{site}.lora_{factor}.weight"].detach() for factor in "BA")
        torch.testing.assert_close(gradients[f"{site}.lora_B.weight"], net.scale * whole @ a.T, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradients[f"{site}.lora_A.weight"], net.scale * b.T @ whole, rtol=1e-4, atol=1e-6)
    tree = {name: leaf.detach() for name, leaf in tree.items()}
    margins, expected = margins.detach(), expected.detach()
    scored = task.statistics(Predictor.of(tree), [tree], x, y).tolist()
    assert scored[:2] == [3, int((margins > 0).sum())]
    assert scored[2:] == pytest.approx([float(margins.sum()), 3 * float(expected)], abs=1e-5)


@KINDS
def test_stacked_losses_and_gradients_are_those_of_single_clients(kind: str) -> None:
    net = language_network("qwen2")
    task, trees = task_of(net, kind), [trained(net, seed) for seed in (1, 2, 3)]
    x, y = (part.view(3, 4, 2, 12) for part in pairs(12, 3))
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]])
    stack = {name: torch.stack([tree[name] for tree in trees]).requires_grad_() for name in trees[0]}
    losses = vmap(lambda tree, *batch: task.loss(tree, Batch(*batch)))(stack, x, y, mask)
    gradients = torch.autograd.grad(losses.sum(), list(stack.values()))
    for client, tree in enumerate(trees):
        size = int(mask[client].sum())
        variables = {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
        alone = task.loss(variables, Batch(x[client, :size], y[client, :size]))
        torch.testing.assert_close(losses[client], alone, rtol=1e-5, atol=1e-5)
        for stacked, own in zip(gradients, torch.autograd.grad(alone, list(variables.values())), strict=True):
            torch.testing.assert_close(stacked[client], own, rtol=1e-4, atol=1e-5)


@KINDS
def test_the_loss_of_outputs_is_the_loss_computed_in_parts(kind: str) -> None:
    net = language_network("gpt2")
    task, tree = task_of(net, kind), trained(net, 1)
    batch = Batch(*pairs(4, 2))
    whole = task.loss_of(task.logits(tree, batch), batch)
    torch.testing.assert_close(task.loss(tree, batch), whole, rtol=1e-5, atol=1e-5)
    assert task.logits(tree, batch).shape == (4, 2, 12, 50)


def test_the_reference_is_read_once_a_mini_batch_without_gradients_and_of_no_loss_without_one() -> None:
    net = language_network("llama")
    tree = {name: leaf.requires_grad_() for name, leaf in trained(net, 1).items()}
    for kind, passes in (("dpo", 2), ("ipo", 2), ("simpo", 1), ("orpo", 1)):
        task, batch = task_of(net, kind), Batch(*pairs(3, 0))
        with passes_of_networks() as seen:
            task.loss(tree, batch)
            assert len(seen) == passes and {len(x) for x in seen} == {6}
            task.loss(tree, batch)  # another loss of the same mini-batch, as APFL has it
            assert len(seen) == passes + 1
            task.loss(tree, Batch(*pairs(3, 1)))
            assert len(seen) == 2 * passes + 1


def test_the_reference_is_what_the_run_begins_with() -> None:
    """With the adapters of the start every margin is 0 and the loss log 2, whatever the adapter was trained for."""
    net = language_network("llama")
    begun = trained(net, 5)
    net._own_given.update(begun)
    net._drawn = None
    task, batch = task_of(net), Batch(*pairs(3, 0))
    assert_equal(net.beginning(), begun)
    assert float(task.loss(begun, batch)) == pytest.approx(np.log(2), abs=1e-6)
    assert float(task.loss(trained(language_network("llama"), 1), batch)) != pytest.approx(np.log(2), abs=1e-3)


@pytest.mark.two_cases
@KINDS
def test_clients_scored_together_in_batches_and_alone_have_the_same_sums(kind: str) -> None:
    net = language_network("llama")
    task, asked = task_of(net, kind), []
    for client, size in enumerate((5, 3, 0, 4)):
        x, y = pairs(size, client)
        models = {"global": trained(net, 0), "own": trained(net, 1 + client)}
        asked.append(ScoringRequest({name: Predictor.of(one) for name, one in models.items()}, Examples(x, y)))
    for batch_size in (2, 1000):
        for request, together in zip(asked, evaluate_together(asked, task, batch_size, most_rows=48), strict=True):
            alone = evaluate(request.predictors, request.examples, task, batch_size)
            for name, found in together.items():
                np.testing.assert_allclose(found.vector, alone[name].vector, rtol=1e-5, atol=1e-5)
    both = Predictor.of(trained(net, 0), trained(net, 1))
    plain = evaluate({"both": both}, asked[0].examples, task, 3)["both"].vector
    mixing = Predictor(both.models, lambda models, x, task: task.predictions(models, x))
    again = evaluate({"it": mixing}, asked[0].examples, task, 3)["it"].vector
    np.testing.assert_allclose(plain, again, rtol=1e-5, atol=1e-5)


def test_on_a_device_losses_and_sums_are_those_of_the_processor() -> None:
    net = language_network("llama")
    task, tree, (x, y) = task_of(net), trained(net, 1), pairs(5, 0)
    loss = task.loss(tree, Batch(x, y))
    expected = evaluate({"own": Predictor.of(tree)}, Examples(x, y), task, 1000)["own"].vector
    with elsewhere() as device:
        there = {name: leaf.to(device) for name, leaf in tree.items()}
        examples = Examples(x.to(device), y.to(device))
        found = evaluate({"own": Predictor.of(there)}, examples, task, 2)["own"].vector
        assert float(task.loss(there, Batch(examples.x, examples.y))) == pytest.approx(float(loss), abs=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_columns_without_tokens_are_cut_by_the_longer_text_and_a_sample_counts_two_texts() -> None:
    net = language_network("llama")
    task = task_of(net)
    x, y = pairs(4, 0)
    x[:, :, 7:], y[:, :, 7:] = 0, IGNORED
    x[2, 1, 7] = 3
    trimmer = trimmer_of(task)
    assert trimmer is not None
    lengths = trimmer.lengths(x, y)
    assert lengths.shape == (4,) and int(lengths[2]) == 8 and int(lengths[0]) <= 7
    cut = trimmer.cut(x, y, lengths)
    assert cut[0].shape == cut[1].shape == (4, 2, 8)
    tree = trained(net, 1)
    torch.testing.assert_close(task.loss(tree, Batch(*cut)), task.loss(tree, Batch(x, y)), rtol=1e-6, atol=1e-6)
    assert net.rows_per_sample == 12 and clients_for_rows(12 * 2 * 5 * 3, task, batch_size=5) == 3
    assert samples_at_a_time(10**6, task) == (1 << 14) // 24
    assert trimmer.lengths(torch.zeros(0, 1), torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"loss": "orpo", "beta": 0.1}, r"beta is for loss=dpo, ipo, simpo"),
        ({"loss": "simpo", "label_smoothing": 0.1}, r"label_smoothing is for loss=dpo"),
        ({"gamma": 1.0}, r"gamma is for loss=simpo"),
        ({"odds_weight": 1.0}, r"odds_weight is for loss=orpo"),
        ({"label_smoothing": 0.5}, r"less than 0.5"),
        ({"beta": 0}, r"greater than 0"),
    ],
)
def test_options_that_a_loss_does_not_read_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        PreferenceSection(**section)
