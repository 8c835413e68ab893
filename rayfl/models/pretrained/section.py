"""The section ``model`` of a configuration that trains adapters in a pretrained transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field
from torch import nn

from rayfl.errors import ModelError
from rayfl.examples import InputSpec, Target
from rayfl.models.architecture import NAME, Architecture
from rayfl.models.pretrained.adapted_model import AdaptedModel
from rayfl.models.pretrained.adapter_section import AdapterConfig, HeadConfig
from rayfl.models.pretrained.families import FAMILIES, OUTPUT_LAYER, Family, family_of
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.initial_values import own_shapes
from rayfl.models.pretrained.language import AdaptedLanguageModel, LanguageNetwork
from rayfl.models.pretrained.loading import Source, library
from rayfl.models.pretrained.magnitudes import MAGNITUDE
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.peft_files import AdapterFolder
from rayfl.models.pretrained.sites import Head, Site, TrainedLinear, chosen, replace
from rayfl.naming.texts import Checksum


class PretrainedModel(Architecture):
    """A pretrained transformer from a local folder, frozen, with adapters and a head that are trained.

    What the data ask for says what it does: it classifies images or texts, or it predicts the next token.

    A model's tree, and so every message, state and commit, holds adapters and head alone. The base is loaded once a
    process and device. Needs ``pip install 'rayfl[transformers]'``; nothing is ever downloaded.
    """

    name: Literal["pretrained"] = Field(default="pretrained", description=NAME)
    folder: str = Field(
        min_length=1,
        description="Folder with config.json and *.safetensors, as save_pretrained of transformers writes it; every "
        "node must have it.",
    )
    base: Checksum | None = Field(
        default=None,
        description="Checksum of the folder's weights and configuration: found out and recorded, and what results "
        "depend on in place of the folder's path.",
    )
    adapter: AdapterConfig = Field(default=AdapterConfig(), description="The adapters.")
    head: HeadConfig = Field(default=HeadConfig(), description="The last layers.")
    attention: Literal["sdpa", "eager"] = Field(
        default="sdpa", description="How attention is computed: sdpa, in fused kernels; eager, step by step."
    )
    checkpointing: bool | Literal["auto"] = Field(
        default=False,
        description="Whether blocks are computed again in the backward pass, in place of keeping what they computed: "
        "less memory for more time. auto: where memory has no room for as many clients at a time as "
        "engine.rows_per_step asks for.",
    )

    def settled(self) -> PretrainedModel:
        """The section with the checksum of the folder's weights; unchanged where there is no such folder here."""
        adapter, found = self.adapter, dict[str, Any]()
        try:
            if self.base is None:
                found["base"] = BaseFolder(self.folder).sha256
            if adapter.start is not None and adapter.sha256 is None:
                found["adapter"] = adapter.model_copy(update={"sha256": AdapterFolder(adapter.start).sha256})
        except ModelError:
            pass  # said where a model is made of it
        return self.model_copy(update=found) if found else self

    def saving_memory(self) -> PretrainedModel:
        """See the base class."""
        return self.model_copy(update={"checkpointing": True}) if self.checkpointing == "auto" else self

    def build(self, spec: InputSpec) -> AdaptedModel:
        """The model on the device ``meta``: with shapes, but without values."""
        library()
        folder, family = self._folder, self._family
        channels = self._fit(spec)
        module = self._source(spec).skeleton().requires_grad_(False)
        layers = None if self.adapter.layers == "all" else self.adapter.layers
        outputs = _outputs(family, spec.target)
        names = chosen(module, self.adapter.targets or family.targets, layers, outputs)
        for name in names:
            layer, own = module.get_submodule(name), self.adapter
            replace(module, name, Site(layer, own.r, own.scale, own.trains, own.use_dora).to("meta"))
        blocks = _blocks(module, folder.model_type) if self.checkpointing else ()
        if spec.target == "tokens":
            return AdaptedLanguageModel(module, spec.padding).checkpointing(blocks, now=self.checkpointing is True)
        block = module.get_submodule(family.block)
        inside = [family.block] if isinstance(block, nn.Linear) else _linear_in(block, family.block)
        for name in inside:
            kind = Head if name == family.head else TrainedLinear
            replace(module, name, kind(module.get_submodule(name), self.head.train).to("meta"))
        padding = self._padding(spec) if family.masked else None
        model = AdaptedModel(module, family.head, family.block, family.kind == "image", channels, padding)
        return model.checkpointing(blocks, now=self.checkpointing is True)

    def network(self, spec: InputSpec) -> AdaptedNetwork:
        """See the base class."""
        if self.base is not None:
            self._folder.check(self.base)
        model = self.build(spec)
        kind = LanguageNetwork if isinstance(model, AdaptedLanguageModel) else AdaptedNetwork
        return kind(model, self._source(spec), self._given(model, spec.target), self._tokens(spec))

    @property
    def _folder(self) -> BaseFolder:
        return BaseFolder(self.folder)

    @property
    def _family(self) -> Family:
        return family_of(self._folder.model_type)

    def _source(self, spec: InputSpec) -> Source:
        folder = self._folder
        known = (str(folder.path), self.base or folder.sha256)
        if spec.target == "tokens":
            return Source(*known, "next_tokens", None, self.attention)
        if self._family.kind == "image":
            return Source(*known, "images", spec.num_classes, self.attention)
        return Source(*known, "sequences", spec.num_classes, self.attention, self._padding(spec))

    def _padding(self, spec: InputSpec) -> int:
        """The token behind the ends of rows: the base's own, or the data's where it has none.

        Raises:
            ModelError: the data's is another one than the base's.
        """
        own, given = self._folder.config.get("pad_token_id"), spec.padding
        if own is not None and given is not None and own != given:
            raise self.misfit(spec, f"rows padded with the token {own}: use the tokenizer of the base")
        return next((int(token) for token in (own, given) if token is not None), 0)

    def _fit(self, spec: InputSpec) -> int:
        """Refuses inputs that the base cannot read; returns the channels that it reads, 0 for tokens."""
        config, family = self._folder.config, self._family
        if "quantization_config" in config:
            raise ModelError(
                f"model.folder: config.json of {self.folder} says that its weights are quantised "
                f"({config['quantization_config'].get('quant_method')}), and there are no quantised bases: give the "
                "folder of the whole weights, and set engine.precision=bfloat16 to have them take half the memory"
            )
        if family.kind == "tokens":
            self._fit_tokens(spec)
            return 0
        if spec.target == "tokens":
            raise self.misfit(spec, "images")
        channels, rows, columns = self.image(spec)
        side, wanted = config.get("image_size", 224), int(config.get("num_channels", 3))
        height, width = side if isinstance(side, list) else (side, side)
        if (rows, columns) != (height, width):
            raise self.misfit(spec, f"images of {height} x {width} pixels: set transform.resize={height}")
        if channels not in (1, wanted):
            raise self.misfit(spec, f"images of {wanted} channels")
        return wanted

    def _fit_tokens(self, spec: InputSpec) -> None:
        """Refuses texts that the base cannot read, or from which it cannot learn."""
        config, family = self._folder.config, self._family
        if spec.target == "tokens" and not family.causal:
            known = ", ".join(name for name, one in FAMILIES.items() if one.causal)
            raise self.misfit(
                spec, f"one class, some labels or numbers a sample (a language model needs one of {known})"
            )
        if spec.target == "tokens" and self.head.train:
            raise ModelError(
                "model.head.train: the output layer of a language model is the base's own, and is not trained: set "
                "model.head.train=false"
            )
        if spec.kind != "tokens" or len(spec.shape) != 1:
            raise self.misfit(spec, f"rows of tokens ({self._folder.model_type})")
        # A token of the data's own that only fills rows up is never read where the model is causal.
        padded = spec.target == "tokens" and spec.padding == config.get("vocab_size")
        if spec.vocabulary - padded > int(config.get("vocab_size", 0)):
            if spec.padding == config.get("vocab_size"):
                raise self.misfit(
                    spec,
                    "rows that are filled up with a token of the base, and its tokenizer names none: set pad_token in "
                    "tokenizer_config.json beside it, for instance to the token that ends a text",
                )
            raise self.misfit(spec, f"tokens below {config.get('vocab_size')}: use the tokenizer of the base")
        most = config.get("max_position_embeddings", config.get("n_positions"))
        if most is not None and spec.shape[0] > (most := int(most) - family.first_position):
            raise self.misfit(spec, f"texts of at most {most} tokens: set dataset.length={most}")

    def _tokens(self, spec: InputSpec) -> int:
        """Rows that one sample makes in the base's products."""
        if self._family.kind == "tokens":
            return spec.shape[0]
        patch = self._folder.config.get("patch_size", 16)
        height, width = patch if isinstance(patch, list) else (patch, patch)
        return spec.shape[1] // int(height) * (spec.shape[2] // int(width)) + 1

    def _given(self, model: AdaptedModel, target: Target) -> dict[str, Any]:
        """Initial values that are not drawn: those of an adapter, and the folder's head."""
        found = self._begun(model, target) if self.adapter.start is not None else {}
        if self.head.train and self.head.init == "new":
            return found
        for name, module in model.model.named_modules():
            for key, parameter in module.named_parameters(recurse=False) if isinstance(module, TrainedLinear) else ():
                tensor = self._folder.tensor(f"{name}.{key}")
                if tensor is None or tensor.shape != parameter.shape:
                    there = "none" if tensor is None else f"shape {tuple(tensor.shape)}"
                    raise ModelError(
                        f"model.head: {self.folder} has {there} for {name}.{key}, needed is {tuple(parameter.shape)}: "
                        "set model.head.init=new and model.head.train=true"
                    )
                begun = found.get(f"model.{name}.{key}")
                if begun is not None and not begun.equal(tensor.float()):
                    option = "model.head.init=folder" if self.head.train else "model.head.train=false"
                    raise ModelError(
                        f"{option} takes the head of {self.folder}, but the adapter in {self.adapter.start} was "
                        "trained with a head of its own, and has it: set model.head.init=new and model.head.train=true "
                        "to begin from that"
                    )
                found[f"model.{name}.{key}"] = tensor
        return found

    def _begun(self, model: AdaptedModel, target: Target) -> dict[str, Any]:
        """The tensors of the adapter to begin from."""
        assert self.adapter.start is not None
        adapter = AdapterFolder(self.adapter.start)
        if self.adapter.sha256 not in (None, adapter.sha256):
            raise ModelError(
                f"model.adapter.start: the adapter in {adapter.path} has the checksum {adapter.sha256}, but "
                f"model.adapter.sha256 is {self.adapter.sha256}: it was changed. Restore it, or leave sha256 out to "
                "begin a new run"
            )
        own = self.adapter
        adapter.check(own.r, own.alpha, own.scaling == "alpha_over_sqrt_r", own.use_dora)
        return adapter.values(own_shapes(model), f"model.{_outputs(self._family, target)}.")

    def peft_settings(self, names: Sequence[str], target: Target = "class", rank: int | None = None) -> dict[str, Any]:
        """The content of ``adapter_config.json`` for adapters and head over this base.

        Args:
            names: of their tensors.
            target: what the model has learned.
            rank: of the adapters; None: that of the section. The scale is the same for every rank.
        """
        block, own = self._family.block, self.adapter
        rank = own.r if rank is None else rank
        times = rank / own.r
        over_texts = "CAUSAL_LM" if target == "tokens" else "SEQ_CLS"
        sites = [name.removeprefix("model.").partition(".lora_A.")[0] for name in names if ".lora_A." in name]
        headed = any(name.startswith(f"model.{block}.") for name in names)
        return {
            "peft_type": "LORA",
            "task_type": None if self._family.kind == "image" else over_texts,
            "base_model_name_or_path": self._folder.path.name,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": own.alpha * (times if own.scaling == "alpha_over_r" else times**0.5),
            "use_rslora": own.scaling == "alpha_over_sqrt_r",
            "use_dora": any(name.endswith(MAGNITUDE) for name in names),
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sites,
            "fan_in_fan_out": self._family.transposed,
            "modules_to_save": [block] if headed else None,
            "rank_pattern": {},
            "alpha_pattern": {},
        }


def _outputs(family: Family, target: Target) -> str:
    """Dotted name of the module that makes the outputs, whose layers get no adapters."""
    return OUTPUT_LAYER if target == "tokens" else family.block


def _linear_in(block: nn.Module, name: str) -> list[str]:
    return [f"{name}.{inner}" for inner, one in block.named_modules() if isinstance(one, nn.Linear)]


def _blocks(module: nn.Module, model_type: str) -> tuple[nn.Module, ...]:
    """The layers that can be computed again in the backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = tuple(one for one in module.modules() if isinstance(one, GradientCheckpointingLayer))
    if not found:
        raise ModelError(f"model.checkpointing: {model_type} has no layers that can be computed again; set it to false")
    return found
