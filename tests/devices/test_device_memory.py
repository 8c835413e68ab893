"""Memory of a device that runs out changes no result, and nothing stays in it that nobody needs."""

from __future__ import annotations

import gc
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.scaffold import Scaffold
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.config.cluster_section import ClientsConfig
from rayfl.diagnosis import device_errors
from rayfl.engine.updates.requests import GradientRequest, OutputRequest
from rayfl.errors import ClientError, ResourceError
from rayfl.examples import Examples
from rayfl.objectives import TRAINED, loss, squared_cosine, squared_distance
from rayfl.params import Tree, from_numpy
from rayfl.tasks.base import Batch, Task
from tests.support.elsewhere import PRETENDED, context, elsewhere
from tests.support.problems import CPU, NETWORK, VECTOR, cross_entropy, engine_of, examples, slots_of, updates
from tests.support.toys import Toy, assert_close, assert_equal, ragged_toy

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
MOMENTUM = {"momentum": 0.9, "persist_optimizer": True}
LIMIT = "CUDA out of memory. Tried to allocate 2.00 GiB."


def history(own: Toy) -> tuple[Tree, dict[int, Tree], dict[int, dict[str, Any]]]:
    """Two rounds and an evaluation: the server's tree, the states, n and loss of every model."""
    server = own.run()
    scores = {
        client: {name: torch.from_numpy(one.vector[:2]) for name, one in rows.items()}
        for client, rows in own.scores().items()
    }
    return server, {client: from_numpy(state) for client, state in own.states().items()}, scores


def assert_alike(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 1e-10)


METHODS = {"fedavg": (FedAvg(), MOMENTUM), "scaffold": (Scaffold(control_update="option1"), {})}


