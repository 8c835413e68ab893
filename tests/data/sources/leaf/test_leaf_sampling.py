"""LEAF's choice of clients and samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfl.data.sources.leaf.sampling import Plan, Sampling, plan
from rayfl.errors import DataError

SIZES = {"ann": 10, "bob": 2, "eve": 1, "zoe": 40}
sizes = st.lists(st.integers(1, 60), min_size=1, max_size=8).map(lambda n: {f"c{i}": size for i, size in enumerate(n)})
fractions = st.floats(0.05, 0.95)


def places(result: Plan) -> list[int]:
    return [place for parts in result.values() for samples in parts.values() for place in samples.tolist()]


def test_by_sample_every_client_of_two_has_both_parts() -> None:
    result, said = plan(SIZES, Sampling(train_fraction=0.8))
    assert {client: {split: len(n) for split, n in parts.items()} for client, parts in result.items()} == {
        "ann": {"train": 8, "test": 2},
        "bob": {"train": 1, "test": 1},
        "zoe": {"train": 32, "test": 8},
    }
    assert said == ["1 clients have too few samples for a train and a test part"]
    assert sorted(places(result)) == [*range(12), *range(13, 53)]


@given(sizes, fractions, st.integers(0, 99))
def test_without_choice_parts_are_disjoint_and_complete(counts: dict[str, int], fraction: float, seed: int) -> None:
    counts["always"] = 3
    sampling = Sampling(train_fraction=fraction, seed=seed)
    result, _ = plan(counts, sampling)
    start = 0
    for client, size in counts.items():
        if size >= 2:
            train, test = result[client]["train"], result[client]["test"]
            assert sorted([*train, *test]) == list(range(start, start + size))
            assert list(train) == sorted(train)
            assert len(train) == (1 if size == 2 else max(1, int(fraction * size + 1e-9)))
        start += size
    again, _ = plan(counts, sampling)
    assert places(again) == places(result)


def test_a_seed_is_another_split() -> None:
    one, two = (places(plan(SIZES, Sampling(seed=seed))[0]) for seed in (1, 2))
    assert one != two


def test_with_a_gap_parts_are_runs_of_neighbours() -> None:
    result, said = plan({"ann": 20, "bob": 100, "eve": 95}, Sampling(train_fraction=0.2), gap=79)
    assert result.keys() == {"bob"}
    assert result["bob"]["train"].tolist() == list(range(20, 40))
    assert result["bob"]["test"].tolist() == [119]
    assert said == ["2 clients have too few samples for a train and a test part"]


@given(sizes, st.floats(0.01, 1), st.booleans(), st.integers(0, 9))
def test_a_fraction_of_the_samples_is_chosen(counts: dict[str, int], fraction: float, iid: bool, seed: int) -> None:
    wanted = int(fraction * sum(counts.values()) + 1e-9)
    sampling = Sampling(fraction, iid, 0.5 if iid else None, by="user", train_fraction=0.99, seed=seed)
    try:
        result, _ = plan(counts, sampling)
    except DataError:
        # floor(0.99 * 1) clients train, or nothing is chosen at all.
        assert iid or wanted == 0 or len(counts) < 2 or wanted <= max(counts.values())
        return
    assert len(places(result)) == wanted == len(set(places(result)))
    if not iid and fraction < 1:
        starts = dict(zip(counts, np.cumsum([0, *counts.values()])[:-1], strict=True))
        cut = 0
        for client, parts in result.items():
            (samples,) = parts.values()
            assert samples.tolist() == list(range(starts[client], starts[client] + len(samples)))
            cut += len(samples) < counts[client]
        assert cut <= 1


def test_iid_deals_to_new_clients() -> None:
    result, _ = plan(SIZES, Sampling(iid=True, iid_clients=0.5))
    assert result.keys() == {"0", "1"}
    assert sorted(places(result)) == list(range(53))
    assert [sum(map(len, parts.values())) for parts in result.values()] == [27, 26]
    assert plan(SIZES, Sampling(iid=True))[0].keys() == {"0"}
    # Dealt samples are no neighbours: the gap has no meaning, and the parts are drawn.
    assert len(places(plan(SIZES, Sampling(iid=True), gap=79)[0])) == 53


def test_small_clients_are_left_out() -> None:
    result, said = plan(SIZES, Sampling(min_samples=10))
    assert result.keys() == {"ann", "zoe"}
    assert said == ["2 clients have fewer than 10 samples and are left out"]


def test_by_user_a_client_is_in_one_part() -> None:
    result, said = plan(SIZES, Sampling(by="user", train_fraction=0.5))
    assert sorted(str(*parts) for parts in result.values()) == ["test", "test", "train", "train"]
    assert sorted(places(result)) == list(range(53))
    assert said == ["2 clients have a test part only; they are in the file, but runs take no part of them"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampling(sample_fraction=0), "--sample-fraction is 0; it must be above 0 and at most 1"),
        (lambda: Sampling(sample_fraction=float("nan")), "--sample-fraction is nan"),
        (lambda: Sampling(iid=True, iid_clients=0), "--iid-clients is 0"),
        (lambda: Sampling(iid_clients=0.5), "--iid-clients is for --iid only"),
        (lambda: Sampling(min_samples=-1), "--min-samples is -1"),
        (lambda: Sampling(train_fraction=1), "--train-fraction is 1; it must be above 0 and below 1"),
        (lambda: Sampling(seed=-1), "--seed is -1"),
        (lambda: plan(SIZES, Sampling(min_samples=41)), "no client is left to train on; lower --min-samples"),
        (lambda: plan(SIZES, Sampling(0.01)), "no client is left to train on; .* raise --sample-fraction"),
        (lambda: plan({"ann": 9}, Sampling(by="user")), "no client is left to train on"),
    ],
)
def test_unusable_choices_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()
