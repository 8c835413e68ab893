"""What errors of devices are taken for, and how work is cut into pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.hosting import outgoing
from algorithms.fedavg import FedAvg
from rayfl.diagnosis.device_errors import Pieces, check_context, ran_out_of_memory
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import DeviceLostError
from rayfl.messages.compressors import TopK
from rayfl.messages.privacy import PrivacyConfig
from tests.support.elsewhere import PRETENDED, elsewhere
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, random_clients

LIMIT = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    "text",
    [
        LIMIT,
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "not enough workspace memory available for this convolution",
    ],
)
def test_all_libraries_run_out_of_memory_alike(text: str) -> None:
    assert ran_out_of_memory(RuntimeError(text))
    for how in ("__cause__", "__context__"):
        caused = ValueError("a method's own words")
        setattr(caused, how, RuntimeError(text))
        assert ran_out_of_memory(caused)
    caused.__suppress_context__ = True
    assert not ran_out_of_memory(caused)


@pytest.mark.parametrize(
    "text",
    [
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "GET was unable to find an engine to execute this computation",
    ],
)
def test_errors_that_say_nothing_are_for_want_of_memory_where_there_is_little(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not ran_out_of_memory(RuntimeError(text))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for free, short in ((1 << 30, True), (8 << 30, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 80 << 30))
        assert ran_out_of_memory(RuntimeError(text)) == short


def test_where_all_calls_fail_memory_is_not_said_to_be_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> tuple[int, int]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    assert not ran_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory"),
        IndexError("Target 9 is out of bounds."),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        RuntimeError("CUDA error: device-side assert triggered"),
    ],
)
def test_other_errors_are_not_for_want_of_memory(error: Exception) -> None:
    assert not ran_out_of_memory(error)


def test_a_device_that_computes_is_not_lost_whatever_went_wrong_on_it() -> None:
    with elsewhere() as device:
        for error in (None, ValueError("mine"), RuntimeError("CUDA error: invalid argument")):
            check_context(device, error)
    check_context(CPU, RuntimeError("CUDA error: device-side assert triggered"))
    lost = DeviceLostError("said before")
    with pytest.raises(DeviceLostError, match=r"^said before$"):
        check_context(CPU, lost)


def test_work_in_pieces() -> None:
    done: list[slice] = []

    def work(here: slice) -> None:
        if here.stop - here.start > 3:
            raise torch.OutOfMemoryError(LIMIT)
        done.append(here)

    pieces = Pieces("things")
    pieces.over(10, work)
    assert [(here.start, here.stop) for here in done] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    pieces.over(0, work)
    with pytest.raises(ZeroDivisionError):
        pieces.over(1, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    tried: list[slice] = []
    with pytest.raises(torch.OutOfMemoryError):
        Pieces("things").over(3, lambda here: (tried.append(here), work(slice(0, 9)))[1])
    assert [here.stop - here.start for here in tried] == [3, 2, 1, 1]


@PRETENDED
@pytest.mark.parametrize(("what", "failing", "least"), [("compression", 3, 9), ("privacy", 1, 3)])
def test_a_message_that_does_not_fit_is_made_in_a_smaller_stack(
    what: str, failing: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def one_fails(function: Any) -> Any:
        def called(*given: Any, **options: Any) -> Any:
            calls.append(function)
            if len(calls) == failing:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
            return function(*given, **options)

        return called

    owner, name = (TopK, "encoded") if what == "compression" else (outgoing, "limited")
    monkeypatch.setattr(owner, name, one_fails(getattr(owner, name)))
    private = {"privacy": PrivacyConfig(clip_norm=1.0, noise_multiplier=1.0)}
    options: dict[str, Any] = {"compression": TopK()} if what == "compression" else private
    train = TrainConfig(rounds=4, clients_per_round="all", local_epochs=1, batch_size=5, lr=0.1)
    with elsewhere() as device:
        data = random_clients([6] * 8, seed=1)
        toy = Toy(FedAvg(aggregation="uniform"), data, two_layers(), train, mode="vectorized", device=device, **options)
        toy.client_hosts[0].engine.width = 8
        toy.step()
        assert toy.client_hosts[0].engine.width == 4
    assert len(calls) >= least  # the stack's, and those of its halves
