"""Clients that train adapters of peft in a pretrained module, one after the other.

Needs torch, transformers and peft alone, so that other simulators can have it in environments of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import peft
import torch
import transformers
from torch import Tensor, nn


class PeftClients:
    """A vision transformer in bfloat16 with adapters of rank 8 in float32, which clients use in turn.

    Args:
        folder: of the base.
        device: where it is.

    Attributes:
        model: the module.
        own: its trained parameters: adapters and head.
    """

    def __init__(self, folder: str, device: str) -> None:
        bare = transformers.AutoModelForImageClassification.from_pretrained(folder, dtype=torch.bfloat16)
        settings = peft.LoraConfig(
            r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]
        )
        self.model: nn.Module = peft.get_peft_model(bare, settings).to(device).train()
        self.own = {name: leaf for name, leaf in self.model.named_parameters() if leaf.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """A copy of the trained parameters, in float32 (the head is trained in bfloat16)."""
        return {name: leaf.detach().to(torch.float32, copy=True) for name, leaf in self.own.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes the trained parameters from a state."""
        with torch.no_grad():
            for name, leaf in self.own.items():
                leaf.copy_(state[name])

    def train(self, x: Tensor, y: Tensor, steps: int) -> None:
        """Takes steps of SGD on one mini-batch."""
        optimizer = torch.optim.SGD(self.own.values(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(pixel_values=x.bfloat16()).logits.float(), y).backward()
            optimizer.step()
