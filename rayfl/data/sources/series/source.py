"""Time series of clients, cut into windows: from a user's own files, or made up."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.data.series import Cut, Scaling, Series, SeriesDataset
from rayfl.data.sources.base import Source
from rayfl.data.sources.columns.files import Decimal, Dialect
from rayfl.data.sources.made_up.making import MadeUpSource
from rayfl.data.sources.made_up.source import client_names
from rayfl.data.sources.rows.parquet import located
from rayfl.data.sources.series.borders import Border, check_borders, places_of
from rayfl.data.sources.series.calendar import Cycle
from rayfl.data.sources.series.files import Gaps, Missing, Reading, files_of, in_order, read_long, read_wide
from rayfl.errors import DataError
from rayfl.naming.lists import EACH_ONCE
from rayfl.randomness import RandomStreams

_HARMONICS = (1, 2, 3)


class WindowedSource(Source):
    """What sources of series have in common: how windows are cut, divided and scaled (see :class:`Cut`)."""

    window: int = Field(default=96, ge=1, description="Times that a model sees.")
    horizon: int = Field(default=24, ge=1, description="Times after these that it forecasts.")
    stride: int = Field(default=1, ge=1, description="Times from the beginning of a window to that of the next one.")
    validation: float = Field(
        default=0.1, ge=0, lt=1, description="Share of each client's times, before those for testing, for validation."
    )
    test: float = Field(default=0.2, gt=0, lt=1, description="Share of each client's times, the last, for testing.")
    borders: tuple[Border, ...] = Field(
        default=(),
        description="In place of validation and test: the counts of times, or the times as texts, at which validation "
        "begins, test begins, and perhaps what follows is left out, such as [8640, 11520, 14400]; none: shares.",
    )
    scaling: Scaling = Field(
        default="client",
        description="By whose mean and standard deviation values are scaled, of training times alone: client, each "
        "client's own; global, those of all clients' times; none. Errors are of scaled values.",
    )
    season: int = Field(
        default=1,
        ge=1,
        description="Times of a season, at most window: the naive forecast that a model is compared with repeats the "
        "last one seen; 1: the last value.",
    )

    @model_validator(mode="after")
    def _divided(self) -> Self:
        if self.borders:
            check_borders(self.borders)
            if any(getattr(self, name) != type(self).model_fields[name].default for name in ("validation", "test")):
                raise ValueError("borders say where validation and test begin: leave validation and test out")
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation={self.validation:g} and test={self.test:g} leave no times for training: lower one of them"
            )
        if self.season > self.window:
            raise ValueError(
                f"season={self.season} is longer than window={self.window}, in which the last season must be seen: "
                "lower it, or raise window"
            )
        return self

    def cut_into_windows(
        self, series: Sequence[Series], targets: int, remarks: Sequence[str] = (), unscaled: int = 0
    ) -> SeriesDataset:
        """Returns the clients' windows; errors as for :class:`SeriesDataset`."""
        validation = 0.0 if self.borders else self.validation
        cut = Cut(self.window, self.horizon, self.stride, validation, self.test, self.season)
        return SeriesDataset(series, targets, cut, self.scaling, remarks, unscaled)


class SeriesSource(WindowedSource):
    """Configuration of your own files of series: Parquet, CSV or JSON.

    In the long form a row is a time of a client, which a column names; without such a column each file is a client. In
    the wide form, that of the files electricity.csv and traffic.csv of the papers on forecasting, a row is a time of
    all clients, and a column is a client. Rows are sorted by time.
    """

    name: Literal["series"] = Field(default="series", description="Your own files of time series.")
    path: Path | None = Field(
        default=None,
        description="A file (.csv, .tsv, .parquet, .json or .jsonl), or a folder of them; a relative path is also "
        "looked up in RAYFL_DATA.",
    )
    paths: Annotated[tuple[Path, ...], EACH_ONCE] = Field(
        default=(), description="Several files with the same columns, in place of path."
    )
    form: Literal["long", "wide"] = Field(
        default="long", description="What a row is: long, a time of one client; wide, a time of all, a column each."
    )
    client: str | None = Field(
        default=None, description="Of the long form: column of the clients' names; null: each file is a client."
    )
    time: str = Field(default="time", description="Column of the times: numbers, or dates and times.")
    time_format: str | None = Field(
        default=None,
        min_length=1,
        description="Of times that are texts, how they are written, as strptime of Python reads it, such as "
        "%d.%m.%Y %H:%M; null: as in ISO 8601, 2016-07-01 00:00:00.",
    )
    separator: str | None = Field(
        default=None,
        min_length=1,
        max_length=1,
        description="What is between columns of CSV files; null: a tab in .tsv, else the only one of comma, semicolon "
        "and tab that the header has, or a comma.",
    )
    decimal: Decimal = Field(default=".", description="The decimal sign of CSV files, a point or a comma.")
    targets: Annotated[tuple[str, ...], EACH_ONCE] = Field(
        default=(),
        description="Columns of what is forecast; of the wide form, those that are clients (none: all others).",
    )
    covariates: Annotated[tuple[str, ...], EACH_ONCE] = Field(
        default=(), description="Columns that models see, too, and do not forecast."
    )
    calendar: Annotated[tuple[Cycle, ...], EACH_ONCE] = Field(
        default=(),
        description="Covariates that are made of the times, two of each: sine and cosine of the hour of the day, the "
        "day of the week, or the month of the year.",
    )
    missing: Missing = Field(
        default="error",
        description="Where a value is missing: error; forward, the last value before it is taken; drop, the client's "
        "row is left out.",
    )
    gaps: Gaps = Field(
        default="error",
        description="Where times are not as far apart as the client's others (the median): error; split, windows do "
        "not cross the place; ignore, rows follow each other, as those of months do.",
    )

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if (self.path is None) == (not self.paths):
            raise ValueError("give either path, a file or a folder, or paths, several files")
        if self.form == "wide" and self.client is not None:
            raise ValueError("client is for form=long: in the wide form columns are clients; leave it out")
        if self.form == "long" and not self.targets:
            raise ValueError("targets must name the columns that are forecast, or set form=wide")
        if self.time_format is not None:
            check_format(self.time_format)
        named = [self.time, *([] if self.client is None else [self.client]), *self.targets, *self.covariates]
        if twice := next((name for place, name in enumerate(named) if name in named[:place]), None):
            raise ValueError(f"column {twice!r} is named twice among client, time, targets and covariates")
        return self

    def open(self, streams: RandomStreams) -> SeriesDataset:
        """Reads the files.

        Raises:
            DataError: naming the file, the column, the row or the client, and the fix.
        """
        given = self.paths if self.path is None else (self.path,)
        files = files_of([located(path.expanduser()) for path in given])
        dialect = Dialect(self.separator, self.decimal)
        reading = Reading(self.time, self.covariates, self.time_format, dialect)
        if self.form == "wide":
            measured = read_wide(files, self.targets, reading)
            targets = 1
        else:
            measured = read_long(files, self.client, self.targets, reading)
            targets = len(self.targets)
        series, remarks = in_order(measured, self.missing, self.gaps, self.borders, self.calendar)
        return self.cut_into_windows(series, targets, remarks, unscaled=2 * len(self.calendar))


