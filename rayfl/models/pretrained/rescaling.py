"""Frozen linear layers whose outputs or inputs each client rescales by a trained vector: (IA)^3.

With l the vector, a layer computes l * (W x + c), or W (l * x) + c. Vectors begin as ones, so that a model begins as
the base. GPT-2 makes queries, keys and values in one layer. There all of its outputs are rescaled, as ``peft`` does it:
what rescales queries could as well rescale keys, so that models are the same.

Source: Liu, Tam, Muqeeth, Mohta, Huang, Bansal, Raffel: Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper
than In-Context Learning, NeurIPS 2022 (arXiv:2205.05638), section 3.3.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from rayfl.errors import ModelError
from rayfl.models.pretrained.adapter_section import IA3Config
from rayfl.models.pretrained.sites import ALL_LINEAR, chosen, is_linear, replace, shape_of

FACTORS = ".ia3_l"
"""What the names of vectors end with, as in the files of ``peft``."""

_DECODER = (("k_proj", "v_proj"), r".*\.down_proj")
_ENCODER = (("key", "value"), r".*\.layer\.\d+\.output\.dense")

_LAYERS: dict[str, tuple[tuple[str, ...], str]] = {
    "vit": (("k_proj", "v_proj"), r".*\.mlp\.fc2"),
    "clip": (("k_proj", "v_proj"), r".*\.mlp\.fc2"),
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "gpt2": (("c_attn",), r".*\.mlp\.c_proj"),
    "bert": _ENCODER,
    "roberta": _ENCODER,
}
"""By family: last parts of the names of the layers that make keys and values; and a regular expression for the names of
the second layers of feed-forward parts."""


class Rescaled(nn.Module):
    """A frozen linear layer whose outputs or inputs are rescaled by a vector of each client.

    Args:
        base: the layer, ``nn.Linear`` or the ``Conv1D`` of transformers.
        of_inputs: whether its inputs are rescaled; else its outputs.

    Attributes:
        ia3_l: the vector, shape (1, i) or (o, 1), with a dimension of clients in front when it is bound for N of them.
    """

    def __init__(self, base: nn.Module, of_inputs: bool) -> None:
        super().__init__()
        outputs, inputs = shape_of(base)
        self.base, self._of_inputs = base, of_inputs
        self.ia3_l = nn.Parameter(torch.empty((1, inputs) if of_inputs else (outputs, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N b, ..., o) of inputs (N b, ..., i), of which the first b are the first client's."""
        factors = self.ia3_l.flatten(1)
        if self._of_inputs:
            found: Tensor = self.base(_times(x, factors))
            return found
        return _times(self.base(x), factors)


def _times(x: Tensor, factors: Tensor) -> Tensor:
    """Rows (N b, ..., f) of N clients times their factors (N, f).

    Rows are moved by their product with the factor minus 1, which has digits where the factor itself, near 1 in a
    narrow type, has none. At 1 nothing changes.
    """
    rows = x.reshape(len(factors), -1, x.shape[-1])
    return torch.addcmul(rows, rows, (factors - 1).to(rows.dtype)[:, None]).view(x.shape)


def rescale(module: nn.Module, adapter: IA3Config, model_type: str, without: str) -> None:
    """Puts vectors into a model.

    Args:
        module: the model, on the device ``meta``.
        adapter: which layers get them.
        model_type: the family's name.
        without: dotted name of the module that makes the outputs, whose layers get none.

    Raises:
        ModelError: an option names no layer, or the family needs both of them.
    """
    if model_type not in _LAYERS and None in (adapter.targets, adapter.feedforward):
        raise ModelError(
            f"model.adapter: which layers of {model_type} have vectors is not known: set model.adapter.targets, and "
            "model.adapter.feedforward to those whose inputs are rescaled"
        )
    layers = None if adapter.layers == "all" else adapter.layers
    attention, second = _LAYERS.get(model_type, ((), ""))
    if adapter.targets is None:
        both = {*chosen(module, attention, layers, without), *chosen(module, second, layers, without)}
        names = [name for name, one in module.named_modules() if is_linear(one) and name in both]
    else:
        names = chosen(module, adapter.targets, layers, without)
    if adapter.feedforward is not None:
        second_layers = chosen(module, adapter.feedforward, layers, without, "model.adapter.feedforward")
        if others := sorted(set(second_layers) - set(names)):
            raise ModelError(f"model.adapter.feedforward names {others[0]}, which is none of model.adapter.targets")
    for name in names:
        of_inputs = rescales_inputs(name, adapter, model_type)
        replace(module, name, Rescaled(module.get_submodule(name), of_inputs).to("meta"))


def rescales_inputs(name: str, adapter: IA3Config, model_type: str) -> bool:
    """Returns whether a layer with a vector has its inputs rescaled, and not its outputs.

    Args:
        name: of the layer.
        adapter: the section ``model.adapter``.
        model_type: the family's name.
    """
    given = adapter.feedforward or _LAYERS[model_type][1]
    if isinstance(given, str):
        return given == ALL_LINEAR or re.fullmatch(given, name) is not None
    return any(name == last or name.endswith(f".{last}") for last in given)
