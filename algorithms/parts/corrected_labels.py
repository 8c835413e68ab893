"""Labels that a client corrects, and keeps in place of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.parts.weak_strong import pseudo_labels
from rayfl.engine.client import Client
from rayfl.examples import Examples
from rayfl.params import Tree


def corrected(client: Client) -> Examples:
    """The client's training samples with their labels as they are now."""
    own = client.examples()
    labels: Tensor = client.state.get("labels", own.y)
    return Examples(own.x, labels.to(own.y.device))


async def outputs_of(client: Client, model: Tree) -> Tensor:
    """A model's logits for the client's training samples in evaluation mode, shape (n, C)."""
    return await client.outputs(lambda x, task: task.network.logits(model, x, training=False))


async def correct(client: Client, model: Tree, threshold: float, chosen: Tensor | None = None) -> None:
    """Gives samples the class that a model finds the likeliest, if it is as likely as the threshold asks.

    Args:
        client: whose labels.
        model: says what is likely.
        threshold: probability.
        chosen: which samples, bool of shape (n,); None: all.
    """
    classes, sure = pseudo_labels(await outputs_of(client, model), threshold)
    labels = corrected(client).y
    client.state["labels"] = torch.where(sure if chosen is None else sure & chosen, classes, labels)