@PRETENDED
@pytest.mark.parametrize("mode", ["vectorized", pytest.param("looped", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "scaffold"])
@pytest.mark.slow
def test_memory_that_is_short_for_once_changes_nothing_whenever_that_is(method: str, mode: str) -> None:
    algorithm, options = METHODS[method]
    expected = history(ragged_toy(mode, CPU, algorithm, **options))
    with elsewhere() as device:
        history(ragged_toy(mode, device, algorithm, **options))
        made = context().made
    for moment in range(0, made, max(made // 8, 1)):
        with elsewhere() as device:
            context().failing = range(moment, moment + 1)
            assert_alike(history(ragged_toy(mode, device, algorithm, **options)), expected)


@PRETENDED
@MODES
@pytest.mark.first_case
def test_little_memory_gives_the_same_or_an_error_that_says_so(mode: str) -> None:
    expected = history(ragged_toy(mode, **MOMENTUM))
    with elsewhere() as device:
        history(ragged_toy(mode, device, **MOMENTUM))
        most = context().most
    done = 0
    for share in (0.1, 0.4, 0.6, 0.8, 0.95):
        with elsewhere(memory=int(share * most)) as device:
            own = ragged_toy(mode, device, **MOMENTUM)
            try:
                found = history(own)
            except (ClientError, ResourceError) as error:
                assert "the memory of the device is too small" in str(error)  # noqa: PT017
                continue
            assert_alike(found, expected)
            done += 1
    assert done >= 2


@PRETENDED
def test_a_client_that_is_too_large_alone_is_named_with_the_fix() -> None:
    with elsewhere() as device:
        own = ragged_toy("looped", device)
        own.step([1])
        enough = context().most
    with elsewhere(memory=enough) as device:
        own = ragged_toy("looped", device)
        with pytest.raises(ClientError, match=r"client 0, round 1, local_update: the memory .*lower train\.batch_size"):
            own.step([1, 0])
    with elsewhere(memory=enough) as device:
        own = ragged_toy("looped", device)
        own.federation._policy = ClientsConfig(on_error="skip")
        own.federation.begin_round(0, (), [1, 0])
        own.federation.play(own.algorithm, own.server, [1, 0])
        (failure,) = own.federation.absent.values()
        assert failure.reason == "the memory of the device is too small for this client alone"


@PRETENDED
def test_memory_of_others_is_told_from_that_of_the_actor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU of 80 GiB, of which this actor's tensors have 3 GiB and others 62 GiB."""
    others = "of the GPU's 80.0 GiB, 62.0 are not this actor's tensors: its CUDA context, other actors, and programs"
    with elsewhere() as device:
        own = ragged_toy("vectorized", device)
        own.step([0, 1])
        most = context().most
    for name, answer in {
        "is_initialized": True,
        "empty_cache": None,
        "memory_reserved": 3 << 30,
        "mem_get_info": (15 << 30, 80 << 30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    device_errors.note_smaller_pieces.cache_clear()
    for share in (0.8, 0.6):
        with elsewhere(memory=int(share * most)) as device:
            ragged_toy("vectorized", device).step([0, 1])
    for what in ("clients of an evaluation", "clients"):
        assert re.search(rf"too small for \d {what} at a time: 1 from now on {re.escape('(' + others)}", caplog.text)
    with (
        elsewhere(memory=1) as device,
        pytest.raises((ClientError, ResourceError), match=re.escape(f"model ({others}")),
    ):
        ragged_toy("looped", device).step([0])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # as on a CPU
    assert device_errors.memory_beside() == ""


def failing_at(work: Callable[..., Any], times: Iterator[int], when: int) -> Callable[..., Any]:
    """The same work, which fails for want of memory the ``when``-th time."""

    def tried(*arguments: Any, **options: Any) -> Any:
        if next(times) == when:
            raise torch.OutOfMemoryError(LIMIT)
        return work(*arguments, **options)

    return tried


@pytest.mark.parametrize("moment", range(10))
def test_an_update_that_fails_late_leaves_momenta_as_they_were(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, wanted = updates(4), engine_of("vectorized", width=4)
    good = wanted.execute(expected)
    tried, own = updates(4), engine_of("vectorized", width=4)
    monkeypatch.setattr(Tensor, "clone", failing_at(Tensor.clone, iter(range(10**6)), 3 * moment))
    found = own.execute(tried)
    monkeypatch.undo()
    assert own.width == 2
    for one, other, mine, theirs in zip(found, good, tried, expected, strict=True):
        assert_close(one, other, 1e-5)
        assert_close(slots_of(mine), slots_of(theirs), 1e-5)


def asked(device: torch.device, kind: str) -> Any:
    data = examples(2000, VECTOR, 0)
    moved = Examples(data.x.to(device), data.y.to(device))
    model = {name: leaf.to(device) for name, leaf in NETWORK.initialize(0).items()}
    if kind == "gradient":
        return GradientRequest(0, moved, model, cross_entropy, 1600, seed=0)
    return OutputRequest(0, moved.x, lambda x, task: task.network.logits(model, x), 1600)


@PRETENDED
@pytest.mark.parametrize("kind", ["gradient", "outputs"])
def test_gradients_and_outputs_are_computed_in_smaller_pieces(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    (expected,) = engine_of("looped").execute([asked(CPU, kind)])
    device_errors.note_smaller_pieces.cache_clear()
    with elsewhere() as device:
        ask, own = asked(device, kind), engine_of("looped", device)
        begun = context().live
        own.execute([ask])
        context().limit = begun + (context().most - begun) * 3 // 4
        for _ in range(2):
            (found,) = own.execute([ask])
            assert not isinstance(found, Exception)
            here = {"": found.cpu()} if kind == "outputs" else {name: leaf.cpu() for name, leaf in found.items()}
            assert_close(here, {"": expected} if kind == "outputs" else expected, 1e-6)
    assert caplog.text.count("for 1600 samples") == 1


@PRETENDED
@pytest.mark.parametrize("sent", [False, True])
def test_sums_have_the_same_bits_whenever_memory_is_short_for_once(sent: bool) -> None:
    trees = [{"a": torch.rand(5), "b": torch.rand(2, 2)} for _ in range(3)]

    def summed(moment: int) -> tuple[Tree, int]:
        """The mean, and how often memory was taken for it; there was too little at one of these times."""
        with elsewhere() as device:
            total = ExactSum()
            for tree in trees:
                total.add(Weighted({name: leaf.to(device) for name, leaf in tree.items()}, 7))
            begun = context().made
            context().failing = range(begun + moment, begun + moment + 1)
            found = (pickle.loads(pickle.dumps(total)) if sent else total).mean()
            return found, context().made - begun

    mean, made = summed(-1)
    assert made > 10
    for moment in range(made):
        assert_equal(summed(moment)[0], mean)


@PRETENDED
@pytest.mark.parametrize("alike", [False, True])
def test_sums_have_the_same_bits_in_pieces(alike: bool) -> None:
    trees = [{"a": torch.rand(40_000), "b": {"c": torch.rand(20_000)}} for _ in range(5)]
    trees = trees[:1] * 5 if alike else trees
    expected = ExactSum()
    for tree in trees:
        expected.add(Weighted(tree, 7))
    mean = expected.mean()

    def summed(device: torch.device, sent: bool) -> Tree:
        total = ExactSum()
        for tree in trees:
            there = {"a": tree["a"].to(device), "b": {"c": tree["b"]["c"].to(device)}}  # type: ignore[index]
            total.add(Weighted(there, 7))
        return pickle.loads(pickle.dumps(total)).mean() if sent else total.mean()  # type: ignore[no-any-return]

    with elsewhere() as device:
        summed(device, sent=False)
        most = context().most
    for share in (0.3, 0.4, 0.6, 0.8, 0.9):
        for sent in (False, True):
            with elsewhere(memory=int(share * most)) as device:
                assert_equal(summed(device, sent), mean)


@PRETENDED
@MODES
def test_nothing_of_an_update_stays_on_the_device_but_its_results(mode: str) -> None:
    with elsewhere() as device:
        requests, own = updates(3, device), engine_of(mode, device)
        before = context().live
        replies = own.execute(requests)
        kept = [leaf for one in replies for leaf in one.values()]
        kept += [leaf for one in requests for leaf in slots_of(one).values()]
        storages = {leaf.here.untyped_storage().data_ptr(): leaf.here.untyped_storage().nbytes() for leaf in kept}
        assert context().live - before == sum(storages.values())


@PRETENDED
@MODES
def test_of_updates_that_fail_nothing_stays_on_the_device(mode: str) -> None:
    def fails(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        task.loss(model, batch)
        raise ArithmeticError("made up")

    with elsewhere() as device:
        requests, own = updates(3, device, objective=fails), engine_of(mode, device)
        before = context().live
        replies = own.execute(requests)
        assert {type(one) for one in replies} == {ArithmeticError}
        assert context().live == before


ANCHORED = loss() + 0.1 * squared_distance(TRAINED, "anchor") + 0.3 * squared_cosine(TRAINED, "anchor")


@PRETENDED
@pytest.mark.parametrize("objective", [ANCHORED, cross_entropy], ids=["terms", "function"])
def test_of_updates_that_memory_ends_nothing_stays_on_the_device(objective: Any) -> None:
    def executed(moment: int) -> int:
        """How often memory was taken where it ends at a moment."""
        with elsewhere() as device:
            anchor = {name: leaf.to(device) for name, leaf in NETWORK.initialize(9).items()}
            asked = [replace(one, frozen={"anchor": anchor}) for one in updates(2, device, objective=objective)]
            own, begun, before = engine_of("looped", device), context().made, context().live
            context().failing = range(begun + moment, 10**9)
            found = own.execute(asked)
            if moment < 10**6:
                assert isinstance(found[-1], torch.OutOfMemoryError)
                del found[:-1], asked[:-1]
                gc.collect()
                assert context().live - before <= 0, moment
            return context().made - begun

    made = executed(10**6)
    assert made > 20
    for moment in range(0, made, max(made // 12, 1)):
        executed(moment)


@PRETENDED
@MODES
def test_after_a_round_and_an_evaluation_only_samples_stay_on_the_device(mode: str) -> None:
    with elsewhere() as device:
        own = ragged_toy(mode, device, **MOMENTUM)
        history(own)
        (host,) = own.client_hosts
        gc.collect()
        assert context().live == host._samples._recent.bytes
