"""Virtual tokens against transformers' own models with inputs_embeds, in float64, and against peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.errors import ModelError
from tests.models.pretrained.test_network import check_gradients, cross_entropy, two_models
from tests.support import exact
from tests.support.bases import (
    CAUSAL,
    CONFIGS,
    NEXT,
    TOKENS,
    base,
    inputs,
    language_network,
    language_section,
    network,
    section,
    texts,
    trained,
)

N = 3
SOFT: dict[str, Any] = {"name": "prompt", "tokens": N}
DEEP: dict[str, Any] = {**SOFT, "depth": "deep"}
DECODERS = ["llama", "mistral", "qwen3", "gpt2"]
ENCODERS = ["bert", "roberta"]


def ragged(samples: int, seed: int) -> tuple[Tensor, list[int]]:
    """Rows of tokens that are filled up with 0, and their lengths; the longest is full."""
    x, lengths = inputs("llama", samples, seed), [12, 5, 9, 1, 7][:samples]
    return x.where(torch.arange(12) < torch.tensor(lengths)[:, None], 0), lengths


def of_decoder(family: str, tree: dict[str, Tensor], x: Tensor, lengths: list[int], classes: int | None) -> Tensor:
    """Logits of each row alone, without padding: of its last token, or of all of them."""
    model = exact.plain(family, classes)
    found = []
    for row, length in zip(x, lengths, strict=True):
        embedded = model.get_input_embeddings()(row[None, :length])
        whole = torch.cat([tree["prompts.0.weight"][None], embedded], 1)
        hidden = model.base_model(inputs_embeds=whole).last_hidden_state[0]
        if classes is None:
            found.append(model.lm_head(hidden[N:]))
        else:
            found.append(hidden[-1] @ tree["model.score.weight"].T)
    return torch.stack(found) if classes is not None else torch.cat(found)


def of_encoder(family: str, tree: dict[str, Tensor], x: Tensor, lengths: list[int]) -> Tensor:
    """Logits of each row alone, of which the class is that of the first of its own tokens."""
    model = exact.plain(family, 4)

    def without_virtual(_: Any, args: Any, out: Any) -> Any:
        out.last_hidden_state = out.last_hidden_state[:, N:]
        return out

    model.base_model.encoder.register_forward_hook(without_virtual)
    found = []
    for row, length in zip(x, lengths, strict=True):
        whole = torch.cat([tree["prompts.0.weight"], model.get_input_embeddings()(row[:length])])[None]
        found.append(exact.with_head(model, tree, lambda whole=whole: model(inputs_embeds=whole).logits[0]))  # type: ignore[misc]
    return torch.stack(found)


def of_images(tree: dict[str, Tensor], x: Tensor) -> Tensor:
    """Logits of a vision transformer into which hooks put the tokens."""
    model = exact.plain("vit", 10)
    prompts = [leaf for name, leaf in tree.items() if name.startswith("prompts.")]

    def put(hidden: Tensor, own: Tensor, behind: int) -> Tensor:
        return torch.cat([hidden[:, :1], own.expand(len(hidden), -1, -1), hidden[:, behind:]], 1)

    model.vit.embeddings.register_forward_hook(lambda _, args, out: put(out, prompts[0], 1))
    for layer, own in zip(model.vit.layers[1:], prompts[1:], strict=False):
        layer.register_forward_pre_hook(lambda _, args, own=own: (put(args[0], own, 1 + N), *args[1:]))
    return exact.with_head(model, tree, lambda: model(pixel_values=x.double()).logits)


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_reads_them_first_and_tells_the_class_at_the_last_token(family: str) -> None:
    net, (x, lengths) = network(family, adapter=SOFT), ragged(5, 0)
    tree = exact.double(trained(net, 3))
    exact.check_same(exact.outputs(net, tree, x), of_decoder(family, tree, x, lengths, 4), tree)


@pytest.mark.parametrize("family", sorted(CAUSAL))
@pytest.mark.two_cases
def test_a_language_model_predicts_after_the_texts_own_tokens(family: str) -> None:
    net, (x, lengths) = language_network(family, adapter=SOFT), ragged(5, 1)
    tree = exact.double(trained(net, 3))
    whole = exact.outputs(net, tree, x)
    assert whole.shape == (5, 12, 50)
    found = torch.cat([row[:length] for row, length in zip(whole, lengths, strict=True)])
    exact.check_same(found, of_decoder(family, tree, x, lengths, None), tree)


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_reads_them_first_and_tells_the_class_at_the_first_own_token(family: str) -> None:
    net, (x, lengths) = network(family, adapter=SOFT), ragged(5, 2)
    tree = exact.double(trained(net, 3))
    exact.check_same(exact.outputs(net, tree, x), of_encoder(family, tree, x, lengths), tree)


@pytest.mark.parametrize("adapter", [SOFT, DEEP])
def test_images_have_them_behind_the_class_token(adapter: dict[str, Any]) -> None:
    net, x = network("vit", adapter=adapter), inputs("vit", 5, 0)
    tree = exact.double(trained(net, 3))
    assert len(net.groups["prompt"]) == (2 if adapter is DEEP else 1)
    exact.check_same(exact.outputs(net, tree, x), of_images(tree, x), tree)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("family", "adapter"), [("vit", DEEP), ("llama", SOFT), ("gpt2", SOFT), ("roberta", SOFT)])
def test_folded_gradients_are_those_of_one_client_at_a_time(family: str, adapter: Any, checkpointing: bool) -> None:
    net = network(family, adapter=adapter, checkpointing=checkpointing)
    check_gradients(net, family, cross_entropy, [trained(net, k) for k in range(3)])


def test_several_passes_with_teachers_and_heads_alone() -> None:
    net = network("vit", adapter=SOFT)
    check_gradients(net, "vit", two_models, [trained(net, k) for k in range(3)])


def test_the_tree_is_virtual_tokens_and_head_and_they_are_rows_of_products() -> None:
    net = network("vit", adapter=DEEP)
    assert net.parameter_names == (
        "prompts.0.weight", "prompts.1.weight", "model.classifier.weight", "model.classifier.bias",
    )  # fmt: skip
    assert net.groups["adapters"] == net.groups["prompt"] == net.parameter_names[:2] and not net.sites
    assert net.rows_per_sample == 1 + 4 + N and network("bert", adapter=SOFT).rows_per_sample == 12 + N
    assert len(net.layers) == 3


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.two_cases
def test_a_base_in_bfloat16_has_float32_tokens(family: str) -> None:
    net, whole = network(family, adapter=SOFT), network(family, adapter=SOFT)
    net.compute_in(torch.bfloat16)
    tree, x = trained(net, 0), inputs(family, 4, 0)
    found, expected = net.logits(tree, x), whole.logits(tree, x)
    assert found.dtype == torch.float32 and 0 < (found - expected).abs().max() < 0.1 * expected.abs().max()


def embeddings(family: str) -> Tensor:
    model = exact.plain(family, 4)
    found: Tensor = model.get_input_embeddings().weight.float()
    return found


def test_they_begin_as_embeddings_of_drawn_tokens_of_a_text_or_as_drawn_numbers(tmp_path: Path) -> None:
    known = embeddings("bert")
    net = network("bert", adapter={**SOFT, "tokens": 20})
    first, second = (net.initialize(seed)["prompts.0.weight"] for seed in (0, 1))
    chosen = [(known == row).all(1) for row in first]
    assert all(one.any() for one in chosen) and len({int(one.int().argmax()) for one in chosen}) > 5
    assert not torch.equal(first, second) and torch.equal(first, net.initialize(0)["prompts.0.weight"])
    drawn = network("bert", adapter={**SOFT, "tokens": 20, "init": "random"}).initialize(0)["prompts.0.weight"]
    assert 0.45 < drawn.abs().max() <= 0.5
    of_images = network("vit", adapter={**SOFT, "tokens": 20})
    images = of_images.initialize(0)["prompts.0.weight"]
    of_images.logits(of_images.initialize(1), inputs("vit", 2, 0))  # what is bound has no influence
    assert images.shape == of_images.initialize(2)["prompts.0.weight"].shape == (20, 32)
    bound = (6 / (16 + 32)) ** 0.5
    assert 0.95 * bound < images.abs().max() <= bound
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordLevel({"what": 7, "is": 8, "it": 9, "[UNK]": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    of_text = section("bert", adapter={**SOFT, "tokens": 5, "text": "what is it", "tokenizer": str(tmp_path)})
    for seed in (0, 1):
        tree = of_text.network(TOKENS).initialize(seed)
        assert torch.equal(tree["prompts.0.weight"], known[[7, 8, 9, 7, 8]])
    settled = of_text.settled()
    assert settled.adapter.text_tokens == (7, 8, 9)  # type: ignore[union-attr]
    (tmp_path / "tokenizer.json").unlink()
    assert torch.equal(settled.network(TOKENS).initialize(0)["prompts.0.weight"], known[[7, 8, 9, 7, 8]])
    with pytest.raises(ModelError, match=r"model\.adapter\.text: .* is no tokenizer"):
        of_text.network(TOKENS)


def test_bytes_are_a_tokenizer_too() -> None:
    net = language_section("llama", folder=str(base("llama", causal=True)), adapter={**SOFT, "text": "\x03\x05"})
    with pytest.raises(ModelError, match=r"tokenizer\.json is no tokenizer"):
        net.network(NEXT)
    given = {**SOFT, "text": "\x03\x05", "tokenizer": "bytes"}
    assert language_section("llama", adapter=given).settled().adapter.text_tokens == (5, 7)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"model\.adapter\.text has the token 99, and the base has 50"):
        language_network("llama", adapter={**given, "text": "a"})


@pytest.mark.parametrize(
    ("family", "adapter", "message"),
    [
        ("bert", DEEP, r"depth=deep is for images"),
        ("vit", {**SOFT, "init": "vocabulary"}, r"model\.adapter\.init=vocabulary is for texts"),
        ("vit", {**SOFT, "text": "a"}, r"model\.adapter\.text is for texts"),
        ("llama", {**SOFT, "tokens": 53}, r"at most 11 tokens beside 53 virtual ones: set dataset\.length=11"),
        ("roberta", {**SOFT, "tokens": 51}, r"at most 11 tokens beside 51 virtual ones"),
    ],
)
def test_what_does_not_fit_the_base_is_refused(family: str, adapter: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        network(family, adapter=adapter)


def test_stacked_losses_of_a_language_model_are_those_of_one_client_at_a_time() -> None:
    net = language_network("llama", adapter=SOFT)
    trees = [trained(net, k) for k in range(3)]
    x, y = texts(4, 0)
    stack = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
    found = torch.func.vmap(lambda tree: net.token_losses(tree, x, y))(stack)
    for k, tree in enumerate(trees):
        torch.testing.assert_close(found[k], net.token_losses(tree, x, y), rtol=1e-5, atol=1e-6)
