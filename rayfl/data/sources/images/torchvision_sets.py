"""Image data sets that torchvision reads: its classes, their official parts, and how many images these have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class OfficialPart(NamedTuple):
    """An official part of a set.

    Attributes:
        rows: how many images it has.
        arguments: what torchvision's class is given for it.
    """

    rows: int
    arguments: Mapping[str, Any]


class TorchvisionSet(NamedTuple):
    """A set whose images show one of several classes.

    Attributes:
        class_name: of torchvision's class.
        classes: how many there are.
        parts: by name, of ``train``, ``val`` and ``test`` those that there are.
        side: height and width in pixels, where all images have one size.
        channels: 1 for grey images, 3 for colours.
    """

    class_name: str
    classes: int
    parts: Mapping[str, OfficialPart]
    side: int | None = None
    channels: int = 3


def _splits(**rows: int) -> dict[str, OfficialPart]:
    return {name: OfficialPart(count, {"split": name}) for name, count in rows.items()}


def _flags(train: int, test: int) -> dict[str, OfficialPart]:
    return {"train": OfficialPart(train, {"train": True}), "test": OfficialPart(test, {"train": False})}


SETS: Mapping[str, TorchvisionSet] = {
    "country211": TorchvisionSet(
        "Country211",
        211,
        {**_splits(train=31650, test=21100), "val": OfficialPart(10550, {"split": "valid"})},
    ),
    "dtd": TorchvisionSet("DTD", 47, _splits(train=1880, val=1880, test=1880)),
    "eurosat": TorchvisionSet("EuroSAT", 10, {"train": OfficialPart(27000, {})}, side=64),
    "fgvc_aircraft": TorchvisionSet("FGVCAircraft", 100, _splits(train=3334, val=3333, test=3333)),
    "flowers102": TorchvisionSet("Flowers102", 102, _splits(train=1020, val=1020, test=6149)),
    "food101": TorchvisionSet("Food101", 101, _splits(train=75750, test=25250)),
    "gtsrb": TorchvisionSet("GTSRB", 43, _splits(train=26640, test=12630)),
    # Its authors call the images that are kept for tests validation.
    "imagenette": TorchvisionSet(
        "Imagenette",
        10,
        {
            "train": OfficialPart(9469, {"split": "train", "size": "320px"}),
            "test": OfficialPart(3925, {"split": "val", "size": "320px"}),
        },
    ),
    "kmnist": TorchvisionSet("KMNIST", 10, _flags(60000, 10000), side=28, channels=1),
    "oxford_iiit_pet": TorchvisionSet(
        "OxfordIIITPet",
        37,
        {"train": OfficialPart(3680, {"split": "trainval"}), "test": OfficialPart(3669, {"split": "test"})},
    ),
    "rendered_sst2": TorchvisionSet("RenderedSST2", 2, _splits(train=6920, val=872, test=1821), side=448),
    "stanford_cars": TorchvisionSet("StanfordCars", 196, _splits(train=8144, test=8041)),
    "stl10": TorchvisionSet("STL10", 10, _splits(train=5000, test=8000), side=96),
    "usps": TorchvisionSet("USPS", 10, _flags(7291, 2007), side=16, channels=1),
}
