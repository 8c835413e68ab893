from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.processes.gpus import ActorGpu, check_gpus
from actors.processes.placement import Node, lay_out, most_together, room, share_of_gpu
from rayfl.errors import ResourceError

NODES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=5).map(
    lambda sizes: [Node(str(i), float(cpus), float(gpus)) for i, (cpus, gpus) in enumerate(sizes)]
)


@given(k=st.integers(1, 10_000))
def test_k_shares_are_at_most_one_gpu_in_rays_ten_thousandths(k: int) -> None:
    units = round(share_of_gpu(k) * 10_000)
    assert share_of_gpu(k) * 10_000 == pytest.approx(units)
    assert units >= 1
    assert units * k <= 10_000 < (units + 1) * k


@given(nodes=NODES, count=st.integers(0, 30), cpus=st.sampled_from([0.0, 0.5, 1.0, 2.0]), k=st.integers(1, 5))
def test_actors_are_laid_out_within_bounds_and_evenly(nodes: list[Node], count: int, cpus: float, k: int) -> None:
    slots = lay_out(nodes, count, cpus, k)
    assert sum(actors for _, actors in slots) == min(count, room(nodes, cpus, k, 1_000))
    on_node: Counter[str] = Counter()
    for node, actors in slots:
        assert 1 <= actors <= k
        on_node[node] += actors
    for node in nodes:
        assert on_node[node.id] * cpus <= node.cpus
        mine = [actors for id, actors in slots if id == node.id]
        assert len(mine) <= node.gpus
        mine += [0] * (int(node.gpus) - len(mine))
        assert not mine or max(mine) - min(mine) <= 1


def test_a_node_short_of_cpus_takes_fewer() -> None:
    nodes = [Node("small", 2, 1), Node("large", 16, 2), Node("without", 64, 0)]
    assert lay_out(nodes, 12, 1, 4) == [("large", 4), ("large", 4), ("small", 2)]
    assert lay_out(nodes, 3, 1, 4) == [("small", 1), ("large", 1), ("large", 1)]
    assert room(nodes, 1, 4, 99) == 10


@pytest.mark.parametrize(
    ("cpus", "count", "expected"), [((64, 4), 68, 64), ((8, 8), 16, 8), ((8, 8), 3, 3), ((), 5, 5), ((0,), 2, 1)]
)
def test_memory_is_divided_as_on_the_node_with_most_actors(cpus: tuple[int, ...], count: int, expected: int) -> None:
    nodes = [Node(str(number), size, 0) for number, size in enumerate(cpus)]
    assert most_together(nodes, 1.0, 0, count) == expected
    assert most_together(nodes, 0.0, 0, count) == (count if nodes else expected)


def test_no_actor_is_spread_over_two_nodes() -> None:
    assert room([Node("a", 1.5, 0), Node("b", 1.5, 0)], 1, 0, 99) == 2
    assert room([Node("a", 0, 0), Node("b", 8, 0)], 1, 0, 5) == 5
    assert room([Node("a", 0.3, 0)], 0.1, 0, 99) == 3


def test_actors_on_the_gpus_meant_for_them() -> None:
    check_gpus([ActorGpu("a", 0, "GPU-1"), ActorGpu("b", 1, "GPU-2"), ActorGpu("c", 0, "GPU-1")], 2)
    check_gpus([ActorGpu("a", None, "GPU-1"), ActorGpu("b", None, "GPU-1")], 2)


@pytest.mark.parametrize(
    ("actors", "message"),
    [
        (
            [ActorGpu("a", 0, "GPU-1"), ActorGpu("b", 0, "GPU-2")],
            r"GPU 0 of the run is GPU-1 for a, but GPU-2 for b: its actors are spread over two devices",
        ),
        (
            [ActorGpu("a", 0, "GPU-1"), ActorGpu("b", 1, "GPU-1")],
            r"GPUs 0 and 1 of the run are one device, GPU-1 \(a, b\)",
        ),
        (
            [ActorGpu(name, None, "GPU-1") for name in "abc"],
            r"3 actors share GPU-1 \(a, b, c\), where cluster\.actors_per_gpu allows 2",
        ),
    ],
)
def test_actors_elsewhere_are_refused_with_numbers(actors: list[ActorGpu], message: str) -> None:
    with pytest.raises(ResourceError, match=message):
        check_gpus(actors, 2)
