"""Networks that compute in bfloat16 on CPUs, whose library has convolutions that it computes wrong."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from rayfl.examples import InputSpec
from rayfl.models.networks.waveforms import M5
from rayfl.models.reduced_precision import has_broad_kernels, reduced_precision

STEREO = InputSpec("image", (2, 1, 640), 4)


@pytest.mark.parametrize(
    ("layer", "broad"),
    [
        (nn.Conv2d(1, 8, (1, 80)), False),
        (nn.Conv2d(2, 8, (1, 80)), True),
        (nn.Conv1d(8, 8, 8), True),
        (nn.Conv1d(8, 8, 4), False),
        (nn.Conv2d(3, 8, 16), False),
        (nn.Conv2d(4, 8, 16), True),
        (nn.Conv2d(32, 64, 16), False),
        (nn.Conv2d(32, 64, 16, groups=8), True),
        (nn.Conv2d(64, 64, 3), False),
        (nn.Linear(4, 16), False),
    ],
)
def test_kernels_that_onednn_gets_wrong_are_known(layer: nn.Module, broad: bool) -> None:
    assert has_broad_kernels(nn.Sequential(nn.ReLU(), layer)) == broad


def test_waveforms_of_two_channels_are_convolved_as_in_float32() -> None:
    """On processors with AMX, what comes of the first layer had nothing to do with it."""
    x = torch.randn(4, *STEREO.shape, generator=torch.Generator().manual_seed(0))
    found = []
    for precision in (None, torch.bfloat16):
        network = M5(width=3, norm="group").network(STEREO)
        if precision is not None:
            network.compute_in(precision)
        found.append(network.logits(network.initialize(0), x))
    exact, rounded = found
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).abs().max() < 0.05 * (exact - exact.mean(0)).abs().max()


@pytest.mark.parametrize(
    ("device", "broad", "left_out"), [("cpu", True, True), ("cpu", False, False), ("cuda", True, False)]
)
def test_onednn_is_left_out_where_it_would_be_wrong(
    device: str, broad: bool, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = mock.MagicMock(enabled=True)
    monkeypatch.setattr(torch.backends, "mkldnn", library)
    monkeypatch.setattr(torch, "autocast", mock.MagicMock())
    with reduced_precision(torch.bfloat16, torch.device(device), False, broad):
        assert library.enabled == (not left_out)
    assert library.enabled
