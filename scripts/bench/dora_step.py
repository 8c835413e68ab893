"""Measures what a stacked step takes with magnitudes (DoRA) and without, over a made-up vision transformer.

    python scripts/bench/dora_step.py [--width 768] [--side 224] [--clients 4] [--batch 4]

It prints the processor time of a forward and backward pass of all clients on one thread, the median of some repetitions
in which both kinds take turns, and the number of trained scalars. Patches have 16 x 16 pixels.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.gradients.stacked_gradients import StackedGradients
from rayfl.examples import InputSpec
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.section import PretrainedModel
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification

CLASSES = 10


def networks(folder: str, given: argparse.Namespace) -> dict[str, AdaptedNetwork]:
    """Writes a base with random weights, and returns networks over it by the kind of their adapters."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=given.width, num_hidden_layers=given.blocks, num_attention_heads=given.width // 64,
        intermediate_size=4 * given.width, image_size=given.side, num_labels=CLASSES,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    spec = InputSpec("image", (3, given.side, given.side), CLASSES)
    return {
        name: PretrainedModel.model_validate(
            {"folder": folder, "adapter": {"r": given.rank, "use_dora": name == "DoRA"}}
        ).network(spec)
        for name in ("LoRA", "DoRA")
    }


def step_time(network: AdaptedNetwork, x: Tensor, y: Tensor) -> float:
    """Seconds of one step of clients whose adapters differ."""
    task, start = Classification(network), network.initialize(0)
    stack = {name: leaf + 0.01 * torch.randn(len(x), *leaf.shape) for name, leaf in start.items()}

    def loss(tree: Any, x: Tensor, y: Tensor, mask: None) -> Tensor:
        return task.loss(tree, Batch(x, y, mask))

    gradients = StackedGradients(loss, task)
    before = time.process_time()
    gradients(stack, list(stack), None, x, y, None)
    return time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("width", 768), ("blocks", 2), ("side", 224), ("clients", 4), ("batch", 4), ("rank", 8), ("repetitions", 5),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.rand(given.clients, given.batch, 3, given.side, given.side)
    y = torch.randint(CLASSES, (given.clients, given.batch))
    with tempfile.TemporaryDirectory() as folder:
        kinds = networks(folder, given)
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for repetition in range(given.repetitions + 1):
            for name, network in kinds.items():
                taken = step_time(network, x, y)
                if repetition:  # the base is loaded in the first one
                    times[name].append(taken)
        medians = {name: statistics.median(some) for name, some in times.items()}
        for name, network in kinds.items():
            print(f"{name}  {1000 * medians[name]:8.1f} ms  {network.num_parameters} scalars")
        print(f"ratio {medians['DoRA'] / medians['LoRA']:.3f}")


if __name__ == "__main__":
    main()
