"""The section ``model`` of a configuration that trains adapters in a pretrained transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.architecture import NAME, Architecture
from rayfl.models.pretrained.families import Family, family_of
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.loading import Source, library
from rayfl.models.pretrained.network import AdaptedModel, AdaptedNetwork, own_shapes
from rayfl.models.pretrained.peft_files import AdapterFolder
from rayfl.models.pretrained.sites import Head, Site, TrainedLinear, chosen, replace
from rayfl.naming.texts import Checksum


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AdapterConfig(_Part):
    """Low-rank adapters (LoRA) in linear layers of the base: W x + s B A x."""

    name: Literal["lora"] = Field(default="lora", description="The kind of adapter.")
    r: int = Field(default=8, ge=1, description="Rank of the adapters.")
    alpha: float = Field(default=16, gt=0, allow_inf_nan=False, description="Numerator of their scale s.")
    targets: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="Which linear layers get an adapter, by the last parts of their names; null: the family's "
        "projections to queries and values.",
    )
    layers: Literal["all"] | tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default="all", description="Numbers of the blocks whose layers get one, from 0; all: every block."
    )
    scaling: Literal["alpha_over_r", "alpha_over_sqrt_r"] = Field(
        default="alpha_over_r", description="s = alpha / r, or alpha / sqrt(r) (rank-stabilised)."
    )
    trains: tuple[Literal["a", "b"], ...] = Field(
        default=("a", "b"),
        min_length=1,
        description="Which factors are trained and travel; the other stays as the seed has drawn it. [b] is FFA-LoRA.",
    )

    start: str | None = Field(
        default=None,
        min_length=1,
        description="Folder with an adapter that peft or `rayfl export --format peft` has written, from which every "
        "model begins; null: A is drawn, B is zero.",
    )
    sha256: Checksum | None = Field(
        default=None, description="Checksum of that adapter: found out and recorded, and what results depend on."
    )

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> AdapterConfig:
        if self.sha256 is not None and self.start is None:
            raise ValueError("sha256 needs start, the folder of an adapter")
        return self

    @property
    def scale(self) -> float:
        """s."""
        return self.alpha / (self.r if self.scaling == "alpha_over_r" else self.r**0.5)


class HeadConfig(_Part):
    """The last layers, for the data set's classes."""

    train: bool = Field(default=True, description="Whether the head is trained and travels; else it is the folder's.")
    init: Literal["new", "folder"] = Field(
        default="new", description="new: drawn from the seed; folder: the folder's, of just as many classes."
    )


