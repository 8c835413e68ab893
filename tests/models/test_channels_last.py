"""Some models read images channels last: up to round-off nothing but the time depends on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayfl.engine.stacks import vectorized
from rayfl.engine.steps import looped
from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.networks.convolutional import TFCNN
from rayfl.models.zoo import Architecture, LeafCNN, TwoCNN
from rayfl.objectives import loss
from rayfl.tasks.base import Batch, Task
from rayfl.tasks.classification import Classification
from tests.support.problems import CPU, examples, request
from tests.support.toys import assert_close

COLOURED = InputSpec("image", (3, 16, 16), 5)
ARCHITECTURES: dict[str, Architecture] = {"two_cnn": TwoCNN(), "leaf_cnn": LeafCNN(), "tf_cnn": TFCNN()}


class Viewing(ClassificationModel):
    """Flattens with ``view``, which takes no map whose channels are last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4 * 14 * 14, 5)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x)).view(len(x), -1)

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def viewing(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """Reads the images as they are."""
    found: Tensor = task.loss(model, batch) * batch.x.view(len(batch.x), -1).mean()
    return found


def layouts(network: Network, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether images of several channels reach a network's first convolution channels last, one entry a call."""
    seen: list[bool] = []
    convolve = nn.Conv2d.forward

    def noting(self: nn.Conv2d, x: Tensor) -> Tensor:
        if x.shape[1:] == COLOURED.shape:
            seen.append(not x.is_contiguous())
        return convolve(self, x)

    monkeypatch.setattr(nn.Conv2d, "forward", noting)
    return seen


@pytest.mark.parametrize("objective", [loss(), viewing], ids=["terms", "function"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_is_the_same_up_to_round_off(
    name: str, objective: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = ARCHITECTURES[name].network(COLOURED)
    seen, trained = layouts(network, monkeypatch), []
    for channels_last in (True, False):
        network._channels_last = channels_last
        update = request(examples(17, COLOURED, 0), network.initialize(0), objective)
        seen.clear()
        trained.append(looped.train(update, Classification(network), CPU))
        assert set(seen) == {channels_last}
    assert_close(*trained, 1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stacks_are_trained_as_clients_are(name: str) -> None:
    network = ARCHITECTURES[name].network(COLOURED)
    update, task = request(examples(17, COLOURED, 0), network.initialize(0), loss()), Classification(network)
    (stacked,) = vectorized.train([update], task, CPU)
    assert_close(stacked, looped.train(update, task, CPU), 1e-5)


def test_evaluations_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    network = TwoCNN().network(COLOURED)
    seen = layouts(network, monkeypatch)
    network.logits(network.initialize(0), torch.rand(2, *COLOURED.shape))
    assert seen == [False]


def test_own_models_may_flatten_with_view() -> None:
    network = Network(Viewing)
    update = request(examples(17, COLOURED, 0), network.initialize(0), loss())
    trained = looped.train(update, Classification(network), CPU)
    assert not torch.equal(trained["conv.weight"], update.trainable["conv.weight"])
