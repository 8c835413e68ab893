"""The section ``model`` of a configuration that trains adapters in a pretrained transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from pydantic import Field
from torch import nn

from rayfl.errors import ModelError
from rayfl.examples import InputSpec, Target
from rayfl.models.architecture import NAME, Architecture
from rayfl.models.pretrained.adapted_model import AdaptedModel
from rayfl.models.pretrained.adapter_section import (
    AdapterConfig,
    AnyAdapter,
    FeatureAdapterConfig,
    HeadConfig,
    NoAdapter,
    PromptTuningConfig,
)
from rayfl.models.pretrained.class_texts import class_texts
from rayfl.models.pretrained.clip import ClipModel, ClipNetwork
from rayfl.models.pretrained.families import OUTPUT_LAYER, Family, family_of
from rayfl.models.pretrained.feature_adapter import FeatureAdapter
from rayfl.models.pretrained.fitting import check_inputs, is_of_features
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.initial_values import own_shapes
from rayfl.models.pretrained.language import AdaptedLanguageModel, LanguageNetwork
from rayfl.models.pretrained.loading import Source, library
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.peft_files import AdapterFolder
from rayfl.models.pretrained.peft_settings import settings_of, why_not_of_peft
from rayfl.models.pretrained.prompt_section import PromptConfig
from rayfl.models.pretrained.putting_in import put_in, text_tokens
from rayfl.models.pretrained.sites import Head, TrainedLinear, replace
from rayfl.models.pretrained.text_head import text_head
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
    adapter: AnyAdapter = Field(default=AdapterConfig(), description="The adapters.")
    head: HeadConfig = Field(default=HeadConfig(), description="The last layers.")
    prompt: PromptConfig | None = Field(
        default=None, description="Of CLIP, which tells classes by texts: the texts, and what of them is trained."
    )
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
                checksum = AdapterFolder(adapter.start, adapter.name).sha256
                found["adapter"] = adapter.model_copy(update={"sha256": checksum})
            if isinstance(adapter, PromptTuningConfig) and adapter.text is not None and adapter.text_tokens is None:
                tokens = text_tokens(adapter, self._folder)
                found["adapter"] = adapter.model_copy(update={"text_tokens": tokens})
            if self.prompt is not None and self.prompt.classes is not None and self.prompt.sha256 is None:
                checksum = class_texts(self.prompt, self._folder.path).sha256
                found["prompt"] = self.prompt.model_copy(update={"sha256": checksum})
        except ModelError:
            pass  # said where a model is made of it
        return self.model_copy(update=found) if found else self

    def told(self, class_names: Callable[[], Sequence[str]]) -> PretrainedModel:
        """See the base class."""
        prompt = self.prompt or PromptConfig()
        with suppress(ModelError):  # said where a model is made of it
            if self._family.tower and prompt.classes is None and (names := tuple(class_names())):
                return self.model_copy(update={"prompt": prompt.model_copy(update={"classes": names})})
        return self

    def saving_memory(self) -> PretrainedModel:
        """See the base class."""
        return self.model_copy(update={"checkpointing": True}) if self.checkpointing == "auto" else self

    def build(self, spec: InputSpec) -> AdaptedModel:
        """The model on the device ``meta``: with shapes, but without values."""
        library()
        folder, family = self._folder, self._family
        if self.prompt is not None and not family.tower:
            raise ModelError(f"model.prompt: {folder.model_type} does not tell classes by texts: leave it out")
        if family.tower and is_of_features(spec) and not isinstance(self.adapter, FeatureAdapterConfig | NoAdapter):
            raise ModelError(
                f"model.adapter={self.adapter.name} is in the image tower, and the data are features that were made of "
                "images before: set model.adapter to none or features, or train on the images"
            )
        channels = check_inputs(self, folder, spec, self.head.train, self._virtual)
        module = self._source(spec).skeleton().requires_grad_(False)
        place = module.get_submodule(family.tower)
        prompts = put_in(place, self.adapter, folder, _outputs(family, spec.target))
        blocks = _blocks(module, folder.model_type) if self.checkpointing else ()
        if spec.target == "tokens":
            language = AdaptedLanguageModel(module, spec.padding, prompts)
            return language.checkpointing(blocks, now=self.checkpointing is True)
        if family.tower:
            head = text_head(self.prompt or PromptConfig(), folder, spec, module)
            if head.context is None and isinstance(self.adapter, NoAdapter):
                raise ModelError(
                    "model.prompt.context=none and model.adapter=none leave nothing to train: set one of them"
                )
            width, on_features = head.weight.shape[1], None
            if isinstance(self.adapter, FeatureAdapterConfig):
                on_features = FeatureAdapter(self.adapter, width)
            return ClipModel(module, head, channels, on_features).checkpointing(blocks, self.checkpointing is True)
        block = module.get_submodule(family.block)
        inside = [family.block] if isinstance(block, nn.Linear) else _linear_in(block, family.block)
        for name in inside:
            kind = Head if name == family.head else TrainedLinear
            replace(module, name, kind(module.get_submodule(name), self.head.train).to("meta"))
        padding = self._padding(spec) if family.masked else None
        model = AdaptedModel(module, family.head, family.block, family.kind == "image", channels, padding, prompts)
        return model.checkpointing(blocks, now=self.checkpointing is True)

    def network(self, spec: InputSpec) -> AdaptedNetwork:
        """See the base class."""
        if self.base is not None:
            self._folder.check(self.base)
        model = self.build(spec)
        if isinstance(model, ClipModel):
            return ClipNetwork(model, self._source(spec), self._given(model, spec.target), self._tokens(spec))
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
        if self._family.tower:
            return Source(*known, "images_and_texts", None, self.attention)
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

    @property
    def _virtual(self) -> int:
        """How many virtual tokens are read with each sample."""
        return self.adapter.tokens if isinstance(self.adapter, PromptTuningConfig) else 0

    def _tokens(self, spec: InputSpec) -> int:
        """Rows that one sample makes in the base's products."""
        if self._family.kind == "tokens":
            return spec.shape[0] + self._virtual
        if is_of_features(spec):
            return 1
        patch = self._folder.vision_config.get("patch_size", self._family.patch)
        height, width = patch if isinstance(patch, list) else (patch, patch)
        return spec.shape[1] // int(height) * (spec.shape[2] // int(width)) + 1 + self._virtual

    def _given(self, model: AdaptedModel, target: Target) -> dict[str, Any]:
        """Initial values that are not drawn: those of an adapter, and the folder's head."""
        found = self._begun(model, target) if self.adapter.start is not None else {}
        if self._family.tower or (self.head.train and self.head.init == "new"):
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
        adapter = AdapterFolder(self.adapter.start, self.adapter.name)
        if self.adapter.sha256 not in (None, adapter.sha256):
            raise ModelError(
                f"model.adapter.start: the adapter in {adapter.path} has the checksum {adapter.sha256}, but "
                f"model.adapter.sha256 is {self.adapter.sha256}: it was changed. Restore it, or leave sha256 out to "
                "begin a new run"
            )
        own = self.adapter
        if isinstance(own, AdapterConfig):
            adapter.check(own.r, own.alpha, own.scaling == "alpha_over_sqrt_r", own.use_dora)
        elif isinstance(own, PromptTuningConfig):
            if why := why_not_of_peft(self._family, True):
                raise ModelError(f"model.adapter.start: {why}")
            adapter.check_tokens(own.tokens)
        return adapter.values(own_shapes(model), f"model.{_outputs(self._family, target)}.")

    def peft_settings(self, names: Sequence[str], target: Target = "class", rank: int | None = None) -> dict[str, Any]:
        """The content of ``adapter_config.json`` for adapters and head over this base.

        Args:
            names: of their tensors.
            target: what the model has learned.
            rank: of low-rank adapters; None: that of the section. The scale is the same for every rank.

        Raises:
            ConfigError: ``peft`` has no adapters of the kind for this base.
        """
        return settings_of(self.adapter, self._folder, names, target, rank)


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
