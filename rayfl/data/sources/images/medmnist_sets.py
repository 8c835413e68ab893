"""The sets of MedMNIST: classes, official parts and checksums, as version 3.0.2 of its own package has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rayfl.examples import Target


class MedMnistSet(NamedTuple):
    """A set of two-dimensional images.

    Attributes:
        channels: 1 for grey images, 3 for colours.
        classes: names of the classes, or of the findings that an image may have several of, by number.
        rows: how many images the official parts ``train``, ``val`` and ``test`` have.
        md5: of the official files on Zenodo, by the side of the images in pixels.
        target: what is known of an image.
    """

    channels: int
    classes: tuple[str, ...]
    rows: Mapping[str, int]
    md5: Mapping[int, str]
    target: Target = "class"


def _rows(train: int, val: int, test: int) -> dict[str, int]:
    return {"train": train, "val": val, "test": test}


def _md5(*digests: str) -> dict[int, str]:
    return dict(zip((28, 64, 128, 224), digests, strict=True))


_ORGANS = (
    *("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left"),
    *("lung-right", "pancreas", "spleen"),
)

SETS: Mapping[str, MedMnistSet] = {
    "pathmnist": MedMnistSet(
        channels=3,
        classes=(
            "adipose",
            "background",
            "debris",
            "lymphocytes",
            "mucus",
            "smooth muscle",
            "normal colon mucosa",
            "cancer-associated stroma",
            "colorectal adenocarcinoma epithelium",
        ),
        rows=_rows(89996, 10004, 7180),
        md5=_md5(
            "a8b06965200029087d5bd730944a56c1",
            "55aa9c1e0525abe5a6b9d8343a507616",
            "ac42d08fb904d92c244187169d1fd1d9",
            "2c51a510bcdc9cf8ddb2af93af1eadec",
        ),
    ),
    "chestmnist": MedMnistSet(
        channels=1,
        classes=(
            "atelectasis",
            "cardiomegaly",
            "effusion",
            "infiltration",
            "mass",
            "nodule",
            "pneumonia",
            "pneumothorax",
            "consolidation",
            "edema",
            "emphysema",
            "fibrosis",
            "pleural",
            "hernia",
        ),
        rows=_rows(78468, 11219, 22433),
        md5=_md5(
            "02c8a6516a18b556561a56cbdd36c4a8",
            "9de6cd0b934ebb5b7426cfba5efbae16",
            "db107e5590b27930b62dbaf558aebee3",
            "45bd33e6f06c3e8cdb481c74a89152aa",
        ),
        target="labels",
    ),
    "dermamnist": MedMnistSet(
        channels=3,
        classes=(
            "actinic keratoses and intraepithelial carcinoma",
            "basal cell carcinoma",
            "benign keratosis-like lesions",
            "dermatofibroma",
            "melanoma",
            "melanocytic nevi",
            "vascular lesions",
        ),
        rows=_rows(7007, 1003, 2005),
        md5=_md5(
            "0744692d530f8e62ec473284d019b0c7",
            "b70a2f5635c6199aeaa28c31d7202e1f",
            "2defd784463fa5243564e855ed717de1",
            "8974907d8e169bef5f5b96bc506ae45d",
        ),
    ),
    "octmnist": MedMnistSet(
        channels=1,
        classes=(
            "choroidal neovascularization",
            "diabetic macular edema",
            "drusen",
            "normal",
        ),
        rows=_rows(97477, 10832, 1000),
        md5=_md5(
            "c68d92d5b585d8d81f7112f81e2d0842",
            "e229e9440236b774d9f0dfef9d07bdaf",
            "0a97e76651ace45c5d943ee3f65b63ae",
            "abc493b6d529d5de7569faaef2773ba3",
        ),
    ),
    "pneumoniamnist": MedMnistSet(
        channels=1,
        classes=(
            "normal",
            "pneumonia",
        ),
        rows=_rows(4708, 524, 624),
        md5=_md5(
            "28209eda62fecd6e6a2d98b1501bb15f",
            "8f4eceb4ccffa70c672198ea285246c6",
            "05b46931834c231683c68f40c47b2971",
            "d6a3c71de1b945ea11211b03746c1fe1",
        ),
    ),
    "retinamnist": MedMnistSet(
        channels=3,
        classes=(
            "0",
            "1",
            "2",
            "3",
            "4",
        ),
        rows=_rows(1080, 120, 400),
        md5=_md5(
            "bd4c0672f1bba3e3a89f0e4e876791e4",
            "afda852cc34dcda56f86ad2b2457dbcc",
            "e48e916a24454daf90583d4e6efb1a18",
            "eae7e3b6f3fcbda4ae613ebdcbe35348",
        ),
    ),
    "breastmnist": MedMnistSet(
        channels=1,
        classes=(
            "malignant",
            "normal, benign",
        ),
        rows=_rows(546, 78, 156),
        md5=_md5(
            "750601b1f35ba3300ea97c75c52ff8f6",
            "742edef2a1fd1524b2efff4bd7ba9364",
            "363e4b3f8d712e9b5de15470a2aaadf1",
            "b56378a6eefa9fed602bb16d192d4c8b",
        ),
    ),
    "bloodmnist": MedMnistSet(
        channels=3,
        classes=(
            "basophil",
            "eosinophil",
            "erythroblast",
            "immature granulocytes (myelocytes, metamyelocytes and promyelocytes)",
            "lymphocyte",
            "monocyte",
            "neutrophil",
            "platelet",
        ),
        rows=_rows(11959, 1712, 3421),
        md5=_md5(
            "7053d0359d879ad8a5505303e11de1dc",
            "2b94928a2ae4916078ca51e05b6b800b",
            "adace1e0ed228fccda1f39692059dd4c",
            "b718ff6835fcbdb22ba9eacccd7b2601",
        ),
    ),
    "tissuemnist": MedMnistSet(
        channels=1,
        classes=(
            "Collecting Duct, Connecting Tubule",
            "Distal Convoluted Tubule",
            "Glomerular endothelial cells",
            "Interstitial endothelial cells",
            "Leukocytes",
            "Podocytes",
            "Proximal Tubule Segments",
            "Thick Ascending Limb",
        ),
        rows=_rows(165466, 23640, 47280),
        md5=_md5(
            "ebe78ee8b05294063de985d821c1c34b",
            "123ece2eba09d0aa5d698fda57103344",
            "61b955355d7425a89687b06cca3ce0c2",
            "b077128c4a949f0a4eb01517f9037b9c",
        ),
    ),
    "organamnist": MedMnistSet(
        channels=1,
        classes=_ORGANS,
        rows=_rows(34561, 6491, 17778),
        md5=_md5(
            "68e3f8846a6bd62f0c9bf841c0d9eacc",
            "2dcccc29b88e6da5a01161ef20cda288",
            "eeae80d0a227a8d099027e1b3cfd3b60",
            "50747347e05c87dd3aaf92c49f9f3170",
        ),
    ),
    "organcmnist": MedMnistSet(
        channels=1,
        classes=_ORGANS,
        rows=_rows(12975, 2392, 8216),
        md5=_md5(
            "b9ceb9546e10131b32923c5bbeaea2b1",
            "3ce34a8724ea6f548e6db4744d03b6a9",
            "773c1f009daa3fe5d9a2a201b2a7ed94",
            "050f5e875dc056f6768abf94ec9995d1",
        ),
    ),
    "organsmnist": MedMnistSet(
        channels=1,
        classes=_ORGANS,
        rows=_rows(13932, 2452, 8827),
        md5=_md5(
            "9ab87b696fb54e2a387ebe992d6ed5f1",
            "53a6d115339d874c25e309a994ff46d3",
            "ded0c5fa01a95dc4978b956f613e9b8e",
            "b354719e553fbbb2513d5533f52a4cb1",
        ),
    ),
}
