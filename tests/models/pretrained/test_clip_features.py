"""Features of CLIP's texts and of images' patches, alone and in stacks, are those of transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from rayfl.models.pretrained.making_clip import NAMES
from tests.support.bases import inputs, trained
from tests.support.clips import ADAPTER, clip_network, expected, texts_with, wide_network, wide_reference

CONTEXT = "model.texts.context"
WIDE = inputs("vit", 5, 0).double()


def unit(rows: Tensor) -> Tensor:
    return rows / rows.square().sum(-1, keepdim=True).sqrt()


def patches_of(x: Tensor) -> Tensor:
    """Features of patches by transformers' own modules, one patch after the other."""
    model, _ = wide_reference()
    with torch.no_grad():
        hidden = model.vision_model(pixel_values=x).last_hidden_state
        rows = [model.visual_projection(model.vision_model.post_layernorm(hidden[:, n])) for n in range(1, 17)]
    return unit(torch.stack(rows, 1))


@pytest.mark.two_cases
@pytest.mark.parametrize("adapter", ["none", ADAPTER])
@pytest.mark.parametrize("prompt", [{"length": 2}, {"length": 3, "context": "by_class"}, {"start": "template"}])
def test_in_float64_they_are_equal_to_ten_digits(prompt: dict[str, Any], adapter: Any) -> None:
    net = wide_network(prompt, adapter=adapter)
    tree = net.initialize(4)
    wanted = texts_with(tree[CONTEXT], list(NAMES), ".")
    found = net.text_features(tree)
    assert found.dtype == torch.float64 and found.shape == (10, 32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    patches = net.patch_features(tree, WIDE)
    assert patches.shape == (5, 16, 32)
    torch.testing.assert_close(patches, patches_of(WIDE), rtol=0, atol=1e-11)
    logits = net.text_scale * net.features(tree, WIDE) @ found.T
    torch.testing.assert_close(logits, net.logits(tree, WIDE), rtol=0, atol=1e-11)


@pytest.mark.two_cases
@pytest.mark.parametrize("template", ["a photo of a {}.", "the {}", "a handwritten picture of the number {} ."])
@pytest.mark.parametrize("prompt", [{"length": 1}, {"length": 5, "context": "by_class"}, {"start": "template"}, {}])
def test_the_templates_texts_are_the_same_whatever_the_context(prompt: dict[str, Any], template: str) -> None:
    """Shorter and longer contexts than the template's words, whose places all come back."""
    if prompt:
        net = wide_network({**prompt, "template": template})
    else:
        net = wide_network({"context": "none", "template": template}, adapter=ADAPTER)
    wanted = expected([template.replace("{}", name) for name in NAMES], WIDE).text_embeds
    torch.testing.assert_close(net.template_features, unit(wanted.double()), rtol=0, atol=1e-11)
    assert not net.why_no_template


def test_a_template_that_is_longer_than_the_base_reads_is_said() -> None:
    """A short context makes texts of it that can be read; the template's own cannot."""
    net = clip_network({"length": 1, "template": "a " * 40 + "{}"})
    assert "have 43 tokens, and the base reads at most 32: shorten model.prompt.template" in net.why_no_template
    assert not clip_network({"length": 1, "template": "a " * 29 + "{}"}).why_no_template


def test_they_follow_the_type_that_is_computed_in() -> None:
    net = clip_network({"length": 2})
    whole, tree = net.template_features, net.initialize(0)
    assert whole.dtype == net.text_features(tree).dtype == torch.float32
    net.compute_in(torch.bfloat16)
    assert torch.equal(net.template_features, whole)
    assert net.text_features(tree).dtype == net.patch_features(tree, inputs("vit", 2, 0)).dtype == torch.float32
    net.compute_in(torch.float64)
    assert net.template_features.dtype == torch.float64


def test_without_a_context_texts_are_the_templates() -> None:
    net = clip_network({"context": "none"}, adapter=ADAPTER)
    tree = net.initialize(0)
    torch.testing.assert_close(net.text_features(tree), net.template_features, rtol=0, atol=1e-6)
    stack = {name: leaf.expand(3, *leaf.shape) for name, leaf in tree.items()}
    found = vmap(net.text_features)(stack)
    torch.testing.assert_close(found, net.text_features(tree).expand(3, -1, -1), rtol=0, atol=0)


@pytest.mark.parametrize("prompt", [{"length": 2}, {"length": 2, "context": "by_class"}])
@pytest.mark.parametrize("adapter", ["none", ADAPTER])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.two_cases
def test_stacked_clients_are_one_client_at_a_time(prompt: dict[str, Any], adapter: Any, checkpointing: bool) -> None:
    net = clip_network(prompt, adapter=adapter, checkpointing=checkpointing)
    trees = [trained(net, k, 0.02) for k in range(3)]
    x = inputs("vit", 12, 0).view(3, 4, 1, 8, 8)
    stack = {name: torch.stack([tree[name] for tree in trees]).requires_grad_() for name in trees[0]}

    def value(tree: Any, x: Tensor) -> Tensor:
        texts = net.text_features(tree, training=True)
        return (net.patch_features(tree, x, training=True) @ texts.T).square().sum()

    values = vmap(value)(stack, x)
    found = torch.autograd.grad(values.sum(), list(stack.values()))
    for k, tree in enumerate(trees):
        one = {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
        alone = value(one, x[k])
        torch.testing.assert_close(alone, values[k], rtol=1e-5, atol=1e-4)
        for mine, theirs in zip(torch.autograd.grad(alone, list(one.values())), found, strict=True):
            torch.testing.assert_close(theirs[k], mine, rtol=1e-3, atol=1e-4)
    with torch.no_grad():  # one model that is asked for several clients
        same = {name: leaf[:1].expand(3, *leaf.shape[1:]) for name, leaf in stack.items()}
        found_texts = vmap(net.text_features)(same)
        torch.testing.assert_close(found_texts, net.text_features(trees[0]).expand(3, -1, -1), rtol=1e-5, atol=1e-6)
