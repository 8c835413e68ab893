"""Trained virtual tokens of each client, which a frozen transformer reads with its own: clients lie in the batch.

* A decoder reads them before the text. What is computed at them is left out, so that a text has the positions that it
  has without them, and so have its targets.
* An encoder of texts reads them before the text, too. The class is that of the text's first token, as without them.
* An image has them behind the class token. They have no position. With ``deep``, each further block reads other ones in
  the place of what the block before it has made of them.

Padding comes after the tokens of a text, or, where a text is generated, before virtual ones. These are never masked.

Sources: Lester, Al-Rfou, Constant: The Power of Scale for Parameter-Efficient Prompt Tuning, EMNLP 2021
(arXiv:2104.08691), section 2; Jia, Tang, Chen, Cardie, Belongie, Hariharan, Lim: Visual Prompt Tuning, ECCV 2022
(arXiv:2203.12119), section 3.2.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfl.models.pretrained.sites import Matrix

PROMPTS = "prompts."
"""What the names of virtual tokens begin with."""

_OF_TEXTS = 0.5
"""Largest initial value of an entry that is drawn for texts, as in Lester et al."""


class Prompts(nn.ModuleList):
    """The virtual tokens of the first block, or of each block.

    Args:
        count: n, how many there are at a time.
        width: d, of an embedding.
        blocks: how many times they are put in.
        bound: largest entry of what is drawn; None: embeddings of the base are taken.
        text: the tokens whose embeddings are taken; None: some are drawn.

    Attributes:
        count: n.
    """

    def __init__(
        self, count: int, width: int, blocks: int = 1, bound: float | None = None, text: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(Matrix(count, width, trained=True) for _ in range(blocks))
        self.count, self._width, self._bound, self._text = count, width, bound, text

    def of(self, block: int, like: Tensor) -> Tensor:
        """The tokens before a block, shape (N b, n, d), for rows (N b, ...) of which the first b are one client's."""
        matrix: Any = self[block]
        weight: Tensor = matrix.weight.to(like.dtype)
        if len(weight) == 1:
            return weight.expand(len(like), -1, -1)
        return weight.repeat_interleave(len(like) // len(weight), 0)

    def initial(self, seed: int, name: str, embeddings: Tensor | None) -> Tensor:
        """What tokens are before any training, float32 of shape (n, d): a function of the seed and of their name.

        Args:
            seed: of the experiment's initial model.
            name: of the tensor in a tree.
            embeddings: those of the base, shape (V, d), where :attr:`takes_embeddings`.
        """
        key = np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        if embeddings is None:
            assert self._bound is not None
            drawn = generator.uniform(-self._bound, self._bound, (self.count, self._width))
            return torch.from_numpy(drawn).float()
        if self._text is None:
            chosen = generator.integers(len(embeddings), size=self.count)
        else:
            chosen = np.resize(np.array(self._text), self.count)
        return embeddings[torch.from_numpy(chosen)].float()

    @property
    def takes_embeddings(self) -> bool:
        """Returns whether tokens begin as embeddings of the base."""
        return self._bound is None


def of_texts(count: int, width: int, init: str, text: tuple[int, ...] | None) -> Prompts:
    """Virtual tokens of texts; with ``init`` and ``text`` as in the section ``model.adapter``."""
    return Prompts(count, width, bound=_OF_TEXTS if init == "random" else None, text=text)


def of_images(count: int, width: int, patch: int, blocks: int) -> Prompts:
    """Virtual tokens of images, uniform within sqrt(6 / (entries of a patch + d)), as of a layer that makes patches.

    Args:
        count: n.
        width: d.
        patch: how many numbers a patch has.
        blocks: how many times they are put in.
    """
    return Prompts(count, width, blocks, bound=(6 / (patch + width)) ** 0.5)


def image_features(module: Any, prompts: Prompts, pixels: Tensor) -> Tensor:
    """What the head of a vision transformer reads of images (N b, ...): the class token, shape (N b, f)."""
    trunk = module.base_model
    hidden: Tensor = trunk.embeddings(pixels)
    for place, block in enumerate(trunk.layers):
        if place < len(prompts):
            behind = 1 if place == 0 else 1 + prompts.count
            hidden = torch.cat([hidden[:, :1], prompts.of(place, hidden), hidden[:, behind:]], 1)
        hidden = block(hidden, None)
    found: Tensor = trunk.layernorm(hidden)[:, 0]
    return found


def text_features(module: Any, prompts: Prompts, x: Tensor, mask: Tensor | None, block: str) -> Tensor:
    """What the head of a classifier of texts reads, shape (N b, f).

    Args:
        module: the classifier, with a head that passes its features through.
        prompts: the virtual tokens.
        x: tokens, shape (N b, T).
        mask: 1 for tokens and 0 for padding, of an encoder; None for a decoder.
        block: dotted name of the module that the head is the last layer of.
    """
    hidden = token_features(module.base_model, prompts, x, mask)
    if mask is None:
        filled = (x != module.config.pad_token_id) * torch.arange(x.shape[1], device=x.device)
        return hidden[torch.arange(len(x), device=x.device), filled.argmax(1)]
    pooler = module.base_model.pooler
    found: Tensor = module.get_submodule(block)(hidden if pooler is None else pooler(hidden))
    return found


def token_features(trunk: Any, prompts: Prompts, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """What a transformer makes of the tokens of texts after virtual ones, shape (N b, T, f); ``mask`` as above."""
    embedded = trunk.get_input_embeddings()(x)
    masks = {} if mask is None else {"attention_mask": F.pad(mask, (prompts.count, 0), value=1)}
    whole = torch.cat([prompts.of(0, embedded), embedded], 1)
    found: Tensor = trunk(inputs_embeds=whole, **masks).last_hidden_state[:, prompts.count :]
    return found


def behind_padding(prompts: Prompts, embedded: Tensor, known: Tensor) -> Tensor:
    """Embeddings of texts with virtual tokens right before their first tokens, shape (b, n + t, d).

    Args:
        prompts: the virtual tokens.
        embedded: of texts that are filled up on the left, shape (b, t, d).
        known: 0 for what fills them up, else 1, shape (b, t).
    """
    padding = known.shape[1] - known.sum(1, keepdim=True)
    columns = torch.arange(prompts.count + known.shape[1], device=known.device)[None]
    place = (columns - padding)[..., None].expand(-1, -1, embedded.shape[-1])
    tokens = embedded.gather(1, (columns - prompts.count).clamp(min=0)[..., None].expand_as(place))
    virtual = prompts.of(0, embedded).gather(1, place.clamp(0, prompts.count - 1))
    return tokens.where((place < 0) | (place >= prompts.count), virtual)
