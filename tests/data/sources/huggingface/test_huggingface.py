"""Data sets of Hugging Face in folders: which features are taken, whose rows they are, and what is refused."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rayfl.data.federated import FederatedDataset
from rayfl.data.images.transform import TransformConfig
from rayfl.data.opening import open_dataset
from rayfl.data.partitions.base import IIDPartition, NaturalPartition
from rayfl.data.partitions.holdout import HoldoutConfig
from rayfl.data.partitions.long_tail import LongTail
from rayfl.data.partitions.noise import LabelNoise
from rayfl.data.sources.huggingface.source import HuggingFaceSource
from rayfl.data.sources.preparation.inventory import inventory
from rayfl.data.sources.preparation.preparing import Order
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

datasets = pytest.importorskip("datasets", reason="needs the extra hf")

COUNT = 24
GENERATOR = np.random.default_rng(0)
PICTURES = GENERATOR.integers(0, 255, (COUNT, 6, 5), dtype=np.uint8)
ARRAYS = GENERATOR.normal(size=(COUNT, 2, 3, 4)).astype(np.float32)
ROWS: dict[str, list[Any]] = {
    "image": [Image.fromarray(picture) for picture in PICTURES],
    "label": [i % 2 for i in range(COUNT)],
    "text": ["a word " * (1 + i % 3) for i in range(COUNT)],
    "input_ids": [[5 + i % 2] * (1 + i % 4) for i in range(COUNT)],
    "array": list(ARRAYS),
    "nested": PICTURES[:, :2, :2].tolist(),
    "tags": [[i % 3] * (i % 2) for i in range(COUNT)],
    "age": [float(i) for i in range(COUNT)],
    "sex": [i % 2 for i in range(COUNT)],
    "hospital": [i // 8 for i in range(COUNT)],
    "both": [{"en": "a", "de": "b"}] * COUNT,
    "unknown": [-1] * COUNT,
}


def made(**changes: Any) -> Any:
    """The rows as a data set, some columns of which are changed."""
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["cat", "dog", "cow"]),
        "text": datasets.Value("string"),
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "array": datasets.Array3D((2, 3, 4), "float32"),
        "nested": datasets.Sequence(datasets.Sequence(datasets.Value("uint8"))),
        "tags": datasets.Sequence(datasets.ClassLabel(names=["red", "green", "blue"])),
        "age": datasets.Value("float64"),
        "sex": datasets.ClassLabel(names=["f", "m"]),
        "hospital": datasets.ClassLabel(names=["B", "A", "C"]),
        "both": {"en": datasets.Value("string"), "de": datasets.Value("string")},
        "unknown": datasets.ClassLabel(names=["no", "yes"]),
    }
    return datasets.Dataset.from_dict({**ROWS, **changes}, features=datasets.Features(features))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `save_to_disk` wrote, with the splits train (shuffled), test and validation."""
    folder: Path = tmp_path_factory.mktemp("saved") / "animals"
    rows = made()
    order = list(reversed(range(18)))
    splits = {"train": rows.select(order), "test": rows.select(range(18, 22)), "validation": rows.select([22, 23])}
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reaches for another machine."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", refused)


def opened(folder: Path, root: Path, target: str = "class", partition: Any = None, **options: Any) -> FederatedDataset:
    sections = SimpleNamespace(
        dataset=HuggingFaceSource(path=folder, root=root, **options),
        task=SimpleNamespace(target=target),
        partition=partition or IIDPartition(num_clients=2),
        holdout=HoldoutConfig(test=0.25, validation=0) if partition is None else HoldoutConfig(),
        long_tail=LongTail(),
        noise=LabelNoise(),
        transform=TransformConfig(),
    )
    return open_dataset(sections, RandomStreams(0))


def test_images_and_classes_in_the_order_of_the_shuffled_rows(saved: Path, tmp_path: Path) -> None:
    source = HuggingFaceSource(path=saved, root=tmp_path)
    samples = source.open()
    assert samples.spec.shape == (1, 6, 5)  # type: ignore[union-attr]
    assert samples.spec.num_classes == 3  # type: ignore[union-attr]  # no sample is a cow
    order = [*reversed(range(18)), *range(18, 22)]
    np.testing.assert_array_equal(samples.x[:, 0], PICTURES[order])  # type: ignore[union-attr]
    assert samples.y.tolist() == [i % 2 for i in order]  # type: ignore[union-attr]
    assert any("the splits validation are left out" in remark.text for remark in samples.remarks())
    assert any("4 of 22 samples are of the split test" in remark.text for remark in samples.remarks())
    training = HuggingFaceSource(path=saved, root=tmp_path, part="train").open()
    assert len(training.y) == 18  # type: ignore[union-attr]


@pytest.mark.parametrize("column", ["array", "nested"])
def test_arrays_keep_their_shape(saved: Path, tmp_path: Path, column: str) -> None:
    samples = HuggingFaceSource(path=saved, root=tmp_path, x=column, part="test").open()
    expected = ARRAYS[18:22] if column == "array" else PICTURES[18:22, :2, :2]
    np.testing.assert_array_equal(samples.x, expected)  # type: ignore[union-attr]