def check_format(format: str) -> None:
    """Raises ValueError for a format with which no time can be read."""
    some = datetime.datetime(2016, 12, 31, 23, tzinfo=datetime.UTC)
    try:
        read = datetime.datetime.strptime(some.strftime(format), format)
    except ValueError as error:
        raise ValueError(f"time_format={format!r} reads no times: {error}") from error
    if read.year != some.year:
        raise ValueError(f"time_format={format!r} has no year: add it, as in %Y-%m-%d %H:%M")


class SyntheticSeriesSource(WindowedSource, MadeUpSource):
    """Made-up clients with days and weeks of their own, such as households.

    The value of client k at time t is l_k + s_k t / times + d_k(t) + w_kj + e_kt, where j = floor(t / period) mod 7 is
    the day of the week. The day is d_k = (d + difference d'_k) / sqrt(1 + difference^2). d and d'_k are sums of the
    first three harmonics of the period, the amplitudes of sine and cosine of harmonic h drawn from N(0, 1 / h^2).
    The noise is e_kt = a_k e_k,t-1 + noise n_kt with n_kt from N(0, 1) and a_k uniform in [-memory, memory]: how a
    client's values go on depends on a_k, also where they are scaled. l_k, s_k and w_kj are drawn from N(0, 9), N(0, 1)
    and N(0, 1/4).
    """

    amounts: ClassVar[tuple[str, ...]] = ("num_clients", "times")

    name: Literal["synthetic_series"] = Field(default="synthetic_series", description="Made-up series, such as loads.")
    num_clients: int = Field(default=20, ge=1, description="Number of clients.")
    times: int = Field(default=1000, ge=10, description="Length of a client's series.")
    period: int = Field(default=24, ge=2, description="Times of a day; a week is seven.")
    difference: float = Field(default=1.0, ge=0, le=1e6, description="How much the clients' days differ.")
    memory: float = Field(
        default=0.9, ge=0, lt=1, description="Largest share of its last value that a client's noise keeps."
    )
    noise: float = Field(default=0.5, ge=0, le=1e6, description="Standard deviation of what is new in the noise.")

    @property
    def least_bytes(self) -> int:
        return self.num_clients * self.times * 12  # as they are made, and scaled

    def open(self, streams: RandomStreams) -> SeriesDataset:
        """Draws all series; uses the stream ``synthetic``, also of each client."""
        if self.window + self.horizon > self.times:
            raise DataError(
                f"dataset.times is {self.times}, but a window and what follows it take {self.window + self.horizon} "
                "(dataset.window + dataset.horizon): raise it, or lower these"
            )
        self.check_room()
        common = self._day(streams.generator("synthetic"))
        names = client_names(self.num_clients, 1).tolist()
        series = [Series(name, self._client(client, common, streams)) for client, name in enumerate(names)]
        if self.borders:
            places = places_of(self.borders, np.arange(self.times), "made-up series")
            series = [one.divided(places) for one in series]
        return self.cut_into_windows(series, 1)

    def _client(self, client: int, common: np.ndarray, streams: RandomStreams) -> np.ndarray:
        """float64 of shape (times, 1)."""
        generator = streams.generator("synthetic", client=client)
        level, slope = generator.normal(0, 3), generator.normal()
        day = (common + self.difference * self._day(generator)) / np.sqrt(1 + self.difference**2)
        week = generator.normal(0, 0.5, size=7)
        kept, new = generator.uniform(-self.memory, self.memory), self.noise * generator.normal(size=self.times)
        noise = np.zeros(self.times)
        for place in range(self.times):
            noise[place] = kept * noise[place - 1] + new[place]
        time = np.arange(self.times)
        values: np.ndarray = level + slope * time / self.times + noise
        values += day[time % self.period] + week[time // self.period % 7]
        return values[:, None]

    def _day(self, generator: np.random.Generator) -> np.ndarray:
        """float64 of shape (period,)."""
        angle = 2 * np.pi * np.arange(self.period) / self.period
        waves = [wave(harmonic * angle) / harmonic for harmonic in _HARMONICS for wave in (np.sin, np.cos)]
        found: np.ndarray = np.einsum("w,wt->t", generator.normal(size=len(waves)), np.stack(waves))
        return found
