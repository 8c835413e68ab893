"""Conversations by a tokenizer's chat template: what transformers makes of them, and what of it is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.sources.base import Samples
from rayfl.data.sources.texts.instructions import InstructionsSource
from rayfl.data.sources.tokens.tokenizers import CHAT_FILE
from rayfl.errors import DataError
from rayfl.metrics.language import IGNORED
from rayfl.runs.outside import outside_files

CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}{{ message.role + ':' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ 'thinking,' }}{% endif %}"
    "{{ message.content + ';' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))


def tokenizer(folder: Path, template: Any = CHATML, blank: bool = False) -> Path:
    """A tokenizer of bytes with ChatML's tokens; with ``blank`` it puts a blank before every text."""
    library = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    found = library.Tokenizer(library.models.BPE({sign: place for place, sign in enumerate(alphabet)}, []))
    found.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=blank)
    found.decoder = library.decoders.ByteLevel()
    found.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder.mkdir()
    found.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def opened(rows: list[dict[str, Any]], folder: Path, **options: Any) -> Samples:
    file = folder.parent / "rows.json"
    file.write_text(json.dumps(rows))
    given = {"path": file, "tokenizer": str(folder), "template": "chat", **options}
    found = InstructionsSource.model_validate(given).open()
    assert isinstance(found, Samples)
    return found


def learned(found: Samples, row: int, folder: Path) -> str:
    """What is learned of a row, as a text."""
    import tokenizers

    known = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    y = found.y[row]
    return str(known.decode(y[y != IGNORED].tolist(), skip_special_tokens=False))


@pytest.mark.parametrize("blank", [False, True])
def test_tokens_and_what_is_learned_are_those_of_transformers(blank: bool, tmp_path: Path) -> None:
    """Also of a tokenizer that puts a blank before a text: none is before an answer in the midst of one."""
    transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
    folder = tokenizer(tmp_path / "base", blank=blank)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    talks = [TALK, TALK[:3], TALK[1:]]
    found = opened([{"messages": talk} for talk in talks], folder)
    for row, talk in enumerate(talks):
        made = theirs.apply_chat_template(talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = np.array(made["input_ids"]), np.array(made["assistant_masks"])
        assert found.x[row, : len(ids) - 1].tolist() == ids[:-1].tolist()
        asked = np.where(mask[1:] == 1, ids[1:], IGNORED)
        if blank:  # transformers leaves out the last token of a sign that is several, here the line's end
            asked[np.flatnonzero(mask[1:-1] > mask[2:]) + 1] = ids[np.flatnonzero(mask[1:-1] > mask[2:]) + 2]
        assert found.y[row, : len(ids) - 1].tolist() == asked.tolist()
        assert (found.y[row, len(ids) - 1 :] == IGNORED).all()
    assert learned(found, 0, folder).replace(" ", "") == "Hello!<|im_end|>\n4<|im_end|>\n"
    assert not found.remarks()


def test_conversations_of_sharegpt_and_rows_of_alpaca_are_the_same_messages(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "base")
    own = {"user": "human", "assistant": "gpt", "system": "system"}
    other = [{"from": own[one["role"]], "value": one["content"]} for one in TALK]
    first, second = (opened([{name: talk}], folder) for name, talk in (("messages", TALK), ("conversations", other)))
    assert (first.x == second.x).all() and (first.y == second.y).all()
    named = opened([{"talk": TALK, "messages": TALK[:3]}], folder, response="talk")
    assert (named.x == first.x).all()
    row = {"instruction": "Add.", "input": "2 + 2", "output": "4"}
    short = [{"role": "user", "content": "Add.\n\n2 + 2"}, {"role": "assistant", "content": "4"}]
    assert (opened([row], folder).x == opened([{"messages": short}], folder).x).all()
    assert learned(opened([row], folder), 0, folder) == "4<|im_end|>\n"
    assert learned(opened([row], folder, end="<|im_start|>"), 0, folder) == "4<|im_end|>\n<|im_start|>"


def test_a_template_that_rewrites_earlier_turns_has_the_last_one_learned_and_says_so(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "base", FORGETFUL)
    found = opened([{"messages": TALK}, {"messages": TALK[:3]}], folder)
    assert learned(found, 0, folder) == "thinking,4;" and learned(found, 1, folder) == "thinking,Hello!;"
    (remark,) = found.remarks()
    assert remark.text.startswith("1 conversations are learned in their last answer alone")


def test_the_blank_of_a_tokenizer_is_the_one_a_piece_begins_with(tmp_path: Path) -> None:
    spoken = "{% for m in messages %}{{ ('Q: ' if m.role == 'user' else ' ') + m.content }}{% endfor %}"
    folder = tokenizer(tmp_path / "base", spoken, blank=True)
    found = opened([{"messages": TALK[1:3]}], folder)
    assert learned(found, 0, folder) == " Hello!"


def test_a_template_is_told_that_there_are_no_tools(tmp_path: Path) -> None:
    asking = "{% if tools is not none or documents is not none %}{{ 'Tools: ' }}{% endif %}" + CHATML
    folder = tokenizer(tmp_path / "base", asking)
    plain = opened([{"messages": TALK}], tokenizer(tmp_path / "plain"))
    assert (opened([{"messages": TALK}], folder).x == plain.x).all()


def test_the_template_counts_in_what_identifies_a_run(tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "base")
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"messages": TALK, "instruction": "a", "output": "b"}]))

    def checksum(template: str) -> str:
        options = {"name": "instructions", "path": str(file), "tokenizer": str(folder), "template": template}
        config = load_config(Experiment, "quickstart-text", {"dataset": options})
        found = config.dataset.tokenizer_sha256
        assert found is not None
        (seen,) = outside_files(config.model_dump(mode="json"))
        assert not seen.problem
        return str(found)

    before = {template: checksum(template) for template in ("chat", "alpaca")}
    (folder / CHAT_FILE).write_text(FORGETFUL)
    assert checksum("chat") != before["chat"] and checksum("alpaca") == before["alpaca"]
    assert learned(opened([{"messages": TALK}], folder), 0, folder) == "thinking,4;"


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ([{"messages": TALK[:2]}], CHATML, r"column 'messages', row 0: it has no message of the assistant"),
        ([{"messages": TALK}, {"messages": []}], CHATML, "row 1: it is no list of messages"),
        ([{"messages": [{"role": "user"}]}], CHATML, "a message has no role .* and content"),
        (
            [{"messages": TALK, "client": "ann"}],
            "{{ raise_exception('no system here') }}",
            r"row 0 \(client 'ann'\): the chat template in .* refuses it: no system here",
        ),
        ([{"messages": TALK}], "{% for %}", r"the chat template in .* is none of jinja2"),
        ([{"messages": TALK}], "{{ messages.append(1) }}", "refuses it"),
        ([{"messages": TALK}], None, r"neither .*tokenizer_config\.json nor chat_template\.jinja has a chat template"),
        ([{"text": "a"}], CHATML, r"dataset\.response: .* has only text; name the column"),
    ],
    ids=lambda value: "",
)
def test_what_is_wrong_is_named(rows: list[dict[str, Any]], template: Any, message: str, tmp_path: Path) -> None:
    folder = tokenizer(tmp_path / "base", template)
    with pytest.raises(DataError, match=message):
        opened(rows, folder)


def test_bytes_have_no_chat_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer=bytes has no chat template"):
        opened([{"messages": TALK}], tokenizer(tmp_path / "base"), tokenizer="bytes")