def test_text_and_tokens(saved: Path, tmp_path: Path) -> None:
    texts = opened(saved, tmp_path, tokenizer="words")
    assert texts.spec.kind == "tokens" and texts.spec.shape == (6,) and texts.spec.vocabulary == 4
    tokens = HuggingFaceSource(path=saved, root=tmp_path, kind="tokens", part="test").open()
    assert tokens.x.tolist() == [[5, 5, 5, 0], [6, 6, 6, 6], [5, 0, 0, 0], [6, 6, 0, 0]]  # type: ignore[union-attr]
    assert tokens.spec.padding == 0  # type: ignore[union-attr]


def test_tables_have_categories_by_name_and_several_labels(saved: Path, tmp_path: Path) -> None:
    dataset = opened(saved, tmp_path, "labels", x=("age", "sex"), y="tags", standardize="global")
    assert dataset.spec.shape == (3,)  # age, sex=f, sex=m
    assert dataset.spec.num_classes == 3
    samples = HuggingFaceSource(path=saved, root=tmp_path, x="age", y="tags", target="labels", part="test").open()
    assert samples.y.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0], [1, 0, 0]]  # type: ignore[union-attr]


def test_clients_have_the_names_of_their_classes_and_keep_the_division(saved: Path, tmp_path: Path) -> None:
    dataset = opened(saved, tmp_path, partition=NaturalPartition(), client="hospital")
    assert dataset.names == ("A", "B", "C")
    assert [entry.kind for entry in inventory(tmp_path)] == ["huggingface"]
    sizes = dataset.sizes()
    assert sizes[:, 2].tolist() == [0, 0, 4]
    assert sizes[:, :2].sum(1).tolist() == [8, 8, 2]


def test_a_split_by_name(saved: Path, tmp_path: Path) -> None:
    other = HuggingFaceSource(path=saved, root=tmp_path, x="age", train=("train", "test"), test="validation")
    assert len(other.model_copy(update={"part": "train"}).open().y) == 22  # type: ignore[union-attr]
    alone = HuggingFaceSource(path=saved, root=tmp_path, x="age", test="none").open()
    assert len(alone.y) == 18  # type: ignore[union-attr]


def test_parquet_files_of_a_repository_and_arrow_files_of_a_cache_are_the_same_samples(
    saved: Path, tmp_path: Path
) -> None:
    whole = datasets.load_from_disk(str(saved))
    repository, cache = tmp_path / "repository", tmp_path / "cache"
    (repository / "data").mkdir(parents=True)
    cache.mkdir()
    for split in ("train", "test"):
        whole[split].to_parquet(str(repository / "data" / f"{split}-00000-of-00001.parquet"))
        half = len(whole[split]) // 2
        for shard, rows in enumerate((range(half), range(half, len(whole[split])))):
            writer = whole[split].select(rows).flatten_indices(cache_file_name=str(tmp_path / f"{split}{shard}.arrow"))
            Path(writer.cache_files[0]["filename"]).rename(cache / f"animals-{split}-0000{shard}-of-00002.arrow")
    (cache / "cache-1234.arrow").write_bytes(b"of a map")
    expected = HuggingFaceSource(path=saved, root=tmp_path).open()
    for folder in (repository, cache):
        found = HuggingFaceSource(path=folder, root=tmp_path).open()
        np.testing.assert_array_equal(found.x, expected.x)  # type: ignore[union-attr]
        np.testing.assert_array_equal(found.y, expected.y)  # type: ignore[union-attr]
        assert found.spec == expected.spec  # type: ignore[union-attr]


def test_images_beside_the_data_set_are_read_and_none_is_fetched(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(4)]
    for path, picture in zip(paths, PICTURES, strict=False):
        Image.fromarray(picture).save(path)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict({"image": list(map(str, paths)), "label": [0, 1, 0, 1]}, features=features)
    (tmp_path / "linked").mkdir()
    # Written without embedding what is beside it, as a map does it.
    import pyarrow.parquet as pq

    pq.write_table(rows.with_format("arrow")[:], tmp_path / "linked" / "train.parquet")
    samples = HuggingFaceSource(path=tmp_path / "linked", root=tmp_path).open()
    np.testing.assert_array_equal(samples.x[:, 0], PICTURES[:4])  # type: ignore[union-attr]
    paths[2].unlink()
    again = HuggingFaceSource(path=tmp_path / "linked", root=tmp_path / "other")
    with pytest.raises(DataError, match=r"linked/train: column 'image', row 2 is the image .*2.png, which cannot be"):
        again.open()


