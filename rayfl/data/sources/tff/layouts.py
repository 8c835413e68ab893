"""How the files of each data set are called, which splits they have, and their published checksums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["stackoverflow", "shakespeare", "emnist", "emnist-digits", "cifar100"]


@dataclass(frozen=True)
class Layout:
    """The files of a data set, as ``tff.simulation.datasets`` names them.

    Attributes:
        stem: what the HDF5 files' names begin with; ``_train.h5`` and so on follow.
        archive_sha256: of the archive ``<stem>.tar.bz2`` with them.
        tables: by part, the split's name in the SQLite file.
        columns: the columns that are read.
        same_clients: whether a client of the test part is the client of that name of the training part.
    """

    stem: str
    archive_sha256: str
    tables: Mapping[str, str]
    columns: tuple[str, ...]
    same_clients: bool = True

    def file(self, part: str) -> str:
        """Returns the name of a part's HDF5 file."""
        return f"{self.stem}_{part}.h5"


_PLAIN = {"train": "train", "test": "test"}

LAYOUTS: Mapping[Kind, Layout] = {
    "stackoverflow": Layout(
        "stackoverflow",
        "99eca2f8b8327a09e5fc123979df2d237acbc5e52322f6d86bf523ee47b961a2",
        {**_PLAIN, "held_out": "heldout"},
        ("tokens",),
    ),
    "shakespeare": Layout(
        "shakespeare", "0285be9906cb5f268092eee4edeeacfc2af4574f2941f7cc2f08a321d7f5c707", _PLAIN, ("snippets",)
    ),
    "emnist": Layout(
        "fed_emnist",
        "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
        {"train": "all_train", "test": "all_test"},
        ("pixels", "label"),
    ),
    "emnist-digits": Layout(
        "fed_emnist_digitsonly",
        "55333deb8546765427c385710ca5e7301e16f4ed8b60c1dc5ae224b42bd5b14b",
        {"train": "digits_only_train", "test": "digits_only_test"},
        ("pixels", "label"),
    ),
    "cifar100": Layout(
        "fed_cifar100",
        "e8575e22c038ecef1ce6c7d492d7abee7da13b1e1ba9b70a7fc18531ba7590de",
        _PLAIN,
        ("image", "label"),
        same_clients=False,
    ),
}
