"""CLIP as a classifier: logits are cosines of an image's features with those of the classes' texts, times a scale.

Averaging the contexts of :mod:`rayfl.models.pretrained.text_head` over clients is PromptFL: Guo, Guo, Wang, Tang, Xu:
PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models, IEEE TMC 2023. Its abstract was
read; the paper's text was not at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfl.models.pretrained.adapted_model import AdaptedModel
from rayfl.models.pretrained.feature_adapter import FEATURE_ADAPTER, FeatureAdapter
from rayfl.models.pretrained.loading import Source
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.text_head import CONTEXT, TEXTS, WEIGHT, TextHead, of_length_one


class ClipModel(AdaptedModel):
    """CLIP with adapters in its image tower, on its features or none, and with the head that texts make.

    Args:
        module: transformers' ``CLIPModel``, with sites put in.
        head: what texts make; becomes a part of the module.
        channels: of the images that the base reads; 0: inputs are features that were made of images before.
        adapter: on features of images; becomes a part of the module. None: there is none.
    """

    def __init__(self, module: nn.Module, head: TextHead, channels: int, adapter: FeatureAdapter | None = None) -> None:
        module.add_module(TEXTS, head)
        if adapter is not None:
            module.add_module(FEATURE_ADAPTER, adapter)
        self._adapted = adapter is not None
        super().__init__(module, TEXTS, TEXTS, image=True, channels=channels)

    @property
    def reads_images(self) -> bool:
        """Whether inputs are images; else they are features that were made of images before."""
        return self._channels > 0

    @property
    def text_head(self) -> TextHead:
        """The head."""
        found = self.model.get_submodule(TEXTS)
        assert isinstance(found, TextHead)
        return found

    def features(self, x: Tensor) -> Tensor:
        """Features of images, of length one, shape (N b, D); of rows that are features already, these."""
        base: Any = self.model
        found = self.plain_features(x)
        return of_length_one(base.feature_adapter(found) if self._adapted else found)

    def plain_features(self, x: Tensor) -> Tensor:
        """Features of images as the image tower makes them, of any length, shape (N b, D)."""
        if not self.reads_images:
            return x
        base: Any = self.model
        found: Tensor = base.get_image_features(pixel_values=self.pixels(x)).pooler_output
        return found

    def patch_features(self, x: Tensor) -> Tensor:
        """Features of the P patches of images, of length one, shape (N b, P, D).

        A patch's output of the image tower is normalized, projected and adapted as that of the class token is for an
        image's own features.
        """
        base: Any = self.model
        tower = base.vision_model
        patches = tower(pixel_values=self.pixels(x)).last_hidden_state[:, 1:]
        found: Tensor = base.visual_projection(tower.post_layernorm(patches))
        return of_length_one(base.feature_adapter(found) if self._adapted else found)

    def classify(self, features: Tensor) -> Tensor:
        """Logits (N b, C) of features (N b, D)."""
        weights = self.text_head.weights(self.model)
        features = features.to(weights.dtype)
        if len(weights) == 1:
            return F.linear(features, weights[0])
        return torch.bmm(features.view(len(weights), -1, features.shape[-1]), weights.mT).flatten(0, 1)


class ClipNetwork(AdaptedNetwork):
    """A :class:`ClipModel` as a function of adapters and context; arguments as for the base class.

    Where nothing of the head is trained it is fixed: texts go through the text tower once a process, in float32 on the
    CPU. Else every step of a client passes its context, in the texts of all classes, through that tower.

    Attributes:
        groups: see the base class; also ``context``.
        reads_images: whether inputs are images; else they are features that were made of images before.
    """

    def __init__(
        self, model: ClipModel, source: Source, given: Mapping[str, Tensor] | None = None, tokens: int = 1
    ) -> None:
        super().__init__(model, source, given, tokens)
        base: Any = model.model
        self.reads_images = model.reads_images
        self._head, self._positions = model.text_head, int(base.config.text_config.max_position_embeddings)
        self.groups = {**self.groups, "context": tuple(name for name in self.parameter_names if name == CONTEXT)}
        if self.groups["context"]:
            # The head is computed, so there is no weight to be put in its place.
            del self._own[WEIGHT]
            self._fixed_parameters = tuple(name for name in self._fixed_parameters if name != WEIGHT)
            self._fixed_slots = tuple(slot for slot in self._fixed_slots if slot[-1] != WEIGHT)
            self.rows_per_model = self._head.texts.tokens.numel()

    @property
    def text_scale(self) -> float:
        """s: logits are s times the cosines of features of images and of texts."""
        return self._head.scale

    @cached_property
    def template_features(self) -> Tensor:
        """Features of the template's texts, of length one, shape (C, D), on the CPU, in float32 at least."""
        dtype = torch.promote_types(self._base_type, torch.float32)
        return self._head.template(self.source.loaded(torch.device("cpu"), dtype))

    @cached_property
    def name_features(self) -> Tensor:
        """Features of the classes' names without a template, as :attr:`template_features`."""
        dtype = torch.promote_types(self._base_type, torch.float32)
        return self._head.names(self.source.loaded(torch.device("cpu"), dtype))

    @property
    def begins_as_words(self) -> bool:
        """Whether a context begins as the template's words."""
        return self._head.begun

    @property
    def why_no_template(self) -> str:
        """Returns why there are no :attr:`template_features`, with the fix; empty where there are."""
        longest = self._head.texts.of_template[0].shape[1]
        if longest <= self._positions:
            return ""
        return (
            f"the template's texts have {longest} tokens, and the base reads at most {self._positions}: shorten "
            "model.prompt.template"
        )

    def text_features(self, tree: Mapping[str, Tensor], *, training: bool = False) -> Tensor:
        """Features of the classes' texts with the tree's context, of length one, shape (C, D).

        Args:
            tree: as for :meth:`logits`, of which the context counts; under ``vmap``, of each client.
            training: as for :meth:`logits`.
        """
        row = torch.empty(1, device=next(iter(tree.values())).device)
        found: Tensor = self._call(_texts, tree, row, training)
        return found

    def plain_features(self, tree: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Features of images as the image tower makes them, of any length, shape (b, D).

        They are inputs of a network that reads features. Arguments are as for :meth:`logits`.
        """
        found: Tensor = self._call(_plain, tree, x, False)
        return found

    def patch_features(self, tree: Mapping[str, Tensor], x: Tensor, *, training: bool = False) -> Tensor:
        """Features of the P patches of images, of length one, shape (b, P, D); arguments as for :meth:`logits`."""
        found: Tensor = self._call(_patches, tree, x, training)
        return found

    def compute_in(self, dtype: torch.dtype) -> None:
        """See the base class."""
        super().compute_in(dtype)
        for name in ("template_features", "name_features"):
            vars(self).pop(name, None)

    @property
    def _own_fixed(self) -> dict[str, Tensor]:
        texts = self._head.texts
        return {**super()._own_fixed, f"model.{TEXTS}.tokens": texts.tokens, f"model.{TEXTS}.ends": texts.ends}

    @cached_property
    def _given_head(self) -> Tensor:
        """The head of the template's texts, or the context that its words are."""
        base = self.source.loaded(torch.device("cpu"), torch.float32)
        return self._head.words(base) if self.groups["context"] else self._head.zero_shot(base)

    def _value(self, seed: int, name: str) -> Tensor:
        if name == WEIGHT or (name == CONTEXT and self._head.begun):
            return self._given_head.clone()
        return super()._value(seed, name)


def _texts(model: Any, x: Tensor) -> Tensor:
    """Features of the texts of each client, shape (N C, D); x has a row for each."""
    found: Tensor = model.text_head.features(model.model)
    return found.expand(len(x), -1, -1).flatten(0, 1)


def _plain(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model.plain_features(x)
    return found


def _patches(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model.patch_features(x)
    return found
