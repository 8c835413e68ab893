"""What a failed call means: an error of its code, or the death of its process."""

from __future__ import annotations

import threading

import pytest
import ray
from ray.exceptions import ActorDiedError, RayError, RaySystemError, RayTaskError

from actors.processes.pool import HostDiedError
from actors.processes.ray_errors import result_of
from rayfl.errors import ConfigError, DeviceLostError, MethodError


class OfTwo(Exception):
    """An error that pickle writes, but cannot make again."""

    def __init__(self, name: str, value: int) -> None:
        super().__init__(f"{name} is {value}")


class Locked(Exception):
    """An error that pickle cannot write."""

    def __init__(self) -> None:
        super().__init__("it is locked")
        self.lock = threading.Lock()


def raised_in_an_actor(cause: Exception) -> RayError:
    """What arrives of an error that an actor's method raised."""
    trace = f'Traceback (most recent call last):\n  File "mine.py", line 7, in train\n{type(cause).__name__}: {cause}'
    sent = RayTaskError("run", trace, cause, "actor", 1, "127.0.0.1")
    found = RayError.from_bytes(sent.to_bytes())
    return found.as_instanceof_cause() if isinstance(found, RayTaskError) else found


def result(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(handle: object) -> None:
        raise error

    monkeypatch.setattr(ray, "get", failing)
    result_of(object(), 3)


@pytest.mark.parametrize(
    ("error", "words"), [(OfTwo("width", 5), "host 3: OfTwo: width is 5"), (Locked(), "host 3: Locked: it is locked")]
)
def test_an_error_that_cannot_be_sent_is_no_death_of_its_host(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MethodError, match=words) as raised:
        result(raised_in_an_actor(error), monkeypatch)
    assert "mine.py" in raised.value.__notes__[0]


def test_so_it_is_with_older_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    said = RuntimeError("Failed to unpickle serialized exception")
    with pytest.raises(MethodError):
        result(RaySystemError(said), monkeypatch)
    with pytest.raises(HostDiedError):
        result(RaySystemError(RuntimeError("the raylet is gone")), monkeypatch)


def test_other_errors_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^wrong$"):
        result(raised_in_an_actor(ConfigError("wrong")), monkeypatch)
    with pytest.raises(KeyError):
        result(raised_in_an_actor(KeyError("x")), monkeypatch)
    for lost in (ActorDiedError(), raised_in_an_actor(ActorDiedError()), raised_in_an_actor(DeviceLostError("gone"))):
        with pytest.raises(HostDiedError):
            result(lost, monkeypatch)
