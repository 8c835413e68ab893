"""What models and clients see of data: the shape of inputs, the samples of a split, and which samples they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch

SPLITS = ("train", "validation", "test")

UNLABELLED = "unlabelled"
"""Training samples whose labels nobody knows, which are in no split."""
NO_LABEL = -1
"""In the place of the label of such a sample."""

Places = Mapping[str, np.ndarray]
"""By split, which samples: ascending int64 indices."""

Target = Literal[
    "class", "labels", "values", "tokens", "mask", "survival", "preference", "ranking", "nodes", "forecast"
]
"""What is known of a sample: ``class``, one of C, int64; ``labels``, each of L that it has or not, float32 of shape
(L,), 0 or 1; ``values``, D numbers to predict, float32 of shape (D,); ``tokens``, one for each position of the input,
int64 of shape (T,), -100 where none is asked for; ``mask``, one of C classes for each pixel or voxel, int64 of shape
(H, W) or (H, W, D), -100 where none counts; ``survival``, a time of at least 0, and whether the event was seen then
(1) or was not seen until then (0), float32 of shape (2,); ``preference``, for each position of two texts, the preferred
one first, the next token of the answer, int64 of shape (2, T), -100 where none is asked for; ``ranking``, which of the
items in the row a user chose, int64: 0, for it is the first; ``nodes``, one of C classes for each node of a graph,
int64 of shape (n,), -100 where none counts; ``forecast``, the D numbers that follow a window of series, what a naive
forecast says of them, and the mean absolute error of such forecasts in training times, float32 of shape (3, D)."""

BYTE_TOKENS, END_OF_BYTES = 258, 1
"""How many tokens there are of bytes: 0 fills up, 1 ends a text, and the bytes are 2 to 257."""


def byte_tokens(text: str) -> list[int]:
    """The bytes of a text in UTF-8 as tokens."""
    return [2 + byte for byte in text.encode()]


def text_of_bytes(tokens: Iterable[int]) -> str:
    """The text of such tokens, without the two that are no bytes; what is no UTF-8 is replaced by a sign for it."""
    return bytes(token - 2 for token in tokens if token >= 2).decode(errors="replace")


Kind = Literal["image", "tokens", "graph"]
"""What inputs are; see :class:`InputSpec`."""


@dataclass(frozen=True)
class InputSpec:
    """What a model must know of the data.

    Attributes:
        kind: ``image`` (float32 inputs, in [0, 1] unless normalized; also vectors of any numbers), ``tokens`` (int64
            indices) or ``graph`` (float32 inputs: row i has the weights of node i's edges to all nodes, and then its
            numbers, of which the first is 1 for a node that exists; rows and columns of others are 0).
        shape: shape of one input, e.g. ``(1, 28, 28)``, ``(80,)`` for tokens, ``(2, 80)`` for pairs of texts or
            ``(60,)`` for vectors; of ranking how many items a row has; of graphs ``(n, n + d)`` for at most n nodes
            with d numbers each.
        num_classes: number of outputs: classes (of a sample, or of each pixel or node), labels, values to predict, or
            tokens to choose from; 1 of survival, the risk, and of ranking, the score of an item; of forecasts series
            times times, times quantiles.
        vocabulary: number of distinct tokens, or items; 0 for images.
        target: what is known of a sample.
        padding: the token that fills rows of tokens up to their length, on the right; None where nothing does.
        categories: of rows of a table, by categorical column: where its values' columns of 0 and 1 begin, and how many
            there are. A row that has none of them has a value that is not known.
        horizon: of windows of series, inputs of shape (series, 1, times), how many times are forecast of the first
            ``forecast_series`` series; 0 where inputs are none.
        scaled: whether targets are scaled by deviations, so that errors are not in the units of the data.
        groups: of samples that say to which group of people each belongs, by a sensitive attribute, the groups' names;
            empty where they do not.
        quantiles: of windows of series, which quantiles of each number a model says: of its ``num_classes`` outputs
            those of a number follow each other. Empty where it says one number; and of data, which do not know it.
    """

    kind: Kind
    shape: tuple[int, ...]
    num_classes: int
    vocabulary: int = 0
    target: Target = "class"
    padding: int | None = None
    categories: tuple[tuple[int, int], ...] = ()
    horizon: int = 0
    scaled: bool = False
    quantiles: tuple[float, ...] = ()
    groups: tuple[str, ...] = ()

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of what is known of one sample: () for a class."""
        count = (self.num_classes // max(len(self.quantiles), 1),)
        known = {"class": (), "ranking": (), "labels": count, "values": count, "mask": self.shape[1:], "survival": (2,)}
        known |= {"nodes": self.shape[:1], "forecast": (3, *count)}
        return known.get(self.target, self.shape)

    @property
    def places(self) -> tuple[int, ...]:
        """Where a model has outputs: shape of positions, items, pixels or nodes; () where it has one row a sample."""
        if self.target == "ranking":
            return self.shape
        return self.target_shape if self.target in ("tokens", "mask", "nodes") else ()

    @property
    def forecast_series(self) -> int:
        """Of windows of series, how many of them are forecast; else 0."""
        return self.num_classes // (self.horizon * max(len(self.quantiles), 1)) if self.horizon else 0

    @property
    def of_model(self) -> Self:
        """What a model is made for: of pairs of texts, one text, with the next token at each position; else this."""
        if self.target != "preference":
            return self
        return replace(self, shape=self.shape[1:], target="tokens")

    @property
    def target_type(self) -> type[np.generic]:
        """In what numbers it is stored: int64 or float32."""
        return np.float32 if self.target in ("labels", "values", "survival", "forecast") else np.int64

    def words(self) -> str:
        """Says for messages what the inputs are, and what is learned of each."""
        if self.target == "ranking":
            inputs = f"rows of {self.shape[0]} items, of {self.vocabulary} distinct ones,"
        elif self.kind == "tokens":
            filled = "" if self.padding is None else f", filled up with token {self.padding}"
            pairs = "pairs of " * (self.target == "preference")
            inputs = f"{pairs}texts of {self.shape[-1]} tokens, of {self.vocabulary} distinct ones{filled},"
        elif self.kind == "graph":
            numbers = self.shape[1] - self.shape[0] - 1
            inputs = f"graphs of at most {self.shape[0]} nodes with {numbers} number{'s' * (numbers != 1)} each,"
        elif self.horizon:
            inputs = f"windows of {self.shape[-1]} times of {self.shape[0]} series"
        elif len(self.shape) == 1:
            inputs = f"vectors of {self.shape[0]} numbers"
        else:
            inputs = f"images of {' x '.join(map(str, self.shape))}"
        quantiles = f" by {len(self.quantiles)} quantiles" if self.quantiles else ""
        learned = {
            "class": f"one of {self.num_classes} classes each",
            "labels": f"{self.num_classes} labels each",
            "values": f"{self.num_classes} numbers to predict each",
            "survival": "a time and an event each",
            "tokens": "the next token to predict at each position",
            "preference": "the first text preferred to the second",
            "ranking": "the first one chosen by a user",
            "nodes": f"one of {self.num_classes} classes of each node",
            "forecast": f"{self.horizon} times of {self.forecast_series} series to forecast{quantiles} each",
            "mask": f"one of {self.num_classes} classes at each {'pixel' if len(self.shape) == 3 else 'voxel'}",
        }
        return f"{inputs} with {learned[self.target]}"

    def lengths(self, x: torch.Tensor) -> torch.Tensor:
        """Returns how many tokens rows have without what fills them up; works under ``vmap``.

        Args:
            x: rows of tokens, int64 of shape (..., T); also cut ones.

        Returns:
            int64 of shape (...), each from 0 to T.
        """
        return lengths_of(x, self.padding)

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        """The attention mask of rows of tokens: True for tokens, False for what fills up; bool, of the shape of x."""
        return torch.arange(x.shape[-1], device=x.device) < self.lengths(x)[..., None]


def lengths_of(x: torch.Tensor, padding: int | None) -> torch.Tensor:
    """Returns how many tokens rows have up to the last one that is no padding; see :meth:`InputSpec.lengths`."""
    if padding is None:
        return torch.full(x.shape[:-1], x.shape[-1], device=x.device)
    places = torch.arange(1, x.shape[-1] + 1, device=x.device)
    return ((x != padding) * places).amax(-1)


@dataclass(frozen=True)
class Examples:
    """Samples of one client and split: ``x`` of shape (n, *input shape), ``y`` of shape (n,) or (n, *target shape).

    Those that a method makes to train on may have other targets: ``y`` of shape (n, ...), a row a sample. ``group`` is
    the group of people that each sample is of, a position in :attr:`InputSpec.groups`, int64 of shape (n,); None where
    the data say nothing of that.
    """

    x: torch.Tensor
    y: torch.Tensor
    group: torch.Tensor | None = None

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def __getitem__(self, rows: slice | torch.Tensor) -> Self:
        """Returns some of the samples: a slice, or their places."""
        return replace(self, x=self.x[rows], y=self.y[rows], group=None if self.group is None else self.group[rows])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the samples' tensors by what they are in messages."""
        groups = {} if self.group is None else {"groups": self.group}
        return {"inputs": self.x, "labels": self.y, **groups}

    def to(self, device: torch.device) -> Self:
        """Returns the samples on a device."""
        group = None if self.group is None else self.group.to(device)
        return replace(self, x=self.x.to(device), y=self.y.to(device), group=group)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Returns the samples of several parts, at least one, in their order; all parts have groups, or none."""
        groups = [part.group for part in parts if part.group is not None]
        x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
        return cls(x, y, torch.cat(groups) if groups else None)

    @classmethod
    def unlabelled(cls, x: torch.Tensor) -> Self:
        """Returns samples without labels: their ``y`` is :data:`NO_LABEL`, int64 of shape (n,), on the same device."""
        return cls(x, torch.full((len(x),), NO_LABEL, dtype=torch.int64, device=x.device))