def test_a_copy_is_read_without_the_library(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = HuggingFaceSource(path=saved, root=tmp_path, x="age")
    first = source.open()
    monkeypatch.setitem(sys.modules, "datasets", None)
    np.testing.assert_array_equal(source.open().x, first.x)  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"animals needs the package datasets: pip install 'rayfl\[hf\]'"):
        HuggingFaceSource(path=saved, root=tmp_path, x="array").open()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"x": "both"}, r"animals/train: the column 'both' has the type struct"),
        ({"x": "tags"}, r"animals/train: column 'tags' is of the feature List of ClassLabel, which .* cast_column"),
        ({"x": "weight"}, r"dataset.x: .*animals/train has no column 'weight', only image, label"),
        (
            {"y": "unknown", "client": "hospital"},
            r"column 'unknown', row 0 \(client 'C'\) is -1, which says that its class is not known: .*dataset.test",
        ),
        (
            {"y": "text"},
            r"animals/train: column 'text' has the type string; labels .*dataset.labels=renumbered",
        ),
        ({"x": "text"}, r"animals/train: column 'text' is text: set dataset.tokenizer=words"),
        ({"train": "training"}, r"dataset.train: .*animals has no split 'training', only train, test, validation"),
        ({"train": "train", "test": "train"}, r"both name the split 'train': name it once"),
        ({"client": "ward"}, r"dataset.client: .*animals/train has no column 'ward'"),
        ({"y": "age"}, r"column 'age' has the type double; .*set task=regression"),
        ({"y": "tags"}, r"column 'tags' has the type list.*set task=multilabel"),
    ],
)
def test_what_is_wrong_is_said(saved: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        HuggingFaceSource(path=saved, root=tmp_path, **options).open()


def test_a_number_stands_for_one_class_in_all_splits(tmp_path: Path) -> None:
    def in_two_splits(folder: str, *names: list[str]) -> HuggingFaceSource:
        splits = {}
        for split, classes in zip(("train", "test"), names, strict=True):
            features = datasets.Features({"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=classes)})
            rows = {"x": [1.0, 2.0], "label": ["cat", "dog"]}
            splits[split] = datasets.Dataset.from_dict(rows, features=features)
        datasets.DatasetDict(splits).save_to_disk(str(tmp_path / folder))
        return HuggingFaceSource(path=tmp_path / folder, root=tmp_path)

    with pytest.raises(DataError, match=r"test: class 0 of column 'label' is 'dog', but that of .*train is 'cat'"):
        in_two_splits("turned", ["cat", "dog"], ["dog", "cat"]).open()
    more = in_two_splits("more", ["cat", "dog"], ["cat", "dog", "cow"]).open()
    assert more.y.tolist() == [0, 1, 0, 1] and more.spec.num_classes == 3  # type: ignore[union-attr]


def test_a_folder_may_hold_the_copies_of_itself(tmp_path: Path) -> None:
    made().select(range(6)).save_to_disk(str(tmp_path / "animals"))
    source = HuggingFaceSource(path=tmp_path / "animals", root=tmp_path / "animals", x="age")
    assert source.prepare(Order()) == source.prepare(Order())
    assert len(list((tmp_path / "animals" / "prepared").glob("*.arrow"))) == 1


def test_folders_that_are_none(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no/such does not exist .*: .*rayfl data prepare huggingface path=FOLDER"):
        HuggingFaceSource(path=Path("no/such"), root=tmp_path).open()
    with pytest.raises(DataError, match=r"has no Arrow or Parquet files"):
        HuggingFaceSource(path=tmp_path, root=tmp_path).open()
    for name in ("cola", "sst2"):
        (tmp_path / "glue" / name).mkdir(parents=True)
        made().select(range(4)).to_parquet(str(tmp_path / "glue" / name / "train-00000-of-00001.parquet"))
    with pytest.raises(DataError, match=r"glue has files of several data sets: name the folder of one, such as .*cola"):
        HuggingFaceSource(path=tmp_path / "glue", root=tmp_path).open()
    (tmp_path / "glue" / "cola" / "train-00000-of-00001.parquet").write_bytes(b"no table")
    with pytest.raises(DataError, match=r"cola cannot be read as a data set"):
        HuggingFaceSource(path=tmp_path / "glue" / "cola", root=tmp_path).open()


def test_arrays_of_several_shapes_are_named(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"x": [[[1.0], [2.0]], [[1.0]]], "y": [0, 1]})
    rows.save_to_disk(str(tmp_path / "ragged"))
    with pytest.raises(DataError, match=r"ragged: column 'x', row 1 has another shape than row 0"):
        HuggingFaceSource(path=tmp_path / "ragged", root=tmp_path).open()


def test_prepare_saves_what_a_name_stands_for_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library takes a folder of CSV files for a name, too, so no Hub is needed."""
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "train.csv").write_text("x,y\n1.5,0\n2.5,1\n")
    (tmp_path / "csv" / "test.csv").write_text("x,y\n3.5,1\n")
    saved = tmp_path / "table"
    source = HuggingFaceSource(path=saved, root=tmp_path)
    with pytest.raises(DataError, match=r"with --offline nothing is downloaded"):
        source.prepare(Order(place=str(tmp_path / "csv"), offline=True))
    assert not saved.exists()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    source.prepare(Order(place=str(tmp_path / "csv")))
    samples = source.open()
    assert samples.x.ravel().tolist() == [1.5, 2.5, 3.5]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"table exists already: leave out --source"):
        source.prepare(Order(place="other"))
