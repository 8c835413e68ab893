"""The head of CLIP: features of the classes' texts, of which a context may be trained.

With t_c the features of the text of class c, of length one, and s the base's scale, the head's weights are s t_c.
Without a context they are frozen, and are computed once. A context is M vectors v in the place of the embeddings of a
template's words before the class's name, which are trained through the frozen text tower:

    [start] v_1 ... v_M [name] [rest of the template] [end]

Sources: Radford et al.: Learning Transferable Visual Models From Natural Language Supervision, ICML 2021 (CLIP). Zhou,
Yang, Loy, Liu: Learning to Prompt for Vision-Language Models, IJCV 2022 (CoOp): where its authors' code
(KaiyangZhou/CoOp) puts vectors and how it draws them was read; the paper's text was not at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.pretrained.class_texts import ClassTexts, class_texts
from rayfl.models.pretrained.folder import BaseFolder
from rayfl.models.pretrained.prompt_section import PromptConfig

TEXTS = "texts"
"""Dotted name of the head in the base."""

CONTEXT, WEIGHT = f"model.{TEXTS}.context", f"model.{TEXTS}.weight"
"""Names of the head's tensors in trees, and among what is fixed."""


class TextHead(nn.Module):
    """The head that the classes' texts make.

    Args:
        texts: of C classes.
        width: d, of the text tower.
        features: D, of images and texts.
        by_class: whether each class has a context of its own.
        begun: whether a context begins as the template's words; else it is drawn.
        scale: s.

    Attributes:
        context: shape (M, d), or (C, M, d); (N, ...) when it is bound for N clients; None without a context.
        weight: s t, shape (C, D), of all clients. With a context there is none, and this holds no more than its shape.
    """

    tokens: Tensor
    ends: Tensor

    def __init__(self, texts: ClassTexts, width: int, features: int, by_class: bool, begun: bool, scale: float) -> None:
        super().__init__()
        classes = len(texts.tokens)
        self._shape = (classes, texts.length, width) if by_class else (texts.length, width)
        self.context = nn.Parameter(torch.empty(self._shape)) if texts.length else None
        self.weight = nn.Parameter(torch.empty(classes, features), requires_grad=False)
        self.register_buffer("tokens", texts.tokens, persistent=False)
        self.register_buffer("ends", texts.ends, persistent=False)
        self.texts, self.begun, self.scale = texts, begun, scale

    def weights(self, base: Any) -> Tensor:
        """The head of each client, shape (N, C, D); N is one where all have the same."""
        return self.weight[None] if self.context is None else self.scale * self.features(base)

    def features(self, base: Any) -> Tensor:
        """Features t of the texts of each client, of length one, shape (N, C, D); N is one where all have the same."""
        if self.context is None:
            return self.weight[None] / self.scale
        return text_features(base, self.tokens, self.ends, self.context, self.texts.first)

    def zero_shot(self, base: Any) -> Tensor:
        """The head of the template's texts, shape (C, D).

        Args:
            base: see :meth:`template`.
        """
        return self.scale * self.template(base)

    def template(self, base: Any) -> Tensor:
        """Features of the template's texts, of length one, shape (C, D): a context gives way to the template's words.

        Args:
            base: transformers' ``CLIPModel`` with its weights, on the CPU.
        """
        tokens, ends = self.texts.of_template
        with torch.no_grad():
            return text_features(base, tokens, ends)[0]

    def names(self, base: Any) -> Tensor:
        """Features of the classes' names alone, of length one, shape (C, D).

        Args:
            base: see :meth:`template`.
        """
        with torch.no_grad():
            return text_features(base, *self.texts.names)[0]

    def words(self, base: Any) -> Tensor:
        """The context that the template's words are, float32 of the context's shape.

        Args:
            base: see :meth:`zero_shot`.
        """
        found: Tensor = base.text_model.embeddings.token_embedding.weight[list(self.texts.words)]
        return found.float().expand(self._shape).clone()


def text_features(base: Any, tokens: Tensor, ends: Tensor, context: Tensor | None = None, first: int = 0) -> Tensor:
    """Features of length one of texts, shape (N, C, D); N is one without a context, or where all have the same.

    Args:
        base: transformers' ``CLIPModel``.
        tokens: int64 of shape (C, T).
        ends: where texts are read, int64 of shape (C,).
        context: vectors in the place of some tokens' embeddings, shape (N, M, d) or (N, C, M, d); None for none.
        first: the place of the first of them.
    """
    from transformers.masking_utils import create_causal_mask

    tower = base.text_model
    rows: Tensor = tower.embeddings.token_embedding(tokens)[None]
    if context is not None:
        own = context[:1] if not context.stride(0) else context  # one model that is scored for many clients
        own = own[:, None] if own.dim() == 3 else own
        count, _, length, _ = own.shape
        own = own.to(rows.dtype).expand(-1, len(tokens), -1, -1)
        front, back = (part.expand(count, -1, -1, -1) for part in (rows[:, :, :first], rows[:, :, first + length :]))
        rows = torch.cat([front, own, back], 2)
    hidden = tower.embeddings(inputs_embeds=rows.flatten(0, 1))
    mask = create_causal_mask(config=tower.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None)
    hidden = tower.encoder(inputs_embeds=hidden, attention_mask=mask, is_causal=True).last_hidden_state
    read = hidden.unflatten(0, (len(rows), -1))[:, torch.arange(len(ends), device=ends.device), ends]
    return of_length_one(base.text_projection(tower.final_layer_norm(read)))


def of_length_one(features: Tensor) -> Tensor:
    """Rows divided by their norms, in float32 at least."""
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    norms: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide / norms


def text_head(prompt: PromptConfig, folder: BaseFolder, spec: InputSpec, base: Any) -> TextHead:
    """The head for a data set's classes, on the device ``meta``.

    Args:
        prompt: the section ``model.prompt``.
        folder: the base.
        spec: of the data.
        base: transformers' ``CLIPModel`` for that folder, without values.

    Raises:
        ModelError: the texts do not fit the classes or the base, or were changed.
    """
    wanted = spec.num_classes
    if spec.target != "class":
        raise ModelError(
            f"model.folder: {folder.path} tells by texts which of several classes an image has, but the data set has "
            f"{spec.words()}; choose another model or other data (docs/models.md)"
        )
    if prompt.classes is None:
        raise ModelError(
            f"model.prompt.classes: name the {wanted} classes, in the order of their numbers, as in "
            "model.prompt.classes=[zero,one,two]; the data's own names are not known (files have them once they are "
            "prepared: rayfl data prepare)"
        )
    if len(prompt.classes) != wanted:
        raise ModelError(f"model.prompt.classes: {len(prompt.classes)} names are given, and the data set has {wanted}")
    texts = class_texts(prompt, folder.path)
    if prompt.sha256 not in (None, texts.sha256):
        raise ModelError(
            f"model.prompt: the tokens of the texts have the checksum {texts.sha256}, but model.prompt.sha256 is "
            f"{prompt.sha256}: the tokenizer in {folder.path} was changed. Restore it, or leave sha256 out to begin a "
            "new run"
        )
    scale = folder.tensor("logit_scale")
    if scale is None:
        raise ModelError(f"model.folder: {folder.path} lacks logit_scale: give the folder of a CLIPModel")
    config = base.config
    return TextHead(
        texts,
        config.text_config.hidden_size,
        config.projection_dim,
        prompt.context == "by_class",
        prompt.start == "template",
        float(scale.double().exp()),
    ).to("meta")
