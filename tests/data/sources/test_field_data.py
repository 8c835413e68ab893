"""Data sets of the field from small files of the official layouts."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets
from scipy.io import savemat

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.opening import open_dataset
from rayfl.data.sources.images.camelyon import Camelyon17Source
from rayfl.data.sources.images.digit_five import DigitFiveSource
from rayfl.data.sources.images.published_folders import Cinic10Source, DomainNetSource, OfficeCaltechSource
from rayfl.data.sources.images.vision import FashionMnistSource, SvhnSource
from rayfl.data.sources.preparation.inventory import verify
from rayfl.data.sources.preparation.preparing import Order
from rayfl.data.sources.tables.heart_disease import HeartDiseaseSource
from rayfl.errors import ConfigError, DataError
from rayfl.randomness import RandomStreams
from tests.support.field_files import DOMAINS, RANDOM, cinic_files, digit_files, heart_files, office_files, png
from tests.support.image_files import X, Y, idx, unpacked


def test_fashion_mnist_has_files_and_checksums_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, resources = tmp_path / "mine", []
    mine.mkdir()
    for prefix, size in (("train", 20), ("t10k", 10)):
        for name, array in (("images-idx3", X[:size]), ("labels-idx1", Y[:size])):
            packed = gzip.compress(idx(array))
            (mine / f"{prefix}-{name}-ubyte.gz").write_bytes(packed)
            resources.append((f"{prefix}-{name}-ubyte.gz", hashlib.md5(packed).hexdigest()))
    source = FashionMnistSource(root=tmp_path)
    with pytest.raises(DataError, match="has the md5"):
        source.prepare(Order(place=str(mine)))
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "resources", resources)
    assert source.prepare(Order(place=str(mine))) == tmp_path / "prepared" / "fashion_mnist.arrow"
    assert (tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte").exists()
    samples = source.open()
    np.testing.assert_array_equal(samples.x[:, 0], X)
    np.testing.assert_array_equal(samples.y, Y)
    assert len(source.official_test(RandomStreams(0)).y) == 10


def test_the_digit_0_of_svhn_has_the_label_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = RANDOM.integers(0, 256, (32, 32, 3, 12), dtype=np.uint8)
    labels = np.arange(1, 13)[:, np.newaxis] % 10
    labels[labels == 0] = 10
    mine, listed = tmp_path / "mine", {}
    mine.mkdir()
    for part, size in (("train", 12), ("test", 4)):
        savemat(mine / f"{part}_32x32.mat", {"X": images[..., :size], "y": labels[:size].astype(np.uint8)})
        digest = hashlib.md5((mine / f"{part}_32x32.mat").read_bytes()).hexdigest()
        listed[part] = [f"http://nowhere/{part}", f"{part}_32x32.mat", digest]
    source = SvhnSource(root=tmp_path)
    with pytest.raises(DataError, match="has the md5"):
        source.prepare(Order(place=str(mine)))
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", listed)
    source.prepare(Order(place=str(mine)))
    samples = source.open()
    np.testing.assert_array_equal(samples.x, images.transpose(3, 2, 0, 1))
    assert samples.y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    source.prepared_path.unlink()
    np.testing.assert_array_equal(source.open().x, samples.x)  # from the files themselves


@pytest.mark.parametrize("validation", ["leave_out", "train"])
def test_cinic_10_from_a_folder_and_from_its_archive(tmp_path: Path, validation: Any) -> None:
    folder = unpacked(tmp_path / "cinic", cinic_files())
    archive = tmp_path / "mine.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, arcname=".")
    for number, place in enumerate((folder, archive)):
        source = Cinic10Source(root=tmp_path / f"root{number}", validation=validation)
        source.prepare(Order(place=str(place), offline=True))
        assert verify(source.prepared_path)[0] == []
        train, test = source.open(), source.official_test(RandomStreams(0))
        wanted = [20 * label + offset for label in range(10) for offset in ((0, 1) if validation == "train" else (0,))]
        assert train.x[:, 0, 0, 0].tolist() == wanted
        assert train.y.tolist() == [value // 20 for value in wanted]
        assert test.x[:, 2, 31, 31].tolist() == [20 * label + 2 for label in range(10)]
        assert train.spec.shape == (3, 32, 32)
    assert (tmp_path / "root1" / "CINIC-10" / "train" / "dog").is_dir()


def test_what_is_missing_of_folders_of_images_is_named(tmp_path: Path) -> None:
    files = {name: content for name, content in cinic_files().items() if "test/dog" not in name}
    with pytest.raises(DataError, match="has no test image of the class 'dog'"):
        Cinic10Source(root=tmp_path).prepare(Order(place=str(unpacked(tmp_path / "mine", files))))
    with pytest.raises(DataError, match="no address that anybody may read"):
        OfficeCaltechSource(root=tmp_path).prepare(Order())
    with pytest.raises(DataError, match=r"cinic10\.arrow does not exist.*rayfl data prepare cinic10"):
        Cinic10Source(root=tmp_path).open()
    (tmp_path / "mine.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"CINIC-10\.tar\.gz cannot be unpacked"):
        Cinic10Source(root=tmp_path / "other").prepare(Order(place=str(tmp_path / "mine.tar.gz")))
    assert not list(tmp_path.rglob("*.arrow"))


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    folder = unpacked(tmp_path / "office_caltech_10", office_files())
    OfficeCaltechSource(side=16).prepare(Order())
    return folder


def opened(*overrides: str) -> Any:
    plain = ["holdout.validation=0", "holdout.test=0.25", "model=two_nn", "algorithm=fedavg", "partition=domains"]
    dataset = "dataset={name: office_caltech, side: 16}"
    config = load_config(Experiment, "quickstart", [dataset, *plain, *overrides])
    return open_dataset(config, RandomStreams(config.seed))


def test_each_domain_is_a_client_or_a_group_of_clients(office: Path) -> None:
    data = opened()
    assert data.names == DOMAINS
    assert data.spec.shape == (3, 16, 16)
    for place in range(4):
        splits = data.load(place)
        x = torch.cat([splits["train"].x, splits["test"].x])
        assert len(x) == 20
        assert set((x[:, 0, 0, 0] * 255).round().int().tolist()) == {60 * place + value for value in range(20)}
    groups = opened("partition.clients_per_domain=3", "partition.samples_per_client=6")
    assert groups.names[:4] == ("amazon-0", "amazon-1", "amazon-2", "caltech-0")
    assert groups.num_clients == 12
    assert (groups.sizes().sum(1) == 6).all()
    with pytest.raises(DataError, match="clients_per_domain is 21, but a domain has only 20 samples"):
        opened("partition.clients_per_domain=21")
    with pytest.raises(ConfigError, match=r"domains.*dataset 'digits' have none"):
        opened("dataset=digits")
    with pytest.raises(ConfigError, match="no official test part"):
        OfficeCaltechSource(side=16).official_test(RandomStreams(0))


def test_domainnet_has_its_official_lists(tmp_path: Path) -> None:
    ten = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
    files: dict[str, bytes] = {"clipart/axe/other.png": b"of none of the ten classes"}
    lists: dict[str, list[str]] = {}
    for place, domain in enumerate(("clipart", "sketch")):
        for number, label in enumerate(ten):
            for part in ("train", "test"):
                name = f"{domain}/{label}/{part}.png"
                files[name] = png(100 * place + 10 * number + (part == "test"), 9, 12)
                lists.setdefault(f"{domain}_{part}.txt", []).append(f"{name} {number + 23}")
    lists["clipart_train.txt"].append("clipart/axe/other.png 5")
    files |= {name: "\n".join(lines).encode() + b"\n" for name, lines in lists.items()}
    source = DomainNetSource(root=tmp_path / "root", side=8)
    source.prepare(Order(place=str(unpacked(tmp_path / "mine", files))))
    train, both = source.open(), source.model_copy(update={"part": "both"}).open()
    assert (train.domains, train.spec.num_classes) == (("clipart", "sketch"), 10)
    assert train.domain is not None and both.domain is not None
    assert train.domain.tolist() == [0] * 10 + [1] * 10
    assert both.domain.tolist() == [0] * 10 + [1] * 10 + [0] * 10 + [1] * 10
    assert train.y.tolist() == [*range(10)] * 2
    assert both.x[:, 0, 0, 0].tolist() == [
        100 * place + 10 * number + part for part in (0, 1) for place in (0, 1) for number in range(10)
    ]
    with pytest.raises(DataError, match="images of 11 classes, not 345"):
        DomainNetSource(root=tmp_path / "root", side=8, classes="all").prepare(Order(place=str(tmp_path / "mine")))
    (tmp_path / "mine" / "sketch" / "zebra" / "test.png").unlink()
    with pytest.raises(DataError, match=r"lacks the image sketch/zebra/test\.png"):
        source.prepare(Order(place=str(tmp_path / "mine"), force=True))


def test_digit_five_is_read_from_its_authors_files(tmp_path: Path) -> None:
    pixels = digit_files(tmp_path / "mine")
    source = DigitFiveSource(root=tmp_path)
    with pytest.raises(DataError, match=r"lacks mnist_data\.mat, .*usps_28x28\.mat; get Digit-Five's files"):
        source.prepare(Order())
    source.prepare(Order(place=str(tmp_path / "mine")))
    train, test = source.open(), source.official_test(RandomStreams(0))
    assert train.domains == ("mnist", "mnist_m", "svhn", "synthetic", "usps")
    assert train.y.tolist() == [3, 0, 9, 1] * 5
    assert test.y.tolist() == [2, 5] * 5
    x = train.x.reshape(5, 4, 3, 28, 28)
    for place in (0, 4):
        np.testing.assert_array_equal(x[place], np.repeat(pixels["grey"][:4, np.newaxis], 3, axis=1))
    np.testing.assert_array_equal(x[1], pixels["small"][:4].transpose(0, 3, 1, 2))
    assert (x[2:4] == 77).all()
    savemat(tmp_path / "mine" / "syn_number.mat", {"train_data": np.zeros((4, 32, 32, 3))})
    with pytest.raises(DataError, match=r"syn_number\.mat is not Digit-Five's file of synthetic .KeyError"):
        source.prepare(Order(place=str(tmp_path / "mine"), force=True))


def test_heart_disease_is_a_table_of_four_hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"processed\.cleveland\.data cannot be read.*rayfl data prepare heart_disease"):
        HeartDiseaseSource().open()
    HeartDiseaseSource().prepare(Order(place=str(heart_files(tmp_path / "mine")), offline=True))
    samples = HeartDiseaseSource().open()
    assert samples.x.shape == (36, 13) and samples.clients is not None and samples.table is not None
    assert samples.y[:9].tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 1]
    row = dict(zip(samples.table.columns.names, samples.x[2].tolist(), strict=True))
    assert (row["age"], row["cp=2"], row["cp=3"], row["cp=4"], row["restecg=1"], row["restecg=2"]) == (
        42,
        0,
        1,
        0,
        0,
        1,
    )
    overrides = ["dataset=heart_disease", "partition=natural", "holdout.test=0.34", "holdout.validation=0"]
    config = load_config(Experiment, "quickstart", [*overrides, "model=tabular_mlp", "algorithm=fedavg"])
    data = open_dataset(config, RandomStreams(0))
    assert data.names == ("cleveland", "hungarian", "switzerland", "va")
    assert data.sizes().tolist() == [[6, 0, 3]] * 4
    ages = torch.cat([data.load(client)["train"].x[:, 0] for client in range(4)])
    assert abs(float(ages.mean())) < 1e-5 and abs(float(ages.std(correction=0)) - 1) < 1e-5
    (tmp_path / "heart_disease" / "processed.va.data").write_text("1,2,3\n")
    with pytest.raises(DataError, match=r"processed\.va\.data, line 1: 3 fields, not 14"):
        HeartDiseaseSource().open()


def test_camelyon_is_packed_by_hospital_and_stays_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    files, lines = {}, [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for row in range(30):
        patient, node, center = f"{row % 7:03d}", row % 2, row % 5
        name = f"patch_patient_{patient}_node_{node}_x_{row}_y_{2 * row}.png"
        files[f"patches/patient_{patient}_node_{node}/{name}"] = png(row, 96, 96)
        lines.append(f"{row},{patient},{node},{row},{2 * row},{row % 3 == 0:d},{row},{center},0")
    files["metadata.csv"] = "\n".join(lines).encode() + b"\n"
    folder = unpacked(tmp_path / "camelyon17_v1.0", files)
    with pytest.raises(DataError, match=r"camelyon17\.arrow does not exist.*rayfl data prepare camelyon17"):
        Camelyon17Source().open()
    path = Camelyon17Source().prepare(Order())
    assert verify(path) == ([], [])
    plain = ["partition=natural", "holdout.validation=0", "holdout.test=0.5", "model=two_nn", "algorithm=fedavg"]
    config = load_config(Experiment, "quickstart", ["dataset=camelyon17", *plain])
    data = open_dataset(config, RandomStreams(0))
    assert data.names == tuple(f"hospital_{center}" for center in range(5))
    assert data.sizes().tolist() == [[3, 0, 3]] * 5
    splits = data.load(2)
    x, y = (torch.cat([getattr(splits[split], part) for split in ("train", "test")]) for part in ("x", "y"))
    rows = (x[:, 0, 5, 5] * 255).round().int()
    assert sorted(rows.tolist()) == [2, 7, 12, 17, 22, 27]
    assert y.tolist() == [int(row % 3 == 0) for row in rows.tolist()]
    next((folder / "patches" / "patient_003_node_1").iterdir()).unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        Camelyon17Source().prepare(Order(force=True))
    (folder / "metadata.csv").write_text("patient,node\n1,2\n")
    with pytest.raises(DataError, match=r"metadata\.csv cannot be read"):
        Camelyon17Source().prepare(Order(force=True))
