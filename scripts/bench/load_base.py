"""Measures how much memory loading a pretrained model takes: a made-up Llama in shards, in a process of its own.

    python scripts/bench/load_base.py [--mebibytes 400]

It prints, by type of the files and type of the loaded weights: their sizes, the most resident memory that loading took,
and how much is resident after a pass over all weights. In memory are also pages of the files that are mapped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from actors.probing.memory import ProcessMemory
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.loading import Source

MIB = 1 << 20
TYPES = ("float32", "bfloat16")
_SHARDS = 8
_WIDTH, _VOCABULARY = 512, 8000


@dataclass(frozen=True)
class Loaded:
    """What was measured, in bytes.

    Attributes:
        files: of all files.
        shard: of the largest file.
        weights: of the loaded weights.
        peak: most resident memory beyond that before.
        used: resident after a pass over all weights, beyond that before.
    """

    files: int
    shard: int
    weights: int
    peak: int
    used: int


def write_base(folder: Path, dtype: str, mebibytes: int) -> None:
    """Writes a Llama with random weights, of a given number of MiB in float32, in shards of one size."""
    import transformers

    size, layers = 0, 0
    while size < mebibytes * MIB:
        layers += 1
        config = transformers.LlamaConfig(
            hidden_size=_WIDTH, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
            intermediate_size=4 * _WIDTH, vocab_size=_VOCABULARY, architectures=["LlamaForCausalLM"],
        )  # fmt: skip
        with torch.device("meta"):
            tensors = transformers.LlamaForCausalLM(config).state_dict()
        size = sum(4 * tensor.numel() for tensor in tensors.values())
    config.save_pretrained(folder)
    generator, names, places = torch.Generator().manual_seed(0), list(tensors), {}
    each = -(-len(names) // _SHARDS)
    for shard in range(0, len(names), each):
        file = f"model-{shard // each + 1:05d}-of-{-(-len(names) // each):05d}.safetensors"
        part = {
            name: (0.02 * torch.randn(tensors[name].shape, generator=generator)).to(getattr(torch, dtype))
            for name in names[shard : shard + each]
        }
        save_file(part, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def load(folder: Path, dtype: str) -> Loaded:
    """Loads a base in this process, and measures that."""
    known = BaseFolder(folder)
    source = Source(str(folder), known.sha256, "next_tokens", None, "sdpa")
    source.skeleton()  # imports what is imported once
    memory = ProcessMemory()
    memory.mark()
    module = source.loaded(torch.device("cpu"), getattr(torch, dtype))
    peak = memory.peak()
    for parameter in module.parameters():
        parameter.sum()
    sizes = [file.stat().st_size for file in known.files]
    weights = sum(parameter.nbytes for parameter in module.parameters())
    return Loaded(sum(sizes), max(sizes), weights, peak, memory.peak())


def measured(folder: Path, dtype: str) -> Loaded:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--load", str(folder), dtype]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Loaded(**json.loads(found.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=400, help="size of the weights in float32")
    parser.add_argument("--load", nargs=2, metavar=("FOLDER", "TYPE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load:
        print(json.dumps(vars(load(Path(given.load[0]), given.load[1]))))
        return
    print("files     loaded    files MiB  shard MiB  weights MiB  peak MiB  peak/weights  used MiB")
    for stored in TYPES:
        with tempfile.TemporaryDirectory() as name:
            write_base(Path(name), stored, given.mebibytes)
            for dtype in TYPES:
                one = measured(Path(name), dtype)
                print(
                    f"{stored:9s} {dtype:9s} {one.files / MIB:9.0f} {one.shard / MIB:10.0f} {one.weights / MIB:12.0f} "
                    f"{one.peak / MIB:9.0f} {one.peak / one.weights:13.2f} {one.used / MIB:9.0f}"
                )


if __name__ == "__main__":
    main()
