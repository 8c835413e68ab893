"""CLIP computes what transformers computes, and a context is trained as autograd through its text tower says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from rayfl.examples import InputSpec
from rayfl.models.pretrained.clip import ClipModel
from rayfl.models.pretrained.making_clip import NAMES
from rayfl.models.pretrained.peft_files import write_adapter
from tests.support.bases import IMAGES, inputs, trained, transformers
from tests.support.clips import (
    ADAPTER,
    clip_network,
    clip_section,
    expected,
    reference,
    texts_with,
    write_clip,
)
from tests.support.toys import assert_equal

CONTEXT, WEIGHT = "model.texts.context", "model.texts.weight"
TEXTS = [f"a photo of a {name}." for name in NAMES]
ENDS = ("<|startoftext|>", "<|endoftext|>")
WAYS: dict[str, dict[str, Any]] = {
    "zero-shot": {"context": "none"},
    "shared": {"context": "shared", "start": "template"},
    "by class": {"context": "by_class", "start": "template"},
}
"""Heads that begin as the template's texts."""


@pytest.mark.two_cases
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("adapter", ["none", ADAPTER, {"name": "ia3"}])
def test_features_and_logits_are_those_of_transformers(way: str, attention: str, adapter: Any) -> None:
    if way == "zero-shot" and adapter == "none":
        return  # nothing is trained
    net, x = clip_network(WAYS[way], attention=attention, adapter=adapter), inputs("vit", 5, 0)
    tree, own = net.initialize(3), expected(TEXTS, x)
    features, logits = net.features_and_logits(tree, x)
    torch.testing.assert_close(features, own.image_embeds, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits, own.logits_per_image, rtol=0, atol=1e-5)
    torch.testing.assert_close(net.classify(tree, features), logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_in_float64_they_are_equal_to_ten_digits(way: str) -> None:
    model = clip_section(WAYS[way], adapter=ADAPTER).build(IMAGES)
    assert isinstance(model, ClipModel)
    own, _ = reference()
    texts = model.text_head.texts
    model.to_empty(device="cpu").double()
    state = {name.replace(".base.", "."): leaf for name, leaf in model.model.named_parameters()}
    with torch.no_grad():
        for name, leaf in own.double().named_parameters():
            state[name].copy_(leaf)
        for name, buffer in model.model.named_buffers():
            if name.endswith("position_ids"):
                buffer.copy_(torch.arange(buffer.numel())[None])
        for name, leaf in state.items():
            if ".lora_" in name:
                leaf.zero_()
        model.text_head.tokens.copy_(texts.tokens), model.text_head.ends.copy_(texts.ends)
        if way == "zero-shot":
            model.text_head.weight.copy_(model.text_head.zero_shot(own))
        else:
            words = own.text_model.embeddings.token_embedding.weight[list(texts.words)]
            shape = (1, 10, 4, 48) if way == "by class" else (1, 4, 48)
            model.text_head.context = torch.nn.Parameter(words.expand(shape).clone())
        x = inputs("vit", 5, 0).double()
        wanted = expected(TEXTS, x)
        torch.testing.assert_close(model.features(x), wanted.image_embeds, rtol=0, atol=1e-10)
        torch.testing.assert_close(model(x), wanted.logits_per_image, rtol=0, atol=1e-10)


def test_older_configurations_read_a_text_at_its_highest_token(tmp_path: Path) -> None:
    """``eos_token_id`` is 2 there, which is a word's in this tokenizer."""
    folder, x = write_clip(tmp_path / "base", eos_token_id=2), inputs("vit", 3, 0)
    net = clip_network({"start": "template"}, folder=str(folder))
    wanted = expected(TEXTS, x, folder).logits_per_image
    torch.testing.assert_close(net.logits(net.initialize(0), x), wanted, rtol=0, atol=1e-5)


def test_the_tokenizer_of_clip_itself_parts_words_from_names(tmp_path: Path) -> None:
    """Its tokens are parts of words, and blanks belong to the token before them."""
    letters = [chr(code) for code in range(33, 127)]
    pieces = [*letters, *(f"{one}</w>" for one in letters), "ph", "ca", "cat</w>", "of</w>", *ENDS]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\np h\nc a\nca t</w>\no f</w>\n")
    options = {"vocab_size": len(pieces), "max_position_embeddings": 77, "eos_token_id": 2}
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = {"image_size": 8, "patch_size": 4, "num_channels": 1}
    config = transformers.CLIPConfig(text_config={**small, **options}, vision_config={**small, **images})
    with torch.random.fork_rng(devices=[]):
        transformers.CLIPModel(config).save_pretrained(tmp_path)
    names, x = ["cat", "dog_house", "golden retriever"], inputs("vit", 3, 0)
    section = clip_section({"classes": names, "start": "template"}, folder=str(tmp_path))
    net = section.network(InputSpec("image", (1, 8, 8), 3))
    texts = [f"a photo of a {name.replace('_', ' ')}." for name in names]
    wanted = expected(texts, x, tmp_path).logits_per_image
    torch.testing.assert_close(net.logits(net.initialize(0), x), wanted, rtol=0, atol=1e-5)


@pytest.mark.two_cases
@pytest.mark.parametrize("context", ["shared", "by_class"])
@pytest.mark.parametrize("length", [1, 3])
def test_steps_on_a_context_are_those_of_autograd_over_transformers(context: str, length: int) -> None:
    net = clip_network({"context": context, "length": length, "template": "a dark picture of the {} ."})
    tree, x, y = net.initialize(7), inputs("vit", 6, 1), torch.arange(6)
    own = tree[CONTEXT].clone()
    assert own.shape == ((10, length, 48) if context == "by_class" else (length, 48))
    model, _ = reference()
    with torch.no_grad():
        images = model.get_image_features(pixel_values=x).pooler_output
        images = images / images.norm(dim=-1, keepdim=True)
    for _ in range(3):
        tree = {CONTEXT: tree[CONTEXT].detach().requires_grad_()}
        (gradient,) = torch.autograd.grad(F.cross_entropy(net.logits(tree, x, training=True), y), [tree[CONTEXT]])
        tree = {CONTEXT: tree[CONTEXT].detach() - 0.02 * gradient}
        own = own.detach().requires_grad_()
        logits = model.logit_scale.exp() * images @ texts_with(own, list(NAMES), " .", model).T
        (wanted,) = torch.autograd.grad(F.cross_entropy(logits, y), [own])
        own = own.detach() - 0.02 * wanted
        assert wanted.abs().max() > 1e-3
        torch.testing.assert_close(tree[CONTEXT], own, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("prompt", [{"context": "shared"}, {"context": "by_class", "length": 2}])
@pytest.mark.parametrize("adapter", ["none", ADAPTER, {**ADAPTER, "use_dora": True}])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.two_cases
def test_stacked_clients_are_one_client_at_a_time(prompt: dict[str, Any], adapter: Any, checkpointing: bool) -> None:
    net = clip_network({"length": 3, **prompt}, adapter=adapter, checkpointing=checkpointing)
    trees = [trained(net, k, 0.02) for k in range(3)]
    x, y = inputs("vit", 12, 0).view(3, 4, 1, 8, 8), torch.arange(12).view(3, 4) % 10
    stack = {name: torch.stack([tree[name] for tree in trees]).requires_grad_() for name in trees[0]}
    losses = vmap(lambda tree, x, y: F.cross_entropy(net.logits(tree, x, training=True), y))(stack, x, y)
    found = torch.autograd.grad(losses.sum(), list(stack.values()))
    for k, tree in enumerate(trees):
        one = {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
        loss = F.cross_entropy(net.logits(one, x[k], training=True), y[k])
        torch.testing.assert_close(loss, losses[k], rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(torch.autograd.grad(loss, list(one.values())), found, strict=True):
            torch.testing.assert_close(theirs[k], mine, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # one model for the samples of several clients
        same = {name: leaf[:1].expand(3, *leaf.shape[1:]) for name, leaf in stack.items()}
        torch.testing.assert_close(
            vmap(net.logits)(same, x).flatten(0, 1), net.logits(trees[0], x.flatten(0, 1)), rtol=1e-5, atol=1e-5
        )


def test_the_tree_is_the_context_and_adapters_of_the_image_tower() -> None:
    net = clip_network({"length": 3}, adapter=ADAPTER)
    assert net.groups["context"] == net.groups["head"] == net.head_names == (CONTEXT,)
    assert net.parameter_names == (*net.groups["adapters"], CONTEXT)
    assert all(site.startswith("model.vision_model.") for site in net.sites) and len(net.sites) == 4
    assert not net.buffer_names and not net.fixed_parameters
    assert net.head_is_fixed and net.head_shape == (10, 32)
    assert (net.rows_per_sample, net.rows_per_model) == (17, 10 * (1 + 3 + 2 + 1))  # [begin] context name . [end]
    fixed = clip_network({"context": "none"}, adapter=ADAPTER)
    assert not fixed.groups["context"] and not fixed.head_names and fixed.rows_per_model == 0
    assert fixed.fixed_parameters.keys() == {WEIGHT}


def test_a_context_is_drawn_from_the_seed_or_begins_as_words() -> None:
    net = clip_network({"context": "by_class"})
    one, other = net.initialize(0)[CONTEXT], net.initialize(1)[CONTEXT]
    assert one.shape == (10, 16, 48) and not torch.equal(one, other)
    assert_equal(net.initialize(0), clip_network({"context": "by_class"}).initialize(0))
    assert float(one.std()) == pytest.approx(0.02, rel=0.05) and abs(float(one.mean())) < 1e-3
    words = clip_network({"start": "template", "template": "the picture of {}"})
    model, tokenizer = reference()
    tokens = tokenizer("the picture of", add_special_tokens=False)["input_ids"]
    wanted = model.text_model.embeddings.token_embedding.weight[tokens].detach()
    for seed in (0, 1):
        assert_equal(words.initialize(seed), {CONTEXT: wanted})
    words.release()
    assert_equal(words.initialize(2), {CONTEXT: wanted})


def test_underscores_are_blanks_and_narrow_types_keep_the_heads_digits() -> None:
    names = [f"handwritten_{name}" for name in NAMES]
    net, x = clip_network({"classes": names, "context": "none"}, adapter=ADAPTER), inputs("vit", 4, 0)
    wanted = expected([f"a photo of a handwritten {name}." for name in NAMES], x).logits_per_image
    torch.testing.assert_close(net.logits(net.initialize(0), x), wanted, rtol=0, atol=1e-5)
    drawn = clip_network({"start": "template"})
    whole = drawn.logits(drawn.initialize(0), x)
    drawn.compute_in(torch.bfloat16)
    narrow = drawn.logits(drawn.initialize(0), x)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, whole, rtol=0, atol=0.05 * float(whole.abs().max()))


def test_adapters_in_the_image_tower_are_loaded_from_files_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    net, x = clip_network({"context": "none"}, adapter=ADAPTER), inputs("vit", 4, 0)
    tree = trained(net, 0)
    write_adapter(tmp_path, tree, clip_section({}, adapter=ADAPTER).peft_settings(list(tree)), {})
    model, tokenizer = reference()
    adapted = peft.PeftModel.from_pretrained(model, tmp_path).eval()
    tokens = tokenizer(TEXTS, padding=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        found = adapted(input_ids=tokens, pixel_values=x).logits_per_image
    torch.testing.assert_close(found, net.logits(tree, x), rtol=0, atol=2e-5)
    begun = clip_network({"context": "none"}, adapter={**ADAPTER, "start": str(tmp_path)})
    assert_equal(begun.initialize(5), tree)
