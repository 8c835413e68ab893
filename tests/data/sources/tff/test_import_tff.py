"""Files of TensorFlow Federated: what they become, by hand, and what is refused."""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayfl.data.sources.leaf.vocabulary import METADATA_KEY
from rayfl.data.sources.natural import NaturalDataset
from rayfl.data.sources.preparation.inventory import verify
from rayfl.data.sources.tff import TffOptions, import_tff
from rayfl.data.sources.tff.examples import reader
from rayfl.data.sources.tff.layouts import LAYOUTS
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams
from tests.support.tff_files import serialized, stack_overflow, write_hdf5, write_sqlite

STREAMS = RandomStreams(0)


def opened(path: Path, validation: float = 0.0) -> NaturalDataset:
    return NaturalDataset(path, validation, STREAMS)


def small(path: Path, train: dict[str, list[bytes]], test: dict[str, list[bytes]] | None = None) -> Path:
    """Stack Overflow's SQLite with these sentences by user."""
    splits = {"train": train, "test": test or {}, "heldout": {}}
    return write_sqlite(
        path, {split: {user: {"tokens": texts} for user, texts in users.items()} for split, users in splits.items()}
    )


def test_sentences_become_the_tokens_of_tffs_baseline(tmp_path: Path) -> None:
    """The numbers by hand: padding 0, words by their rank, unknown V + 1, begin V + 2, end V + 3."""
    source = small(tmp_path / "so.sqlite", {"ann": [b"how to sort", b"to be or not to be here"]}, {"ann": [b"sort"]})
    counts = tmp_path / "stackoverflow.word_count"
    counts.write_text("to 9\nhow 5\nsort 3\nbe 2\nor 1\n")
    report = import_tff("stackoverflow", source, tmp_path / "f.parquet", TffOptions(vocabulary=4, length=5))
    assert report.samples == {"train": 2, "test": 1} and not report.warnings
    dataset = opened(report.destination)
    assert dataset.spec.vocabulary == dataset.spec.num_classes == 8 and dataset.spec.padding == 0
    train, test = dataset.load(0)["train"], dataset.load(0)["test"]
    assert train.x.tolist() == [[6, 2, 1, 3, 7], [6, 1, 4, 5, 5]]
    assert train.y.tolist() == [[2, 1, 3, 7, -100], [1, 4, 5, 5, 1]]
    assert test.x.tolist() == [[6, 3, 7, 0, 0]] and test.y.tolist() == [[3, 7, -100, -100, -100]]
    words = json.loads(pq.read_schema(report.destination).metadata[METADATA_KEY])
    assert words == ["<PAD>", "to", "how", "sort", "be", "<UNK>", "<BOS>", "<EOS>"]
    assert verify(report.destination) == ([], [])


def test_a_vocabulary_is_of_the_words_that_most_users_have(tmp_path: Path) -> None:
    train = {"ann": [b"rare rare rare", b"all"], "bob": [b"all two"], "eve": [b"two all"]}
    source = small(tmp_path / "so.sqlite", train, {"ann": [b"test test"]})
    report = import_tff("stackoverflow", source, tmp_path / "f.parquet", TffOptions(vocabulary=3))
    words = json.loads(pq.read_schema(report.destination).metadata[METADATA_KEY])
    assert words[1:4] == ["all", "two", "rare"]
    assert "stackoverflow.word_count" in report.warnings[0]


def test_hdf5_and_sqlite_give_the_same_content(tmp_path: Path) -> None:
    pytest.importorskip("h5py", reason="needs the extra tff")
    parts = stack_overflow()
    for part, clients in parts.items():
        write_hdf5(tmp_path / "h5" / f"stackoverflow_{part}.h5", clients)
    tables = {LAYOUTS["stackoverflow"].tables[part]: clients for part, clients in parts.items()}
    write_sqlite(tmp_path / "so.sqlite", tables)
    files = []
    for number, source in enumerate((tmp_path / "h5", tmp_path / "so.sqlite")):
        report = import_tff("stackoverflow", source, tmp_path / f"{number}.parquet", TffOptions(vocabulary=20))
        files.append(report)
    first, second = (pq.read_table(report.destination) for report in files)
    assert first.equals(second) and files[0].clients == 5
    dataset = opened(files[0].destination)
    assert dataset.names == ("00000001", "00000002", "00000003", "00000004")  # a user with test sentences only is out
    assert dataset.sizes()[:, [0, 2]].tolist() == [[12, 3], [13, 3], [14, 3], [15, 0]]
    held_out = import_tff("stackoverflow", tmp_path / "h5", tmp_path / "h.parquet", TffOptions(users="held-out"))
    assert held_out.samples == {"train": 10, "test": 0}
    assert NaturalDataset(held_out.destination, 0.0, STREAMS, test=0.4).sizes()[:, 2].tolist() == [2, 2]


