"""Tables as models see them: missing numbers filled in, numbers standardized, by what is known of training samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rayfl.data.federated import Derived, FederatedDataset, OnDemand
from rayfl.examples import Examples

Standardize = Literal["none", "global", "client"]


@dataclass(frozen=True)
class TableColumns:
    """What the columns of vectors are.

    Attributes:
        names: of the columns.
        categories: which are a category's value each, 0 or 1; the others are numbers.
        gaps: which have missing values (nan).
        groups: how many values each category has, in the order of ``categories``.
        people: the groups of people that rows are of, by a sensitive attribute. Where there are some, rows have one
            more number at the end, a position among these, which no model sees.
    """

    names: tuple[str, ...]
    categories: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    people: tuple[str, ...] = ()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """By category, where its columns begin, and how many there are."""
        ends = np.cumsum(self.groups, dtype=np.int64)
        return tuple((self.categories[end - size], size) for end, size in zip(ends.tolist(), self.groups, strict=True))


@dataclass(frozen=True)
class TableOptions:
    """What is done to columns.

    Attributes:
        columns: what they are.
        standardize: by whose moments numbers get mean 0 and standard deviation 1: those of the training samples of all
            clients, or of each client's own; or not at all.
        indicator: whether each column with gaps gets another one, at the end, that is 1 where it has one.
    """

    columns: TableColumns
    standardize: Standardize = "none"
    indicator: bool = False


@dataclass(frozen=True, eq=False)
class _Moments:
    """Of the numbers that there are in each column.

    Attributes:
        count: how many.
        rows: how many there could be.
        mean: 0 where there is none.
        std: population standard deviation; 1 where it is 0.
    """

    count: np.ndarray
    rows: int
    mean: np.ndarray
    std: np.ndarray


class TabularDataset(Derived):
    """Clients of another data set, whose vectors are the rows of a table.

    What is filled in and subtracted is known from training samples alone: sums over clients, which a federation could
    compute too. A category that no training sample of any client has is 0 everywhere: models know nothing of it. So is
    a number that none has, and the column that says where one is missing where none lacks it.

    Args:
        inner: the data set; its inputs are of shape (D,), nan where a number is missing, or (D + 1,) with ``people``.
        options: what is done.
    """

    def __init__(self, inner: FederatedDataset, options: TableOptions) -> None:
        super().__init__(inner)
        self._options = options
        self.preprocess = None
        width = len(options.columns.names) + (len(options.columns.gaps) if options.indicator else 0)
        self._width = len(options.columns.names)
        groups = options.columns.people or inner.spec.groups
        self.spec = replace(inner.spec, shape=(width,), categories=options.columns.ranges, groups=groups)

    def load(self, client: int) -> Mapping[str, Examples]:
        """See :class:`FederatedDataset`."""
        raw = self._inner.load(client)

        def read(split: str) -> Examples:
            found = raw[split]
            group = found.x[:, -1].long() if self._options.columns.people else found.group
            return Examples(self._seen(found.x, client), found.y, group)

        return OnDemand(read)

    def made_by(self, client: int) -> dict[str, Any]:
        """What a client's inputs were made by: ``columns``, a dictionary for each number of an input.

        ``name`` is the column's, of a category ``<column>=<value>``, whose input is 1 for this value, else 0. From a
        number ``mean`` is subtracted, and it is divided by ``std``, if these are there. ``filled`` stands for a missing
        number, in the file's units. ``missing`` is true of inputs that are 1 where the number is missing, else 0.
        ``unused`` is true of those that are always 0, because no training sample has them.
        """
        options, everybody = self._options, self._everybody
        moments = self._own(client) if options.standardize == "client" else everybody
        columns = list[dict[str, Any]]()
        for place, name in enumerate(options.columns.names):
            number = place not in options.columns.categories
            told: dict[str, Any] = {"name": name}
            if number and options.standardize != "none":
                told |= {"mean": float(moments.mean[place]), "std": float(moments.std[place])}
            if place in options.columns.gaps:
                told["filled"] = float(moments.mean[place])
            if not everybody.count[place] or (not number and not everybody.mean[place]):
                told["unused"] = True
            columns.append(told)
        for place in options.columns.gaps if options.indicator else ():
            unused = {} if everybody.count[place] < everybody.rows else {"unused": True}
            columns.append({"name": options.columns.names[place], "missing": True, **unused})
        return {"columns": columns}

    def load_public(self) -> Tensor:
        """See :class:`FederatedDataset`; with moments of clients' own they are those of all."""
        return self._seen(self._inner.load_public(), None)

    def _seen(self, x: Tensor, client: int | None) -> Tensor:
        """Rows as a model sees them."""
        options, values = self._options, x[:, : self._width].numpy().astype(np.float64)
        absent = np.isnan(values)
        moments = self._everybody
        if client is not None and options.standardize == "client":
            moments = self._own(client)
        filled = np.where(absent, moments.mean, values)
        numbers = np.setdiff1d(np.arange(values.shape[1]), options.columns.categories)
        if options.standardize != "none":
            filled[:, numbers] = ((filled - moments.mean) / moments.std)[:, numbers]
        filled[:, self._everybody.count == 0] = 0
        known = self._everybody.mean[list(options.columns.categories)] > 0
        filled[:, options.columns.categories] *= known
        if options.indicator:
            seen = self._everybody.count < self._everybody.rows
            filled = np.concatenate([filled, (absent & seen)[:, list(options.columns.gaps)]], axis=1)
        return torch.from_numpy(filled.astype(np.float32))

    @cached_property
    def _everybody(self) -> _Moments:
        """Of the training samples of all clients: sums in double precision, client after client."""
        width, rows = len(self._options.columns.names), 0
        count, total, squares = np.zeros(width), np.zeros(width), np.zeros(width)
        for client in range(self.num_clients):
            values = self._training(client)
            rows += len(values)
            count += (~np.isnan(values)).sum(0)
            total += np.nansum(values, axis=0)
        mean = total / np.maximum(count, 1)
        for client in range(self.num_clients):
            squares += np.nansum((self._training(client) - mean) ** 2, axis=0)
        return _Moments(count, rows, mean, _positive(np.sqrt(squares / np.maximum(count, 1))))

    def _own(self, client: int) -> _Moments:
        """Of a client's own training samples; of a column of which it has no number, those of all clients."""
        values, everybody = self._training(client), self._everybody
        count = (~np.isnan(values)).sum(0)
        mean = np.where(count > 0, np.nansum(values, axis=0) / np.maximum(count, 1), everybody.mean)
        squares = np.nansum((values - mean) ** 2, axis=0)
        std = np.where(count > 0, _positive(np.sqrt(squares / np.maximum(count, 1))), everybody.std)
        return _Moments(count, len(values), mean, std)

    def _training(self, client: int) -> np.ndarray:
        return self._inner.load(client)["train"].x[:, : self._width].numpy().astype(np.float64)


def _positive(std: np.ndarray) -> np.ndarray:
    """A column that does not vary is left as it is, at 0."""
    found: np.ndarray = np.where(std > 0, std, 1.0)
    return found
