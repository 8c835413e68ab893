"""LEAF's data sets of words: Sent140 and Reddit, and their vocabularies."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl.data.sources.leaf import ImportReport, LeafOptions, import_leaf
from rayfl.data.sources.leaf.vocabulary import METADATA_KEY, SPECIAL, Vocabulary
from rayfl.data.sources.natural import NaturalDataset
from rayfl.errors import DataError
from rayfl.models.zoo import CharLSTM
from rayfl.randomness import RandomStreams
from tests.support.leaf_sources import document, write_source

SENTENCE = ["<BOS>", "the", "cat", "sat", "<EOS>", "<PAD>", "<PAD>", "<PAD>", "<PAD>", "<PAD>"]
NEXT = ["the", "cat", "sat", "<EOS>", "<PAD>", "<PAD>", "<PAD>", "<PAD>", "<PAD>", "<PAD>"]


def tweets(*texts: str, label: int = 0) -> dict[str, list[Any]]:
    return {"x": [["17", "Mon Apr 06", "NO_QUERY", "ann", text] for text in texts], "y": [label] * len(texts)}


def comments(*pairs: tuple[list[str], list[str]]) -> dict[str, list[Any]]:
    """A Reddit user whose every comment is one sequence."""
    labels = [{"subreddit": "a", "target_tokens": [following], "count_tokens": [[1] * 10]} for _, following in pairs]
    return {"x": [[said] for said, _ in pairs], "y": labels}


def words(report: ImportReport) -> list[str]:
    result: list[str] = json.loads(pq.read_schema(report.destination).metadata[METADATA_KEY])
    return result


def said(report: ImportReport) -> list[list[str]]:
    """Every row's words without padding at the end."""
    vocabulary = words(report)
    rows = pq.read_table(report.destination).column("x").to_pylist()
    return [" ".join(vocabulary[token] for token in row).split(" <PAD>")[0].split(" ") for row in rows]


def test_sent140_is_cut_into_words_of_the_train_part(tmp_path: Path) -> None:
    train = document(ann=tweets("b b, a! @you's http://t.co"), bob=tweets("b Ünï a", label=4))
    test = document(ann=tweets("a new b", label=1))
    options = LeafOptions(length=6, vocabulary=7)
    report = import_leaf("sent140", write_source(tmp_path / "l", train, test), tmp_path / "f.parquet", options)
    # b thrice, a twice, and of those that occur once the first in alphabetical order.
    assert words(report) == [*SPECIAL, "b", "a", "!", ",", "you's"]
    assert said(report) == [
        ["b", "b", ",", "a", "!", "you's"],
        ["a", "<UNK>", "b"],
        ["b", "<UNK>", "a"],
    ]
    assert pq.read_table(report.destination).column("y").to_pylist() == [0, 1, 1]


def test_sent140_words_that_only_the_test_part_has_are_unknown(tmp_path: Path) -> None:
    source = write_source(tmp_path / "l", document(ann=tweets("one")), document(ann=tweets("two two two one")))
    report = import_leaf("sent140", source, tmp_path / "f.parquet")
    assert words(report) == [*SPECIAL, "one"]
    dataset = NaturalDataset(report.destination, 0, RandomStreams(0))
    assert (dataset.spec.kind, dataset.spec.shape, dataset.spec.num_classes) == ("tokens", (25,), 2)
    assert dataset.spec.vocabulary == 3
    parts = dataset.load(0)
    assert parts["train"].x.tolist() == [[2] + [0] * 24]
    assert parts["test"].x.tolist() == [[1, 1, 1, 2] + [0] * 21]
    network = CharLSTM(hidden=4).network(dataset.spec)
    assert network.logits(network.initialize(0), parts["test"].x).shape == (1, 2)


def test_sent140_may_be_cut_into_characters(tmp_path: Path) -> None:
    source = write_source(tmp_path / "l", document(ann=tweets("aab ", "é\n")))
    report = import_leaf("sent140", source, tmp_path / "f.parquet", LeafOptions(tokens="characters"))
    assert words(report) == [*SPECIAL, "a", "\n", " ", "b", "é"]
    rows = pq.read_table(report.destination).column("x").to_pylist()
    assert rows == [[2, 2, 5, 4] + [0] * 136, [6, 3] + [0] * 138]


