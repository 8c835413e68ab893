"""Loading a base: equal to what its files hold, in another type too, and little more memory than that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.loading import Source
from scripts.bench import load_base
from tests.support.bases import base, network, write_base

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


@pytest.mark.slow
@pytest.mark.parametrize("stored", load_base.TYPES)
def test_loading_takes_little_more_memory_than_the_base(stored: str, tmp_path: Path) -> None:
    load_base.write_base(tmp_path, stored, 200)
    for dtype in load_base.TYPES:
        found = load_base.measured(tmp_path, dtype)
        assert found.peak <= 1.2 * found.weights + found.shard
        assert found.used <= 1.2 * found.weights + found.shard
