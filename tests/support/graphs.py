"""Random graphs for tests of models and of data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rayfl.data.graphs import Graph, GraphRows


def drawn(count: int, most: int, width: int, seed: int = 0) -> list[Graph]:
    """Graphs of 1 to ``most`` nodes, of which some have isolated nodes."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        nodes = int(generator.integers(1, most, endpoint=True))
        edges = generator.integers(nodes, size=(int(generator.integers(0, 2 * nodes)), 2))
        edges = edges[edges[:, 0] != edges[:, 1]]
        found.append(Graph(edges, generator.normal(size=(nodes, width)).astype(np.float32)))
    return found


def dense(graphs: list[Graph], nodes: int) -> torch.Tensor:
    """The graphs as models read them."""
    return torch.from_numpy(GraphRows(graphs, nodes)[:])


def written(folder: Path, name: str, files: dict[str, str]) -> Path:
    """A set in the texts of TUDataset: its files by what they hold, such as ``A``."""
    folder.mkdir(parents=True, exist_ok=True)
    for what, text in files.items():
        (folder / f"{name}_{what}.txt").write_text(text)
    return folder
