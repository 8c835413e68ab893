"""Instructions and responses as tokens: where the response begins and ends, what is cut, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.files.natural_file import open_natural
from rayfl.data.files.records import read_record
from rayfl.data.opening import open_dataset
from rayfl.data.sources.base import NaturalPath, Samples
from rayfl.data.sources.made_up.instructions import COLOURS, SyntheticInstructionsSource
from rayfl.data.sources.preparation.preparing import Order
from rayfl.data.sources.rows.parquet import ParquetSource
from rayfl.data.sources.texts.instructions import InstructionsSource
from rayfl.data.sources.tokens.instruction_texts import TEMPLATES
from rayfl.errors import DataError
from rayfl.examples import BYTE_TOKENS, END_OF_BYTES, byte_tokens
from rayfl.metrics.language import IGNORED
from rayfl.randomness import RandomStreams

ROWS = [
    {"instruction": "Say hello.", "input": "", "output": "Hello!"},
    {"instruction": "Translate.", "input": "chat", "output": "cät"},
    {"instruction": "Count.", "output": "one two"},
]

GOOD = {"instruction": "a", "output": "b"}


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))


def written(folder: Path, rows: list[dict[str, Any]], kind: str = "json") -> Path:
    file = folder / f"rows.{kind}"
    if kind == "json":
        file.write_text(json.dumps(rows), encoding="utf-8")
    elif kind == "jsonl":
        file.write_text("\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    else:
        table = pa.table({name: [row.get(name) for row in rows] for name in {key: 0 for row in rows for key in row}})
        pq.write_table(table, file) if kind == "parquet" else pyarrow.csv.write_csv(table, file)
    return file


def opened(path: Path, **options: Any) -> Samples:
    found = InstructionsSource.model_validate({"path": path, "tokenizer": "bytes", **options}).open()
    assert isinstance(found, Samples)
    return found


def spelled(tokens: np.ndarray) -> str:
    return bytes(int(token) - 2 for token in tokens if token > END_OF_BYTES).decode()


def warnings_of(found: Samples) -> list[str]:
    return [remark.text for remark in found.remarks()]


@pytest.mark.parametrize("options", [{}, {"client": "client"}])
def test_clients_of_a_csv_file_are_called_as_it_stands_there(tmp_path: Path, options: dict[str, str]) -> None:
    path = written(tmp_path, [{**GOOD, "client": name} for name in ("007", "07", "7")], "csv")
    path.write_text(path.read_text().replace('"', ""))
    found = InstructionsSource(path=path, tokenizer="bytes", **options).open()
    assert isinstance(found, NaturalPath)
    assert open_natural(found.path).owners().column("client").to_pylist() == ["007", "07", "7"]


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "csv"])
def test_the_next_token_is_learned_where_the_response_is_and_nowhere_else(kind: str, tmp_path: Path) -> None:
    found = opened(written(tmp_path, ROWS, kind))
    assert found.spec.target == "tokens" and found.spec.vocabulary == BYTE_TOKENS == found.spec.num_classes
    for x, y, row in zip(found.x, found.y, ROWS, strict=True):
        prompt = TEMPLATES["alpaca"].prompt(row)
        assert prompt.count("### Input:\nchat") == bool(row.get("input")) == prompt.count("further context")
        asked = np.flatnonzero(y != IGNORED)
        assert asked[0] == len(prompt.encode()) - 1 and (np.diff(asked) == 1).all()
        assert spelled(y[asked]) == row["output"] and y[asked[-1]] == END_OF_BYTES
        assert spelled(x) == prompt + row["output"]
        # shifted by one: what is asked for at a position is what is read at the next one
        assert (y[asked[:-1]] == x[asked[1:]]).all()
        assert not x[asked[-1] + 2 :].any()
    assert found.x.shape[1] == max(
        len(TEMPLATES["alpaca"].prompt(row).encode()) + len(row["output"].encode()) for row in ROWS
    )
    assert not warnings_of(found)


def test_templates_of_ones_own_and_a_response_without_end(tmp_path: Path) -> None:
    file = written(tmp_path, [{"q": "2 + 2", "by": "Ann", "answer": "4"}])
    found = opened(file, template="{by} asks: {q}", end="none")
    assert spelled(found.x[0]) == "Ann asks: 2 + 2 " and spelled(found.y[0][found.y[0] != IGNORED]) == " 4"
    assert END_OF_BYTES not in found.x and END_OF_BYTES not in found.y
    assert opened(file, template="{q}\n", response="by", end="none").y[0][-3:].tolist() == byte_tokens("Ann")
    # Without a line's end, or a blank, there is a blank before the response.
    assert spelled(opened(file, template="{q}=\n", end="none").y[0][-1:]) == "4"
    with pytest.raises(ValidationError, match="names no column in braces, and is none of alpaca, flowertune"):
        opened(file, template="alpacca")
    with pytest.raises(ValidationError, match="nothing else in them"):
        opened(file, template="{q!r}")


def test_what_is_too_long_is_cut_or_left_out_and_said(tmp_path: Path) -> None:
    rows = [{"q": "a" * n, "output": "b" * 5} for n in (2, 6, 10, 20)]
    file = written(tmp_path, rows)
    found = opened(file, template="{q}\n", length=9)
    assert found.x.shape == (2, 9)
    assert [int((y != IGNORED).sum()) for y in found.y] == [6, 3]
    assert warnings_of(found) == [
        "1 of 2 responses are cut, since with their prompts they are longer than 9 tokens: raise dataset.length to "
        "keep them whole",
        "2 rows are left out, since no token of their responses would be learned: their prompts have 9 tokens "
        "(dataset.length) or more, or the response is empty and dataset.end=none",
    ]
    with pytest.raises(DataError, match=r"no response has a token within 2 tokens: raise dataset\.length"):
        opened(file, template="{q}\n", length=2)


def test_clients_and_splits_are_kept(tmp_path: Path) -> None:
    rows = [
        {"instruction": f"{client} {n}", "output": "yes", "client": client, "split": "test" if n == 2 else "train"}
        for client in ("ann", "bob")
        for n in range(3)
    ]
    file = written(tmp_path, rows)
    config = load_config(
        Experiment, "quickstart-text", {"dataset": {"name": "instructions", "path": str(file), "tokenizer": "bytes"}}
    )
    config = config.model_copy(update={"holdout": config.holdout.model_copy(update={"test": None, "validation": 0.0})})
    dataset = open_dataset(config, RandomStreams(0))
    assert dataset.names == ("ann", "bob") and dataset.sizes().tolist() == [[2, 0, 1], [2, 0, 1]]
    assert "bob 2" in spelled(dataset.load(1)["test"].x[0].numpy())


def tokenizer(folder: Path, words: str = "hello", settings: dict[str, Any] | None = None) -> Path:
    """A tokenizer of words that begins texts with <s> and ends them with </s>, as a folder."""
    library = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    names = ["<unk>", "<s>", "</s>", "ask", ":", "Say", "it", ".", "Count", "one", "two", words]
    found = library.Tokenizer(library.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    found.pre_tokenizer = library.pre_tokenizers.Whitespace()
    found.add_special_tokens(["<s>", "</s>"])
    found.post_processor = library.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    found.enable_truncation(3)  # which must not cut anything here
    folder.mkdir()
    found.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_prompt_and_response_become_tokens_apart_and_the_end_is_the_tokenizers(tmp_path: Path) -> None:
    file = written(
        tmp_path, [{"instruction": "Say it .", "output": "hello hello"}, {"instruction": "Count", "output": "one"}]
    )
    folder = tokenizer(tmp_path / "tokenizer", settings={"eos_token": {"content": "</s>"}})
    found = opened(file, tokenizer=str(folder), template="ask : {instruction}")
    assert found.x.tolist() == [[1, 3, 4, 5, 6, 7, 11, 11], [1, 3, 4, 8, 9, 2, 2, 2]]
    assert found.y.tolist() == [[IGNORED] * 5 + [11, 11, 2], [IGNORED] * 3 + [9, 2] + [IGNORED] * 3]
    # Nothing fills up in this tokenizer, so what ends a text does.
    assert found.spec.padding == 2 and found.spec.vocabulary == 12
    lengths = found.spec.lengths
    import torch

    assert lengths(torch.from_numpy(found.x.astype(np.int64))).tolist() == [8, 5]
    other = opened(file, tokenizer=str(folder), template="ask : {instruction}", end="none")
    assert other.y.tolist()[1] == [IGNORED] * 3 + [9] + [IGNORED] * 3
    with pytest.raises(DataError, match=r"dataset\.end: .* has no token '<eot>'"):
        opened(file, tokenizer=str(folder), template="ask : {instruction}", end="<eot>")


def test_a_changed_tokenizer_is_another_experiment_and_a_recorded_one_is_checked(tmp_path: Path) -> None:
    file = written(tmp_path, ROWS)
    first = tokenizer(tmp_path / "one", settings={"eos_token": "</s>"})
    options = {"name": "instructions", "path": str(file), "tokenizer": str(first)}
    config = load_config(Experiment, "quickstart-text", {"dataset": options})
    assert config.dataset.tokenizer_sha256 is not None
    path = config.dataset.prepare(Order())
    record = read_record(path)
    assert record is not None and record.options["tokenizer_sha256"] == config.dataset.tokenizer_sha256
    assert config.dataset.prepared_path == path
    (first / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    changed = load_config(Experiment, "quickstart-text", {"dataset": options})
    assert changed.fingerprint() != config.fingerprint() and changed.dataset.prepared_path != path
    with pytest.raises(DataError, match=r"but dataset\.tokenizer_sha256 is .*: it was changed"):
        config.dataset.open()
    with pytest.raises(DataError, match=r"is 0{64}: it was changed"):
        opened(file, tokenizer=str(first), tokenizer_sha256="0" * 64)
    # A copy that is there needs no tokenizer.
    (first / "tokenizer.json").unlink()
    assert config.dataset.prepared_path == path


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"instruction": "a", "out": "b"}], {}, r"dataset\.response: .* has only instruction, out; name the column"),
        ([{**GOOD, "answer": "c"}], {}, "has columns output and answer"),
        ([{"question": "a", "output": "b"}], {}, r"dataset\.template: .* has no column 'instruction', only question"),
        ([{**GOOD, "output": None, "client": "ann"}, GOOD], {}, r"column 'output', row 0 \(client 'ann'\) is null"),
        ([{**GOOD, "instruction": 3}], {}, "column 'instruction' has the type int64; prompts and responses are text"),
        ([GOOD], {"client": "user"}, r"dataset\.client: .* has no column 'user'"),
        ([GOOD], {"tokenizer": "words"}, "instructions are for models that are there already"),
        ([GOOD], {"tokenizer": "nowhere"}, "nowhere does not exist"),
        ([GOOD], {"end": "</s>"}, r"dataset\.end is '</s>', but tokenizer=bytes"),
        ([], {}, "no rows"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    rows: list[dict[str, Any]], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        opened(written(tmp_path, rows), **options)


@pytest.mark.parametrize(("kind", "content"), [("json", "{"), ("json", '{"a": 1}'), ("json", "[1]"), ("jsonl", "3\n")])
def test_files_that_are_no_rows_are_named(kind: str, content: str, tmp_path: Path) -> None:
    file = tmp_path / f"rows.{kind}"
    file.write_text(content)
    with pytest.raises(DataError, match=rf"dataset\.path: .*rows\.{kind} is not a readable JSON file"):
        opened(file)


def test_plain_texts_of_json_as_bytes(tmp_path: Path) -> None:
    file = written(tmp_path, [{"text": "añ", "by": "ann"}, {"text": "b"}])
    options = {"path": file, "x": "text", "target": "tokens", "client": "none"}
    found = ParquetSource.model_validate({**options, "tokenizer": "bytes"}).open()
    assert isinstance(found, Samples)
    assert found.x.tolist() == [byte_tokens("añ")[:-1], [*byte_tokens("b"), 0]]
    assert found.y.tolist() == [byte_tokens("añ")[1:], [IGNORED] * 2]
    assert found.spec.vocabulary == BYTE_TOKENS and found.spec.padding == 0
    with pytest.raises(DataError, match=r"dataset\.vocabulary is 300, but tokenizer=bytes has 258 tokens"):
        ParquetSource.model_validate({**options, "tokenizer": "bytes", "vocabulary": 300}).open()


def test_made_up_answers_are_those_of_the_clients_table() -> None:
    source, streams = SyntheticInstructionsSource(num_clients=4, samples=50, things=10, own=0.4), RandomStreams(3)
    found = source.open(streams)
    tables = [source.table(client, streams) for client in range(4)]
    assert found.clients is not None
    for x, y, client in zip(found.x, found.y, found.clients, strict=True):
        asked = y != IGNORED
        (thing,) = [name for name in tables[int(client)] if f" {name}" in spelled(x)]
        assert spelled(y[asked]) == tables[int(client)][thing] and y[asked][-1] == END_OF_BYTES
    differing = [sum(tables[0][name] != other[name] for name in other) for other in tables[1:]]
    assert all(0 < count <= 8 for count in differing)
    assert all(colour in COLOURS for table in tables for colour in table.values())
    same = SyntheticInstructionsSource(num_clients=4, own=0.0)
    assert len({tuple(same.table(client, streams).items()) for client in range(4)}) == 1
