"""A data set of samples held in one array and divided among clients by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rayfl.data.federated import FederatedDataset, OnDemand
from rayfl.data.graphs import GraphRows
from rayfl.data.images.transform import Preprocessing
from rayfl.data.partitions.holdout import HoldoutConfig, split_client
from rayfl.data.partitions.noise import LabelNoise
from rayfl.data.partitions.public import draw_public
from rayfl.data.soundness import check_targets
from rayfl.errors import DataError
from rayfl.examples import SPLITS, Examples, InputSpec, Places
from rayfl.randomness import RandomStreams

_CLEAN = LabelNoise()


class PooledDataset(FederatedDataset):
    """Clients that are index arrays into shared samples; their names are "0", "1", ..., if they have no others.

    The arrays are kept, not copied; they may be memory-mapped.

    Args:
        x: inputs of shape (N, *spec.shape), float32, or uint8 standing for x / 255.
        y: labels, int64 of shape (N,), each in [0, spec.num_classes); or other targets (N, *spec.target_shape).
        spec: the shape and kind of the inputs.
        parts: the samples of every client, integers in [0, N), see :mod:`rayfl.data.partitions.base`; or, for clients
            that are divided already, their samples by split.
        holdout: each client's fractions for test and validation, and the number of public samples.
        streams: the experiment's randomness; uses the stream ``holdout`` of each client, ``public`` and ``noise``.
        noise: wrong labels in train and validation parts.
        public: the public samples of clients that are divided already.
        preprocess: what is done to inputs that are stored as ``spec`` says.
        names: the clients' names.

    Attributes:
        group: which group of people each sample is of, positions in ``spec.groups``, int64 of shape (N,); None where
            the spec names none.

    Raises:
        DataError: the arrays do not fit each other or the spec, or a client has nothing to train on.
    """

    group: np.ndarray | None = None

    def __init__(
        self,
        x: np.ndarray | GraphRows,
        y: np.ndarray,
        spec: InputSpec,
        parts: Sequence[np.ndarray | Places],
        holdout: HoldoutConfig,
        streams: RandomStreams,
        noise: LabelNoise = _CLEAN,
        public: np.ndarray | None = None,
        preprocess: Preprocessing | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        _check_arrays(x, y, spec)
        self.preprocess: Preprocessing = preprocess or Preprocessing(spec)
        self.spec = self.preprocess.spec
        self.names = tuple(str(client) for client in range(len(parts))) if names is None else tuple(names)
        self._x = x
        # From a file that is read in place, or made of edges.
        self.reads_ahead = isinstance(x, GraphRows) or not x.flags.writeable
        self._y = y
        self._splits = [
            self._split(client, indices, holdout, streams.generator("holdout", client=client))
            for client, indices in enumerate(parts)
        ]
        self._public = self._take_public(holdout.public, streams) if public is None else public
        self._noisy = noise.corrupt(y, spec.num_classes, streams.generator("noise")) if noise.active else y
        self._owners = noise.owners(len(parts), streams)
        self._in_test = noise.in_test

    def sizes(self) -> np.ndarray:
        """Samples by client and split: int64 of shape (K, 3), columns in the order of ``SPLITS``."""
        rows = [[len(splits[name]) for name in SPLITS] for splits in self._splits]
        return np.array(rows, dtype=np.int64).reshape(self.num_clients, len(SPLITS))

    def load(self, client: int) -> Mapping[str, Examples]:
        """The three splits of one client as copies on the CPU: ``x`` float32 of shape (n, *spec.shape)."""
        places = self._splits[client]
        return OnDemand(lambda split: self._examples(places[split], self._labels(client, split)))

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """The labels of one client by split; inputs are not read."""
        return {name: self._labels(client, name)[at] for name, at in self._splits[client].items()}

    def _labels(self, client: int, split: str) -> np.ndarray:
        """The labels of all samples as a client has them in a split, with noise or without."""
        noisy = client in self._owners and (split != "test" or self._in_test)
        return self._noisy if noisy else self._y

    def places(self, client: int) -> Places:
        """Indices into the samples, by split."""
        return self._splits[client]

    def public_places(self) -> np.ndarray:
        """Indices of the public samples."""
        return self._public

    def load_public(self) -> torch.Tensor:
        """The public samples in ascending order of their clients, shape (count, *spec.shape)."""
        return self._examples(self._public, self._y).x

    def public_labels(self) -> np.ndarray:
        """The labels of the public samples, without noise."""
        labels: np.ndarray = self._y[self._public].astype(self.spec.target_type, copy=False)
        return labels

    def _take_public(self, count: int, streams: RandomStreams) -> np.ndarray:
        """Moves samples from the clients' train parts to the public part; returns their indices."""
        taken = draw_public(np.array([len(splits["train"]) for splits in self._splits]), count, streams)
        public = [splits["train"][positions] for splits, positions in zip(self._splits, taken, strict=True)]
        for splits, positions in zip(self._splits, taken, strict=True):
            splits["train"] = np.delete(splits["train"], positions)
        return np.concatenate(public)

    def _split(
        self, client: int, indices: np.ndarray | Places, holdout: HoldoutConfig, generator: np.random.Generator
    ) -> dict[str, np.ndarray]:
        if isinstance(indices, Mapping):
            return dict(indices)
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self._y)):
            raise DataError(
                f"client {client}: an index is outside 0..{len(self._y) - 1}; make the parts from these labels"
            )
        try:
            return split_client(indices, holdout, generator)
        except DataError as error:
            raise DataError(f"client {client}: {error}") from error

    def _examples(self, indices: np.ndarray, labels: np.ndarray) -> Examples:
        targets = labels[indices].astype(self.spec.target_type, copy=False)
        group = None if self.group is None else torch.from_numpy(self.group[indices])
        return Examples(torch.from_numpy(self.preprocess(self._x[indices])), torch.from_numpy(targets), group)


def _check_arrays(x: np.ndarray | GraphRows, y: np.ndarray, spec: InputSpec) -> None:
    of_tokens = spec.kind == "tokens"
    floats = (np.float32,) if spec.kind == "graph" else (np.uint8, np.float32)
    if not np.issubdtype(x.dtype, np.integer) if of_tokens else x.dtype not in floats:
        wanted = "int64 (tokens)" if of_tokens else "uint8 (pixels 0..255) or float32"
        wanted = "float32 (graphs)" if spec.kind == "graph" else wanted
        raise DataError(f"x has the type {x.dtype}; convert it to {wanted}")
    integers = {"tokens": "i", "preference": "i", "mask": "iu", "nodes": "i"}.get(spec.target, "")
    if y.dtype.kind not in integers if integers else y.dtype != spec.target_type:
        raise DataError(f"y has the type {y.dtype}; convert it to {np.dtype(spec.target_type)}")
    if x.shape[1:] != spec.shape or y.shape != (len(x), *spec.target_shape):
        targets = "(N,)" if spec.target == "class" else f"(N, *{spec.target_shape})"
        raise DataError(f"x has the shape {x.shape} and y {y.shape}; reshape them to (N, *{spec.shape}) and {targets}")
    if spec.target == "class":
        if len(y) and (y.min() < 0 or y.max() >= spec.num_classes):
            raise DataError(
                f"y has labels from {y.min()} to {y.max()}; number them 0..{spec.num_classes - 1} or correct "
                "num_classes"
            )
    else:
        check_targets(torch.from_numpy(y.astype(spec.target_type)), spec, "y")
