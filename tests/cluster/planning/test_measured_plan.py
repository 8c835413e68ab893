"""From measurements to a plan: pure functions, so no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.probing.measure import Measured
from actors.processes.placement import Node
from algorithms.registry import Experiment
from cluster.planning.measuring import sample_bytes
from cluster.planning.plan import actor_bytes, actors_on_a_gpu, clients_at_a_time, depends_on_measuring
from cluster.planning.resources import plan_actors
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ResourceError
from rayfl.examples import InputSpec
from tests.support.plans import GIB, LOOPED, MEASURED, ON_CPU, STACKED, experiment, plan


def over_a_base(config: ExperimentConfig) -> ExperimentConfig:
    return Experiment.model_validate(config.model_dump() | {"model": {"name": "pretrained", "folder": "x"}})


def test_several_actors_share_a_gpu_if_clients_are_trained_one_by_one() -> None:
    found = plan(experiment(actors_per_gpu="auto"), LOOPED)
    assert (found.options.per_gpu, found.options.count, found.options.num_gpus) == (8, 16, 0.125)  # 8 CPUs a GPU
    assert found.config.cluster.actors_per_gpu == 8
    assert plan(experiment(actors_per_gpu="auto"), LOOPED, cpus=64).options.per_gpu == 10  # clients in a round
    assert plan(experiment(actors_per_gpu="auto"), LOOPED, cpus=99, m=100).options.per_gpu == 18  # 36 GiB by 2 GiB
    assert plan(experiment(actors_per_gpu="auto"), replace(LOOPED, held_bytes=7 * GIB)).options.per_gpu == 4
    assert plan(experiment(actors_per_gpu="auto", cpus_per_actor=0), LOOPED, m=10).options.per_gpu == 5


def test_actors_share_a_gpu_if_each_has_many_stacked_clients() -> None:
    small = replace(STACKED, client_bytes=GIB // 100)
    shared = experiment("auto", actors_per_gpu="auto")
    found = plan(shared, small, clients=1000, m=1000)
    assert (found.options.per_gpu, found.options.count, found.config.engine.width) == (4, 8, 125)
    assert plan(shared, small, clients=1000, m=1000, cpus=4).options.per_gpu == 2  # 2 CPUs a GPU
    assert plan(shared, small, clients=1000, m=260).options.per_gpu == 2  # 130 clients of a round
    assert plan(shared, replace(STACKED, client_bytes=GIB // 4), clients=1000, m=1000).options.per_gpu == 2  # 140 fit
    assert plan(shared, STACKED, clients=1000, m=1000).options.per_gpu == 1  # 35 fit


def test_actors_share_a_gpu_unless_a_number_says_otherwise() -> None:
    small = replace(STACKED, client_bytes=GIB // 100)
    assert plan(experiment("auto"), small, clients=1000, m=1000).options.per_gpu == 4
    assert plan(experiment("auto", actors_per_gpu=1), small, clients=1000, m=1000).options.per_gpu == 1
    assert plan(experiment("auto", num_actors=2), small, clients=1000, m=1000).options.per_gpu == 1


def test_nobody_shares_a_gpu_that_takes_one_process_or_a_pretrained_base() -> None:
    for measured in (LOOPED, replace(STACKED, client_bytes=GIB // 100)):
        assert plan(experiment("auto"), replace(measured, exclusive=True), clients=1000, m=1000).options.per_gpu == 1
        assert plan(over_a_base(experiment("auto")), measured, clients=1000, m=1000).options.per_gpu == 1


def test_one_actor_has_a_gpu_if_few_clients_are_stacked_or_nothing_is_measured() -> None:
    for measured in ((STACKED,), ()):
        found = plan(experiment(actors_per_gpu="auto"), *measured)
        assert (found.options.per_gpu, found.options.count) == (1, 2)
        asked = plan(experiment(actors_per_gpu="auto", num_actors=7), *measured)
        assert (asked.options.per_gpu, asked.options.count) == (4, 7)
    pinned = plan(experiment(actors_per_gpu="auto", clients_per_actor=1), LOOPED, clients=20)
    assert (pinned.options.per_gpu, pinned.options.count) == (10, 20)


def test_the_device_with_the_least_room_decides() -> None:
    small = replace(LOOPED, device_free_bytes=7 * GIB)
    assert plan(experiment(actors_per_gpu="auto"), LOOPED, small).options.per_gpu == 3
    little = replace(STACKED, device_free_bytes=7 * GIB)
    assert plan(experiment("auto"), STACKED, little).config.engine.width == 5


def test_a_number_stays_what_it_is_and_a_cpu_knows_no_share() -> None:
    found = plan(experiment(actors_per_gpu=3), LOOPED)
    assert (found.options.per_gpu, found.config.engine.width) == (3, 32)
    on_cpus = plan(experiment(actors_per_gpu="auto"), gpus=0)
    assert on_cpus.options == plan(experiment(), gpus=0).options
    assert on_cpus.options.per_gpu == 0


def test_as_many_clients_are_stacked_as_fit_but_no_more_than_there_are() -> None:
    assert plan(experiment("auto"), STACKED).config.engine.width == 10  # 20 in a round, 2 actors
    assert plan(experiment("auto"), STACKED, m=100).config.engine.width == 35  # 36 GiB less the base
    assert plan(experiment("auto", actors_per_gpu=4), STACKED, m=100).config.engine.width == 8
    assert plan(experiment("auto"), replace(STACKED, held_bytes=30 * GIB), m=100).config.engine.width == 5
    assert plan(experiment("auto"), replace(STACKED, base_bytes=37 * GIB)).config.engine.width == 1
    assert plan(experiment("auto"), LOOPED).config.engine.width == "auto"
    on_cpus = plan(experiment("auto", "vectorized", num_actors=2), ON_CPU, gpus=0, m=100)
    assert on_cpus.config.engine.width == 6


def test_unless_a_number_is_given_the_width_is_measured_on_gpus_and_only_there() -> None:
    assert plan(experiment(None), STACKED, m=100).config.engine.width == 35
    on_cpus = experiment(None, "vectorized", num_actors=2)
    options = plan_actors(on_cpus.cluster, {"CPU": 16.0, "GPU": 0.0}, 100, [Node("x", 16, 0)])
    assert not depends_on_measuring(on_cpus, options)
    assert plan(on_cpus, ON_CPU, gpus=0, m=100).config.engine.width is None


@given(measured=MEASURED, cpus=st.integers(1, 64), gpus=st.integers(1, 4), m=st.integers(1, 64) | st.integers(64, 2000))
def test_what_is_planned_fits(measured: Measured, cpus: int, gpus: int, m: int) -> None:
    nodes = [Node("x", float(cpus), float(gpus))]
    k = actors_on_a_gpu([measured], 1.0, nodes, m)
    usable = measured.device_free_bytes * 9 // 10
    assert k == actors_on_a_gpu([measured], 1.0, nodes, m)
    assert k >= 1
    assert k == 1 or (k * actor_bytes(measured, 1, k) <= usable and k <= cpus / gpus and (k - 1) * gpus < m)
    if not measured.vectorized and k < min(cpus // gpus, -(-m // gpus)):
        assert (k + 1) * actor_bytes(measured, 1, k + 1) > usable - k - 1
    width = clients_at_a_time(measured, k)
    assert k == 1 or not measured.vectorized or width >= 64
    assert width == 1 or k * actor_bytes(measured, width, k) <= usable
    assert k * actor_bytes(measured, width + 1, k) > usable - k


@given(measured=MEASURED, width=st.sampled_from(["auto", 32]), share=st.sampled_from(["auto", 1, 4]))
def test_a_plan_is_a_function_of_what_was_measured(measured: Measured, width: Any, share: Any) -> None:
    config = experiment(width, actors_per_gpu=share)
    try:
        first = plan(config, measured)
    except ResourceError:
        with pytest.raises(ResourceError):
            plan(config, measured)
        return
    assert plan(config, measured) == first
    again = plan(first.config, measured)
    assert (again.options, again.config) == (first.options, first.config)


def test_samples_have_a_part_of_the_gpu_that_its_actors_divide() -> None:
    many = replace(STACKED, held_bytes=150 * GIB, divides=True)
    for per_gpu, width in ((1, 23), (2, 11), (4, 5)):
        found = plan(experiment("auto", actors_per_gpu=per_gpu), many, m=200)
        assert found.config.engine.width == width
        assert found.config.cluster.data_memory == 12 * GIB // per_gpu  # 30 % of 40 GiB
        assert not found.warnings
    few = plan(experiment("auto"), replace(many, held_bytes=GIB), m=200)
    assert (few.config.engine.width, few.config.cluster.data_memory) == (34, 12 * GIB)
    looped = plan(experiment(actors_per_gpu="auto"), replace(many, vectorized=False), cpus=99, m=100)
    assert looped.options.per_gpu == 12  # (36 - 12) GiB by 2 GiB
    assert looped.config.cluster.data_memory == GIB
    little = plan(experiment("auto"), many, replace(many, device_free_bytes=20 * GIB))
    assert little.config.cluster.data_memory == 6 * GIB
    given = plan(experiment(data_memory=3 * GIB), replace(STACKED, held_bytes=3 * GIB))
    assert given.config.cluster.data_memory == 3 * GIB
    assert plan(experiment("auto", "vectorized"), ON_CPU, gpus=0).config.cluster.data_memory == "auto"


def test_what_cannot_fit_is_refused_with_numbers() -> None:
    small = replace(STACKED, device_free_bytes=int(3.5 * GIB))
    wanted = r"needs 2\.0 GiB per actor, 4\.0 GiB for 2: GPU 0 of node x has 3\.5 GiB free; lower train\.batch_size or"
    with pytest.raises(ResourceError, match=wanted):
        plan(experiment(actors_per_gpu=2), small)
    with pytest.raises(ResourceError, match=r"2\.0 GiB per actor: GPU 0 of .* 1\.0 GiB free.*cluster\.device=cpu"):
        plan(experiment(), replace(small, device_free_bytes=GIB))
    with pytest.raises(ResourceError, match=r"9\.0 GiB for 9: node x has 8\.0 GiB in all; lower cluster\.num_actors"):
        plan(experiment("auto", num_actors=9), replace(ON_CPU, device_total_bytes=8 * GIB), gpus=0)


def test_what_may_not_fit_is_a_warning() -> None:
    assert not plan(experiment(32), STACKED).warnings
    (line,) = plan(experiment(100), STACKED, m=200).warnings
    assert "40.0 GiB free for 1 actor, one may come to need 51.0 GiB" in line
    assert line.endswith("lower engine.width (about 35 fit)")
    (line,) = plan(experiment(), replace(LOOPED, held_bytes=50 * GIB)).warnings
    assert line.endswith("lower cluster.data_memory (samples may take 50.0 GiB)")
    (line,) = plan(experiment("auto", num_actors=9), replace(ON_CPU, device_free_bytes=8 * GIB), gpus=0).warnings
    assert line.startswith("node x has 8.0 GiB free for 9 actors")
    assert line.endswith("lower the number of actors")


def test_the_plan_in_words() -> None:
    assert plan(experiment("auto", actors_per_gpu=4), STACKED, m=100).lines == (
        "plan: 1 node, 2 GPUs: 8 actors, up to 4 on a GPU, 13 of a round's clients each",
        "measured on GPU 0 of node x: first step after 3.0 s, then 0.002 s each; an actor with 8 clients at a time "
        "needs 9.0 GiB (1.0 GiB per client, 0.0 MiB for samples), 40.0 GiB are free for 4",
    )
    assert plan(experiment(), gpus=0, cpus=1).lines == (
        "plan: 1 node: 1 actor with 1 CPU each, 20 of a round's clients each",
    )
    assert "an actor with one client at a time needs 2.0 GiB" in plan(experiment(), LOOPED).lines[1]


@pytest.mark.parametrize("probe", [True, False])
def test_it_is_measured_where_something_depends_on_it(probe: bool) -> None:
    def depends(config: ExperimentConfig, gpus: float) -> bool:
        return depends_on_measuring(config, plan(config, gpus=gpus).options)

    assert depends(experiment(probe=probe), 1) == probe
    assert depends(experiment("auto", "vectorized", probe=probe), 0) == probe
    for config in (experiment(probe=probe), experiment(actors_per_gpu="auto"), experiment("auto"), experiment(8)):
        assert not depends(config, 0)
    assert not depends(experiment(8, "vectorized"), 0)
    assert not depends(experiment(device="cpu"), 1)


def test_bytes_of_samples() -> None:
    assert sample_bytes(InputSpec("image", (1, 28, 28), 10)) == 4 * 784 + 8
    assert sample_bytes(InputSpec("tokens", (80,), 90, 90)) == 8 * 80 + 8
