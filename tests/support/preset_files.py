"""Small files of the official layouts, by preset."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision.datasets
from scipy.io import savemat

from rayfl.data.sources.images.camelyon import Camelyon17Source
from rayfl.data.sources.images.digit_five import DigitFiveSource
from rayfl.data.sources.images.isic import Isic2019Source
from rayfl.data.sources.images.medmnist import MedMnistSource
from rayfl.data.sources.images.published_folders import Cinic10Source, DomainNetSource, OfficeCaltechSource
from rayfl.data.sources.images.vision import FashionMnistSource, SvhnSource
from rayfl.data.sources.leaf import LeafOptions, import_leaf
from rayfl.data.sources.preparation.preparing import Order
from rayfl.data.sources.speech.speech_commands import SpeechCommandsSource
from rayfl.data.sources.tables.har import HarSource
from rayfl.data.sources.tables.heart_disease import HeartDiseaseSource
from rayfl.data.sources.tables.pamap2 import Pamap2Source
from rayfl.data.sources.tables.tcga_brca import TcgaBrcaSource
from rayfl.data.sources.tff import TffOptions, import_tff
from tests.data.sources.images.test_isic import isic_files
from tests.data.sources.leaf.test_leaf_words import NEXT, SENTENCE, comments, tweets
from tests.data.sources.rows.test_arrays import table as write_table
from tests.support.field_files import brca_files, digit_files, heart_files, office_files, png
from tests.support.har_files import har_files
from tests.support.image_files import idx, unpacked
from tests.support.medmnist_files import BREAST, medmnist_arrays, write_medmnist
from tests.support.pamap2_files import pamap2_files
from tests.support.speech_made import speech_files
from tests.support.tff_files import stack_overflow, write_sqlite

RANDOM = np.random.default_rng(0)


def grey(count: int, side: int = 28) -> np.ndarray:
    return RANDOM.integers(0, 256, (count, side, side), dtype=np.uint8)


def fashion_mnist(root: Path, patch: pytest.MonkeyPatch) -> None:
    resources, mine = [], root / "mine"
    mine.mkdir()
    for prefix, size in (("train", 200), ("t10k", 40)):
        for name, array in (("images-idx3", grey(size)), ("labels-idx1", (np.arange(size) % 10).astype(np.uint8))):
            packed = gzip.compress(idx(array))
            (mine / f"{prefix}-{name}-ubyte.gz").write_bytes(packed)
            resources.append((f"{prefix}-{name}-ubyte.gz", hashlib.md5(packed).hexdigest()))
    patch.setattr(torchvision.datasets.FashionMNIST, "resources", resources)
    FashionMnistSource(root=root).prepare(Order(place=str(mine)))


def svhn(root: Path, patch: pytest.MonkeyPatch) -> None:
    listed, mine = {}, root / "mine"
    mine.mkdir()
    for part, size in (("train", 200), ("test", 40)):
        labels = (np.arange(size)[:, np.newaxis] % 10 + 1).astype(np.uint8)
        pixels = RANDOM.integers(0, 256, (32, 32, 3, size), dtype=np.uint8)
        savemat(mine / f"{part}_32x32.mat", {"X": pixels, "y": labels})
        digest = hashlib.md5((mine / f"{part}_32x32.mat").read_bytes()).hexdigest()
        listed[part] = [f"http://nowhere/{part}", f"{part}_32x32.mat", digest]
    patch.setattr(torchvision.datasets.SVHN, "split_list", listed)
    SvhnSource(root=root).prepare(Order(place=str(mine)))


def cinic10(root: Path, patch: pytest.MonkeyPatch) -> None:
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    files = {
        f"{part}/{label}/{part}-{number}-{copy}.png": png(20 * number + copy)
        for part, copies in (("train", 20), ("valid", 1), ("test", 2))
        for number, label in enumerate(classes)
        for copy in range(copies)
    }
    Cinic10Source(root=root).prepare(Order(place=str(unpacked(root / "cinic", files)), offline=True))


def digit_five(root: Path, patch: pytest.MonkeyPatch) -> None:
    digit_files(root / "mine")
    DigitFiveSource(root=root).prepare(Order(place=str(root / "mine")))


def office_caltech(root: Path, patch: pytest.MonkeyPatch) -> None:
    unpacked(root / "office_caltech_10", office_files())
    OfficeCaltechSource(root=root, side=32).prepare(Order())


def domainnet(root: Path, patch: pytest.MonkeyPatch) -> None:
    ten = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
    files: dict[str, bytes] = {}
    lists: dict[str, list[str]] = {}
    for domain in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"):
        for number, label in enumerate(ten):
            for part in ("train", "test"):
                name = f"{domain}/{label}/{part}.png"
                files[name] = png(10 * number, 9, 12)
                lists.setdefault(f"{domain}_{part}.txt", []).append(f"{name} {number + 23}")
    files |= {name: "\n".join(lines).encode() + b"\n" for name, lines in lists.items()}
    DomainNetSource(root=root, side=32).prepare(Order(place=str(unpacked(root / "mine", files))))


def camelyon17(root: Path, patch: pytest.MonkeyPatch) -> None:
    files, lines = {}, [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for row in range(40):
        name = f"patch_patient_{row % 7:03d}_node_{row % 2}_x_{row}_y_{row}.png"
        files[f"patches/patient_{row % 7:03d}_node_{row % 2}/{name}"] = png(6 * row, 96, 96)
        lines.append(f"{row},{row % 7:03d},{row % 2},{row},{row},{row % 3 == 0:d},{row},{row % 5},0")
    files["metadata.csv"] = "\n".join(lines).encode() + b"\n"
    unpacked(root / "camelyon17_v1.0", files)
    Camelyon17Source(root=root).prepare(Order())


def isic2019(root: Path, patch: pytest.MonkeyPatch) -> None:
    isic_files(root / "fed_isic2019")
    Isic2019Source(root=root, side=64).prepare(Order())


def heart_disease(root: Path, patch: pytest.MonkeyPatch) -> None:
    HeartDiseaseSource(root=root).prepare(Order(place=str(heart_files(root / "mine")), offline=True))


def tcga_brca(root: Path, patch: pytest.MonkeyPatch) -> None:
    TcgaBrcaSource(root=root).prepare(Order(place=str(brca_files(root / "mine")), offline=True))


def har(root: Path, patch: pytest.MonkeyPatch) -> None:
    har_files(root / "UCI HAR Dataset", windows=40)
    HarSource(root=root).prepare(Order(offline=True))


def pamap2(root: Path, patch: pytest.MonkeyPatch) -> None:
    pamap2_files(root / "PAMAP2_Dataset", rows=2000)
    Pamap2Source(root=root).prepare(Order(offline=True))


def speech_commands(root: Path, patch: pytest.MonkeyPatch) -> None:
    speech_files(root / "mine")
    SpeechCommandsSource(root=root, features="waveform").prepare(Order(place=str(root / "mine"), offline=True))


def medmnist(root: Path, patch: pytest.MonkeyPatch) -> None:
    digest = write_medmnist(root / "mine" / "breastmnist.npz", medmnist_arrays(BREAST, 2))
    source = MedMnistSource(root=root, subset="breastmnist", validation="train")
    source.prepare(Order(place=str(root / "mine"), sha256=digest, offline=True))


def stackoverflow(root: Path, patch: pytest.MonkeyPatch) -> None:
    tables = {"heldout" if part == "held_out" else part: clients for part, clients in stack_overflow(6).items()}
    source = write_sqlite(root / "mine.sqlite", tables)
    import_tff("stackoverflow", source, root / "tff-stackoverflow.parquet", TffOptions(most_samples=10))


def shakespeare(root: Path, patch: pytest.MonkeyPatch) -> None:
    clients = {f"PLAY_ROLE{role}": {"snippets": [b"to be, or not to be" * 20]} for role in range(10)}
    source = write_sqlite(root / "mine.sqlite", {"train": clients, "test": clients})
    import_tff("shakespeare", source, root / "tff-shakespeare.parquet")


def emnist(root: Path, patch: pytest.MonkeyPatch) -> None:
    clients = {
        f"f{writer:04d}_01": {"pixels": (grey(10) / 255).astype(np.float32), "label": np.arange(10)}
        for writer in range(10)
    }
    source = write_sqlite(root / "mine.sqlite", {"all_train": clients, "all_test": clients})
    import_tff("emnist", source, root / "tff-emnist.parquet")


def cifar100(root: Path, patch: pytest.MonkeyPatch) -> None:
    def clients(count: int) -> dict[str, Any]:
        image = RANDOM.integers(0, 256, (4, 32, 32, 3))
        label = np.array([[0], [5], [50], [99]])
        return {str(client): {"coarse_label": label // 5, "image": image, "label": label} for client in range(count)}

    source = write_sqlite(root / "mine.sqlite", {"train": clients(10), "test": clients(2)})
    import_tff("cifar100", source, root / "tff-cifar100.parquet")


def leaf_document(users: dict[str, dict[str, list[Any]]]) -> str:
    sizes = [len(entry["y"]) for entry in users.values()]
    return json.dumps({"users": list(users), "num_samples": sizes, "user_data": users})


def leaf_json(folder: Path, users: dict[str, dict[str, list[Any]]]) -> Path:
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        (folder / split / "all.json").write_text(leaf_document(users))
    return folder


def reddit(root: Path, patch: pytest.MonkeyPatch) -> None:
    users = {f"user{number}": comments((SENTENCE, NEXT), (SENTENCE, NEXT)) for number in range(10)}
    import_leaf("reddit", leaf_json(root / "mine", users), root / "reddit.parquet", LeafOptions(sequences=True))


def sent140(root: Path, patch: pytest.MonkeyPatch) -> None:
    users = {f"user{number}": tweets("a good day", "no, not good", label=4 * (number % 2)) for number in range(4)}
    import_leaf("sent140", leaf_json(root / "mine", users), root / "sent140.parquet")


def celeba(root: Path, patch: pytest.MonkeyPatch) -> None:
    (root / "images").mkdir()
    users: dict[str, dict[str, list[Any]]] = {}
    for celebrity in range(4):
        names = [f"{celebrity}{copy}.jpg" for copy in range(3)]
        for name in names:
            (root / "images" / name).write_bytes(png(60 * celebrity, 178, 218))
        users[str(celebrity)] = {"x": list(names), "y": [0, 1, 0]}
    options = LeafOptions(images=root / "images")
    import_leaf("celeba", leaf_json(root / "mine", users), root / "celeba.parquet", options)


def ixi_tiny(root: Path, patch: pytest.MonkeyPatch) -> None:
    (root / "ixi").mkdir()
    write_table(root / "ixi", ".nii.gz")


def kits19(root: Path, patch: pytest.MonkeyPatch) -> None:
    (root / "kits19").mkdir()
    write_table(root / "kits19", ".nii.gz")


def lidc(root: Path, patch: pytest.MonkeyPatch) -> None:
    (root / "lidc").mkdir()
    write_table(root / "lidc", ".nii.gz")


def camelyon16(root: Path, patch: pytest.MonkeyPatch) -> None:
    (root / "camelyon16").mkdir()
    lines = ["image,label,client,split"]
    for number in range(16):
        bag = np.zeros((5, 8), np.float32)
        bag[: 2 + number % 4] = RANDOM.normal(size=(2 + number % 4, 8))
        np.save(root / "camelyon16" / f"{number}.npy", bag)
        hospital, split = ("RUMC", "UMCU")[number // 8], "test" if number % 4 > 1 else "train"
        lines.append(f"{number}.npy,{number % 2},{hospital},{split}")
    (root / "camelyon16" / "table.csv").write_text("\n".join(lines) + "\n")


def nothing(root: Path, patch: pytest.MonkeyPatch) -> None:
    """The data are generated."""


Maker = Callable[[Path, pytest.MonkeyPatch], None]
PRESETS: dict[str, tuple[Maker, list[str]]] = {
    "heart-disease": (heart_disease, []),
    "tcga-brca": (tcga_brca, ["train.min_local_steps=5", "train.max_local_steps=5"]),
    "har": (har, []),
    "pamap2": (pamap2, []),
    "speech-commands": (speech_commands, ["train.clients_per_round=2", "model.width=8"]),
    "medmnist": (medmnist, ["dataset.subset=breastmnist", "partition.num_clients=5", "partition.alpha=1"]),
    "stackoverflow-nwp": (stackoverflow, ["train.clients_per_round=4", "model.hidden=30"]),
    "synthetic": (nothing, ["train.local_epochs=1"]),
    "tff-shakespeare": (shakespeare, []),
    "tff-emnist": (emnist, []),
    "tff-cifar100": (cifar100, []),
    "reddit": (reddit, []),
    "sent140": (sent140, []),
    "celeba": (celeba, []),
    "fashion-mnist": (fashion_mnist, ["train.local_epochs=1", "partition.min_samples=2"]),
    "svhn": (svhn, ["train.local_epochs=1", "partition.min_samples=2"]),
    "cinic10": (cinic10, ["train.local_epochs=1", "partition.num_clients=10"]),
    "digit-five": (digit_five, ["partition.samples_per_client=6"]),
    "office-caltech": (office_caltech, ["dataset.side=32"]),
    "domainnet": (domainnet, ["dataset.side=32"]),
    "camelyon17": (camelyon17, ["transform.resize=32"]),
    "isic2019": (
        isic2019,
        ["dataset.side=64", "model.weights=null", "train.min_local_steps=2", "train.max_local_steps=2"],
    ),
}
PRESETS["ixi-tiny"] = (
    ixi_tiny,
    ["dataset.shape=[8,8,8]", "train.min_local_steps=2", "train.max_local_steps=2", "model.width=2"],
)
for own in (kits19, lidc):
    small = ["dataset.shape=[12,10,9]", "augment.patch=[8,6,5]", "model.width=2", "model.depth=2"]
    PRESETS[own.__name__] = (own, [*small, "train.min_local_steps=2", "train.max_local_steps=2"])
PRESETS["camelyon16"] = (camelyon16, ["train.min_local_steps=2", "train.max_local_steps=2"])
