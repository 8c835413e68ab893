"""The picture of a partition: what is in it, not how it looks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from rayfl.data.partitions.holdout import HoldoutConfig
from rayfl.data.sources.preparation.pooled import PooledDataset
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.plots.partition import draw_partition, label_matrix, save_figure
from rayfl.randomness import RandomStreams

STREAMS = RandomStreams(0)


def dataset(clients: int, classes: int = 4, names: list[str] | None = None) -> PooledDataset:
    """Client k has 10 samples of class k mod C and 5 of the next."""
    y = np.concatenate([np.repeat([k % classes, (k + 1) % classes], [10, 5]) for k in range(clients)])
    parts = [np.arange(15 * k, 15 * (k + 1)) for k in range(clients)]
    x = np.zeros((len(y), 1), dtype=np.float32)
    spec = InputSpec("image", (1,), classes)
    return PooledDataset(x, y.astype(np.int64), spec, parts, HoldoutConfig(), STREAMS, names=names)


def test_the_matrix_counts_all_splits() -> None:
    counts = label_matrix(dataset(5))
    assert counts.tolist()[:2] == [[10, 5, 0, 0], [0, 10, 5, 0]]
    assert counts.sum() == 75


def test_few_clients_are_bubbles_with_areas_in_proportion() -> None:
    main, above, beside = draw_partition(dataset(6), "title").axes
    bubbles = main.collections[0]
    places = {tuple(map(int, place)): size for place, size in zip(bubbles.get_offsets(), bubbles._widths, strict=True)}
    assert len(places) == 12 and set(places) >= {(0, 0), (0, 1), (5, 1), (5, 2)}
    assert (places[0, 0] / places[0, 1]) ** 2 == pytest.approx(2)
    assert len(above.patches) == 18  # three splits of six clients
    assert [bar.get_width() for bar in beside.patches] == label_matrix(dataset(6)).sum(0).tolist()


@pytest.mark.parametrize("clients", [61, 400])
def test_many_clients_are_a_heat_map(clients: int) -> None:
    main = draw_partition(dataset(clients), "title").axes[0]
    shown = main.images[0].get_array()
    assert shown.shape == (4, clients) and shown.sum() == 15 * clients
    commonest = np.argmax(shown.filled(0), axis=0)
    assert (np.diff(commonest) >= 0).all() == (clients == 400)
    assert ("sorted" in main.get_xlabel()) == (clients == 400)


def test_very_unequal_clients_are_a_heat_map_too() -> None:
    y = np.repeat([0, 1, 2, 3], [5000, 3, 3, 3])
    parts = np.split(np.arange(len(y)), [5000, 5003, 5006])
    spec = InputSpec("image", (1,), 4)
    unequal = PooledDataset(np.zeros((len(y), 1), np.float32), y, spec, parts, HoldoutConfig(), STREAMS)
    assert draw_partition(unequal, "").axes[0].images


def test_names_are_shown_where_they_can_be_read() -> None:
    main = draw_partition(dataset(3, names=["ann", "bob", "a very long name indeed"]), "").axes[0]
    assert [label.get_text() for label in main.get_xticklabels()] == ["ann", "bob", "a very long n…"]
    assert len(draw_partition(dataset(60, classes=200), "").axes[0].get_yticks()) <= 26


@pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
def test_the_file_has_the_format_of_its_name(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "new" / f"p.{ending}"
    save_figure(draw_partition(dataset(3), "title"), path)
    start = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[ending]
    assert path.read_bytes().startswith(start)
    if ending == "png":
        assert imread(path).std() > 0.05
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"p\.jpg must end in \.png, \.pdf, \.svg"):
        save_figure(draw_partition(dataset(3), "title"), tmp_path / "p.jpg")
    assert not list(tmp_path.iterdir())