class PretrainedModel(Architecture):
    """A pretrained transformer from a local folder, frozen, with adapters and a head that are trained.

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
    checkpointing: bool = Field(
        default=False,
        description="Whether blocks are computed again in the backward pass, in place of keeping what they computed: "
        "less memory for more time.",
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

    def build(self, spec: InputSpec) -> AdaptedModel:
        """The model on the device ``meta``: with shapes, but without values."""
        library()
        folder, family = self._folder, self._family
        channels = self._fit(spec)
        module = self._source(spec).skeleton().requires_grad_(False)
        layers = None if self.adapter.layers == "all" else self.adapter.layers
        names = chosen(module, self.adapter.targets or family.targets, layers, family.block)
        for name in names:
            site = Site(module.get_submodule(name), self.adapter.r, self.adapter.scale, self.adapter.trains)
            replace(module, name, site.to("meta"))
        block = module.get_submodule(family.block)
        inside = [family.block] if isinstance(block, nn.Linear) else _linear_in(block, family.block)
        for name in inside:
            kind = Head if name == family.head else TrainedLinear
            replace(module, name, kind(module.get_submodule(name), self.head.train).to("meta"))
        if self.checkpointing:
            _checkpoint(module, folder.model_type)
        padding = self._padding(spec) if family.masked else None
        return AdaptedModel(module, family.head, family.block, family.kind == "image", channels, padding)

    def network(self, spec: InputSpec) -> AdaptedNetwork:
        """See the base class."""
        if self.base is not None:
            self._folder.check(self.base)
        model = self.build(spec)
        return AdaptedNetwork(model, self._source(spec), self._given(model), self._tokens(spec))

    @property
    def _folder(self) -> BaseFolder:
        return BaseFolder(self.folder)

    @property
    def _family(self) -> Family:
        return family_of(self._folder.model_type)

    def _source(self, spec: InputSpec) -> Source:
        purpose: Any = "images" if self._family.kind == "image" else "sequences"
        folder = self._folder
        padding = self._padding(spec) if purpose == "sequences" else None
        checksum = self.base or folder.sha256
        return Source(str(folder.path), checksum, purpose, spec.num_classes, self.attention, padding)

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
        if spec.target == "tokens":
            raise self.misfit(spec, "one class, some labels or numbers a sample")
        if family.kind == "tokens":
            if spec.kind != "tokens" or len(spec.shape) != 1:
                raise self.misfit(spec, f"rows of tokens ({self._folder.model_type})")
            if spec.vocabulary > int(config.get("vocab_size", 0)):
                raise self.misfit(spec, f"tokens below {config.get('vocab_size')}: use the tokenizer of the base")
            return 0
        channels, rows, columns = self.image(spec)
        side, wanted = config.get("image_size", 224), int(config.get("num_channels", 3))
        height, width = side if isinstance(side, list) else (side, side)
        if (rows, columns) != (height, width):
            raise self.misfit(spec, f"images of {height} x {width} pixels: set transform.resize={height}")
        if channels not in (1, wanted):
            raise self.misfit(spec, f"images of {wanted} channels")
        return wanted

    def _tokens(self, spec: InputSpec) -> int:
        """Rows that one sample makes in the base's products."""
        if self._family.kind == "tokens":
            return spec.shape[0]
        patch = self._folder.config.get("patch_size", 16)
        height, width = patch if isinstance(patch, list) else (patch, patch)
        return spec.shape[1] // int(height) * (spec.shape[2] // int(width)) + 1

    def _given(self, model: AdaptedModel) -> dict[str, Any]:
        """Initial values that are not drawn: those of an adapter, and the folder's head."""
        found = self._begun(model) if self.adapter.start is not None else {}
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
                found[f"model.{name}.{key}"] = tensor
        return found

    def _begun(self, model: AdaptedModel) -> dict[str, Any]:
        """The tensors of the adapter to begin from."""
        assert self.adapter.start is not None
        adapter = AdapterFolder(self.adapter.start)
        if self.adapter.sha256 not in (None, adapter.sha256):
            raise ModelError(
                f"model.adapter.start: the adapter in {adapter.path} has the checksum {adapter.sha256}, but "
                f"model.adapter.sha256 is {self.adapter.sha256}: it was changed. Restore it, or leave sha256 out to "
                "begin a new run"
            )
        adapter.check(self.adapter.r, self.adapter.alpha, self.adapter.scaling == "alpha_over_sqrt_r")
        return adapter.values(own_shapes(model), f"model.{self._family.block}.")

    def peft_settings(self, names: Sequence[str], times: int = 1) -> dict[str, Any]:
        """The content of ``adapter_config.json`` for adapters and head over this base.

        Args:
            names: of their tensors.
            times: how many times the rank of the section their rank is; the scale stays.
        """
        block = self._family.block
        sites = [name.removeprefix("model.").partition(".lora_A.")[0] for name in names if ".lora_A." in name]
        headed = any(name.startswith(f"model.{block}.") for name in names)
        return {
            "peft_type": "LORA",
            "task_type": None if self._family.kind == "image" else "SEQ_CLS",
            "base_model_name_or_path": self._folder.path.name,
            "inference_mode": True,
            "r": self.adapter.r * times,
            "lora_alpha": self.adapter.alpha * (times if self.adapter.scaling == "alpha_over_r" else times**0.5),
            "use_rslora": self.adapter.scaling == "alpha_over_sqrt_r",
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sites,
            "fan_in_fan_out": self._family.transposed,
            "modules_to_save": [block] if headed else None,
            "rank_pattern": {},
            "alpha_pattern": {},
        }


def _linear_in(block: nn.Module, name: str) -> list[str]:
    return [f"{name}.{inner}" for inner, one in block.named_modules() if isinstance(one, nn.Linear)]


def _checkpoint(module: nn.Module, model_type: str) -> None:
    """Marks the layers that are computed again in the backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [one for one in module.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not found:
        raise ModelError(f"model.checkpointing: {model_type} has no layers that can be computed again; set it to false")
    for one in found:
        one.gradient_checkpointing = True
