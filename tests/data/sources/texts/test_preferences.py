"""Pairs of answers as tokens: the forms that TRL reads, what is left out, what is refused, and made-up pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfl.data.files.natural_file import open_natural
from rayfl.data.opening import open_dataset
from rayfl.data.partitions.stats import dataset_stats
from rayfl.data.sources.base import NaturalPath, Samples
from rayfl.data.sources.made_up.instructions import COLOURS, SyntheticInstructionsSource
from rayfl.data.sources.made_up.preferences import SyntheticPreferencesSource
from rayfl.data.sources.texts.preferences import PreferencesSource
from rayfl.data.sources.tokens.tokenizers import CHAT_FILE
from rayfl.errors import DataError
from rayfl.examples import BYTE_TOKENS, END_OF_BYTES, byte_tokens
from rayfl.metrics.language import IGNORED
from rayfl.plots.partition import label_matrix
from rayfl.randomness import RandomStreams
from tests.data.sources.texts.test_instructions import spelled, warnings_of, written
from tests.data.sources.tokens.test_chat_texts import FORGETFUL, TALK, tokenizer

ROW = {"prompt": "Sky?", "chosen": "blue", "rejected": "green"}


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))


def source(path: Path, **options: Any) -> PreferencesSource:
    return PreferencesSource.model_validate({"path": path, "tokenizer": "bytes", **options})


def opened(path: Path, **options: Any) -> Samples:
    found = source(path, **options).open()
    assert isinstance(found, Samples)
    return found


def both(found: Samples, row: int = 0) -> tuple[tuple[str, str], tuple[str, str]]:
    """What is read, and what is learned, of the preferred answer and the other."""
    texts = zip(found.x[row], found.y[row], strict=True)
    one, other = ((spelled(x), spelled(y[y != IGNORED])) for x, y in texts)
    return one, other


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "csv"])
def test_a_row_is_two_texts_of_which_the_answers_are_learned(kind: str, tmp_path: Path) -> None:
    found = opened(written(tmp_path, [ROW, {**ROW, "prompt": "Grass?\n"}], kind))
    assert both(found) == (("Sky? blue", " blue"), ("Sky? green", " green"))
    assert both(found, 1) == (("Grass?\nblue", "blue"), ("Grass?\ngreen", "green"))
    assert found.spec.target == "preference" and found.spec.shape == (2, len("Grass?\ngreen"))
    assert found.x.shape == found.y.shape == (2, 2, 12) and found.spec.padding == 0
    prompt, answer = byte_tokens("Sky?"), [*byte_tokens(" blue"), END_OF_BYTES]
    assert found.x[0, 0].tolist() == [*prompt, *answer, 0, 0]
    assert found.y[0, 0].tolist() == [*[IGNORED] * (len(prompt) - 1), *answer, *[IGNORED] * 3]
    assert found.spec.of_model.shape == (12,) and found.spec.of_model.target == "tokens"


def test_answers_that_begin_with_a_blank_have_no_other_one(tmp_path: Path) -> None:
    found = opened(written(tmp_path, [{"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}]))
    assert both(found)[0] == ("The sky is blue.", " blue.")


def test_without_a_column_of_prompts_they_are_what_both_answers_begin_with(tmp_path: Path) -> None:
    rows = [
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"chosen": "H: hi\n\nA: bye", "rejected": "H: hi\n\nA: by"},
        {"chosen": "yes", "rejected": "no"},
        {"chosen": "Q?\nyes", "rejected": "Q?\nno"},
    ]
    found = opened(written(tmp_path, rows))
    assert both(found)[1] == ("The sky is green.", " green.")
    # A word in which the answers differ is theirs from its beginning on.
    assert both(found, 1) == (("H: hi\n\nA: bye", " bye"), ("H: hi\n\nA: by", " by"))
    assert both(found, 2) == (("yes", "es"), ("no", "o"))  # nothing is read before the first token
    assert both(found, 3) == (("Q?\nyes", "yes"), ("Q?\nno", "no"))


def test_prompts_are_made_by_templates_and_columns_may_have_other_names(tmp_path: Path) -> None:
    path = written(tmp_path, [{"instruction": "Add.", "input": "1 1", "good": "2", "bad": "3"}])
    found = opened(path, template="alpaca", chosen="good", rejected="bad")
    assert both(found)[0][0].endswith("### Input:\n1 1\n\n### Response:\n2") and both(found)[1][1] == "3"
    found = opened(path, template="{input}: {instruction}\n", chosen="good", rejected="bad")
    assert both(found)[0][0] == "1 1: Add.\n2"


def test_pairs_that_are_alike_cut_or_without_an_answer_are_named(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "rejected": "blue"}, {**ROW, "rejected": "blueish"}, {**ROW, "prompt": "x" * 30}]
    found = opened(written(tmp_path, rows), length=8)
    assert len(found.y) == 1 and both(found)[1] == ("Sky? gre", " gree")
    # The two that are alike are so within the length: "blueish" is cut to "blue".
    texts = warnings_of(found)
    assert any(text.startswith("1 of 1 pairs have an answer that is cut") for text in texts)
    assert any(text.startswith("1 rows are left out, since no token of one of their answers") for text in texts)
    assert any(
        text.startswith("2 rows are left out, since both of their answers are the same within 8") for text in texts
    )
    assert len(opened(written(tmp_path, rows)).y) == 3
    with pytest.raises(DataError, match=r"no response has a token within 9 tokens that another response to the prompt"):
        opened(written(tmp_path, rows[1:2]), length=9)


def test_clients_and_splits_stay_apart_in_the_copy(tmp_path: Path) -> None:
    rows = [
        {**ROW, "chosen": f"{client}{place}", "client": client, "split": split}
        for client in ("b", "a") for place, split in enumerate(("train", "test", "train"))
    ]  # fmt: skip
    found = source(written(tmp_path, rows, "parquet")).open()
    assert isinstance(found, NaturalPath)
    header = open_natural(found.path).header
    assert header.target == "preference" and header.shape[0] == 2 and header.own_test
    from algorithms.registry import Experiment
    from rayfl.config.loading import load_config

    content = {"dataset": {"name": "preferences", "path": str(tmp_path / "rows.parquet"), "tokenizer": "bytes"}}
    content |= {"partition": "natural", "task": "preference", "algorithm": "fedavg", "model": "two_nn"}
    dataset = open_dataset(load_config(Experiment, content, {}), RandomStreams(0))
    first = dataset.load(0)
    assert dataset.names == ("a", "b") and first["train"].x.shape == (2, 2, header.shape[1])
    assert spelled(first["test"].x[0, 0].numpy()) == "Sky? a1"
    assert first["train"].x.shape == first["train"].y.shape
    stats = dict(dataset_stats(dataset).rows())
    assert stats["clients"] == "2" and label_matrix(dataset).tolist() == [[3], [3]]


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([{"prompt": "a", "chosen": "b"}], {}, r"dataset.rejected: .*has no column 'rejected'.* only prompt, chosen"),
        ([ROW], {"chosen": "choosen"}, r"dataset.chosen: .*has no column 'choosen' .did you mean 'chosen'"),
        ([ROW], {"template": "{question}"}, r"dataset.template: .*has no column 'question', only prompt, chosen, rej"),
        ([{**ROW, "chosen": 3}], {}, r"column 'chosen' has the type int64; prompts and responses are text"),
        ([ROW, {**ROW, "rejected": None}], {}, r"column 'rejected', row 1 is null; fill it or remove the row"),
        ([{**ROW, "chosen": TALK}], {}, r"column 'chosen' has lists, such as those of messages: set dataset.templ"),
        (
            [{**ROW, "prompt": "x" * 50}],
            {"length": 9},
            r"no response has a token within 9 tokens: raise dataset.length",
        ),
        ([{**ROW, "rejected": "blue"}], {}, r"no response has a token within 9 tokens that another response"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    rows: list[dict[str, Any]], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        opened(written(tmp_path, rows, "jsonl"), **options)


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


FORMS: dict[str, dict[str, Any]] = {
    "whole conversations": {"chosen": TALK, "rejected": [*TALK[:-1], said("5")]},
    "a prompt of messages": {"prompt": TALK[:-1], "chosen": TALK[-1:], "rejected": [said("5")]},
    "a prompt that the answers repeat": {"prompt": TALK[:-1], "chosen": TALK, "rejected": [*TALK[:-1], said("5")]},
}


@pytest.mark.parametrize("form", FORMS)
def test_conversations_are_those_of_transformers_up_to_the_answer_and_with_it(form: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
    folder = tokenizer(tmp_path / "base")
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found = opened(written(tmp_path, [FORMS[form]]), tokenizer=str(folder), template="chat")
    for place, answer in enumerate((TALK[-1], said("5"))):
        whole = theirs.apply_chat_template([*TALK[:-1], answer], tokenize=False)
        before = theirs.apply_chat_template(TALK[:-1], tokenize=False, add_generation_prompt=True)
        ids = theirs(whole, add_special_tokens=False)["input_ids"]
        begin = len(theirs(before, add_special_tokens=False)["input_ids"])
        assert found.x[0, place, : len(ids) - 1].tolist() == ids[:-1]
        y = found.y[0, place]
        assert y[y != IGNORED].tolist() == ids[begin:] and int((y != IGNORED).argmax()) == begin - 1


def test_texts_and_prompts_of_text_become_conversations_too(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "base")
    forms = [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"prompt": "2 + 2?", "chosen": [said("4")], "rejected": [said("5")]},
        {"prompt": "2 + 2?", "chosen": [TALK[3], said("4")], "rejected": [TALK[3], said("5")]},
    ]
    found = [opened(written(tmp_path, [row]), tokenizer=str(folder), template="chat") for row in forms]
    for one in found[1:]:
        assert np.array_equal(one.x, found[0].x) and np.array_equal(one.y, found[0].y)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": TALK, "rejected": TALK[2:]}, r"row 0.*'chosen' and 'rejected' differ before their last answers"),
        ({"chosen": TALK[:-1], "rejected": TALK}, r"row 0.*column 'chosen': its last message is not of the assistant"),
        ({"chosen": TALK, "rejected": "5"}, r"column 'chosen' has conversations, and 'rejected' has none"),
        ({"chosen": TALK, "rejected": []}, r"column 'rejected': it is no list of messages"),
        ({"chosen": [{"role": "assistant"}], "rejected": TALK}, r"column 'chosen': a message has no role .*content"),
    ],
)
def test_conversations_that_are_no_pairs_are_named(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "base")
    with pytest.raises(DataError, match=words):
        opened(written(tmp_path, [row]), tokenizer=str(folder), template="chat")


def test_a_template_that_begins_answers_otherwise_than_it_writes_them_is_refused(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "base", FORGETFUL)
    (folder / CHAT_FILE).write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert len(opened(written(tmp_path, [row]), tokenizer=str(folder), template="chat").y) == 1
    (folder / CHAT_FILE).write_text("{% for m in messages %}{{ loop.length }};{% endfor %}")
    with pytest.raises(DataError, match=r"begins an answer otherwise than it writes one"):
        opened(written(tmp_path, [row]), tokenizer=str(folder), template="chat")


def test_another_tokenizer_option_or_file_makes_another_copy(tmp_path: Path) -> None:
    path = written(tmp_path, [ROW, {**ROW, "chosen": "grey"}])
    names = {source(path, **options).prepared_path.name for options in ({}, {"length": 8}, {"end": "none"})}
    assert len(names) == 3
    text = path.read_text()
    before = source(path).prepared_path
    path.write_text(json.dumps(json.loads(text)[:1]))
    assert source(path).prepared_path != before


def test_made_up_pairs_prefer_a_clients_own_colour_to_the_common_one() -> None:
    section, streams = SyntheticPreferencesSource(num_clients=3, samples=40, things=6), RandomStreams(4)
    found = section.open(streams)
    assert found.spec.target == "preference" and found.spec.vocabulary == BYTE_TOKENS == found.spec.num_classes
    assert found.x.shape == found.y.shape == (120, *found.spec.shape)
    common = SyntheticPreferencesSource(num_clients=1, things=6, own=0).table(0, streams)
    for client in range(3):
        table = section.table(client, streams)
        assert sum(table[thing] != common[thing] for thing in common) == 3
        for row in range(40 * client, 40 * client + 40):
            (asked, own), (also, other) = both(found, row)
            (thing,) = (name for name in table if name in asked)
            assert asked.removesuffix(own) == also.removesuffix(other)
            assert own == table[thing] != other and other in COLOURS
            assert table[thing] == common[thing] or other == common[thing]
    again = section.open(RandomStreams(4))
    assert np.array_equal(found.x, again.x) and not np.array_equal(found.x, section.open(RandomStreams(5)).x)
    instructions = SyntheticInstructionsSource(num_clients=3, samples=40, things=6)
    assert instructions.table(1, streams) == section.table(1, streams)
