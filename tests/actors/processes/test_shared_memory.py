"""Messages in memory that stays mapped: what is read stays what it is, and what nobody reads is used again."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.processes.shared_memory import LEAST_BYTES, Inbox, Outbox, Parcel

MIB = 1 << 20
PROGRAM = """
import sys, pickle
import numpy as np
from actors.processes.shared_memory import Inbox, Outbox
inbox, outbox = Inbox(), Outbox(64 << 20)
for line in sys.stdin:
    found = inbox.open(pickle.loads(bytes.fromhex(line)))
    parcel = outbox.pack({"doubled": found["array"] * 2, "name": found["name"]})
    print(pickle.dumps(parcel).hex(), flush=True)
"""


def message(fill: int, size: int = 200_000) -> dict[str, Any]:
    return {"name": f"message {fill}", "array": np.full(size, fill, np.int64)}


def packed(outbox: Outbox, value: Any, **options: Any) -> Parcel:
    parcel = outbox.pack(value, **options)
    assert parcel is not None
    return parcel


def test_another_process_reads_a_message_and_answers() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        outbox, inbox = Outbox(64 * MIB), Inbox()
        for fill in range(3):
            parcel = packed(outbox, message(fill))
            assert len(pickle.dumps(parcel)) < 1000
            print(pickle.dumps(parcel).hex(), file=process.stdin, flush=True)
            answer = inbox.open(pickle.loads(bytes.fromhex(process.stdout.readline())))
            outbox.free(parcel.serial)
            assert answer["name"] == f"message {fill}"
            np.testing.assert_array_equal(answer["doubled"], np.full(200_000, 2 * fill))
        process.stdin.close()
        process.wait()
        # What the dead process wrote can still be read.
        assert answer["doubled"][0] == 4
        with pytest.raises(OSError, match="No such file"):
            Inbox().open(Parcel(process.pid, 3, 99, MIB, b"", ()))


def test_arrays_keep_type_shape_and_alignment_and_are_read_only() -> None:
    value = {
        "matrix": np.arange(40_000, dtype=np.float32).reshape(200, 200),
        "odd": np.arange(3, dtype=np.int8),
        "flags": np.array([True, False]),
        "empty": np.empty((0, 5)),
        "strided": np.arange(10)[::2],
        "number": np.float64(0.5) * np.ones(()),
        "words": ["a", None, (1, 2.5)],
    }
    outbox = Outbox(4 * MIB)
    found = Inbox().open(packed(outbox, value))
    assert found["words"] == value["words"]
    for name in ("matrix", "odd", "flags", "empty", "strided", "number"):
        assert found[name].dtype == value[name].dtype
        np.testing.assert_array_equal(found[name], value[name])
    for name in ("matrix", "odd", "flags"):
        assert found[name].ctypes.data % 64 == 0
        with pytest.raises(ValueError, match="read-only"):
            found[name][0] = 1


def test_memory_is_used_again_only_when_it_was_freed() -> None:
    outbox, inbox = Outbox(64 * MIB), Inbox()
    first = packed(outbox, message(1))
    read = inbox.open(first)
    assert inbox.freed() == ()
    second = packed(outbox, message(2))
    assert second.serial != first.serial
    kept = read["array"][5:7]
    del read
    assert inbox.freed() == ()
    assert kept.tolist() == [1, 1]
    del kept
    assert inbox.freed() == (first.serial,)
    assert inbox.freed() == ()
    outbox.free(first.serial)
    assert packed(outbox, message(3)).serial == first.serial
    assert inbox.open(second)["array"][0] == 2


def test_a_message_opened_twice_is_freed_as_often() -> None:
    outbox, inbox = Outbox(64 * MIB), Inbox()
    parcel = packed(outbox, message(1))
    one, other = inbox.open(parcel), inbox.open(parcel)
    del one
    assert inbox.freed() == (parcel.serial,)
    assert other["array"][-1] == 1
    del other
    assert inbox.freed() == (parcel.serial,)


def test_memory_that_was_given_up_is_never_written_again() -> None:
    outbox, inbox = Outbox(64 * MIB), Inbox()
    parcel = packed(outbox, message(1))
    read = inbox.open(parcel)
    outbox.give_up(parcel.serial)
    outbox.free(parcel.serial)
    assert all(packed(outbox, message(fill)).serial != parcel.serial for fill in range(2, 6))
    assert (read["array"] == 1).all()


def test_what_is_too_small_too_large_or_too_much_travels_in_another_way() -> None:
    outbox = Outbox(4 * MIB)
    assert outbox.pack({"array": np.zeros(LEAST_BYTES - 64, np.uint8)}) is None
    assert outbox.pack({"no": "array"}, least=0) is None
    assert outbox.pack(np.zeros(2 * MIB + 1, np.uint8)) is None
    both = [packed(outbox, np.zeros(2 * MIB, np.uint8)) for _ in range(2)]
    assert outbox.pack(np.zeros(LEAST_BYTES, np.uint8)) is None
    outbox.free(both[0].serial)
    # A smaller message takes the room of a larger one, which stays as it is.
    assert packed(outbox, np.zeros(LEAST_BYTES, np.uint8)).serial == both[0].serial
    assert Outbox(0).pack(message(1)) is None
    assert packed(Outbox(4 * MIB), np.zeros(16, np.uint8), least=1).places == ((0, 16),)


def test_larger_messages_replace_the_memory_of_smaller_ones() -> None:
    outbox = Outbox(4 * MIB)
    small = packed(outbox, np.zeros(MIB, np.uint8))
    outbox.free(small.serial)
    large = packed(outbox, np.zeros(2 * MIB, np.uint8))
    assert large.serial != small.serial
    outbox.free(large.serial)
    assert packed(outbox, np.zeros(2 * MIB, np.uint8)).serial == large.serial


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_a_machine_without_such_memory_or_without_any_left_sends_in_another_way(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("none")

    monkeypatch.setattr(os, call, refuse)
    assert Outbox(64 * MIB).pack(message(1)) is None
    monkeypatch.delattr(os, call)
    assert Outbox(64 * MIB).pack(message(1)) is None


def test_descriptors_are_closed_with_the_outbox() -> None:
    before = len(os.listdir("/proc/self/fd"))
    outbox = Outbox(64 * MIB)
    parcels = [packed(outbox, message(fill)) for fill in range(4)]
    assert len(os.listdir("/proc/self/fd")) == before + 8  # Python maps a copy of each
    read = Inbox().open(parcels[0])
    del outbox
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert (read["array"] == 0).all()


def test_something_else_in_the_place_of_a_segment_is_refused() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(OSError, match=f"no segment of process {os.getpid()}"):
            Inbox().open(Parcel(os.getpid(), reading, 10**6, MIB, b"", ()))
    finally:
        os.close(reading)
        os.close(writing)
    with Path(__file__).open("rb") as file, pytest.raises(OSError, match="no segment"):
        Inbox().open(Parcel(os.getpid(), file.fileno(), 10**6, MIB, b"", ()))


def test_a_reader_forgets_segments_that_it_has_not_heard_of_for_long() -> None:
    outbox, inbox = Outbox(64 * MIB), Inbox()
    kept = inbox.open(packed(outbox, message(7)))
    for fill in range(20):
        parcel = packed(outbox, message(fill))
        assert inbox.open(parcel)["array"][0] == fill
        outbox.give_up(parcel.serial)
    assert (kept["array"] == 7).all()
