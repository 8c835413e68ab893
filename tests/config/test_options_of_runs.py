"""Options of clusters, storage and tracking have their effect in a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import cluster.run
import rayfl
from actors.hosting.samples import Samples
from rayfl.errors import ResourceError
from rayfl.examples import Examples
from rayfl.params import leaves
from tests.support.experiments import outcome, small_experiment


class After(rayfl.Callback):
    """Calls something after every round."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self._look = look
        self.seen: list[Any] = []

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self.seen.append(self._look())


def run(folder: Path, method: str = "scaffold", look: Callable[[], Any] = bool, **changes: Any) -> list[Any]:
    """Runs a small experiment in this process; returns what was seen after every round."""
    listener = After(look)
    where = changes.pop("cluster", {})
    config = small_experiment(folder, "run", method, **({"backend": "inline"} | where)) | changes
    rayfl.run(config, callbacks=[listener])
    return listener.seen


@pytest.mark.parametrize(("every", "keep", "left"), [(1, 1, [4]), (1, 3, [2, 3, 4]), (2, 2, [2, 4]), (3, 2, [3, 4])])
def test_keep_commits_and_commit_every(every: int, keep: int, left: list[int], tmp_path: Path) -> None:
    run(tmp_path, storage={"commit_every": every, "keep_commits": keep})
    found = sorted(path.name for path in (tmp_path / "run" / "commits").glob("manifest-*"))
    assert found == [f"manifest-{rounds:06d}.json" for rounds in left]


@pytest.mark.parametrize("tensorboard", [True, False])
def test_tensorboard(tensorboard: bool, tmp_path: Path) -> None:
    run(tmp_path, tracking={"tensorboard": tensorboard})
    assert bool(list((tmp_path / "run").glob("events.out.tfevents.*"))) == tensorboard


@pytest.mark.parametrize("threads_per_actor", [1, 2])
def test_threads_per_actor(threads_per_actor: int, tmp_path: Path) -> None:
    seen = run(tmp_path, look=torch.get_num_threads, cluster={"threads_per_actor": threads_per_actor})
    assert seen == [threads_per_actor] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_device(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"cluster\.device is cuda, but this process sees no GPU"):
        run(tmp_path, cluster={"device": "cuda"})
    assert len(run(tmp_path, cluster={"device": "cpu"})) == 4


@pytest.mark.parametrize("state_memory", ["auto", 1])
def test_state_memory_and_spill_dir(state_memory: Any, tmp_path: Path) -> None:
    place = tmp_path / "spilled"
    place.mkdir()

    def spilled() -> int:
        return len(list(place.rglob("*.safetensors")))

    seen = run(tmp_path, look=spilled, cluster={"state_memory": state_memory, "spill_dir": str(place)})
    assert (max(seen) > 0) == (state_memory == 1)
    with pytest.raises(ResourceError, match=r"cluster\.spill_dir=.*missing cannot be written to .*No such file"):
        run(tmp_path / "other", cluster={"state_memory": state_memory, "spill_dir": str(place / "missing")})


def test_data_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    of = Samples.of

    def noting(self: Samples, client: int) -> Mapping[str, Examples]:
        held.append(self.held_bytes)
        return of(self, client)

    monkeypatch.setattr(Samples, "of", noting)
    run(tmp_path / "auto")
    assert held == sorted(held), "what was loaded stays"
    most = max(held)
    held.clear()
    run(tmp_path / "little", cluster={"data_memory": 1})
    assert 0 < 4 * max(held) < most


def test_stop_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = cluster.run.stop_requests
    given: list[float] = []

    def noting(grace_s: float) -> Any:
        given.append(grace_s)
        return requests(grace_s)

    monkeypatch.setattr(cluster.run, "stop_requests", noting)
    run(tmp_path, cluster={"stop_grace_s": 7})
    assert given == [7]


@pytest.mark.parametrize(
    "option", [{"exchange": "derangement"}, pytest.param({"cluster_outputs": "logits"}, marks=pytest.mark.slow)]
)
def test_options_of_fedme(option: dict[str, Any], tmp_path: Path) -> None:
    servers = []
    for name, more in (("default", {}), ("other", option)):
        method = {"name": "fedme", "cluster_rounds": [1], "finetune_epochs": 1, **more}
        run(tmp_path / name, "fedme", algorithm=method)
        servers.append(dict(leaves(outcome(tmp_path / name / "run").server)))
    one, other = servers
    assert any(not torch.equal(one[path], other[path]) for path in one if isinstance(one[path], torch.Tensor))
