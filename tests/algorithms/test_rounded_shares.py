"""Shares of a number that are whole numbers themselves are not rounded down to the one below."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from algorithms.fat import FAT
from algorithms.fedcac import critical
from algorithms.fedld import principal_step
from algorithms.fedweit import FedWeIT
from algorithms.pfedgp import PFedGP
from algorithms.turbosvm import drawn_classes
from rayfl.engine.updates.settings import TrainConfig
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, random_clients


def test_shares_of_other_things_than_samples() -> None:
    """0.29 of 100 is 28.999... in floating point, and 0.58 of 50 as well."""
    numbers = torch.arange(100, dtype=torch.float64)
    assert len(drawn_classes(100, 0.29, np.random.default_rng(0))) == 29
    assert int(FedWeIT(unsent_share=0.29)._kept(numbers).sum()) == 71
    assert int(critical({"w": numbers}, {"w": numbers - 1}, 0.29)["w"].sum()) == 29
    side, order = torch.ones(1, 100), torch.rand(1, 100, generator=torch.Generator().manual_seed(0))
    assert int(PFedGP(predict_share=0.53).held(side, order).sum()) == 53
    changes = torch.diag(torch.arange(50, 0, -1, dtype=torch.float64))
    assert int((principal_step(changes, 0.58).abs() > 1e-12).sum()) == 29


@pytest.mark.parametrize("keep_clean", [False, True])
def test_as_many_samples_are_attacked_in_stacks_as_in_a_loop(keep_clean: bool) -> None:
    train = TrainConfig(rounds=1, clients_per_round=2, local_epochs=1, batch_size=100, lr=0.1)
    method = FAT(radius=0.2, step=0.2, steps=1, attacked_share=0.29, keep_clean=keep_clean)
    looped, vectorized = (
        Toy(method, random_clients((100, 70)), two_layers(), train, mode=mode) for mode in ("looped", "vectorized")
    )
    assert_close(looped.step()["model"], vectorized.step()["model"], 1e-12)
