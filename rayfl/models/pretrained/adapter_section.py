"""What is trained in a base: the sections ``model.adapter`` and ``model.head``."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rayfl.naming.lists import EACH_ONCE
from rayfl.naming.texts import Checksum


def _readable(targets: Any) -> Any:
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            raise ValueError(f"{targets!r} is no regular expression: {error}") from error
    return targets


_Targets = Annotated[
    Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)] | None,
    EACH_ONCE,
    AfterValidator(_readable),
]
_Layers = Annotated[Literal["all"] | tuple[Annotated[int, Field(ge=0)], ...], EACH_ONCE]
_KIND = "The kind of adapter."
_SHA256 = "Checksum of that adapter: found out and recorded, and what results depend on."


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Adapter(_Part):
    """What all kinds have; each declares ``start`` and ``sha256`` itself, after its own options."""

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> Self:
        if getattr(self, "sha256", None) is not None and getattr(self, "start", None) is None:
            raise ValueError("sha256 needs start, the folder of an adapter")
        return self


class AdapterConfig(_Adapter):
    """Low-rank adapters (LoRA) in linear layers of the base: W x + s B A x; with magnitudes: DoRA."""

    name: Literal["lora"] = Field(default="lora", description=_KIND)
    r: int = Field(default=8, ge=1, description="Rank of the adapters.")
    alpha: float = Field(default=16, gt=0, allow_inf_nan=False, description="Numerator of their scale s.")
    targets: _Targets = Field(
        default=None,
        description="Which linear layers get an adapter: a list of last parts of their names; all-linear: all but "
        "those that make the outputs; another text: a regular expression that whole names match; null: the family's "
        "projections to queries and values.",
    )
    layers: _Layers = Field(
        default="all", description="Numbers of the blocks whose layers get one, from 0; all: every block."
    )
    scaling: Literal["alpha_over_r", "alpha_over_sqrt_r"] = Field(
        default="alpha_over_r", description="s = alpha / r, or alpha / sqrt(r) (rank-stabilised)."
    )
    use_dora: bool = Field(
        default=False,
        description="Whether every output of such a layer has a magnitude of its own, which is always trained (DoRA): "
        "m (W x + s B A x) / ||W + s B A||, divided by rows, and then the bias.",
    )
    trains: Annotated[tuple[Literal["a", "b"], ...], EACH_ONCE] = Field(
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
    sha256: Checksum | None = Field(default=None, description=_SHA256)

    @property
    def scale(self) -> float:
        """s."""
        return self.alpha / (self.r if self.scaling == "alpha_over_r" else self.r**0.5)


class IA3Config(_Adapter):
    """Trained vectors that rescale what linear layers compute, or what they read: (IA)^3."""

    name: Literal["ia3"] = Field(default="ia3", description=_KIND)
    targets: _Targets = Field(
        default=None,
        description="Which linear layers get a vector, as for lora; null: the family's projections to keys and values, "
        "and the second layer of its feed-forward parts.",
    )
    feedforward: _Targets = Field(
        default=None,
        description="Which of them have their inputs rescaled, and not their outputs; null: those that are second "
        "layers of feed-forward parts.",
    )
    layers: _Layers = Field(
        default="all", description="Numbers of the blocks whose layers get one, from 0; all: every block."
    )
    start: str | None = Field(
        default=None,
        min_length=1,
        description="Folder with (IA)^3 that peft or `rayfl export --format peft` has written, from which every model "
        "begins; null: ones.",
    )
    sha256: Checksum | None = Field(default=None, description=_SHA256)


class PromptTuningConfig(_Adapter):
    """Trained virtual tokens: soft prompts of texts, visual prompts of images (VPT)."""

    name: Literal["prompt"] = Field(default="prompt", description=_KIND)
    tokens: int = Field(default=8, ge=1, description="How many virtual tokens there are.")
    depth: Literal["shallow", "deep"] = Field(
        default="shallow",
        description="Of images: shallow: tokens are put before the first block; deep: other ones take their place "
        "before each further block.",
    )
    init: Literal["auto", "random", "vocabulary"] = Field(
        default="auto",
        description="What they are at first: random: uniform; vocabulary: embeddings of tokens that the seed draws; "
        "auto: vocabulary for texts, random for images.",
    )
    text: str | None = Field(
        default=None,
        min_length=1,
        description="A text whose tokens' embeddings they are at first, cut or repeated to as many; null: see init.",
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="Of that text: a tokenizer.json, or a folder with one; bytes; null: the one in model.folder.",
    )
    text_tokens: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, description="The tokens of that text: found out and recorded, and what results depend on."
    )
    start: str | None = Field(
        default=None,
        min_length=1,
        description="Folder with prompt tuning that peft or `rayfl export --format peft` has written, from which every "
        "model begins; null: see init.",
    )
    sha256: Checksum | None = Field(default=None, description=_SHA256)

    @model_validator(mode="after")
    def _one_beginning(self) -> Self:
        given = [name for name in ("tokenizer", "text_tokens") if getattr(self, name) is not None]
        if self.text is None and given:
            raise ValueError(f"{' and '.join(given)} need text")
        if self.init != "auto" and self.text is not None:
            raise ValueError("text says what tokens are at first: leave init out, or text")
        if self.start is not None and (self.init != "auto" or self.text is not None):
            raise ValueError("start says what tokens are at first: leave init and text out, or start")
        if self.text_tokens == ():
            raise ValueError("text has no token: give another one")
        return self


class NoAdapter(_Adapter):
    """No adapter: a head is trained alone, or the context of CLIP's texts."""

    name: Literal["none"] = Field(default="none", description=_KIND)

    start: ClassVar[str | None] = None
    sha256: ClassVar[str | None] = None


