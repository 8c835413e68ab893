"""What a failed call means: an error of its code, or the death of its process."""

from __future__ import annotations

import threading

import pytest
import ray
from ray.exceptions import ActorDiedError, RayError, RaySystemError, RayTaskError

from actors.processes.pool import HostDiedError
from actors.processes.ray_errors import result_of
from rayfl.errors import ConfigError, DeviceLostError, MethodError, ResourceError


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


DEATH = """The actor died unexpectedly before finishing this task.
\tclass_name: ClientActor
\tactor_id: 5f00ba
\tpid: 4711
\tname: rayfl-host-03
\tnamespace: rayfl-run-1
\tip: 10.0.0.7
The actor died because its node has died. Node Id: c0ffee
\tthe actor's node was terminated expectedly: spot instance reclaimed
"""


def test_the_death_of_an_actor_says_which_one_where_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = ActorDiedError()
    monkeypatch.setattr(ActorDiedError, "__str__", lambda _: DEATH)
    with pytest.raises(HostDiedError) as raised:
        result(lost, monkeypatch)
    for word in ("rayfl-host-03", "10.0.0.7", "pid: 4711", "its node has died", "spot instance reclaimed"):
        assert word in raised.value.reason
    assert "5f00ba" not in raised.value.reason and "\n" not in raised.value.reason
    monkeypatch.setattr(ActorDiedError, "__str__", lambda _: "x" * 5000)
    with pytest.raises(HostDiedError) as raised:
        result(lost, monkeypatch)
    assert len(raised.value.reason) < 700


def test_an_actor_that_could_not_be_set_up_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "The actor died because of an error raised in its creation task, ray::Actor() (pid=1, ip=10.0.0.7, x=2)"
    monkeypatch.setattr(ActorDiedError, "__str__", lambda _: f"{said}\nOSError: no space left")
    with pytest.raises(ResourceError, match=r"^host 3 \(10\.0\.0\.7\) could not be set up: OSError: no space left"):
        result(ActorDiedError(), monkeypatch)


def test_other_errors_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^wrong$"):
        result(raised_in_an_actor(ConfigError("wrong")), monkeypatch)
    with pytest.raises(KeyError):
        result(raised_in_an_actor(KeyError("x")), monkeypatch)
    for lost in (ActorDiedError(), raised_in_an_actor(ActorDiedError()), raised_in_an_actor(DeviceLostError("gone"))):
        with pytest.raises(HostDiedError):
            result(lost, monkeypatch)
