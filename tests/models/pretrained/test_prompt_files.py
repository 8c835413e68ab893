"""Virtual tokens as files of peft, and answers with keys and values that are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rayfl.errors import ConfigError, ModelError
from rayfl.models.pretrained.peft_files import write_adapter
from rayfl.tasks.base import Predictor
from rayfl.tasks.further_tasks import LanguageModel
from rayfl.tasks.generation import Prompt, answers, prompts_of
from tests.support import exact
from tests.support.bases import (
    CAUSAL,
    NEXT,
    TOKENS,
    inputs,
    language_network,
    language_section,
    network,
    section,
    texts,
    trained,
    transformers,
    write_base,
)
from tests.support.toys import assert_equal

N = 3
SOFT: dict[str, Any] = {"name": "prompt", "tokens": N}
DECODERS = ["llama", "mistral", "qwen3", "gpt2"]
ENCODERS = ["bert", "roberta"]


def peft_model(family: str, folder: Path, classes: int | None) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.PeftModel.from_pretrained(exact.plain(family, classes).float(), folder).eval()


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=() if one in ("gpt2", "llama") else pytest.mark.slow) for one in DECODERS],
)
def test_peft_reads_classifiers_and_a_run_begins_from_what_peft_writes(family: str, tmp_path: Path) -> None:
    net, made = network(family, adapter=SOFT), section(family, adapter=SOFT)
    tree, x = trained(net, 0), inputs(family, 4, 0)
    write_adapter(tmp_path / "adapter", tree, made.peft_settings(list(tree)), {})
    model = peft_model(family, tmp_path / "adapter", 4)
    with torch.no_grad():
        found = model(input_ids=x, attention_mask=torch.ones_like(x))
    torch.testing.assert_close(found.logits, net.logits(tree, x), rtol=2e-6, atol=2e-6)
    model.save_pretrained(tmp_path / "again", save_embedding_layers=False)
    begun = section(family, adapter={**SOFT, "start": str(tmp_path / "again")})
    assert_equal(begun.network(TOKENS).initialize(11), tree)
    with pytest.raises(ModelError, match=r"needs model\.adapter\.tokens=3$"):
        section(family, adapter={**SOFT, "tokens": 4, "start": str(tmp_path / "again")}).network(TOKENS)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_reads_language_models(family: str, tmp_path: Path) -> None:
    net, made = language_network(family, adapter=SOFT), language_section(family, adapter=SOFT)
    tree, x = trained(net, 0), inputs(family, 4, 0)
    write_adapter(tmp_path / "adapter", tree, made.peft_settings(list(tree), "tokens"), {})
    with torch.no_grad():
        found = peft_model(family, tmp_path / "adapter", None)(input_ids=x, attention_mask=torch.ones_like(x)).logits
    torch.testing.assert_close(found[:, N:], net.logits(tree, x), rtol=2e-6, atol=2e-6)
    begun = language_section(family, adapter={**SOFT, "start": str(tmp_path / "adapter")})
    assert_equal(begun.network(NEXT).initialize(11), tree)


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_computes_what_peft_computes_and_reads_the_class_elsewhere(family: str) -> None:
    """peft takes the class at the first virtual token: so its form is refused."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    net, x = network(family, adapter=SOFT), inputs(family, 4, 0)
    tree = trained(net, 0)
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=N)
    theirs = peft.get_peft_model(exact.plain(family, 4).float(), config).eval()
    theirs.prompt_encoder["default"].embedding.weight.data.copy_(tree["prompts.0.weight"])
    with torch.no_grad():
        hidden = theirs(input_ids=x, attention_mask=torch.ones_like(x), output_hidden_states=True).hidden_states[-1]
        features = hidden[:, N:]
        pooler = theirs.base_model.base_model.pooler
        if pooler is None:
            state = {name: tree[f"model.classifier.{name}"] for name in ("dense.weight", "dense.bias")}
            features = torch.tanh(features[:, 0] @ state["dense.weight"].T + state["dense.bias"])
            expected = features @ tree["model.classifier.out_proj.weight"].T + tree["model.classifier.out_proj.bias"]
        else:
            expected = pooler(features) @ tree["model.classifier.weight"].T + tree["model.classifier.bias"]
        torch.testing.assert_close(net.logits(tree, x), expected, rtol=2e-5, atol=2e-5)
    with pytest.raises(ConfigError, match=r"--format peft: with virtual tokens peft takes the class .*: leave"):
        section(family, adapter=SOFT).peft_settings(list(tree))
    with pytest.raises(ConfigError, match=r"--format peft: peft has no virtual tokens of images"):
        section("vit", adapter=SOFT).peft_settings(["prompts.0.weight"])


def given(samples: int, seed: int) -> list[Prompt]:
    return [one for x, y in zip(*texts(samples, seed), strict=True) for one in prompts_of(x, y)]


def answered(net: Any, tree: Any, prompts: list[Prompt]) -> list[list[int]]:
    task = LanguageModel(net, (), NEXT)
    return list(answers(Predictor.of(tree), task, prompts, most=6, length=12, end=None, device=torch.device("cpu")))


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=() if one in ("gpt2", "llama") else pytest.mark.slow) for one in sorted(CAUSAL)],
)
def test_answers_are_those_of_transformers_without_keys_and_values(family: str) -> None:
    net = language_network(family, adapter=SOFT)
    tree, prompts = trained(net, 3, 0.5), given(8, 2)
    model = exact.plain(family, None).float()
    expected = []
    for prompt in prompts:
        tokens = list(prompt.tokens)
        for _ in range(min(6, 13 - len(tokens))):
            embedded = model.get_input_embeddings()(torch.tensor([tokens]))
            with torch.no_grad():
                logits = model(inputs_embeds=torch.cat([tree["prompts.0.weight"][None], embedded], 1)).logits
            tokens.append(int(logits[0, -1].argmax()))
        expected.append(tokens[len(prompt.tokens) :])
    assert answered(net, tree, prompts) == expected
    net.reading = None  # type: ignore[method-assign]
    assert answered(net, tree, prompts) == expected


def test_a_sliding_window_sees_the_virtual_tokens_right_before_the_text(tmp_path: Path) -> None:
    """However a text is filled up: with a window of 5 its first tokens see them, and its last ones do not."""
    folder = write_base("mistral", tmp_path, causal=True)
    content = (folder / "config.json").read_text()
    changed = content.replace('"sliding_window": 4096', '"sliding_window": 5')
    assert changed != content
    (folder / "config.json").write_text(changed)
    net = language_network("mistral", folder=str(folder), adapter=SOFT)
    tree, prompts = trained(net, 5, 0.5), given(9, 3)
    once = answered(net, tree, prompts)
    net.reading = None  # type: ignore[method-assign]
    assert once == answered(net, tree, prompts)
    assert transformers.AutoConfig.from_pretrained(folder).sliding_window == 5
