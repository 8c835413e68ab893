"""Domains that arrive one after another, with the same classes (``stages.name=domains``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from algorithms.registry import METHODS, Experiment
from rayfl.data.partitions.arriving import DomainStages
from rayfl.data.sources.base import Samples
from rayfl.errors import ConfigError
from rayfl.examples import SPLITS, InputSpec
from rayfl.experiment.parts import Parts
from rayfl.randomness import RandomStreams
from rayfl.results.stages import by_stage
from rayfl.runs.finding import load_run

COUNT, DOMAINS = 240, ("photo", "sketch", "clip")


def three_domains(streams: RandomStreams) -> Samples:
    """Two classes that lie elsewhere in each domain, which come in turns."""
    generator = streams.generator("domains")
    domain, y = np.arange(COUNT) % 3, generator.integers(2, size=COUNT)
    x = np.zeros((COUNT, 1, 2, 3), dtype=np.float32)
    x[np.arange(COUNT), 0, y, domain] = 1.0
    spec = InputSpec("image", (1, 2, 3), 2)
    return Samples(x + 0.1 * generator.random(x.shape, dtype=np.float32), y, spec, domains=DOMAINS, domain=domain)


def without_domains(streams: RandomStreams) -> Samples:
    """The same samples, of which nobody knows where they are from."""
    known = three_domains(streams)
    return Samples(known.x, known.y, known.spec)


def content(**sections: Any) -> dict[str, Any]:
    return {
        "dataset": {"name": f"{__name__}:three_domains"},
        "partition": {"name": "iid", "num_clients": 3},
        "holdout": {"test": 0.25, "validation": 0.1},
        "model": {"name": "two_nn", "hidden": [8, 8]},
        "algorithm": {"name": "fedavg"},
        "train": {"rounds": 6, "clients_per_round": "all", "local_epochs": 2, "batch_size": 8, "lr": 0.2},
        "stages": {"name": "domains", "count": 3, "rounds": 2},
        "cluster": {"backend": "inline"},
        "tracking": {"tensorboard": False},
        **sections,
    }


def parts(**sections: Any) -> Parts:
    return Parts(Experiment.model_validate(content(**sections)))


def test_each_stage_trains_on_its_domain_and_is_tested_on_those_so_far() -> None:
    made = parts()
    domain = three_domains(RandomStreams(0)).domain
    assert domain is not None and made.dataset.domains == DOMAINS
    for stage in range(3):
        there = made.dataset_in(2 * stage)
        for client in range(3):
            places, whole = there.places(client), made.dataset.places(client)
            assert set(domain[places["train"]]) == {stage}
            assert set(domain[places["test"]]) == set(range(stage + 1))
            for split in SPLITS:
                held = domain[whole[split]] == stage if split == "train" else domain[whole[split]] <= stage
                assert np.array_equal(places[split], whole[split][held])
            assert len(there.tested(client)) == (domain[whole["test"]] == stage).sum() > 0


def test_domains_may_arrive_in_a_drawn_order_and_in_one_of_each_client() -> None:
    kinds, none = [np.array([0, 1, 2, 2])], np.empty(0, dtype=np.int64)
    given = DomainStages(count=2, rounds=1).arrivals([*kinds, none, none], 3, RandomStreams(0), 0)
    assert given[0].tolist() == [0, 0, 1, 1]
    orders = {
        tuple(DomainStages(count=3, rounds=1, order="own").arrivals([*kinds, none, none], 3, RandomStreams(0), k)[0])
        for k in range(20)
    }
    assert len(orders) > 1 and all(sorted(set(order)) == [0, 1, 2] for order in orders)
    drawn = [DomainStages(count=3, rounds=1, order="drawn") for _ in range(2)]
    one, other = (stages.arrivals([*kinds, none, none], 3, RandomStreams(0), k)[0] for k, stages in enumerate(drawn))
    assert np.array_equal(one, other)


def test_clients_of_one_domain_each_train_in_its_stage_alone() -> None:
    made = parts(partition={"name": "domains"}, train={"rounds": 6, "clients_per_round": 1})
    assert [list(made.able(round)) for round in range(6)] == [[0], [0], [1], [1], [2], [2]]
    assert [made.cohort(round) for round in range(6)] == [[0], [0], [1], [1], [2], [2]]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"dataset": {"name": f"{__name__}:without_domains"}}, r"stages.name is domains, but these samples are of no"),
        (
            {"stages": {"name": "domains", "count": 4, "rounds": 1}},
            r"stages.count is 4, but there are only 3 domains to divide \(photo, sketch, clip\): lower it",
        ),
    ],
)
def test_data_without_enough_domains_are_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parts(**sections).check()


def test_a_run_says_what_is_left_of_each_domain(tmp_path: Path) -> None:
    found = []
    for name, memory in (("forgets", 0), ("keeps", "all")):
        stages = {**content()["stages"], "memory": memory}
        result = rayfl.run(content(storage_path=str(tmp_path), name=name, stages=stages))
        own = load_run(result.path, METHODS).own
        scores = by_stage(result.rounds, result.config.stages.stage_of, own)
        assert scores is not None and scores.scores.shape == (3, 3)
        found.append(scores)
    assert found[1].average > found[0].average and found[1].forgetting < found[0].forgetting
