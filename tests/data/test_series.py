"""Windows of series against a loop in numpy: which there are, what is in them, and that none sees what it must not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.data.series import Cut, Series, SeriesDataset
from rayfl.errors import DataError
from rayfl.examples import SPLITS


def walk(times: int, seed: int = 0, series: int = 1) -> np.ndarray:
    found: np.ndarray = np.random.default_rng(seed).normal(size=(times, series)).cumsum(0)
    return found


def looped(series: Series, cut: Cut, targets: int) -> dict[str, list[tuple[int, np.ndarray, np.ndarray]]]:
    """Every window by its split: where it begins, x and y; ``left`` are those that cross a border."""
    total = len(series.values)
    first, second = total - int(total * cut.test + 1e-9) - int(total * cut.validation + 1e-9), total
    second = total - int(total * cut.test + 1e-9)
    found: dict[str, list[tuple[int, np.ndarray, np.ndarray]]] = {name: [] for name in (*SPLITS, "left")}
    bounds = [0, *series.breaks, total]
    errors = naive_errors(series, cut.season, first, bounds)
    for begin, end in pairwise(bounds):
        start = begin
        while start + cut.window + cut.horizon <= end:
            seen = list(range(start, start + cut.window))
            ahead = list(range(start + cut.window, start + cut.window + cut.horizon))
            if ahead[-1] < first:
                split = "train"
            elif ahead[0] >= first and ahead[-1] < second:
                split = "validation"
            else:
                split = "test" if ahead[0] >= second else "left"
            x = np.array([[[series.values[t, c] for t in seen]] for c in range(series.values.shape[1])])
            naive = []
            for time in ahead:
                back = time
                while back > seen[-1]:
                    back -= cut.season
                naive.append(back)
            y = np.array([[series.values[t, c] for c in range(targets) for t in places] for places in (ahead, naive)])
            y = np.concatenate([y, np.repeat(errors[:targets], cut.horizon)[None]])
            found[split].append((start, x, y))
            start += cut.stride
    return found


def naive_errors(series: Series, season: int, border: int, bounds: list[int]) -> np.ndarray:
    """Of each series the mean |v_t - v_(t - season)| of training times in one stretch."""
    apart = [
        abs(series.values[t] - series.values[t - season])
        for begin, end in pairwise(bounds)
        for t in range(begin + season, min(end, border))
    ]
    return np.mean(apart, axis=0) if apart else np.zeros(series.values.shape[1])


def cuts() -> st.SearchStrategy[Cut]:
    sizes = st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 5), st.integers(1, 9))
    shares = st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.3]), st.sampled_from([0.1, 0.2, 0.5]))
    return st.builds(
        lambda size, share: Cut(size[0], size[1], size[2], *share, season=min(size[3], size[0])), sizes, shares
    )


@settings(max_examples=150, deadline=None)
@given(cuts(), st.integers(5, 80), st.lists(st.integers(1, 79), max_size=3, unique=True), st.integers(1, 3), st.data())
def test_windows_are_those_of_a_loop(cut: Cut, times: int, breaks: list[int], width: int, data: st.DataObject) -> None:
    targets = data.draw(st.integers(1, width))
    series = Series("a", walk(times, times, width), tuple(sorted(one for one in breaks if one < times)))
    wanted = looped(series, cut, targets)
    of_split, left = cut.windows(series)
    assert left == len(wanted["left"])
    assert {split: found.tolist() for split, found in of_split.items()} == {
        split: [start for start, _, _ in wanted[split]] for split in SPLITS
    }
    if not all(wanted[split] for split in SPLITS if split != "validation" or cut.validation):
        with pytest.raises(DataError, match="no client has a window in each of train"):
            SeriesDataset([series], targets, cut, "none")
        return
    found = SeriesDataset([series], targets, cut, "none")
    assert found.sizes().tolist() == [[len(wanted[split]) for split in SPLITS]]
    many = 10 * left > left + sum(len(wanted[split]) for split in SPLITS)
    assert any(f"of two splits are left out, {left} of" in one for one in found.remarks()) == many
    for split in SPLITS:
        examples = found.load(0)[split]
        assert examples.x.shape[1:] == found.spec.shape == (width, 1, cut.window)
        assert examples.y.shape[1:] == found.spec.target_shape == (3, targets * cut.horizon)
        np.testing.assert_array_equal(examples.y.numpy(), found.labels(0)[split])
        for place, (_, x, y) in enumerate(wanted[split]):
            np.testing.assert_array_equal(examples.x[place].numpy(), x.astype(np.float32))
            np.testing.assert_array_equal(examples.y[place, :2].numpy(), y[:2].astype(np.float32))
            np.testing.assert_allclose(examples.y[place, 2].numpy(), y[2], rtol=1e-6)


def times_of(begins: np.ndarray, cut: Cut) -> Iterator[tuple[range, range]]:
    """What each window sees, and what it forecasts."""
    for begin in begins.tolist():
        yield range(begin, begin + cut.window), range(begin + cut.window, begin + cut.window + cut.horizon)


@settings(max_examples=150, deadline=None)
@given(cuts(), st.integers(5, 80), st.lists(st.integers(1, 79), max_size=3, unique=True))
def test_no_time_of_an_earlier_split_lies_at_or_after_what_a_later_one_forecasts(
    cut: Cut, times: int, breaks: list[int]
) -> None:
    """Also not at or after the times that scaling looks at: training windows lie within them."""
    of_split, _ = cut.windows(Series("a", walk(times), tuple(sorted(one for one in breaks if one < times))))
    for early, late in (("train", "validation"), ("train", "test"), ("validation", "test")):
        last = max((ahead[-1] for _, ahead in times_of(of_split[early], cut)), default=-1)
        first = min((ahead[0] for _, ahead in times_of(of_split[late], cut)), default=times)
        assert last < first
    border, _ = cut.borders(Series("a", walk(times)))
    assert all(ahead[-1] < border for _, ahead in times_of(of_split["train"], cut))
    assert all(ahead[0] >= border for split in SPLITS[1:] for _, ahead in times_of(of_split[split], cut))


CUT = Cut(6, 3, 1, 0.1, 0.2)


@pytest.mark.parametrize("scaling", ["client", "global"])
def test_scaling_knows_training_times_alone(scaling: str) -> None:
    values = [walk(60, seed, 2) for seed in range(3)]
    border = CUT.borders(Series("a", values[0]))[0]
    later = [np.concatenate([one[:border], 100 + 9 * one[border:]]) for one in values]
    one, other = (
        SeriesDataset([Series(str(k), own) for k, own in enumerate(given)], 1, CUT, scaling)  # type: ignore[arg-type]
        for given in (values, later)
    )
    for client in range(3):
        assert one.load(client)["train"].x.equal(other.load(client)["train"].x)
        made = one.made_by(client)
        back = one.load(client)["train"].x[0, :, 0].double().numpy().T * made["std"] + made["mean"]
        np.testing.assert_allclose(back, values[client][: CUT.window], atol=1e-5)
        assert one.load(client)["train"].y.equal(other.load(client)["train"].y)
        assert not one.load(client)["test"].y.equal(other.load(client)["test"].y)
        training = values[client][:border] if scaling == "client" else np.concatenate([own[:border] for own in values])
        scaled = (values[client] - training.mean(0)) / training.std(0)
        begin = CUT.windows(Series("", values[client]))[0]["test"][0]
        wanted = scaled[begin : begin + 6].T[:, None].astype(np.float32)
        np.testing.assert_allclose(one.load(client)["test"].x[0].numpy(), wanted, rtol=1e-6, atol=1e-7)
    assert one.spec.scaled and not replace(one.spec, scaled=False).scaled
    assert one.content_hash() != other.content_hash()


def test_a_series_that_never_changes_is_not_divided_by_round_off() -> None:
    noise = 1e-15 * np.random.default_rng(0).normal(size=(40, 1))
    found = SeriesDataset([Series("a", np.full((40, 1), 0.1) + noise)], 1, CUT, "client")
    assert found.load(0)["train"].x.abs().max() < 1e-9
    assert not found.load(0)["test"].y[:, 2].any()


def test_clients_that_lack_a_split_are_left_out_and_named() -> None:
    series = [Series("long", walk(60)), Series("short", walk(9)), Series("tiny", walk(2))]
    found = SeriesDataset(series, 1, CUT, "client", ["something"])
    assert found.names == ("long",)
    remarks = list(found.remarks())
    assert remarks[:2] == [
        "something",
        "clients without a window in each of train, validation, test are left out: 2 ('short', 'tiny')",
    ]
    with pytest.raises(
        DataError, match=r"one needs 9 times in a row .* client 'short', which has most, has 9, of whic"
    ):
        SeriesDataset(series[1:], 1, CUT, "client")


def test_series_may_have_borders_of_their_own() -> None:
    cut = Cut(6, 3, validation=0)
    series = Series("a", walk(60), (10, 45)).divided([30, 40, 52])
    assert len(series.values) == 52 and series.breaks == (10, 45) and series.borders == (30, 40)
    wanted = {"train": [0, 1, *range(10, 22)], "validation": [*range(24, 32)], "test": [*range(34, 37)]}
    assert {split: begins.tolist() for split, begins in cut.windows(series)[0].items()} == wanted
    found = SeriesDataset([series], 1, cut, "client")
    training = walk(60)[:30]
    first = (walk(60)[:6, 0] - training.mean()) / training.std()
    np.testing.assert_allclose(found.load(0)["train"].x[0, 0, 0], first, rtol=1e-6)
    assert Series("a", walk(60), (10, 55)).divided([30, 40, 52]).breaks == (10,)
    short = Series("b", walk(35)).divided([30, 40, 52])
    assert len(short.values) == 35 and short.borders == (30, 35)
    both = SeriesDataset([series, short], 1, cut, "client")
    assert both.names == ("a",)
    none = SeriesDataset([Series("c", walk(60)).divided([40, 40])], 1, cut, "client")
    assert none.sizes().tolist() == [[32, 0, 18]]
