"""Blocks that are computed again in the backward pass, where memory would else be too small for stacks."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rayfl.engine.engine import Engine, EngineConfig
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.zoo import Candidates
from rayfl.objectives import loss
from rayfl.tasks.classification import Classification
from tests.support.bases import IMAGES, base, inputs, language_network, network, section, texts, trained
from tests.support.elsewhere import PRETENDED, context, elsewhere
from tests.support.problems import examples, request
from tests.support.toys import assert_equal

CLIENTS, SAMPLES = 8, 32


def kept_and_gradients(net: AdaptedNetwork, x: Tensor) -> tuple[int, list[Tensor]]:
    """Bytes that a forward pass keeps for the backward pass, and the gradients."""
    tree = {name: leaf.requires_grad_() for name, leaf in trained(net, 0).items()}
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        total = net.features(tree, x, training=True).square().sum()
    return sum(kept), list(torch.autograd.grad(total, list(tree.values()), materialize_grads=True))


@pytest.mark.parametrize("family", ["vit", "llama", "gpt2", "bert", "language"])
def test_a_network_begins_to_save_memory_when_it_is_told_to(family: str) -> None:
    def made(**options: Any) -> AdaptedNetwork:
        return language_network("llama", **options) if family == "language" else network(family, **options)

    x = texts(16, 0)[0] if family == "language" else inputs(family, 16, 0)
    plain, always, left_open = made(), made(checkpointing=True), made(checkpointing="auto")
    much, expected = kept_and_gradients(plain, x)
    little, _ = kept_and_gradients(always, x)
    assert 2 * little < much
    assert kept_and_gradients(left_open, x)[0] == much
    assert not plain.save_memory() and not always.save_memory()  # nothing is left open
    assert left_open.save_memory() and not left_open.save_memory()
    kept, found = kept_and_gradients(left_open, x)
    assert kept == little
    assert_equal(dict(enumerate(found)), dict(enumerate(expected)))
    assert kept_and_gradients(made(checkpointing="auto"), x)[0] == much  # another network of the same base


def trained_elsewhere(mode: str, checkpointing: Any, memory: int | None) -> tuple[Engine, int, list[Any]]:
    """Updates of clients on the pretended device: the engine, the most memory in use, and the replies."""
    net = network("vit", checkpointing=checkpointing)
    assert base("vit").is_dir() and net.logits(trained(net, 0), torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    with elsewhere(memory) as device:
        engine = Engine(Classification(net), device, EngineConfig.model_validate({"mode": mode, "width": CLIENTS}))
        requests = []
        for k in range(CLIENTS if mode == "vectorized" else 2):
            own = examples(SAMPLES, IMAGES, k)
            own = replace(own, x=own.x.to(device), y=own.y.to(device))
            requests.append(request(own, trained(net, k), loss(), client=k, batch_size=SAMPLES))
        replies = engine.execute(requests)
        most = context().most
        found = [
            one if isinstance(one, Exception) else {name: leaf.cpu().clone() for name, leaf in one.items()}
            for one in replies
        ]
        del replies, requests
    return engine, most, found


@PRETENDED
@pytest.mark.parametrize("mode", ["vectorized", pytest.param("looped", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_memory_is_saved_before_fewer_clients_are_stacked(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    _, much, expected = trained_elsewhere(mode, False, None)
    _, little, _ = trained_elsewhere(mode, True, None)
    assert little < 0.9 * much
    memory = (much + little) // 2
    with caplog.at_level(logging.WARNING):
        engine, most, found = trained_elsewhere(mode, "auto", memory)
    assert most <= memory and engine.saves_memory
    assert engine.width == (CLIENTS if mode == "vectorized" else 1)
    assert_equal(dict(enumerate(found)), dict(enumerate(expected)))
    assert [message for message in caplog.messages if "model.checkpointing=auto" in message] == caplog.messages
    assert len(caplog.messages) == 1
    engine, _, found = trained_elsewhere(mode, False, memory)
    assert not engine.saves_memory
    if mode == "vectorized":
        assert engine.width < CLIENTS
        assert_equal(dict(enumerate(found)), dict(enumerate(expected)))
    else:
        assert all(isinstance(one, torch.OutOfMemoryError) for one in found)


@PRETENDED
def test_enough_memory_is_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    # As long as an engine is kept, those after it share the base's weights on the device, which are not counted again.
    kept, _, _ = trained_elsewhere("vectorized", False, None)
    _, much, _ = trained_elsewhere("vectorized", False, None)
    engine, most, _ = trained_elsewhere("vectorized", "auto", much)
    assert most == much and not engine.saves_memory and not caplog.messages
    del kept


def test_a_section_that_saves_memory_leaves_nothing_open() -> None:
    left_open = section("vit", checkpointing="auto")
    assert left_open.saving_memory() == section("vit", checkpointing=True)
    for decided in (section("vit"), section("vit", checkpointing=True)):
        assert decided.saving_memory() is decided
    several = Candidates(candidates=(section("vit"), left_open))
    assert several.saving_memory().candidates == (section("vit"), section("vit", checkpointing=True))
    assert several.saving_memory().saving_memory() == several.saving_memory()
