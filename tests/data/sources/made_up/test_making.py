"""Samples that are made up, where memory does not suffice for them."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any, get_args

import pytest

import rayfl
from rayfl.data.sources.made_up.making import MadeUpSource
from rayfl.data.sources.made_up.synthetic import SyntheticSource
from rayfl.data.sources.registry import DatasetConfig
from rayfl.errors import ResourceError
from rayfl.randomness import RandomStreams

STREAMS = RandomStreams(3)
DATASETS = {kind.model_fields["name"].default: kind for kind in get_args(get_args(DatasetConfig)[0])}
MADE = {name: kind for name, kind in DATASETS.items() if issubclass(kind, MadeUpSource)}


def test_all_that_make_samples_up_are_tried() -> None:
    assert set(MADE) == {name for name in DATASETS if str(name).startswith("synthetic")}


@pytest.mark.parametrize("kind", MADE.values(), ids=MADE)
def test_what_does_not_fit_is_refused_before_it_is_made(
    kind: type[MadeUpSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = kind()
    monkeypatch.setattr("rayfl.data.sources.made_up.making.machine_memory", lambda: source.least_bytes - 1)
    monkeypatch.setattr(RandomStreams, "generator", lambda *_, **__: pytest.fail("something was drawn"))
    with pytest.raises(
        ResourceError, match=rf"dataset={source.name} needs at least .* lower dataset\.{kind.amounts[0]}"
    ):
        source.open(STREAMS)


@pytest.mark.parametrize("kind", MADE.values(), ids=MADE)
@pytest.mark.two_cases
def test_what_they_say_they_need_is_about_what_they_take(kind: type[MadeUpSource]) -> None:
    larger: dict[str, Any] = {"num_clients": 60} if "num_clients" in kind.model_fields else {"samples": 20_000}
    source = kind(**larger)
    source.open(STREAMS)  # what is imported and cached at the first use is not counted
    gc.collect()
    tracemalloc.start()
    try:
        opened = source.open(STREAMS)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del opened
    drawn = 0.7 if kind is SyntheticSource else 1.0  # few clients may have fewer samples than on average
    assert drawn * source.least_bytes <= peak
    assert kept < 8 * source.least_bytes


def test_options_on_which_the_amount_depends_are_named() -> None:
    for kind in MADE.values():
        assert set(kind.amounts) <= set(kind.model_fields)


def test_a_run_with_too_many_made_up_clients_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ResourceError, match=r"needs at least .* lower dataset\.num_clients or dataset\.dimension"):
        rayfl.run(
            {
                "dataset": {"name": "synthetic", "num_clients": 10**8, "dimension": 10**4},
                "model": "two_nn",
                "partition": "natural",
                "algorithm": "fedavg",
                "storage_path": str(tmp_path),
                "cluster": {"backend": "inline"},
            }
        )
