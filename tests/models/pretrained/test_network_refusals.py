"""Inputs, trees and options that adapted networks refuse, and padding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from pydantic import ValidationError

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.pretrained.initial_values import own_shapes
from rayfl.models.pretrained.section import PretrainedModel
from tests.support.bases import IMAGES as SPEC
from tests.support.bases import inputs, network, section, trained, transformers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"adapter": {"targets": ["q"]}},
            r"model\.adapter\.targets: no linear layer is called 'q'; there are .*'q_proj'",
        ),
        (
            {"adapter": {"layers": [1, 7]}},
            r"model\.adapter\.layers: no targets are in the blocks \[7\]; there are \[0, 1\]",
        ),
        (
            {"adapter": {"targets": r"layers\.0"}},
            r"no linear layer matches 'layers\\\\\.0' as a whole; some are vit\.layers\.0\.attention\.q_proj",
        ),
        ({"base": "0" * 64}, r"has the checksum [0-9a-f]{64}, but model\.base is 0{64}"),
        ({"folder": "/nowhere/vit"}, r"model\.folder: /nowhere/vit is no folder.*rayfl model make tiny-vit"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        section("vit", **options).network(SPEC)


def test_a_pattern_that_is_none_is_refused_where_it_is_read() -> None:
    with pytest.raises(ValidationError, match=r"'\(q_proj' is no regular expression"):
        section("vit", adapter={"targets": "(q_proj"})
    assert section("vit", adapter={"targets": ["q_proj"]}).adapter.targets == ("q_proj",)


def test_inputs_that_do_not_fit_are_refused() -> None:
    kind = type(SPEC)
    with pytest.raises(ModelError, match=r"images of 8 x 8 pixels: set transform\.resize=8"):
        section("vit").network(kind("image", (1, 28, 28), 10))
    with pytest.raises(ModelError, match="images of 1 channels"):
        section("vit").network(kind("image", (3, 8, 8), 10))
    with pytest.raises(ModelError, match="rows of tokens"):
        section("bert").network(SPEC)
    with pytest.raises(ModelError, match="tokens below 50"):
        section("bert").network(kind("tokens", (12,), 4, vocabulary=51))


@pytest.mark.parametrize(("family", "longest"), [("bert", 64), ("roberta", 62), ("llama", 64), ("gpt2", 64)])
def test_rows_are_as_long_as_the_positions_of_the_base(family: str, longest: int) -> None:
    """RoBERTa's positions begin behind two that no token has."""
    net = section(family).network(InputSpec("tokens", (longest,), 4, vocabulary=50))
    x = torch.randint(5, 50, (1, longest), generator=torch.Generator().manual_seed(0))
    assert net.logits(trained(net, 0), x).isfinite().all()
    with pytest.raises(ModelError, match=f"texts of at most {longest} tokens: set dataset.length={longest}"):
        section(family).network(InputSpec("tokens", (longest + 1,), 4, vocabulary=50))


def test_a_tree_of_another_model_is_refused() -> None:
    net = network("vit")
    tree = net.initialize(0)
    with pytest.raises(ModelError, match="parameters do not fit the model"):
        net.logits({name: leaf for name, leaf in tree.items() if "classifier" not in name}, inputs("vit", 1, 0))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "bert", "roberta"])
def test_padding_behind_a_row_changes_nothing(family: str) -> None:
    """A causal model needs no mask for it, and an encoder has one; the class is read at the last token."""
    net = network(family)
    tree, x = trained(net, 0), inputs(family, 3, 0)
    x[:, 8:] = 0
    x[1, 3] = 0  # a token like others, since tokens come after it
    torch.testing.assert_close(net.logits(tree, x), net.logits(tree, x[:, :8]), rtol=1e-5, atol=1e-6)
    other = x.clone()
    other[:, 7] = 9
    assert (net.logits(tree, other) - net.logits(tree, x)).abs().max() > 1e-4


def test_rows_with_another_padding_than_the_base_has_are_refused() -> None:
    @dataclass(frozen=True)
    class Padded(InputSpec):
        padding: int | None = None

    spec = Padded("tokens", (12,), 4, 50, padding=3)
    with pytest.raises(ModelError, match="rows padded with the token 0: use the tokenizer of the base"):
        section("bert").network(spec)
    assert section("bert").network(replace(spec, padding=0)).source.padding == 0
    words = (
        r"tokens below \d+: use the tokenizer of the base, but the data set has texts of 12 tokens, of 9000 distinct"
    )
    with pytest.raises(ModelError, match=words):
        section("bert").network(replace(spec, padding=0, vocabulary=9000))


def test_a_tokenizer_that_names_no_padding_is_told_where_to_name_it() -> None:
    """GPT-2's and Llama's: rows have a token of their own behind all others then, which no base knows."""
    with pytest.raises(ModelError, match=r"its tokenizer names none: set pad_token in tokenizer_config\.json"):
        section("gpt2").network(InputSpec("tokens", (12,), 4, vocabulary=51, padding=50))


@pytest.mark.parametrize(
    ("kind", "options", "spec", "frozen", "factors", "head"),
    [
        (
            "ViTConfig",
            {"num_labels": 100},
            InputSpec("image", (3, 224, 224), 100),
            85_798_656,
            294_912,
            76_900,
        ),
        (
            "LlamaConfig",
            {
                "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
                "intermediate_size": 5632, "vocab_size": 32000, "pad_token_id": 0,
            },
            InputSpec("tokens", (512,), 4, vocabulary=32000),
            1_100_048_384 - 32000 * 2048,  # without the layer that makes words
            1_126_400,
            4 * 2048,
        ),
    ],
    ids=["ViT-B/16", "TinyLlama-1.1B"],
)  # fmt: skip
def test_a_published_size_has_the_scalars_of_the_page_on_memory(
    kind: str, options: dict[str, Any], spec: InputSpec, frozen: int, factors: int, head: int, tmp_path: Path
) -> None:
    """Counted without memory for weights: docs/adapters.md has these numbers."""
    getattr(transformers, kind)(**options).save_pretrained(tmp_path)
    safetensors.torch.save_file({"none": torch.zeros(1)}, tmp_path / "model.safetensors")
    model = section_over(tmp_path).build(spec)
    own = own_shapes(model)
    assert sum(math.prod(shape) for name, shape in own.items() if ".lora_" in name) == factors
    assert sum(math.prod(shape) for name, shape in own.items() if ".lora_" not in name) == head
    base_parameters = {name: leaf for name, leaf in model.named_parameters() if name not in own}
    assert sum(leaf.numel() for leaf in base_parameters.values()) == frozen
    assert all(leaf.device.type == "meta" for leaf in model.parameters())


def section_over(folder: Path) -> PretrainedModel:
    """Adapters of rank 8 over a base."""
    return PretrainedModel.model_validate({"folder": str(folder), "adapter": {"r": 8, "alpha": 16}})
