"""Columns of texts and of tokens: words, tokenizers, lengths and the next token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from rayfl.data.partitions.base import IIDPartition
from rayfl.errors import DataError
from rayfl.metrics.language import IGNORED
from tests.support.tables import opened, written


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The section ``dataset`` of a file that is written with some columns changed."""

    def make(form: str = "parquet", changes: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        path = written(tmp_path, form, **(changes or {}))
        return {"path": path, "root": tmp_path, "client": "hospital", **options}

    return make


def test_words_are_tokens_learned_from_the_training_rows(own: Callable[..., dict[str, Any]]) -> None:
    notes = ["the cat sat", "a dog sat on the cat", "cat", "an unknown cat"] * 3
    section = own(changes={"note": notes}, x="note", y="outcome", tokenizer="words", length=4)
    dataset = opened(section)
    assert dataset.spec.kind == "tokens"
    assert dataset.spec.shape == (4,)
    assert dataset.spec.vocabulary == 2 + len({"the", "cat", "sat", "a", "dog", "on"})
    train, test = dataset.load(0)["train"].x, dataset.load(0)["test"].x
    cat = int(train[2, 0])
    assert cat == 2  # the most frequent word
    assert train[2].tolist() == [cat, 0, 0, 0]
    assert test[0].tolist() == [1, 1, cat, 0]
    assert any("3 of 12 texts are longer than 4 tokens" in remark for remark in dataset.remarks())


@pytest.mark.parametrize(
    ("changes", "options", "warned"),
    [
        ({}, {}, False),
        ({"split": None}, {}, True),
        ({"split": None}, {"tokenizer": "bytes"}, False),
        ({}, {"part": "train"}, True),
        ({}, {"part": "test"}, False),
        ({}, {"client": "none"}, True),
    ],
)
def test_tokens_that_are_learned_from_what_is_tested_are_warned_of(
    own: Callable[..., dict[str, Any]], changes: dict[str, Any], options: dict[str, Any], warned: bool
) -> None:
    section = own(changes=changes, **{"x": "note", "y": "outcome", "tokenizer": "words", **options})
    partition = IIDPartition(num_clients=2) if section["client"] == "none" else None
    remarks = opened(section, partition=partition).remarks()
    words = "dataset.tokenizer=words learns its tokens before holdout"
    assert [remark.startswith(words) for remark in remarks].count(True) == warned


def saved_tokenizer(folder: Path, padding: bool = False, special: bool = False, **more: Any) -> Any:
    """A tokenizer of three words in a folder, as the library writes it."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    words = {"cat": 0, "dog": 1, "sat": 2, "[UNK]": 3} | ({"[PAD]": 4, "[SEP]": 5} if padding or special else {})
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if special:
        made.post_processor = tokenizers.processors.TemplateProcessing("$A [SEP]", special_tokens=[("[SEP]", 5)])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return made


def test_a_tokenizer_from_a_folder_keeps_its_numbers(
    own: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: Any
) -> None:
    folder = tmp_path / "tokenizer"
    saved_tokenizer(folder)
    section = own(x="note", y="outcome", tokenizer=str(folder), length=6)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(DataError, match=r"needs the package tokenizers: pip install 'rayfl\[hf\]'"):
            opened(section)
    dataset = opened(section)
    assert dataset.spec.vocabulary == 5 and dataset.spec.padding == 4  # after all others
    assert dataset.load(0)["train"].x.tolist()[1:] == [[3, 1, 2, 3, 3, 0], [0, 4, 4, 4, 4, 4]]
    with pytest.raises(DataError, match=r"dataset.vocabulary is 9, but .*tokenizer.json has 5 tokens"):
        opened({**section, "vocabulary": 9})
    (folder / "tokenizer.json").write_text("damaged")
    with pytest.raises(DataError, match=r"tokenizer.json is no tokenizer of the library tokenizers: expected value"):
        opened(section)


def test_a_tokenizers_own_padding_ends_and_lengths(own: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """What a file says of lengths cuts nothing; what ends a text stays where it is cut."""
    folder = tmp_path / "tokenizer"
    made = saved_tokenizer(folder, special=True)
    made.enable_truncation(2)
    made.enable_padding(pad_id=4, pad_token="[PAD]", length=9)
    made.save(str(folder / "tokenizer.json"))
    section = own(x="note", y="outcome", tokenizer=str(folder / "tokenizer.json"))
    whole = opened(section)
    assert whole.spec.vocabulary == 6 and whole.spec.padding == 4
    assert whole.load(0)["train"].x.tolist()[1:] == [[3, 1, 2, 3, 3, 0, 5], [0, 5, 4, 4, 4, 4, 4]]
    cut = opened({**section, "length": 3})
    assert cut.load(0)["train"].x.tolist()[1:] == [[3, 1, 5], [0, 5, 4]]
    assert any("6 of 12 texts are longer than 3 tokens" in remark for remark in cut.remarks())
    with pytest.raises(DataError, match=r"dataset.length is 1, but .*tokenizer.json adds 1 tokens to every text"):
        opened({**section, "length": 1})
    made.no_padding()
    made.save(str(folder / "tokenizer.json"))
    assert opened(section).spec.padding == 4  # [PAD] by its name
    (folder / "tokenizer_config.json").write_text('{"pad_token": {"content": "[SEP]"}}')
    assert opened(section).spec.padding == 5
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not readable JSON"):
        opened(section)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_texts_of_json_lines_may_have_other_ends_of_lines(tmp_path: Path, end: str) -> None:
    lines = [f'{{"text": "a\u2028b\x85c{place}", "y": {place % 2}, "client": "a"}}{end}' for place in range(4)]
    (tmp_path / "rows.jsonl").write_bytes("".join(lines).encode())
    section = {"path": tmp_path / "rows.jsonl", "root": tmp_path, "tokenizer": "characters"}
    assert opened(section, test=0, validation=0).load(0)["train"].x.shape == (4, 6)


def test_words_as_torchtext_cuts_them() -> None:
    from rayfl.data.sources.tokens.tokenizers import tokenized

    text = 'It\'s "New" (really): 3.5!<br />Is it; no?'
    found = tokenized([text], "basic_english", np.ones(1, dtype=bool), None, None)
    words = ["it", "'", "s", "new", "(", "really", ")", "3", ".", "5", "!", "is", "it", "no", "?"]
    assert len(found.rows[0]) == len(words) and found.vocabulary == 2 + len(set(words))
    assert [found.rows[0][i] == found.rows[0][0] for i in range(len(words))] == [word == "it" for word in words]


def test_texts_of_which_the_next_token_is_learned(own: Callable[..., dict[str, Any]]) -> None:
    dataset = opened(own(x="note", tokenizer="characters", length=5), "tokens")
    train = dataset.load(0)["train"]
    assert train.x.shape == train.y.shape == (len(train.x), 5)
    assert torch.equal(train.x[0, 1:], train.y[0, :-1])
    short = next(i for i in range(len(train.x)) if train.x[i, 3] == 0)  # "cat"
    assert train.y[short].tolist()[2:] == [IGNORED, IGNORED, IGNORED]
    assert dataset.spec.num_classes == dataset.spec.vocabulary


def test_lists_of_tokens(tmp_path: Path) -> None:
    rows = {"x": [[3, 1, 2], [4], [1, 1, 1, 1]], "y": [0, 1, 0], "client": ["a", "a", "a"]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    section = {"path": tmp_path / "rows.parquet", "root": tmp_path, "kind": "tokens"}
    dataset = opened(section, test=0, validation=0)
    assert dataset.load(0)["train"].x.tolist() == [[3, 1, 2, 0], [4, 0, 0, 0], [1, 1, 1, 1]]
    assert dataset.spec.vocabulary == 5 and dataset.spec.padding == 0
    assert not dataset.remarks()
    own = opened({**section, "padding": None}, test=0, validation=0)
    assert own.load(0)["train"].x.tolist() == [[3, 1, 2, 5], [4, 5, 5, 5], [1, 1, 1, 1]]
    assert own.spec.vocabulary == 6 and own.spec.padding == 5
    (remark,) = opened({**section, "padding": 1}, test=0, validation=0).remarks()
    assert remark.startswith("1 of 3 rows have the token that fills rows up before other tokens")
    with pytest.raises(
        DataError, match=r"column 'x', row 1 \(client 'a'\) has the token 4; .*below dataset.vocabulary=4"
    ):
        opened({**section, "vocabulary": 4})


@pytest.mark.parametrize("token", [2**31 - 1, 2**31, 2**63 - 1])
def test_tokens_that_have_no_room_are_refused(tmp_path: Path, token: int) -> None:
    pq.write_table(pa.table({"x": [[3, 1], [4, token]], "y": [0, 1], "client": ["a", "b"]}), tmp_path / "rows.parquet")
    section = {"path": tmp_path / "rows.parquet", "root": tmp_path, "kind": "tokens"}
    with pytest.raises(DataError, match=rf"row 1 \(client 'b'\) has the token {token}; .* below 2147483647"):
        opened(section)