def test_a_vocabulary_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("<PAD>\n<UNK>\nzebra\nand\r\n", newline="")
    source = write_source(tmp_path / "l", document(ann=tweets("zebra and and cat")))
    report = import_leaf("sent140", source, tmp_path / "f.parquet", LeafOptions(vocabulary_file=tmp_path / "v.txt"))
    assert words(report) == [*SPECIAL, "zebra", "and"]
    assert pq.read_table(report.destination).column("x").to_pylist()[0][:5] == [2, 3, 3, 1, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "first two lines must be <PAD> and <UNK>"),
        (b"cat\ndog\n", "first two lines must be <PAD> and <UNK>"),
        (b"<PAD>\n<UNK>\ncat\n\ndog", "line 4 is empty"),
        (b"<PAD>\n<UNK>\ncat\ncat\n", "line 4 repeats line 3"),
        (b"<PAD>\n<UNK>\n\xff\n", "cannot be read as text"),
        (b"<PAD>\n<UNK>\n" + b"".join(b"%d\n" % i for i in range(1 << 15)), "32770 words are more than the 32768"),
    ],
)
def test_an_unusable_vocabulary_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "v.txt").write_bytes(content)
    source = write_source(tmp_path / "l", document(ann=comments((SENTENCE, NEXT))))
    with pytest.raises(DataError, match=rf"v\.txt.*{message}"):
        import_leaf("reddit", source, tmp_path / "f.parquet", LeafOptions(vocabulary_file=tmp_path / "v.txt"))
    assert not (tmp_path / "f.parquet").exists()


@given(st.dictionaries(st.text(min_size=1, max_size=4), st.integers(0, 5)), st.integers(3, 12))
def test_a_vocabulary_has_the_most_frequent_words(counts: dict[str, int], size: int) -> None:
    vocabulary = Vocabulary.of_counts(counts, size)
    assert len(vocabulary) <= size
    assert vocabulary.words[:2] == SPECIAL
    chosen = vocabulary.words[2:]
    assert [counts[word] for word in chosen] == sorted((counts[word] for word in chosen), reverse=True)
    left_out = [count for word, count in counts.items() if word not in chosen]
    if chosen:
        assert min(counts[word] for word in chosen) >= max([1, *left_out])
    assert len(vocabulary) == size or not any(left_out)


def test_every_next_word_of_reddit_is_a_sample(tmp_path: Path) -> None:
    source = write_source(tmp_path / "l", document(ann=comments((SENTENCE, NEXT), (SENTENCE, NEXT))))
    report = import_leaf("reddit", source, tmp_path / "f.parquet")
    # Four words are followed by one: <BOS>, the, cat and sat.
    assert report.samples == {"train": 8, "test": 0}
    vocabulary = words(report)
    assert vocabulary == [*SPECIAL, "<BOS>", "<EOS>", "cat", "sat", "the"]
    dataset = NaturalDataset(report.destination, 0, RandomStreams(0))
    assert dataset.spec.num_classes == dataset.spec.vocabulary == 7
    train = dataset.load(0)["train"]
    inputs = [[vocabulary[token] for token in row if token] for row in train.x.tolist()]
    assert inputs[:4] == [["<BOS>"], ["<BOS>", "the"], ["<BOS>", "the", "cat"], ["<BOS>", "the", "cat", "sat"]]
    assert [vocabulary[token] for token in train.y.tolist()] == ["the", "cat", "sat", "<EOS>"] * 2
    assert torch.equal(train.x[:, :6], torch.zeros(8, 6, dtype=torch.int64))


def test_reddits_rare_words_are_unknown_as_labels_too(tmp_path: Path) -> None:
    source = write_source(tmp_path / "l", document(ann=comments((SENTENCE, NEXT))))
    (source / "val").mkdir()
    report = import_leaf("reddit", source, tmp_path / "f.parquet", LeafOptions(vocabulary=4))
    assert words(report) == [*SPECIAL, "<BOS>", "<EOS>"]
    assert pq.read_table(report.destination).column("y").to_pylist() == [1, 1, 1, 3]
    assert report.warnings == (f"{source / 'val'} is left out; runs draw their validation parts from train/",)