def test_clients_and_samples_are_drawn_by_the_seed(tmp_path: Path) -> None:
    source = write_sqlite(tmp_path / "so.sqlite", {"train": stack_overflow(8)["train"], "test": {}, "heldout": {}})
    options = TffOptions(clients=3, most_samples=4, train_only=True, length=4)
    one = import_tff("stackoverflow", source, tmp_path / "1.parquet", options)
    again = import_tff("stackoverflow", source, tmp_path / "2.parquet", options)
    assert pq.read_table(one.destination).equals(pq.read_table(again.destination))
    assert opened(one.destination).num_clients == 3 and one.samples["train"] == 12
    others = {
        opened(
            import_tff("stackoverflow", source, tmp_path / f"s{seed}.parquet", replace(options, seed=seed)).destination
        ).names
        for seed in range(5)
    }
    assert len(others) > 1


def test_snippets_become_the_rows_of_tffs_baseline(tmp_path: Path) -> None:
    clients = {"PLAY_ROLE": {"snippets": [b"dh\xc2\xa7l", b"pt"]}}
    source = write_sqlite(tmp_path / "s.sqlite", {"train": clients, "test": clients})
    report = import_tff("shakespeare", source, tmp_path / "f.parquet", TffOptions(length=4))
    train = opened(report.destination).load(0)["train"]
    # A byte is a character: "dh", two unknown ones and "l" with begin and end are 7 tokens, two rows of 5.
    assert train.x.tolist() == [[88, 1, 2, 87], [3, 89, 0, 0], [88, 4, 5, 89]]
    assert train.y.tolist() == [[1, 2, 87, 87], [89, -100, -100, -100], [4, 5, 89, -100]]
    assert opened(report.destination).spec.num_classes == 90


@pytest.mark.parametrize("exact", [True, False])
def test_emnist_keeps_its_pixels(tmp_path: Path, exact: bool) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (5, 28, 28))
    pixels = (levels / 255).astype(np.float32)
    if not exact:
        pixels[-1, -1, -1] = 0.50001
    clients = {"f0000_14": {"pixels": pixels, "label": np.array([0, 9, 61, 3, 4])}}
    source = write_sqlite(tmp_path / "e.sqlite", {"all_train": clients, "all_test": clients})
    dataset = opened(import_tff("emnist", source, tmp_path / "f.parquet").destination)
    train = dataset.load(0)["train"]
    assert train.y.tolist() == [0, 9, 61, 3, 4] and train.x.shape == (5, 1, 28, 28)
    assert np.abs(train.x[:, 0].numpy() - pixels).max() < 1e-6
    assert pq.read_schema(tmp_path / "f.parquet").field("x").type.value_type == ("uint8" if exact else "float")


def test_cifar100s_test_clients_are_others(tmp_path: Path) -> None:
    image = np.arange(2 * 32 * 32 * 3, dtype=np.uint8).reshape(2, 32, 32, 3)
    columns = {"coarse_label": np.array([[0], [1]]), "image": image, "label": np.array([[99], [3]])}
    source = write_sqlite(tmp_path / "c.sqlite", {"train": {"0": columns}, "test": {"0": columns, "1": columns}})
    report = import_tff("cifar100", source, tmp_path / "f.parquet")
    dataset = opened(report.destination)
    assert dataset.names == ("0",) and dataset.sizes().tolist() == [[2, 0, 0]] and report.samples["test"] == 4
    assert (dataset.load(0)["train"].x.numpy() * 255).round().astype(np.uint8).transpose(0, 2, 3, 1).tolist() == (
        image.tolist()
    )
    assert "test-0" in report.warnings[0]
    alone = import_tff("cifar100", source, tmp_path / "t.parquet", TffOptions(train_only=True))
    assert NaturalDataset(alone.destination, 0.0, STREAMS, test=0.5).sizes().tolist() == [[1, 0, 1]]


def test_an_archive_is_compared_with_the_published_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("h5py", reason="needs the extra tff")
    clients = {"ROLE": {"snippets": [b"a snippet"]}}
    for part in ("train", "test"):
        write_hdf5(tmp_path / f"shakespeare_{part}.h5", clients)
    archive = tmp_path / "shakespeare.tar.bz2"
    with tarfile.open(archive, "w:bz2") as opened_archive:
        for part in ("train", "test"):
            opened_archive.add(tmp_path / f"shakespeare_{part}.h5", f"./shakespeare_{part}.h5")
    with pytest.raises(DataError, match=r"shakespeare.tar.bz2 has the SHA-256 \w+, but TFF's .* has 0285be99"):
        import_tff("shakespeare", archive, tmp_path / "out" / "f.parquet")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setitem(LAYOUTS, "shakespeare", replace(LAYOUTS["shakespeare"], archive_sha256=digest))  # type: ignore[arg-type]
    assert import_tff("shakespeare", archive, tmp_path / "out" / "f.parquet").samples == {"train": 1, "test": 1}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"f.parquet", "f.parquet.json"}


