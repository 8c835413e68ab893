"""The families of transformers that are known to fold: where their attention and their heads are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayfl.errors import ModelError

Kind = Literal["image", "tokens"]

OUTPUT_LAYER = "lm_head"
"""Dotted name of the last linear layer of a language model, in all families."""


@dataclass(frozen=True)
class Family:
    """What is known of a family of models.

    Attributes:
        kind: of the inputs.
        targets: last parts of the names of the linear layers that get adapters unless others are named: the
            projections to queries and values.
        head: dotted name of the last linear layer of a classifier.
        block: dotted name of the module that is new for another task, of which the head is the last layer.
        masked: whether padding has to be masked. A causal model that is padded on the right needs no mask.
        transposed: whether its linear layers hold (inputs, outputs), as GPT-2's do.
        first_position: how many positions before that of the first token are never used.
        tower: of a model of images and texts, dotted name of the part that reads images, which gets the adapters.
        patch: side of an image's patches where ``config.json`` does not say it.
    """

    kind: Kind
    targets: tuple[str, ...]
    head: str
    block: str
    masked: bool = False
    transposed: bool = False
    first_position: int = 0
    tower: str = ""
    patch: int = 16

    @property
    def causal(self) -> bool:
        """Returns whether what is computed at a token depends on those before it alone, as a language model needs."""
        return self.kind == "tokens" and not self.masked


_DECODER = Family("tokens", ("q_proj", "v_proj"), "score", "score")
_BERT = ("query", "value")

FAMILIES: dict[str, Family] = {
    "vit": Family("image", ("q_proj", "v_proj"), "classifier", "classifier"),
    "clip": Family("image", ("q_proj", "v_proj"), "texts", "texts", tower="vision_model", patch=32),
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "gpt2": Family("tokens", ("c_attn",), "score", "score", transposed=True),
    "bert": Family("tokens", _BERT, "classifier", "classifier", masked=True),
    "roberta": Family("tokens", _BERT, "classifier.out_proj", "classifier", masked=True, first_position=2),
}
"""By ``model_type`` of ``config.json``."""


def family_of(model_type: str) -> Family:
    """The family of a name.

    Raises:
        ModelError: it is none of those that are known.
    """
    if model_type not in FAMILIES:
        raise ModelError(
            f"model.folder: config.json says model_type={model_type!r}; known are {', '.join(FAMILIES)}. Another one "
            "can be trained as model=my_module:factory (docs/adapters.md)"
        )
    return FAMILIES[model_type]