@given(
    st.lists(st.lists(st.sampled_from("abcd"), min_size=10, max_size=10), min_size=1, max_size=4),
    st.lists(st.integers(0, 10), min_size=4, max_size=4),
)
def test_reddit_has_as_many_samples_as_words_to_predict(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[list[str]], lengths: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("reddit")
    pairs = [
        (said, said[1 : length + 1] + ["<PAD>"] * (10 - len(said[1 : length + 1])))
        for said, length in zip(sequences, lengths, strict=False)
    ]
    always = (SENTENCE, NEXT)
    source = write_source(folder / "l", document(ann=comments(*pairs, always)))
    report = import_leaf("reddit", source, folder / "f.parquet")
    expected = Counter(word for _, following in [*pairs, always] for word in following if word != "<PAD>")
    vocabulary = words(report)
    found = Counter(vocabulary[label] for label in pq.read_table(report.destination).column("y").to_pylist())
    assert found == expected


SHORT = SENTENCE[1:]
BAD_TWEETS: dict[str, tuple[dict[str, list[Any]], str]] = {
    "a text alone": ({"x": ["hi"], "y": [0]}, r"x\[0\] is not a list of LEAF's 5 fields"),
    "four fields": ({"x": [["1", "2", "3", "4"]], "y": [0]}, r"x\[0\] is not a list of LEAF's 5 fields"),
    "text no text": ({"x": [["1", "2", "3", "4", 5]], "y": [0]}, r"x\[0\]\[4\] is not a text"),
    "half a pair": ({"x": [["1", "2", "3", "4", "\ud83d"]], "y": [0]}, r"x\[0\]\[4\] holds half a surrogate pair"),
    "neutral": (tweets("a", label=2), r"y\[0\] is 2, not an integer from 0 to 1"),
    "true": (tweets("a", label=True), r"y\[0\] is True"),
}
BAD_COMMENTS: dict[str, tuple[dict[str, list[Any]], str]] = {
    "nine words": (comments((SHORT, NEXT)), r"x\[0\] has a sequence that is not a list of 10 words"),
    "nine targets": (comments((SENTENCE, SHORT)), r"the target_tokens of y\[0\] has a sequence"),
    "a number": (comments(([1, *SHORT], NEXT)), r"x\[0\] has a sequence"),  # type: ignore[list-item]
    "a text": ({"x": ["the cat"], "y": [[NEXT]]}, r"x\[0\] is not a list of sequences"),
    "no targets": ({"x": [[SENTENCE]], "y": [{"score": 1}]}, r"the target_tokens of y\[0\] is not a list"),
    "more inputs": ({"x": [[SENTENCE, SENTENCE]], "y": [[NEXT]]}, r"x\[0\] has 2 sequences and .* y\[0\] 1"),
    "half a pair": (comments((["\ud83d", *SHORT], NEXT)), r"x\[0\] holds half a surrogate pair"),
}


@pytest.mark.parametrize(
    ("kind", "user", "message"),
    [
        *(pytest.param("sent140", *case, id=f"sent140 {name}") for name, case in BAD_TWEETS.items()),
        *(pytest.param("reddit", *case, id=f"reddit {name}") for name, case in BAD_COMMENTS.items()),
    ],
)
def test_malformed_samples_are_refused_with_file_and_user(
    tmp_path: Path, kind: Any, user: dict[str, list[Any]], message: str
) -> None:
    source = write_source(tmp_path / "l", document(bob=user))
    with pytest.raises(DataError, match=rf"train/a\.json, user 'bob': {message}"):
        import_leaf(kind, source, tmp_path / "f.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["l"]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("femnist", LeafOptions(vocabulary=9), "--vocabulary does not apply to femnist, only to sent140 and reddit"),
        ("reddit", LeafOptions(length=9), "--length does not apply to reddit, only to sent140"),
        ("reddit", LeafOptions(tokens="words"), "--tokens does not apply to reddit"),
        ("sent140", LeafOptions(images=Path("i")), "--images does not apply to sent140, only to celeba"),
        ("sent140", LeafOptions(vocabulary=9, vocabulary_file=Path("v")), "exclude each other"),
        ("sent140", LeafOptions(vocabulary=2), "--vocabulary is 2; it must be from 3 to 65536"),
        ("reddit", LeafOptions(vocabulary=32769), "--vocabulary is 32769; it must be from 3 to 32768"),
        ("sent140", LeafOptions(length=0), "--length is 0; it must be from 1 to 10000"),
        ("celeba", LeafOptions(), "celeba needs --images"),
    ],
)
def test_options_that_do_not_apply_are_refused(tmp_path: Path, kind: Any, options: LeafOptions, message: str) -> None:
    with pytest.raises(DataError, match=message):
        import_leaf(kind, tmp_path, tmp_path / "f.parquet", options)


def test_reddits_sequences_have_every_next_word(tmp_path: Path) -> None:
    train = document(ann=comments((SENTENCE, NEXT)), bob=comments((SENTENCE, NEXT)))
    test = document(ann=comments((["<BOS>", "dog", *["<PAD>"] * 8], ["dog", "<EOS>", *["<PAD>"] * 8])))
    options = LeafOptions(sequences=True)
    report = import_leaf("reddit", write_source(tmp_path / "l", train, test), tmp_path / "f.parquet", options)
    vocabulary, dataset = words(report), NaturalDataset(tmp_path / "f.parquet", 0.0, RandomStreams(0))
    assert (dataset.spec.target, dataset.spec.padding, dataset.spec.shape) == ("tokens", 0, (10,))
    assert dataset.spec.num_classes == dataset.spec.vocabulary == len(vocabulary)
    own = dataset.load(0)
    assert [vocabulary[token] for token in own["train"].x[0].tolist()] == SENTENCE
    following = own["train"].y[0].tolist()
    assert [vocabulary[token] for token in following[:4]] == NEXT[:4] and following[4:] == [-100] * 6
    # "dog" is unknown to the train part, and so are its target and what is asked of it
    assert [vocabulary[token] for token in own["test"].y[0, :2].tolist()] == ["<UNK>", "<EOS>"]
    with pytest.raises(DataError, match="--sequences does not apply to sent140, only to reddit"):
        import_leaf("sent140", tmp_path / "l", tmp_path / "g.parquet", options)
