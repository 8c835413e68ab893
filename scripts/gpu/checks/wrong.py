"""Part c: memory that runs out, a context that is lost, samples that do not fit."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from actors.hosting import samples
from actors.hosting.job import Job
from actors.probing.measure import measure
from actors.probing.memory import memory_of
from actors.probing.probe_calls import ProbeCall
from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.superfed import SuPerFed
from checks.bench import DEVICE, REHEARSAL, failing_device, federation, peak_bytes, play, scaled
from checks.correct import difference
from checks.running import Check, Record
from rayfl.engine.engine import EngineConfig
from rayfl.errors import ClientError, DeviceLostError
from rayfl.examples import InputSpec
from rayfl.models.zoo import CharLSTM, LeafCNN, TwoNN
from rayfl.params import to_numpy
from tests.support.elsewhere import context

_DIGITS, _LETTERS = InputSpec("image", (1, 28, 28), 10), InputSpec("image", (1, 28, 28), 62)
_MOMENTUM = {"momentum": 0.9, "persist_optimizer": True}


def _history(toy: Any) -> dict[str, Any]:
    """Two rounds: the server's tree, and the clients' states."""
    play(toy)
    play(toy)
    states = {str(client): state for client, state in toy.states().items()}
    return {"server": toy.server, **{f"state {client}": state for client, state in states.items()}}


def memory_short_for_once(record: Record) -> None:
    """Memory that is too little at one moment, early or late in a stack: nothing of the failed attempt is kept."""
    sizes = [30, 20, 20, 10, 30, 20, 20, 10]
    expected = _history(federation(FedAvg(), sizes, TwoNN(), _DIGITS, width=8, **_MOMENTUM))
    make = torch.empty_like
    # The stack's rows are copied when its results are taken out: the last clients' are the latest moment there is.
    for moment in (0, 3, 12, 40, 47):
        times = itertools.count()

        def failing(like: Tensor, *arguments: Any, when: int = moment, times: Any = times, **options: Any) -> Tensor:
            if next(times) == when:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return make(like, *arguments, **options)

        toy = federation(FedAvg(), sizes, TwoNN(), _DIGITS, width=8, **_MOMENTUM)
        with mock.patch.object(torch, "empty_like", failing):
            found = _history(toy)
        apart = difference(found, expected)
        width = toy.client_hosts[0].engine.width
        record.note(f"at copy {moment}", {"largest difference": apart, "width afterwards": width})
        assert apart <= 1e-5, f"memory that ends at copy {moment}: other models or momenta, by {apart:.3g}"
        assert REHEARSAL or width < len(sizes), f"memory did not end at copy {moment}"


def memory_too_small(record: Record) -> None:
    """A device with half the memory that a stack takes: narrower stacks, the same result."""
    sizes = [40] * scaled(400, 8)

    def made(device: torch.device) -> Any:
        return federation(FedAvg(), sizes, TwoNN(), _DIGITS, device=device, width=len(sizes))

    if REHEARSAL:
        with failing_device() as device:
            toy = made(device)
            play(toy)
            expected, most = to_numpy(toy.server), context().most
    else:
        toy = made(DEVICE)
        most = torch.cuda.memory_allocated() + (peak_bytes(lambda: play(toy)) or 0)
        expected = to_numpy(toy.server)
        del toy
        torch.cuda.empty_cache()
    record.note("bytes of the stack", most)
    with failing_device(most // 2) as device:
        toy = made(device)
        play(toy)
        width = toy.client_hosts[0].engine.width
        found = to_numpy(toy.server)
    apart = max(float(abs(found["model"][name] - expected["model"][name]).max()) for name in expected["model"])
    record.note("width afterwards", width)
    record.note("largest difference", apart)
    assert width < len(sizes), "the limit was not felt"
    assert apart <= 1e-5, f"other results, by {apart:.3g}"


def plan_against_peak(record: Record) -> None:
    """Bytes that a stack was planned with, from a measurement of a few clients, and those that it takes."""
    works: dict[str, tuple[Any, Any, InputSpec, int]] = {
        "fedavg, perceptron": (FedAvg(), TwoNN(), _DIGITS, 500),
        "superfed, perceptron": (SuPerFed(start=0.0), TwoNN(), _DIGITS, 300),
        "ditto, perceptron": (Ditto(), TwoNN(), _DIGITS, 300),
        "fedavg, convolutions": (FedAvg(), LeafCNN(), _LETTERS, 32),
        "fedavg, LSTM": (FedAvg(), CharLSTM(), InputSpec("tokens", (80,), 80, vocabulary=80), 32),
    }
    for name, (method, architecture, spec, clients) in works.items():
        clients = scaled(clients, 5)
        toy = federation(method, [40] * clients, architecture, spec, width=clients)
        (host,) = toy.client_hosts
        if not host.engine.vectorized:
            record.note(name, f"is not stacked: {host.engine.note}")
            continue
        model = next(iter(toy.server))
        some = tuple(range(min(12, clients)))
        call = ProbeCall(Job("local_update", "mean", 0, some), to_numpy({model: toy.server[model]}))
        config = EngineConfig(mode="vectorized", width=clients)
        found = measure(host, config, [call], memory_of(DEVICE), "this GPU")
        planned = clients * found.client_bytes
        toy = federation(method, [40] * clients, architecture, spec, width=clients)
        play(toy)  # samples stay on the device from here on: they are planned for apart
        taken = peak_bytes(lambda toy=toy: play(toy))  # type: ignore[misc]
        if taken is None:
            record.note(name, {"planned bytes": planned, "taken bytes": "a CPU's are not counted"})
            continue
        record.note(name, {"planned bytes": planned, "taken bytes": taken, "planned / taken": planned / taken})
        apart = abs(planned / taken - 1)
        record.goal(f"planned against taken bytes: {name}", "within 10 %", apart, apart <= 0.1)


def lost_context(record: Record) -> None:
    """A label out of range, which ends a GPU's context: the device is lost, and no client is to blame."""
    with failing_device() as device, mock.patch.object(samples, "check_examples"):
        toy = federation(FedAvg(), [20] * 6, TwoNN(), _DIGITS, device=device, width=6)
        x, y = toy.dataset._clients[3]  # type: ignore[attr-defined]
        toy.dataset._clients[3] = (x, torch.full_like(y, 99))  # type: ignore[attr-defined]
        for attempt in ("first", "second"):
            try:
                play(toy)
            except DeviceLostError as error:
                record.note(f"{attempt} round", str(error).splitlines()[0][:200])
                continue
            raise AssertionError(f"the {attempt} round went on after the context was lost")


