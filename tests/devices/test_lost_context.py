"""A device whose context is lost is never taken for a client that fails."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from rayfl.aggregation.exact_sum import Weighted
from rayfl.config.cluster_section import ClientsConfig
from rayfl.engine.client import Client
from rayfl.errors import ClientError, DeviceLostError
from rayfl.params import Tree
from tests.support.elsewhere import PRETENDED, REAL, context, elsewhere
from tests.support.problems import engine_of, updates, with_label
from tests.support.toys import ListDataset, ragged_toy

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


@PRETENDED
@MODES
def test_a_lost_context_is_no_answer_to_any_client(mode: str) -> None:
    with elsewhere() as device:
        own = engine_of(mode, device)
        with pytest.raises(
            DeviceLostError,
            match=r"^this process can no longer compute on meta: CUDA error: device-side assert triggered$",
        ):
            own.execute(with_label(9, 3, updates(device=device)))
        with pytest.raises(DeviceLostError):
            own.check()


class Losing(FedAvg):
    """A method whose client 1 ends the device's context in round 1, before or after its training.

    Attributes:
        late: after it; what the client returns is on the CPU by then.
    """

    name: str = "losing"
    late: bool = False

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        lost = client.round == 1 and client.id == 1
        if lost and not self.late:
            context().lost = True
        result = await super().local_update(client, model)
        if lost:
            result = replace(result, tree={name: leaf.cpu() for name, leaf in result.tree.items()})
            context().lost = True
        return result


@pytest.mark.two_cases
@PRETENDED
@MODES
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("policy", [{"on_error": "skip"}, {"on_error": "retry", "after_retries": "skip"}, {}])
def test_no_client_is_left_out_for_a_lost_context(policy: dict[str, Any], late: bool, mode: str) -> None:
    with elsewhere() as device:
        own = ragged_toy(mode, device, Losing(late=late), hosts=2, clients_per_round="all")
        own.federation._policy = ClientsConfig(**policy)
        own.step()
        own.federation.begin_round(1, (), range(4))
        with pytest.raises(DeviceLostError, match=r"run the same command to continue from the last commit"):
            own.federation.play(own.algorithm, own.server, range(4))
        assert not own.federation.absent


@PRETENDED
def test_a_context_that_is_lost_after_all_was_said_is_noticed_before_the_next_call() -> None:
    with elsewhere() as device:
        own = ragged_toy("looped", device, Losing(late=True))
        own.step([0, 1])
        own.federation.begin_round(1)
        with pytest.raises(DeviceLostError):
            own.algorithm.round(own.server, [1], own.federation)


@PRETENDED
@MODES
def test_samples_that_would_end_a_context_do_not_reach_the_device(mode: str) -> None:
    x, y = torch.rand(8, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 3, 2, 1])
    with elsewhere() as device:
        own = replace(ragged_toy(mode, device), dataset=ListDataset([(x, y.clamp(max=2)), (x, y)]))
        own.federation._policy = ClientsConfig(on_error="skip")
        wrong = r"client 1, round 1, .*client 1 \(1\), train: the label of sample 5 is 3, but .* 3 classes"
        with pytest.raises(ClientError, match=wrong):
            own.step([0, 1])
        assert not context().lost


@pytest.mark.skipif(not REAL.startswith("cuda"), reason="needs a GPU (make test-device)")
@MODES
def test_a_real_context_that_is_lost_is_noticed(mode: str) -> None:
    code = f"""
import torch
from rayfl.errors import DeviceLostError
from tests.support.problems import engine_of, updates, with_label
device = torch.device({REAL!r})
try:
    engine_of({mode!r}, device).execute(with_label(9, 3, updates(device=device)))
except DeviceLostError:
    raise SystemExit(7)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == 7
