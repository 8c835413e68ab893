"""What the errors of a device mean: its memory ran out, or its context is lost; and work in pieces that fit into it."""

from __future__ import annotations

import gc
import logging
import re
import traceback
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from rayfl.errors import DeviceLostError

_log = logging.getLogger(__name__)
_OUT_OF_MEMORY = re.compile(
    r"(CUDA|HIP|XPU).*out of memory"
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CURAND|CUFFT)_(STATUS_)?ALLOC(ATION)?_FAILED"
    r"|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"
    r"|not enough workspace"
)
_PERHAPS_OUT_OF_MEMORY = re.compile(
    r"(CUBLAS|CUDNN|CUSOLVER)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)"
    r"|unable to find an engine to execute this computation"
)
"""Libraries make handles and workspaces of their own, and say little when there is no room for them."""
_LITTLE = 20
"""Memory is short where less than a twentieth of it is free."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that a device's memory did not suffice, or was raised because of one that does."""
    if _speaks_of_memory(error):
        return True
    reason = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return reason is not None and ran_out_of_memory(reason)


def _speaks_of_memory(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    known = isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(text)
    return bool(known or (_PERHAPS_OUT_OF_MEMORY.search(text) and _memory_is_short()))


def _memory_is_short() -> bool:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        return False  # the context is lost: all calls fail
    return free * _LITTLE < total


def memory_beside() -> str:
    """Returns whose a GPU's memory is, as an addition to a sentence; empty where there is none in use, or it is lost.

    Nothing tells the context of this process from other processes, which may be the run's own actors.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    try:
        free, total = torch.cuda.mem_get_info()
        beside = max(total - free - torch.cuda.memory_reserved(), 0)
    except RuntimeError:
        return ""  # the context is lost
    return (
        f" (of the GPU's {total / 2**30:.1f} GiB, {beside / 2**30:.1f} are not this actor's tensors: its CUDA context, "
        "other actors, and programs that are not rayfl's)"
    )


def free_device_memory(*errors: BaseException) -> None:
    """Returns memory of devices that nothing refers to any more.

    Args:
        errors: of failed attempts; their tracebacks would keep the tensors of these.
    """
    for error in errors:
        traceback.clear_frames(error.__traceback__)
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.is_initialized() and (give_back := getattr(torch._C, "_host_emptyCache", None)):  # type: ignore[no-untyped-call]
        give_back()  # pinned memory, which may be what ran out


def check_context(device: torch.device, error: Exception | None = None) -> None:
    """Waits for a device, and makes sure that it still computes; CPUs always do.

    After an illegal access or a failed assertion a GPU answers every call of its process with that error, and only a
    new process can go on.

    Args:
        device: where to compute.
        error: what went wrong before; what computes with libraries is then tried as well.

    Raises:
        DeviceLostError: when it does not, or that was what went wrong.
    """
    if isinstance(error, DeviceLostError):
        raise error
    if device.type == "cpu":
        return
    try:
        ones = torch.ones(2, 2, device=device)
        if error is not None:
            ones = torch.conv1d(torch.mm(ones, ones), ones[:, :, None])
        ones.sum().item()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as found:
        if _speaks_of_memory(found):  # itself: what is being handled may be a lack of memory before
            return
        reason = (str(error or found).strip().splitlines() or [type(found).__name__])[0]
        raise DeviceLostError(f"this process can no longer compute on {device}: {reason}") from found


class Pieces:
    """Work in pieces as large as the device's memory has room for, which is learned from those that were too large.

    Args:
        what: the things that are counted, in the plural.
        most: how many are worked on at a time, at most; None for no limit but the memory.
    """

    def __init__(self, what: str, most: int | None = None) -> None:
        self._what = what
        self._most = most

    def over(self, size: int, work: Callable[[slice], None]) -> None:
        """Works on consecutive pieces of ``size`` things; a piece that is too large is halved.

        Args:
            size: how many there are.
            work: does those of a slice. It changes nothing before it has computed everything.
        """
        start, again = 0, False
        while start < size:
            stop = min(start + (self._most or size), size)
            try:
                work(slice(start, stop))
                start, again = stop, False
                continue
            except Exception as error:
                if again or not ran_out_of_memory(error):
                    raise
            # Not in the handler: until it is left, the error keeps the tensors of the failed attempt.
            free_device_memory()
            again = stop - start == 1
            if not again:
                self._most = (stop - start + 1) // 2
                note_smaller_pieces(self._what, stop - start, self._most)

    def of(self, rows: Tensor, work: Callable[[Tensor], None]) -> None:
        """Works on consecutive rows of a tensor as :meth:`over` does on slices.

        Args:
            rows: the tensor.
            work: is given some of its rows.
        """
        self.over(len(rows), lambda here: work(rows[here]))


@cache
def note_smaller_pieces(what: str, tried: int, most: int) -> None:
    """Logs, once for the same numbers, that the device's memory forces smaller pieces.

    Args:
        what: what the pieces are of, in the plural.
        tried: how many did not fit.
        most: how many are tried next.
    """
    _log.warning(
        "the device's memory is too small for %d %s at a time: %d from now on%s", tried, what, most, memory_beside()
    )