def checked_labels(record: Record) -> None:
    """The same label where rayfl looks at samples before they reach the device: the client is named."""
    with failing_device() as device:
        toy = federation(FedAvg(), [20] * 6, TwoNN(), _DIGITS, device=device, width=6)
        x, y = toy.dataset._clients[3]  # type: ignore[attr-defined]
        toy.dataset._clients[3] = (x, torch.full_like(y, 99))  # type: ignore[attr-defined]
        try:
            play(toy)
            said = ""
        except ClientError as error:
            said = str(error)
    record.note("refused", said[:200])
    assert "client 3" in said, f"a label out of range was not refused: {said}"


def samples_larger_than_the_device(record: Record) -> None:
    """Clients with more samples than the device has memory for, with and without a limit for kept samples."""
    clients, size, network = 16, scaled(40_000, 100), TwoNN(hidden=(8,)) if REHEARSAL else TwoNN()
    every = clients * size * 2 * 4 * 28 * 28  # the test part repeats the training samples
    options: dict[str, Any] = {"batch_size": scaled(1000, 10)}

    def made(device: torch.device = DEVICE, data_memory: int | None = None) -> Any:
        return federation(
            FedAvg(), [size] * clients, network, _DIGITS, device=device, width=2, data_memory=data_memory, **options
        )

    whole = made()
    play(whole)
    expected = to_numpy(whole.server)
    del whole
    torch.cuda.empty_cache()
    room = every // 2
    for name, kept in (("a limit for kept samples", every // 6), ("no limit for kept samples", None)):
        with failing_device(room) as device:
            toy = made(device, kept)
            play(toy)
            found, held = to_numpy(toy.server), toy.client_hosts[0]._samples._recent.bytes
            del toy
        apart = max(float(abs(found["model"][path] - expected["model"][path]).max()) for path in expected["model"])
        record.note(name, {"bytes in all": every, "the device has": room, "kept": held, "largest difference": apart})
        assert kept is None or held <= kept, f"{held} bytes of samples are kept, where {kept} are allowed"
        assert apart <= 1e-5, f"other results, by {apart:.3g}"


CHECKS = (
    Check("memory_short_for_once", 60, "Memory that ends once, early or late", memory_short_for_once),
    Check("memory_too_small", 40, "Half the memory that a stack takes", memory_too_small),
    Check("plan_against_peak", 70, "Planned bytes against those taken", plan_against_peak),
    Check("lost_context", 40, "A context that is lost", lost_context),
    Check("checked_labels", 25, "Samples that would end a context", checked_labels),
    Check("samples_larger_than_the_device", 70, "More samples than memory", samples_larger_than_the_device),
)
