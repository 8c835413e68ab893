"""Data of the works: learnable, the same for all contenders, made from a seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.random import Generator
from work import Work


def write(work: Work, folder: Path) -> None:
    """``x.npy`` (clients, samples, *shape), ``y.npy`` (clients, samples), and the same for the test samples."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(7)
    make = _sequences if work.model == "char_lstm" else _images
    prototypes = generator.random((work.classes, *work.shape), dtype=np.float32)
    owned = _owned_labels(work, generator)
    for suffix, samples in (("", work.samples), ("_test", work.test_samples)):
        x, y = make(work, samples, prototypes, owned, generator)
        np.save(folder / f"x{suffix}.npy", x)
        np.save(folder / f"y{suffix}.npy", y)


def _owned_labels(work: Work, generator: Generator) -> np.ndarray:
    per_client = work.classes_per_client or work.classes
    return np.stack([generator.permutation(work.classes)[:per_client] for _ in range(work.clients)])


def _images(
    work: Work, samples: int, prototypes: np.ndarray, owned: np.ndarray, generator: Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A prototype for each label under noise of twice its standard deviation."""
    pick = generator.integers(owned.shape[1], size=(work.clients, samples))
    y = np.take_along_axis(owned, pick, axis=1).astype(np.int64)
    x = np.empty((work.clients, samples, *work.shape), dtype=np.float32)
    for client in range(work.clients):
        noise = generator.standard_normal((samples, *work.shape), dtype=np.float32)
        x[client] = 0.5 + 0.3 * (prototypes[y[client]] - 0.5) + 0.5 * noise
    return x, y


def _sequences(
    work: Work, samples: int, prototypes: np.ndarray, owned: np.ndarray, generator: Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Every character follows from the one before, but one in five is random."""
    length, follows = work.shape[0] + 1, np.random.default_rng(8).permutation(work.classes)
    text = np.empty((work.clients, samples, length), dtype=np.int64)
    text[..., 0] = generator.integers(work.classes, size=(work.clients, samples))
    for place in range(1, length):
        surprise = generator.random((work.clients, samples)) < 0.2
        random = generator.integers(work.classes, size=(work.clients, samples))
        text[..., place] = np.where(surprise, random, follows[text[..., place - 1]])
    return text[..., :-1].copy(), text[..., -1].copy()