def test_what_is_wrong_is_named_with_file_client_and_column(tmp_path: Path) -> None:
    out = tmp_path / "f.parquet"
    good = {"u1": {"tokens": [b"a b"]}}
    with pytest.raises(DataError, match=r"nowhere does not exist; give a folder with stackoverflow_train.h5"):
        import_tff("stackoverflow", tmp_path / "nowhere", out)
    with pytest.raises(DataError, match=r"has no stackoverflow_train.h5"):
        import_tff("stackoverflow", tmp_path, out)
    (tmp_path / "so.sqlite.lzma").write_bytes(b"")
    with pytest.raises(DataError, match=r"unlzma --keep so.sqlite.lzma"):
        import_tff("stackoverflow", tmp_path / "so.sqlite.lzma", out)
    (tmp_path / "no.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match=r"no.sqlite is not an SQLite file of TFF"):
        import_tff("stackoverflow", tmp_path / "no.sqlite", out)
    other = write_sqlite(tmp_path / "other.sqlite", {"train": {"u1": {"snippets": [b"x"]}}, "test": good})
    with pytest.raises(DataError, match=r"other.sqlite, client 'u1': there is no column 'tokens'"):
        import_tff("stackoverflow", other, out)
    with pytest.raises(DataError, match="no client of the split 'all_train', but splits 'train', 'test'"):
        import_tff("emnist", other, out)
    number = write_sqlite(tmp_path / "number.sqlite", {"train": {"u1": {"tokens": np.array([1, 2])}}, "test": good})
    with pytest.raises(DataError, match="client 'u1': column 'tokens', sample 0 is no text"):
        import_tff("stackoverflow", number, out)
    image = {"pixels": np.full((1, 28, 28), 2.0), "label": np.array([1])}
    wrong = write_sqlite(tmp_path / "wrong.sqlite", {"all_train": {"w": image}, "all_test": {"w": image}})
    with pytest.raises(DataError, match=r"client 'w': column 'pixels', sample 0: 2.0 is not in \[0, 1\]"):
        import_tff("emnist", wrong, out)
    image = {"pixels": np.zeros((1, 28, 28)), "label": np.array([62])}
    wrong = write_sqlite(tmp_path / "class.sqlite", {"all_train": {"w": image}, "all_test": {"w": image}})
    with pytest.raises(DataError, match=r"client 'w': column 'label', sample 0 is \[62\], not a class from 0 to 61"):
        import_tff("emnist", wrong, out)
    counts = tmp_path / "counts"
    counts.write_text("a 1\nb\n")
    with pytest.raises(DataError, match="counts, line 2: 'b' is not a word, a blank and a number"):
        import_tff("stackoverflow", small(tmp_path / "s.sqlite", {"u": [b"a"]}, {"u": [b"a"]}), out,
                   TffOptions(vocabulary_file=counts))  # fmt: skip
    with pytest.raises(DataError, match="--vocabulary does not apply to emnist, only to stackoverflow"):
        import_tff("emnist", wrong, out, TffOptions(vocabulary=5))
    with pytest.raises(DataError, match=r"--clients is 9, but .* has 1"):
        import_tff("stackoverflow", tmp_path / "s.sqlite", out, TffOptions(clients=9))
    assert not out.exists()


def test_hdf5_of_another_layout_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="needs the extra tff")
    write_hdf5(tmp_path / "stackoverflow_test.h5", {"u": {"tokens": [b"a"]}})
    train = tmp_path / "stackoverflow_train.h5"
    write_hdf5(train, {"u": {"snippets": [b"a"]}})
    with pytest.raises(DataError, match=r"stackoverflow_train.h5, client 'u': there is no column 'tokens', but snippe"):
        import_tff("stackoverflow", tmp_path, tmp_path / "f.parquet")
    with h5py.File(train, "w") as file:
        file.create_group("users")
    with pytest.raises(DataError, match="has no group 'examples', but users"):
        import_tff("stackoverflow", tmp_path, tmp_path / "f.parquet")
    train.write_bytes(b"no HDF5")
    with pytest.raises(DataError, match=r"stackoverflow_train.h5 is not a readable HDF5 file"):
        import_tff("stackoverflow", tmp_path, tmp_path / "f.parquet")


def test_examples_are_read_as_tensorflow_writes_them() -> None:
    """The bytes are those of TensorFlow for ``{"tokens": b"hi", "score": 3}``, field by field (proto3, packed)."""
    tokens = bytes([10, 14, 10, 6]) + b"tokens" + bytes([18, 4, 10, 2, 10, 0])
    assert reader(("tokens",))(serialized({"tokens": b"hi", "score": np.array([3])})) == {"tokens": b"hi"}
    text = b"\x0a\x10\x0a\x06tokens\x12\x06\x0a\x04\x0a\x02hi"
    score = b"\x0a\x0e\x0a\x05score\x12\x05\x1a\x03\x0a\x01\x03"
    found = reader(("tokens", "score"))(b"\x0a" + bytes([len(text) + len(score)]) + text + score)
    assert found["tokens"] == b"hi" and found["score"].tolist() == [3]
    with pytest.raises(ValueError, match="not a serialized"):
        reader(("tokens",))(b"\xff\xff" + tokens)
