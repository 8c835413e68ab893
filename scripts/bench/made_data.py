"""Files of made-up samples with the shapes of data sets that are not at hand: for times and memory, not for accuracy.

    python scripts/bench/made_data.py femnist FOLDER [--clients 3400] [--samples 226]
    python scripts/bench/made_data.py shakespeare FOLDER [--clients 715] [--samples 3700]
    python scripts/bench/made_data.py cifar100 FOLDER
    python scripts/bench/made_data.py tiny_imagenet FOLDER [--samples 100000]

FOLDER becomes a data root (RAYFL_DATA): images go to ``prepared/<name>.arrow``, data with clients to
``<name>.parquet``, whose clients have sizes of mean ``--samples``. A class is a random picture of its own with noise; a
text repeats a client's own random line. The files say "made up" as their source (``rayfl data list``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from rayfl.data.files.natural_file import NaturalHeader
from rayfl.data.files.records import write_record
from rayfl.data.sources.leaf.codec import Part, Split
from rayfl.data.sources.leaf.writing import Origin, write_clients
from rayfl.data.sources.preparation.pooled_file import write_pooled
from rayfl.data.sources.preparation.preparing import PREPARED

MADE_UP = "made up (scripts/bench/made_data.py)"
IMAGES = {"cifar100": (3, 32, 100, 50_000), "tiny_imagenet": (3, 64, 200, 100_000), "cifar10": (3, 32, 10, 50_000),
          "fashion_mnist": (1, 28, 10, 60_000)}  # fmt: skip
"""Channels, side, classes and training samples."""

_WINDOW, _ALPHABET = 80, 80
_FEMNIST = NaturalHeader(kind="femnist", input="image", shape=(1, 28, 28), num_classes=62)
_SHAKESPEARE = NaturalHeader(
    kind="shakespeare", input="tokens", shape=(_WINDOW,), num_classes=_ALPHABET, vocabulary=_ALPHABET
)


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*IMAGES, "femnist", "shakespeare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    generator = np.random.default_rng(chosen.seed)
    if chosen.name in IMAGES:
        path = images(chosen.name, chosen.folder, chosen.samples, generator)
    else:
        path = clients(chosen.name, chosen.folder, chosen.clients, chosen.samples, generator)
    print(f"made-up {chosen.name} -> {path}")


def images(name: str, folder: Path, samples: int | None, generator: np.random.Generator) -> Path:
    """Writes a prepared file of images without clients, its test part a tenth of the training part."""
    channels, side, classes, usual = IMAGES[name]
    pictures = _pictures(classes, channels, side, generator)
    parts = {}
    for part, count in (("train", samples or usual), ("test", (samples or usual) // 10)):
        y = generator.permutation(np.arange(count) % classes)
        parts[part] = (_noisy(pictures, y, generator), y)
    path = folder / PREPARED / f"{name}.arrow"
    header = write_pooled(path, name, parts, classes, MADE_UP)
    write_record(path, header.sha256, MADE_UP, (), {"name": name})
    return path


def clients(name: str, folder: Path, count: int | None, mean: int | None, generator: np.random.Generator) -> Path:
    """Writes a file of natural clients, nine tenths of each one's samples for training."""
    if name == "femnist":
        count, mean, header = count or 3400, mean or 226, _FEMNIST
    else:
        count, mean, header = count or 715, mean or 3700, _SHAKESPEARE
    pictures = _pictures(62, 1, 28, generator)
    totals = [max(2, round(float(size))) for size in generator.gamma(4, mean / 4, count)]
    sizes: dict[str, dict[Split, int]] = {
        f"made_{client:06d}": {"train": total * 9 // 10, "test": total - total * 9 // 10}
        for client, total in enumerate(totals)
    }

    def part(client: str, split: Split) -> Part:
        size = sizes[client][split]
        if name == "femnist":
            y = generator.integers(0, 62, size)
            return Part(_noisy(pictures, y, generator).reshape(size, -1), y)
        line = np.resize(generator.integers(0, _ALPHABET, 200), size + _WINDOW).astype(np.uint8)
        return Part(np.lib.stride_tricks.sliding_window_view(line, _WINDOW)[:size], line[_WINDOW:].astype(np.int64))

    path = folder / f"{name}.parquet"
    write_clients(path, header, sizes, part, Origin(Path(MADE_UP), (), {"kind": name}))
    return path


def _pictures(classes: int, channels: int, side: int, generator: np.random.Generator) -> np.ndarray:
    """A random picture of 4 x 4 blocks for each class, uint8 of shape (classes, channels, side, side)."""
    blocks = generator.integers(0, 200, (classes, channels, 4, 4), dtype=np.uint8)
    return np.kron(blocks, np.ones((side // 4, side // 4), dtype=np.uint8))


def _noisy(pictures: np.ndarray, y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    x = pictures[y]
    x += generator.integers(0, 56, x.shape, dtype=np.uint8)
    return x


if __name__ == "__main__":
    main()
