"""How far the product of averaged factors is from the average of products.

With weights p_k, E = sum_k p_k B_k A_k - (sum_k p_k B_k)(sum_k p_k A_k) for each site; the error is
sqrt(sum ||E||^2 / sum ||sum_k p_k B_k A_k||^2) over all sites, in Frobenius norms. Both norms are estimated on
:data:`COLUMNS` random directions W (i, columns): E[||M W||^2] = columns ||M||^2. What clients contribute, B_k (A_k W),
is linear in their products, so that its mean is exact and nobody needs all adapters at once.

Source of the error: Sun, Li, Li, Ding: Improving LoRA in Privacy-preserving Federated Learning, ICLR 2024, section 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rayfl.models.base import Network
from rayfl.params import Tree, leaves

COLUMNS = 16
"""Random directions."""

_A, _B = ".lora_A.weight", ".lora_B.weight"


def contribution(network: Network, tree: Mapping[str, object], weight: float) -> Tree:
    """Returns what a client adds to the sums, times its weight; nothing where the tree has not both factors of a site.

    Args:
        network: says whether there are adapters.
        tree: what the client sends to be averaged.
        weight: in that average.
    """
    if "adapters" not in network.groups:
        return {}
    tensors = {path: leaf for path, leaf in leaves(tree) if isinstance(leaf, Tensor)}
    pairs = [path for path in tensors if path.endswith(_A) and _partner(path) in tensors]
    found: Tree = {}
    for path in pairs:
        place, _, name = path.rpartition("/")
        # the first model in the tree: others are differences, as the control variates of SCAFFOLD
        if place == pairs[0].rpartition("/")[0]:
            a, b = (tensors[one].detach().double() for one in (path, _partner(path)))
            low = a @ _directions(name, a.shape[-1]).to(a.device)
            found[name.removesuffix(_A)] = {"low": weight * low, "b": weight * b, "product": weight * (b @ low)}
    if found:
        found["weight"] = torch.tensor(float(weight), dtype=torch.float64)
    return found


def product_error(mean: Mapping[str, Tree]) -> float | None:
    """The error, of the uniform mean of all contributions; None where all products are zero."""
    total = float(mean["weight"])  # type: ignore[arg-type]
    difference = size = 0.0
    for site, sums in mean.items():
        if site != "weight":
            product = sums["product"] / total
            difference += float((product - (sums["b"] / total) @ (sums["low"] / total)).square().sum())
            size += float(product.square().sum())
    return (difference / size) ** 0.5 if size else None


def _partner(path: str) -> str:
    return path.removesuffix(_A) + _B


def _directions(name: str, inputs: int) -> Tensor:
    """Standard normal, shape (inputs, columns): the same in every process."""
    key = np.frombuffer(hashlib.blake2b(f"product/{name}".encode(), digest_size=16).digest(), np.uint64)
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).standard_normal((inputs, COLUMNS)))
