"""Part a: what stacks of clients do beside computing: nothing is waited for in a step, and rarely in a round."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.scaffold import Scaffold
from algorithms.superfed import SuPerFed
from checks.bench import DEVICE, REHEARSAL, failing_device, federation, play
from checks.running import Check, Record
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.augmentation import Augmentation
from rayfl.engine.stacks import vectorized
from rayfl.engine.updates.feed import Feed
from rayfl.examples import InputSpec
from rayfl.models.zoo import CharLSTM, LeafCNN, TwoNN
from tests.support.launches import Launches

_DIGITS, _LETTERS = InputSpec("image", (1, 28, 28), 10), InputSpec("image", (1, 28, 28), 62)
_WORKS: dict[str, tuple[Any, Any, InputSpec]] = {
    "fedavg, perceptron": (FedAvg(), TwoNN(), _DIGITS),
    "superfed, perceptron": (SuPerFed(start=0.0), TwoNN(), _DIGITS),
    "ditto, perceptron": (Ditto(), TwoNN(), _DIGITS),
    "scaffold, perceptron": (Scaffold(momentum_on_corrected=True), TwoNN(), _DIGITS),
    "fedavg, convolutions": (FedAvg(), LeafCNN(), _LETTERS),
    "fedavg, LSTM": (FedAvg(), CharLSTM(), InputSpec("tokens", (20,), 80, vocabulary=80)),
    "fedavg, augmented images": (FedAvg(), LeafCNN(), _LETTERS),
}
_CHANGES = {"fedavg, augmented images": Augmentation(AugmentConfig(crop=2, flip=True), torch.zeros(1))}


@contextmanager
def _refusing_waits() -> Iterator[None]:
    """In its body PyTorch raises an error whenever the host would wait for the device."""
    if not REHEARSAL:
        torch.cuda.set_sync_debug_mode("error")
    try:
        with Launches() as counted:
            yield
        assert not counted.waits, f"waits for {dict(counted.waits)}"
    finally:
        if not REHEARSAL:
            torch.cuda.set_sync_debug_mode("default")


def _guarded(work: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*arguments: Any, **options: Any) -> Any:
        with _refusing_waits():
            return work(*arguments, **options)

    return guarded


@contextmanager
def _steps_that_must_not_wait() -> Iterator[list[str]]:
    """Guards the steps of all kinds of stacks, and the gathering of their mini-batches; yields the kinds."""
    kinds = [kind for kind in vars(vectorized).values() if isinstance(kind, type) and hasattr(kind, "step")]
    kinds = [kind for kind in kinds if not getattr(kind, "_is_protocol", False)]
    with mock.patch.object(Feed, "batch", _guarded(Feed.batch)):
        for kind in kinds:
            mock.patch.object(kind, "step", _guarded(kind.step)).start()
        try:
            yield [kind.__name__ for kind in kinds]
        finally:
            mock.patch.stopall()


def steps_do_not_wait(record: Record) -> None:
    """Under torch.cuda.set_sync_debug_mode("error"), stacked steps of several methods and networks."""
    bad: dict[str, str] = {}
    for name, (method, architecture, spec) in _WORKS.items():
        with failing_device() as device:
            changes = _CHANGES.get(name)
            toy = federation(method, [23, 20, 20, 8], architecture, spec, device=device, width=4, augmentation=changes)
            if not toy.client_hosts[0].engine.vectorized:
                record.note(name, "is not stacked")
                continue
            play(toy)  # what libraries set up when they are first used may wait
            with _steps_that_must_not_wait() as kinds:
                try:
                    play(toy)
                except Exception as error:
                    bad[name] = f"{type(error).__name__}: {error}"[-400:]
    record.note("kinds of stacks", kinds)
    record.note("compared", len(_WORKS))
    assert not bad, f"{bad}"


def waits_of_a_round(record: Record) -> None:
    """How often a round of one stack waits for the device, with 8 clients and with 40."""
    for name in ("fedavg, perceptron", "superfed, perceptron", "ditto, perceptron"):
        method, architecture, spec = _WORKS[name]
        found = []
        for clients in (8, 40):
            with failing_device() as device:
                toy = federation(method, [20] * clients, architecture, spec, device=device, width=clients)
                play(toy)
                play(toy)
                found.append(_waits(toy))
        record.note(name, found)
        assert found[0] == found[1], f"{name}: {found[0]} for 8 clients, {found[1]} for 40"


def _waits(toy: Any) -> int:
    """How often the host waits for the device in a round."""
    if REHEARSAL:
        with Launches() as counted:
            play(toy)
        return sum(counted.waits.values())
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            play(toy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


def fallback_paths(record: Record) -> None:
    """Networks and objectives that cannot be stacked, and stacks that fail, train one by one with the same result."""
    from checks.correct import difference
    from tests.models.test_zoo import SMALL

    architecture, spec = SMALL["mobilenet"]
    single = federation(FedAvg(), [9, 7], architecture, spec, mode="looped")
    both = federation(FedAvg(), [9, 7], architecture, spec)
    play(single)
    play(both)
    engine = both.client_hosts[0].engine
    record.note("batch normalization", "stacked" if engine.vectorized else engine.note)
    apart = difference(both.server, single.server)
    assert apart <= 1e-4, f"with batch normalization: differs by {apart:.3g}"

    def failing(*arguments: Any) -> Any:
        raise RuntimeError("stacks fail here")

    expected = federation(FedAvg(), [30, 20, 10], TwoNN(), _DIGITS, mode="looped")
    found = federation(FedAvg(), [30, 20, 10], TwoNN(), _DIGITS)
    play(expected)
    with mock.patch.object(vectorized, "train", failing):
        play(found)
    apart = difference(found.server, expected.server)
    record.note("a stack that fails as a whole, against clients one by one", apart)
    assert apart == 0.0, "clients of a failed stack do not begin with what they were given"
    record.note("device", str(DEVICE))


CHECKS = (
    Check("steps_do_not_wait", 25, "Stacked steps under set_sync_debug_mode('error')", steps_do_not_wait),
    Check("waits_of_a_round", 20, "How often a round waits for the device, whatever its clients", waits_of_a_round),
    Check("fallback_paths", 25, "What cannot be stacked, or fails stacked, is trained one by one", fallback_paths),
)
