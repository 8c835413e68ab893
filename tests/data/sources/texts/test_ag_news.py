"""AG News from files of its official layout, and the preset that learns them."""

from __future__ import annotations

import csv
import resource
import signal
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import rayfl
from rayfl.data.sources.base import Samples
from rayfl.data.sources.preparation.preparing import Order
from rayfl.data.sources.texts.ag_news import AgNewsSource
from rayfl.errors import ConfigError, DataError
from rayfl.randomness import RandomStreams
from tests.support.news import WORDS, write_news


def samples(root: Path, **options: object) -> Samples:
    opened = AgNewsSource.model_validate({"root": root, **options}).open()
    assert isinstance(opened, Samples)
    return opened


def test_titles_and_descriptions_are_tokens_of_one_length(tmp_path: Path) -> None:
    folder = write_news(tmp_path)
    found = samples(tmp_path, length=12)
    assert found.x.shape == (240, 12) and found.y[:5].tolist() == [0, 1, 2, 3, 0]
    assert found.spec.kind == "tokens" and found.spec.num_classes == 4 and found.spec.padding == 0
    with (folder / "train.csv").open(encoding="utf-8") as file:
        first = next(iter(csv.reader(file)))
    assert first[1:] == ['The "world" (AP)', first[2]]
    # the world ( ap ) it ' s ...: as frequent as the texts are, in the order of the signs
    the = found.x[0, 0]
    assert (found.x[:, 0] == the).all()
    assert len(np.unique(found.x[::4, 1])) == 1 and len(np.unique(found.x[:, 1])) == len(WORDS)
    assert any("of 240 texts are longer than 12 tokens" in remark.text for remark in found.remarks())


def test_the_vocabulary_is_that_of_the_part_that_trains(tmp_path: Path) -> None:
    write_news(tmp_path)
    train, both = samples(tmp_path), samples(tmp_path, part="both")
    assert both.spec.vocabulary == train.spec.vocabulary + 1  # "unseen" is in the part test alone
    assert len(both.y) == 280
    source = AgNewsSource(root=tmp_path)
    test = source.official_test(RandomStreams(0))
    assert isinstance(test, Samples) and test.spec == train.spec and (test.x == 1).any()
    with pytest.raises(ConfigError, match=r"dataset.part is both"):
        AgNewsSource(root=tmp_path, part="both").official_test(RandomStreams(0))
    assert samples(tmp_path, vocabulary=20).spec.vocabulary == 20


def test_files_come_from_a_folder_or_an_archive_and_are_never_got_by_a_run(tmp_path: Path) -> None:
    folder = write_news(tmp_path / "mine")
    with tarfile.open(tmp_path / "news.tar.gz", "w:gz") as archive:
        archive.add(folder, arcname="ag_news_csv")
    with pytest.raises(
        DataError, match=r"ag_news is not there: .*train.csv does not exist; get it with `rayfl data pre"
    ):
        samples(tmp_path / "a")
    with pytest.raises(DataError, match=r"nothing is downloaded offline"):
        AgNewsSource(root=tmp_path / "a").prepare(Order(offline=True))
    for name, place in (("a", folder), ("b", folder.parent), ("c", tmp_path / "news.tar.gz")):
        AgNewsSource(root=tmp_path / name).prepare(Order(place=str(place)))
        np.testing.assert_array_equal(samples(tmp_path / name).x, samples(tmp_path / "mine").x)
    with pytest.raises(DataError, match=r"has the files already: add --force"):
        AgNewsSource(root=tmp_path / "a").prepare(Order(place=str(folder)))
    with pytest.raises(DataError, match=r"there is no train.csv in"):
        AgNewsSource(root=tmp_path / "d").prepare(Order(place=str(tmp_path)))
    with pytest.raises(DataError, match=r"classes.txt is not the archive of AG News"):
        AgNewsSource(root=tmp_path / "e").prepare(Order(place=str(folder / "classes.txt")))
    (tmp_path / "cut.tar.gz").write_bytes((tmp_path / "news.tar.gz").read_bytes()[:-1000])
    with pytest.raises(DataError, match=r"cut.tar.gz is not the archive of AG News"):
        AgNewsSource(root=tmp_path / "f").prepare(Order(place=str(tmp_path / "cut.tar.gz")))


@pytest.mark.parametrize("form", ["folder", "archive"])
def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path: Path, form: str) -> None:
    place = write_news(tmp_path / "mine")
    if form == "archive":
        with tarfile.open(tmp_path / "news.tar.gz", "w:gz") as archive:
            archive.add(place, arcname="ag_news_csv")
        place = tmp_path / "news.tar.gz"
    target = AgNewsSource(root=tmp_path / "a")
    with _largest_file(1000), pytest.raises(DataError, match=r"train.csv cannot be written"):
        target.prepare(Order(place=str(place)))
    assert not any(path.exists() for path in target.files)


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    """Files can grow to this number of bytes and no further, as on a disk that is nearly full."""
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('"5","a title","a text"\n', r"test.csv: row 40 has the class 5; AG News has 1 to 4"),
        ('"World","a title","a text"\n', r"test.csv is not AG News's file of class, title and description: .*World"),
        ('"1","a title"\n', r"test.csv is not AG News's file of class, title and description: .*2"),
    ],
)
def test_damaged_files_are_named(line: str, words: str, tmp_path: Path) -> None:
    folder = write_news(tmp_path)
    with (folder / "test.csv").open("a") as file:
        file.write(line)
    with pytest.raises(DataError, match=words):
        samples(tmp_path)


@pytest.mark.slow
def test_the_preset_learns_the_made_up_news(tmp_path: Path) -> None:
    write_news(tmp_path)
    result = rayfl.run(
        "ag-news",
        storage_path=str(tmp_path),
        name="news",
        **{
            "dataset.root": str(tmp_path),
            "dataset.length": 20,
            "partition.num_clients": 4,
            "model.embedding": 16,
            "model.hidden": 16,
            "train": {"rounds": 15, "clients_per_round": 4, "local_epochs": 2, "batch_size": 10, "lr": 1.0},
            "cluster.backend": "inline",
            "tracking.tensorboard": False,
        },
    )
    rows = [row for row in result.rounds.to_pylist() if (row["cohort"], row["split"]) == ("all", "test")]
    assert rows[-1]["pooled_top1"] > 0.9
