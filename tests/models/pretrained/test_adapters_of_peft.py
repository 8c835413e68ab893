"""Adapters that peft has written: which ones begin a run, and which would be other models without their base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayfl.errors import ModelError
from tests.support.bases import CAUSAL, NEXT, base, language_section, transformers

peft = pytest.importorskip("peft", reason="peft is not installed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, r"\['model\.lm_head\.weight'\] \(1 in all\) are missing, unknown"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, r"'model\.lm_head\.lora_A\.weight', .* are missing"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', of which a part was taken out of the base"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora', of which a part was taken out of the base"),
        ({"init_lora_weights": "gaussian"}, None),
        (
            {"alora_invocation_tokens": [1, 2], "task_type": "CAUSAL_LM"},
            r"alora_invocation_tokens=\[1, 2\], which cannot be continued",
        ),
    ],
)
def test_what_would_be_another_model_is_refused(options: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    bare = getattr(transformers, CAUSAL["llama"]).from_pretrained(base("llama", causal=True), local_files_only=True)
    settings = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], **options}
    peft.get_peft_model(bare, peft.LoraConfig(**settings)).save_pretrained(tmp_path)
    made = language_section("llama", adapter={"r": 3, "alpha": 6, "start": str(tmp_path)})
    if message is None:
        made.network(NEXT)
        return
    with pytest.raises(ModelError, match=message):
        made.network(NEXT)
