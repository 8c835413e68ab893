"""Loading a base: equal to what its files hold, in another type too, and little more memory than that."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.loading import Source
from scripts.bench import load_base
from tests.support.bases import CONFIGS, base, network, transformers, write_base

PURPOSES = {"vit": "images", "llama": "next_tokens", "gpt2": "next_tokens", "roberta": "sequences"}


@pytest.mark.parametrize("family", PURPOSES)
def test_weights_in_another_type_are_those_of_the_files_rounded(family: str, tmp_path: Path) -> None:
    purpose = PURPOSES[family]
    folder = base(family, causal=purpose == "next_tokens")
    classes = None if purpose == "next_tokens" else {"vit": 5}.get(family, 4)
    source = network(family, folder=str(folder)).source if classes else None
    known = source or Source(str(folder), BaseFolder(folder).sha256, "next_tokens", None, "sdpa")
    whole, rounded = known.read(torch.float32), known.read(torch.bfloat16)
    assert whole.state_dict().keys() == rounded.state_dict().keys()
    head = known.family.block
    for name, leaf in whole.state_dict().items():
        own = rounded.state_dict()[name]
        assert own.dtype == (torch.bfloat16 if leaf.is_floating_point() else leaf.dtype)
        if classes is None or not name.startswith(head):  # a head for other classes is not the files'
            assert torch.equal(own, leaf.to(own.dtype)), name
    places = {leaf.data_ptr() for leaf in rounded.parameters()}
    assert len(places) == len({leaf.data_ptr() for leaf in whole.parameters()})  # what is tied stays tied
    assert not any(leaf.requires_grad for leaf in rounded.parameters())


def test_shards_in_another_type_are_one_base(tmp_path: Path) -> None:
    folder = write_base("llama", tmp_path / "shards", shard="20KB", causal=True)
    one, several = (
        Source(str(place), BaseFolder(place).sha256, "next_tokens", None, "sdpa").read(torch.bfloat16).state_dict()
        for place in (base("llama", causal=True), folder)
    )
    assert all(torch.equal(one[name], several[name]) for name in one)


def changed_base(family: str, model: str, folder: Path, **fields: Any) -> Source:
    """What reads a base for four classes whose files a class of transformers wrote, and whose config.json was changed.

    Args:
        family: of :data:`CONFIGS`.
        model: the class that writes the files.
        folder: is made.
        **fields: of config.json.
    """
    config, _, options = CONFIGS[family]
    getattr(transformers, model)(getattr(transformers, config)(**options)).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return Source(str(folder), BaseFolder(folder).sha256, "images" if family == "vit" else "sequences", 4, "sdpa", 0)


@pytest.mark.parametrize(
    ("family", "model", "fields", "weights"),
    [
        ("llama", "LlamaForCausalLM", {"num_hidden_layers": 1}, "9 weights in .*model.layers.1.input_layernorm"),
        ("bert", "BertModel", {"num_hidden_layers": 1}, "16 weights in .*encoder.layer.1.attention"),
        ("vit", "ViTForImageClassification", {"num_hidden_layers": 1}, "16 weights in .*vit.layers.1.attention"),
        ("qwen2", "Qwen2ForCausalLM", {"model_type": "llama"}, "6 weights in .*self_attn.k_proj.bias"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_without_a_place_in_the_model_are_named(
    family: str,
    model: str,
    fields: dict[str, Any],
    weights: str,
    dtype: torch.dtype,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    changed_base(family, model, tmp_path / "base", **fields).read(dtype)
    assert len(caplog.messages) == 1 and re.search(weights, caplog.messages[0])


@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("llama", "LlamaForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("bert", "BertForPreTraining"),
        ("roberta", "RobertaForMaskedLM"),
        ("roberta", "RobertaForTokenClassification"),  # whose head has the name of the new one
        ("vit", "ViTModel"),  # with a pooling layer
        ("vit", "ViTForImageClassification"),
    ],
)
def test_heads_for_other_tasks_are_left_out_without_a_word(
    family: str, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed_base(family, model, tmp_path / "base").read(torch.float32)
    assert not caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize("stored", load_base.TYPES)
def test_loading_takes_little_more_memory_than_the_base(stored: str, tmp_path: Path) -> None:
    load_base.write_base(tmp_path, stored, 200)
    for dtype in load_base.TYPES:
        found = load_base.measured(tmp_path, dtype)
        assert found.peak <= 1.2 * found.weights + found.shard
        assert found.used <= 1.2 * found.weights + found.shard
