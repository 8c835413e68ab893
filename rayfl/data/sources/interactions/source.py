"""Interactions of users with items, each user a client: from a user's own file, or made up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.data.interactions import InteractionDataset, Unknown
from rayfl.data.partitions.owners import places_by_owner
from rayfl.data.sources.base import Source
from rayfl.data.sources.interactions.files import read_interactions
from rayfl.data.sources.made_up.making import MadeUpSource
from rayfl.data.sources.made_up.source import client_names
from rayfl.data.sources.rows.parquet import located
from rayfl.errors import DataError
from rayfl.naming.lists import EACH_ONCE
from rayfl.randomness import RandomStreams

_NEGATIVES = "Items that the user did not choose, in each sample: all are ranked when a model is scored."
_UNKNOWN = (
    "Which of a user's items are never drawn as negatives of its training samples: training, those of its training "
    "samples; all, also those held out (which tells a model that these are special)."
)
_VALIDATION = "Whether the last but one of a user's items is held out for validation."


class InteractionsSource(Source):
    """Configuration of your own file of interactions: a row says that a user chose an item, and perhaps when.

    The file is Parquet, or text with a separator, such as ``u.data`` of MovieLens 100K or ``ratings.dat`` of MovieLens
    1M. Each user is a client. The user's last item is held out for testing, and the one before it for validation. Items
    are numbered from 0 by their names, as numbers if all are whole numbers.
    """

    name: Literal["interactions"] = Field(default="interactions", description="Your own file of users and items.")
    path: Path = Field(
        description="The file: .parquet, .csv, .tsv, .data (tabs), .dat (two colons), or another text with a "
        "dataset.separator; a relative path is also looked up in RAYFL_DATA."
    )
    columns: Annotated[tuple[str, ...], EACH_ONCE] = Field(
        default=(), description="Names of the columns of a text without a header, in their order; none: it has one."
    )
    separator: str | None = Field(
        default=None, min_length=1, description="What separates columns of a text; null: by the file's name."
    )
    user: str = Field(default="user", description="Column of the users' names.")
    item: str = Field(default="item", description="Column of the items' names.")
    time: str | None = Field(
        default=None,
        description="Column of the times, by which the last items are found, with equal times in the order of the "
        "file; null: a user's items are in an order that is drawn by the seed.",
    )
    rating: str | None = Field(
        default=None, description="Column of ratings, of which only those count that reach threshold; null: all rows."
    )
    threshold: float | None = Field(default=None, description="The least rating that counts.", allow_inf_nan=False)
    repeated: Literal["error", "first"] = Field(
        default="error", description="Where a user has an item twice: error, or the first of them is kept."
    )
    min_interactions: int = Field(
        default=5, ge=2, description="Users with fewer items are left out; at least 3 with a validation item."
    )
    negatives: int = Field(default=99, ge=1, description=_NEGATIVES)
    unknown: Unknown = Field(default="training", description=_UNKNOWN)
    validation: bool = Field(default=True, description=_VALIDATION)

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if (self.rating is None) != (self.threshold is None):
            raise ValueError("rating and threshold are for each other: give both, or neither")
        if self.validation and self.min_interactions < 3:
            raise ValueError("min_interactions must be at least 3: one item to train on, and two that are held out")
        if self.path.suffix.lower() == ".parquet" and (self.columns or self.separator is not None):
            raise ValueError("columns and separator are for texts, and path is a Parquet file: leave them out")
        return self

    def open(self, streams: RandomStreams) -> InteractionDataset:
        """Reads the file; uses the stream ``holdout`` of each client if there are no times.

        Raises:
            DataError: naming the file, the column, the row or the user, and the fix.
        """
        path = located(self.path.expanduser())
        named = (self.user, self.item, self.time, self.rating)
        found = read_interactions(path, named, self.columns, self.separator)
        if self.rating is not None:
            assert found.ratings is not None
            found = found.kept(found.ratings >= self.threshold)
        found = found.without_repeated(path, self.repeated == "first")
        counts = np.bincount(found.users, minlength=len(found.user_names))
        enough = counts >= self.min_interactions
        if not enough.any():
            raise DataError(
                f"{path}: no user has dataset.min_interactions={self.min_interactions} items; the most that one has "
                f"(with its rating, if there is one, at least dataset.threshold) is {counts.max()}: lower one of them"
            )
        found, left_out = found.kept(enough[found.users]).renumbered(), int((~enough).sum())
        parts = places_by_owner(found.users, len(found.user_names))
        if self.time is None:
            parts = [
                part[streams.generator("holdout", client=client).permutation(len(part))]
                for client, part in enumerate(parts)
            ]
        words = f"users with fewer than dataset.min_interactions={self.min_interactions} items are left out: {left_out}"
        return InteractionDataset(
            list(map(str, found.user_names)),
            [found.items[part] for part in parts],
            len(found.item_names),
            self.negatives,
            self.unknown,
            self.validation,
            streams,
            lambda: [words] if left_out else [],
        )


class SyntheticInteractionsSource(MadeUpSource):
    """Users who choose made-up items by popularity and by tastes of their own.

    User k chooses item i before others by the score b_i + taste * (u_k . v_i) / sqrt(factors) + g_ki, with all entries
    of b, u_k and v_i drawn from N(0, 1), and g_ki from a Gumbel distribution: the chosen items are drawn one after the
    other without repetition, with probabilities proportional to the exponentials of scores without g. Their order in
    time is random. A user has from half to one and a half times ``interactions`` items.
    """

    amounts: ClassVar[tuple[str, ...]] = ("num_clients", "interactions")

    name: Literal["synthetic_interactions"] = Field(
        default="synthetic_interactions", description="Made-up users who choose items."
    )
    num_clients: int = Field(default=100, ge=1, description="Number of users.")
    items: int = Field(default=200, ge=3, description="Number of items.")
    interactions: int = Field(default=20, ge=6, description="Mean number of items that a user chose.")
    factors: int = Field(default=4, ge=1, description="Numbers of a user's taste, and of an item.")
    taste: float = Field(default=3.0, ge=0, le=1e3, description="How much tastes count beside popularity.")
    negatives: int = Field(default=99, ge=1, description=_NEGATIVES)
    unknown: Unknown = Field(default="training", description=_UNKNOWN)
    validation: bool = Field(default=True, description=_VALIDATION)

    @property
    def least_bytes(self) -> int:
        return self.num_clients * self.interactions * 8

    def open(self, streams: RandomStreams) -> InteractionDataset:
        """Draws all users' items; uses the stream ``synthetic``, also of each client."""
        if self.items <= (most := 3 * self.interactions // 2):
            raise DataError(
                f"dataset.items is {self.items}, but a user may choose {most} of them (one and a half times "
                "dataset.interactions): raise it"
            )
        self.check_room()
        generator = streams.generator("synthetic")
        popularity = generator.normal(size=self.items)
        vectors = generator.normal(size=(self.items, self.factors))
        chosen = [self._user(client, popularity, vectors, streams) for client in range(self.num_clients)]
        names = client_names(self.num_clients, 1).tolist()
        return InteractionDataset(names, chosen, self.items, self.negatives, self.unknown, self.validation, streams)

    def _user(self, client: int, popularity: np.ndarray, vectors: np.ndarray, streams: RandomStreams) -> np.ndarray:
        generator = streams.generator("synthetic", client=client)
        count = int(generator.integers(self.interactions // 2, 3 * self.interactions // 2, endpoint=True))
        # Without BLAS, whose sums depend on its number of threads: all processes have to find the same items.
        liked = np.einsum("if,f->i", vectors, generator.normal(size=self.factors)) / np.sqrt(self.factors)
        scores = popularity + self.taste * liked + generator.gumbel(size=self.items)
        return generator.permutation(np.argsort(-scores, kind="stable")[:count])
