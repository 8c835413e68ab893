"""What ``adapter_config.json`` of the package ``peft`` says of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayfl.errors import ConfigError
from rayfl.examples import Target
from rayfl.models.pretrained.adapter_section import (
    AdapterConfig,
    AnyAdapter,
    FeatureAdapterConfig,
    IA3Config,
    NoAdapter,
    PromptTuningConfig,
)
from rayfl.models.pretrained.families import Family, family_of
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.magnitudes import MAGNITUDE
from rayfl.models.pretrained.prompts import PROMPTS
from rayfl.models.pretrained.rescaling import FACTORS, rescales_inputs


def settings_of(
    adapter: AnyAdapter,
    folder: BaseFolder,
    names: Sequence[str],
    target: Target,
    rank: int | None,
) -> dict[str, Any]:
    """The content of ``adapter_config.json`` for adapters and head over a base.

    Args:
        adapter: the section ``model.adapter``.
        folder: the base.
        names: of the tensors.
        target: what the model has learned.
        rank: of low-rank adapters; None: that of the section. The scale is the same for every rank.

    Raises:
        ConfigError: ``peft`` has no adapters of the kind for this base.
    """
    family = family_of(folder.model_type)
    headed = any(name.startswith(f"model.{family.block}.") for name in names)
    over_texts = "CAUSAL_LM" if target == "tokens" else "SEQ_CLS"
    common = {
        "task_type": None if family.kind == "image" else over_texts,
        "base_model_name_or_path": folder.path.name,
        "inference_mode": True,
        "modules_to_save": [family.block] if headed else None,
    }
    if isinstance(adapter, NoAdapter):
        raise ConfigError(
            "--format peft: model.adapter=none has no adapter: leave --format out for a file of all tensors"
        )
    if isinstance(adapter, FeatureAdapterConfig):
        raise ConfigError(
            "--format peft: peft has no adapters of features: leave --format out for a file of all tensors"
        )
    if isinstance(adapter, IA3Config):
        return {**common, **_of_vectors(adapter, names, folder.model_type)}
    if isinstance(adapter, PromptTuningConfig):
        if why := why_not_of_peft(family, any(name.startswith(PROMPTS) for name in names)):
            raise ConfigError(f"--format peft: {why}: leave --format out for a file of all tensors")
        return {
            **common,
            "peft_type": "PROMPT_TUNING",
            "num_virtual_tokens": adapter.tokens,
            "token_dim": folder.config.get("hidden_size", folder.config.get("n_embd")),
            "num_transformer_submodules": 1,
            "num_attention_heads": folder.config.get("num_attention_heads", folder.config.get("n_head")),
            "num_layers": folder.config.get("num_hidden_layers", folder.config.get("n_layer")),
            "prompt_tuning_init": "RANDOM",
        }
    return {**common, **_of_factors(adapter, names, family, adapter.r if rank is None else rank)}


def why_not_of_peft(family: Family, prompted: bool) -> str:
    """Why a family's virtual tokens are none that ``peft`` has; empty where they are.

    Args:
        family: of the base.
        prompted: whether there are virtual tokens.
    """
    if prompted and family.kind == "image":
        return "peft has no virtual tokens of images"
    if prompted and family.masked:
        return (
            "with virtual tokens peft takes the class from what an encoder computes at the first of them, and rayfl "
            "from the text's own first token"
        )
    return ""


def _of_vectors(adapter: IA3Config, names: Sequence[str], model_type: str) -> dict[str, Any]:
    places = [name.removeprefix("model.").removesuffix(FACTORS) for name in names if name.endswith(FACTORS)]
    return {
        "peft_type": "IA3",
        "target_modules": places,
        "feedforward_modules": [place for place in places if rescales_inputs(place, adapter, model_type)],
        "fan_in_fan_out": family_of(model_type).transposed,
    }


def _of_factors(adapter: AdapterConfig, names: Sequence[str], family: Family, rank: int) -> dict[str, Any]:
    times = rank / adapter.r
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": adapter.alpha * (times if adapter.scaling == "alpha_over_r" else times**0.5),
        "use_rslora": adapter.scaling == "alpha_over_sqrt_r",
        "use_dora": any(name.endswith(MAGNITUDE) for name in names),
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [
            name.removeprefix("model.").partition(".lora_A.")[0] for name in names if ".lora_A." in name
        ],
        "fan_in_fan_out": family.transposed,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
