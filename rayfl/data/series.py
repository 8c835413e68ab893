"""Series as clients: windows of what was seen, what follows them, and the order of time between splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from rayfl.data.federated import FederatedDataset, OnDemand
from rayfl.data.files.content import ContentHash
from rayfl.errors import DataError
from rayfl.examples import SPLITS, Examples, InputSpec

Scaling = Literal["client", "global", "none"]
"""By whose mean and deviation series are scaled: each client's own, or all clients'."""
_SHOWN = 3
_TOLD = 10
"""That windows are left out at borders, as nearly always some are, is said if they are more than one in this number."""
_CONSTANT = 1e-9
"""Deviations below this share of a series' largest number are round-off: the series is constant."""


@dataclass(frozen=True, eq=False)
class Series:
    """What was measured at one client, in the order of time.

    Attributes:
        name: the client's.
        values: finite float64 of shape (times, series); those that are forecast come first.
        breaks: ascending places in ``values`` where a new stretch of time begins, after a gap.
        borders: places of the first validation time and of the first test time, which may be equal; None: those by the
            shares of :class:`Cut`.
    """

    name: str
    values: np.ndarray
    breaks: tuple[int, ...] = ()
    borders: tuple[int, int] | None = None

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """Returns the first place of each stretch, and the one after its last."""
        return list(zip((0, *self.breaks), (*self.breaks, len(self.values)), strict=True))

    def divided(self, places: Sequence[int]) -> Series:
        """Returns the series with given borders.

        Args:
            places: of the first validation time, of the first test time, and perhaps of the first one that is left out
                with all that follow; ascending. Those beyond the last time are taken to be its end.
        """
        total = len(self.values)
        first, second, end = (min(place, total) for place in (*places, total)[:3])
        return Series(self.name, self.values[:end], tuple(one for one in self.breaks if one < end), (first, second))


@dataclass(frozen=True)
class Cut:
    """How windows are cut, and divided among splits.

    Of T times of a client without borders of its own, the last floor(T test) are those that test windows forecast, and
    the floor(T validation) before them those that validation windows forecast; the others, from the first one on, are
    the training times. A window is in a split if all times that it forecasts are the split's. Windows that forecast
    times of two splits are left out. So each time that a training window sees or forecasts comes before each time that
    a validation or test window forecasts, and each time of a validation window before each time that a test window
    forecasts. What validation and test windows see may reach back to the times before: it is known when they are
    forecast.

    Attributes:
        window: times that are seen.
        horizon: times that are forecast.
        stride: times from the beginning of a window to that of the next one; the first one begins with its stretch.
        validation: share of the times that validation windows forecast.
        test: share of the times that test windows forecast.
        season: the naive forecast of a time is the last one seen that lies a multiple of this number of times before.
    """

    window: int
    horizon: int
    stride: int = 1
    validation: float = 0.1
    test: float = 0.2
    season: int = 1

    def borders(self, series: Series) -> tuple[int, int]:
        """Returns the first validation time and the first test time, as places; training times are those before."""
        if series.borders is not None:
            return series.borders
        times = len(series.values)
        tested, validated = (int(times * share + 1e-9) for share in (self.test, self.validation))
        return times - tested - validated, times - tested

    def windows(self, series: Series) -> tuple[dict[str, np.ndarray], int]:
        """Returns where windows begin, by split, as ascending int64 places, and how many windows are left out."""
        first, second = self.borders(series)
        within = [
            np.arange(begin, end - self.window - self.horizon + 1, self.stride) for begin, end in series.stretches
        ]
        begins = np.concatenate(within).astype(np.int64)
        seen, end = begins + self.window, begins + self.window + self.horizon
        of_split = {
            "train": begins[end <= first],
            "validation": begins[(seen >= first) & (end <= second)],
            "test": begins[seen >= second],
        }
        return of_split, len(begins) - sum(map(len, of_split.values()))


@dataclass(frozen=True, eq=False)
class _Client:
    """A client's windows.

    Attributes:
        name: the client's.
        values: scaled, float32 of shape (times, series).
        naive: mean absolute error of naive forecasts of training times, scaled, by series; shape (series,).
        begins: by split, where windows begin.
    """

    name: str
    values: np.ndarray
    naive: np.ndarray
    begins: Mapping[str, np.ndarray]