class FeatureAdapterConfig(_Adapter):
    """A small network on the features that CLIP has of an image: FedCLIP's attention, or CLIP-Adapter."""

    name: Literal["features"] = Field(default="features", description=_KIND)
    form: Literal["attention", "residual"] = Field(
        default="attention",
        description="attention: f * softmax(W_2 tanh(W_1 f + c_1) + c_2), that of FedCLIP; residual: a relu(W_2 "
        "relu(W_1 f)) + (1 - a) f, CLIP-Adapter.",
    )
    reduction: int | None = Field(
        default=None, ge=1, description="Of residual: how many times as many features as hidden units; null: 4."
    )
    ratio: float | None = Field(
        default=None,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Of residual: a, the share of what is new; null: 0.2.",
    )

    start: ClassVar[str | None] = None
    sha256: ClassVar[str | None] = None

    @model_validator(mode="after")
    def _of_residual(self) -> FeatureAdapterConfig:
        given = [option for option in ("reduction", "ratio") if getattr(self, option) is not None]
        if given and self.form != "residual":
            raise ValueError(f"{given[0]} is of form=residual: set that, or leave {given[0]} out")
        return self

    @property
    def hidden_share(self) -> int:
        """How many times as many features as hidden units there are."""
        return 1 if self.form == "attention" else self.reduction or 4

    @property
    def new_share(self) -> float:
        """a."""
        return 0.2 if self.ratio is None else self.ratio


def _with_kind(given: Any) -> Any:
    """A kind alone stands for its section; a section without one is of low-rank adapters."""
    if isinstance(given, str):
        return {"name": given}
    return {"name": "lora", **given} if isinstance(given, dict) else given


AnyAdapter = Annotated[
    AdapterConfig | IA3Config | PromptTuningConfig | FeatureAdapterConfig | NoAdapter,
    Field(discriminator="name"),
    BeforeValidator(_with_kind),
]
"""The section ``model.adapter``."""


class HeadConfig(_Part):
    """The last layers, for the data set's classes."""

    train: bool = Field(
        default=True,
        description="Whether the head is trained and travels; else it is the folder's, as a language model's must be.",
    )
    init: Literal["new", "folder"] = Field(
        default="new", description="new: drawn from the seed; folder: the folder's, of just as many classes."
    )
