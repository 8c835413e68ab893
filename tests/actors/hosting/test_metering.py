"""Seconds of clients are those of their procedures: scoring what they publish is no cost of a method."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from actors.hosting.job import Job
from actors.hosting.scoring import Scorer
from algorithms.fedavg import FedAvg
from rayfl.params import to_numpy
from tests.support.in_place import TRAIN
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

SLOW_S = 0.3


@pytest.mark.parametrize("mode", [pytest.param("looped", marks=pytest.mark.slow), "vectorized"])
def test_scoring_is_not_counted(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    score = Scorer.score

    def slow(*given: Any) -> Any:
        ends = time.process_time() + SLOW_S
        while time.process_time() < ends:
            pass
        return score(*given)

    monkeypatch.setattr(Scorer, "score", slow)
    toy = Toy(FedAvg(), random_clients((8, 12, 6, 10)), two_layers(), TRAIN, mode=mode)
    [host] = toy.client_hosts
    sent = to_numpy({"model": toy.server["model"]})
    job = Job("local_update", "mean", 0, (0, 1), splits=("test",))
    host.run(job, sent)  # what is slow the first time is over
    began = time.process_time()
    found = host.run(replace(job, round=1), sent)
    assert time.process_time() - began > 2 * SLOW_S and len(found.scores) == 2
    assert 0 < found.busy_s < SLOW_S