class SeriesDataset(FederatedDataset):
    """Clients that are series; a sample is a window, what follows it, a naive forecast of that, and how such ones err.

    x is float32 of shape (series, 1, window), so that images of one row are signals along time, as in ``har``. y is
    float32 of shape (3, D) with D = forecast series x horizon, one series after the other: first what follows, then the
    naive forecast, and then the mean absolute difference of the series' training times that lie a season apart in one
    stretch, which is 0 where they repeat. Means and deviations by which series are scaled are those of training times
    alone (:meth:`Cut.borders`). A series that is constant there is scaled by its mean alone.

    Args:
        series: the clients', with the same number of series each.
        targets: how many of them are forecast, the first ones.
        cut: how windows are cut.
        scaling: by whose moments values are scaled.
        remarks: further sentences that a user should read.
        unscaled: how many series, the last ones, are left as they are.

    Raises:
        DataError: no client has a window in each split.
    """

    sound = True

    def __init__(
        self,
        series: Sequence[Series],
        targets: int,
        cut: Cut,
        scaling: Scaling,
        remarks: Sequence[str] = (),
        unscaled: int = 0,
    ) -> None:
        found = [cut.windows(one) for one in series]
        validated = any(cut.validation if one.borders is None else len(set(one.borders)) > 1 for one in series)
        wanted = [split for split in SPLITS if split != "validation" or validated]
        enough = [all(len(begins[split]) for split in wanted) for begins, _ in found]
        if not any(enough):
            longest = max(series, key=lambda one: len(one.values))
            raise DataError(
                f"no client has a window in each of {', '.join(wanted)}: one needs {cut.window + cut.horizon} times in "
                f"a row (dataset.window + dataset.horizon), and client {longest.name!r}, which has most, has "
                f"{len(longest.values)}, of which {cut.borders(longest)[0]} are for training: lower "
                "dataset.window or dataset.horizon, or change dataset.validation and dataset.test, or dataset.borders"
            )
        kept = [place for place, whole in enumerate(enough) if whole]
        scaled = np.arange(series[0].values.shape[1]) < series[0].values.shape[1] - unscaled
        moments = [
            (np.where(scaled, mean, 0.0), np.where(scaled, deviation, 1.0))
            for mean, deviation in _moments([series[place] for place in kept], cut, scaling)
        ]
        self._clients = [
            _Client(
                series[place].name,
                ((series[place].values - mean) / deviation).astype(np.float32),
                _naive_errors(series[place], cut) / deviation,
                found[place][0],
            )
            for place, (mean, deviation) in zip(kept, moments, strict=True)
        ]
        self._cut, self._targets, self._moments = cut, targets, moments
        self.names = tuple(one.name for one in self._clients)
        width = series[0].values.shape[1]
        shape, outputs = (width, 1, cut.window), targets * cut.horizon
        spec = InputSpec("image", shape, outputs, target="forecast")
        self.spec = replace(spec, horizon=cut.horizon, scaled=scaling != "none")
        lost = [one.name for one, whole in zip(series, enough, strict=True) if not whole]
        told = [*remarks, *_on_lost(lost, wanted), *_on_borders([found[place] for place in kept])]
        self.remarks = lambda: told
        self.content_hash = self._checksum

    def sizes(self) -> np.ndarray:
        """See the base class."""
        return np.array([[len(one.begins[split]) for split in SPLITS] for one in self._clients], dtype=np.int64)

    def load(self, client: int) -> Mapping[str, Examples]:
        """See the base class; windows are cut when a split is read."""
        return OnDemand(lambda split: self._split(client, split))

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """See the base class."""
        return {split: self._targets_of(client, split) for split in SPLITS}

    def made_by(self, client: int) -> dict[str, Any]:
        """See the base class; of forecasts, too."""
        mean, deviation = self._moments[client]
        return {"mean": mean.tolist(), "std": deviation.tolist()} if self.spec.scaled else {}

    def _split(self, client: int, split: str) -> Examples:
        one = self._clients[client]
        seen = one.begins[split][:, None] + np.arange(self._cut.window)
        x = one.values[seen].transpose(0, 2, 1)[:, :, None]
        y = self._targets_of(client, split)
        return Examples(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y))

    def _targets_of(self, client: int, split: str) -> np.ndarray:
        """float32 of shape (n, 3, D)."""
        one, cut = self._clients[client], self._cut
        ends = one.begins[split][:, None, None] + cut.window
        steps = np.arange(cut.horizon)
        places = ends + np.stack([steps, steps % cut.season - cut.season])
        found = np.empty((len(ends), 3, self._targets, cut.horizon), dtype=np.float32)
        found[:, :2] = one.values[places][..., : self._targets].transpose(0, 1, 3, 2)
        found[:, 2] = one.naive[: self._targets, None]
        return found.reshape(len(ends), 3, self.spec.num_classes)

    def _checksum(self) -> str:
        digest = ContentHash()
        for one in self._clients:
            counts = np.array([[len(one.begins[split]) for split in SPLITS]])
            digest.update(one.values, counts, (one.name,))
        return digest.hexdigest()


def _moments(series: Sequence[Series], cut: Cut, scaling: Scaling) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns by client the means and the deviations of its series, from training times; float64 of shape (series,)."""
    width = series[0].values.shape[1]
    if scaling == "none":
        return [(np.zeros(width), np.ones(width))] * len(series)
    training = [one.values[: cut.borders(one)[0]] for one in series]
    if scaling == "global":
        return [_of_times(np.concatenate(training))] * len(series)
    return [_of_times(own) for own in training]


def _naive_errors(series: Series, cut: Cut) -> np.ndarray:
    """Returns the mean absolute difference of training times a season apart; float64 of shape (series,)."""
    border, _ = cut.borders(series)
    within = [series.values[begin : min(end, border)] for begin, end in series.stretches if begin < border]
    errors = np.concatenate([np.abs(own[cut.season :] - own[: -cut.season]) for own in within]).mean(0)
    return np.where(errors > _CONSTANT * np.abs(series.values[:border]).max(0), errors, 0.0)


def _of_times(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    deviation = values.std(0)
    return values.mean(0), np.where(deviation > _CONSTANT * np.abs(values).max(0), deviation, 1.0)


def _on_lost(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    return [f"clients without a window in each of {', '.join(wanted)} are left out: {len(names)} ({shown})"]


def _on_borders(found: Sequence[tuple[Mapping[str, np.ndarray], int]]) -> list[str]:
    lost = sum(count for _, count in found)
    kept = sum(len(begins) for by_split, _ in found for begins in by_split.values())
    if _TOLD * lost <= lost + kept:
        return []
    return [f"windows that forecast times of two splits are left out, {lost} of {lost + kept}, so that none is in both"]
