"""A base is a local folder known by its content: shards, checksums, records, and what is wrong with one."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from rayfl.errors import ConfigError, ModelError
from rayfl.models.pretrained import loading, making
from rayfl.models.pretrained.folder import RECORD, BaseFolder
from rayfl.models.pretrained.peft_files import SETTINGS
from rayfl.models.pretrained.section import PretrainedModel
from tests.support.bases import IMAGES, base, inputs, trained, transformers, write_base


def copied(tmp_path: Path, name: str = "copy") -> Path:
    folder = tmp_path / name
    shutil.copytree(base("vit"), folder)
    (folder / RECORD).unlink(missing_ok=True)
    return folder


def flip(file: Path, place: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(bytes(content))


def test_one_file_and_many_shards_are_one_base(tmp_path: Path) -> None:
    whole, parts = write_base("vit", tmp_path / "whole"), write_base("vit", tmp_path / "parts", shard="40KB")
    assert len(BaseFolder(whole).files) == 1 and len(BaseFolder(parts).files) > 1
    assert BaseFolder(whole).sha256 == BaseFolder(parts).sha256
    models = [PretrainedModel(folder=str(folder)).network(IMAGES) for folder in (whole, parts)]
    tree, x = trained(models[0], 0), inputs("vit", 3, 0)
    assert torch.equal(models[0].logits(tree, x), models[1].logits(tree, x))


@pytest.mark.parametrize("shards", [("40KB", "5GB"), ("5GB", "40KB")], ids=["shards first", "one file first"])
def test_a_folder_that_was_saved_to_twice_is_the_model_that_transformers_reads(
    shards: tuple[str, str], tmp_path: Path
) -> None:
    """In whatever type: files of another type are read by other code."""
    for seed, shard in enumerate(shards):
        write_base("vit", tmp_path, shard, seed)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).state_dict()
    name = "vit.embeddings.cls_token"
    read = BaseFolder(tmp_path).tensor(name)
    assert read is not None and torch.equal(read, theirs[name])
    net, x = PretrainedModel(folder=str(tmp_path)).network(IMAGES), inputs("vit", 1, 0)
    for dtype in (torch.float32, torch.bfloat16):
        net.compute_in(dtype)
        net.logits(net.initialize(0), x)
        (own,) = net._bases.values()
        assert torch.equal(own.state_dict()[name], theirs[name].to(dtype))


def test_the_checksum_is_that_of_weights_and_of_what_is_computed(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    first = BaseFolder(folder).sha256
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9", "_name_or_path": "x"}))
    assert BaseFolder(folder).sha256 == first
    (folder / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-3}))
    assert BaseFolder(folder).sha256 != first
    (folder / "config.json").write_text(json.dumps(config))
    assert BaseFolder(folder).sha256 == first
    flip(folder / "model.safetensors")
    assert BaseFolder(folder).sha256 != first


def test_a_record_spares_reading_and_says_nothing_of_changed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(tmp_path)
    first = BaseFolder(folder).sha256
    assert json.loads((folder / RECORD).read_text())["sha256"] == first
    monkeypatch.setattr(BaseFolder, "digest", lambda self: "read again")
    assert BaseFolder(folder).sha256 == first
    os.utime(folder / "model.safetensors", (1, 1))
    assert BaseFolder(folder).sha256 == "read again"
    (folder / RECORD).write_text("{damaged")
    assert BaseFolder(folder).sha256 == "read again"


def test_a_changed_base_is_refused_before_it_is_used(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    section = PretrainedModel(folder=str(folder)).settled()
    assert section.base == BaseFolder(folder).sha256
    assert section.settled() == section
    net = section.network(IMAGES)
    flip(folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"but model\.base is {section.base}"):
        section.network(IMAGES)
    with pytest.raises(ModelError, match=rf"but model\.base is {section.base}"):
        net.logits(net.initialize(0), inputs("vit", 1, 0))


def spoil(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "no json":
        (folder / "config.json").write_text("{")
    elif how == "pickled":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "no weights":
        weights.unlink()
    elif how == "no header":
        weights.write_bytes(b"\xff" * 100)
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "missing shard":
        weights.unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    elif how == "outside":
        weights.unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    elif how == "adapter":
        (folder / SETTINGS).write_text("{}")
    elif how == "unknown":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "swin"}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no config", r"has no config\.json"),
        ("no json", r"config\.json cannot be read"),
        ("pickled", r"in pytorch_model\.bin, which is pickled and can run code"),
        ("no weights", r"has neither model\.safetensors nor"),
        ("no header", "is no whole safetensors file"),
        ("cut", "ends before its last tensor: copy it again"),
        ("missing shard", r"lacks the shards \['one\.safetensors'\]"),
        ("outside", "has no weight_map that names files beside it"),
        ("adapter", r"has an adapter \(adapter_config\.json\) beside its weights"),
        ("unknown", r"model_type='swin'; known are vit, .*my_module:factory"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(how: str, message: str, tmp_path: Path) -> None:
    folder = copied(tmp_path)
    spoil(folder, how)
    with pytest.raises(ModelError, match=message):
        PretrainedModel(folder=str(folder)).network(IMAGES)


def test_weights_that_are_missing_are_not_drawn_at_random(tmp_path: Path) -> None:
    import safetensors.torch

    folder = copied(tmp_path)
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    gone = next(name for name in tensors if name.endswith(("mlp.fc1.weight", "intermediate.dense.weight")))
    del tensors[gone]
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    net = PretrainedModel(folder=str(folder)).network(IMAGES)
    with pytest.raises(ModelError, match=r"lacks weights that its config\.json asks for.*fc1\.weight"):
        net.logits(net.initialize(0), inputs("vit", 1, 0))


def test_nothing_asks_the_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*args: Any) -> Any:
        raise AssertionError("a socket")

    monkeypatch.setattr(socket, "socket", refused)
    monkeypatch.setattr(socket, "create_connection", refused)
    net = PretrainedModel(folder=str(copied(tmp_path))).network(IMAGES)
    assert net.logits(net.initialize(0), inputs("vit", 1, 0)).shape == (1, 10)
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise loading.PackageNotFoundError(name)

    monkeypatch.setattr(loading, "version", absent)
    with pytest.raises(ModelError, match=r"pip install 'rayfl\[transformers\]'"):
        PretrainedModel(folder=str(base("vit"))).network(IMAGES)
    monkeypatch.setattr(loading, "version", lambda name: "4.57.1")
    with pytest.raises(ModelError, match=r"needs transformers 5, here is 4\.57\.1"):
        PretrainedModel(folder=str(base("vit"))).network(IMAGES)


@pytest.mark.parametrize("name", ["tiny-vit", "tiny-llama", "tiny-bert"])
@pytest.mark.first_case
def test_a_small_base_is_made_here(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "TRAINING_STEPS", 3)
    made = making.make(name, tmp_path / name)
    assert made.sha256 == BaseFolder(tmp_path / name).sha256
    assert (
        made.sha256 == making.make(name, tmp_path / "again").sha256 != making.make(name, tmp_path / "other", 1).sha256
    )
    with pytest.raises(ConfigError, match="holds a model"):
        making.make(name, tmp_path / name)


def test_only_what_has_a_maker_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="'tiny-whale' cannot be made; there are tiny-vit, tiny-clip, tiny-llama, tiny-bert"
    ):
        making.make("tiny-whale", tmp_path / "x")
