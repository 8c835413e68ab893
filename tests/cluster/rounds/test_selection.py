"""Runs whose clients are chosen by what is known of them: whom, by which losses, at which cost, and what survives."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

import rayfl
from actors.hosting.scoring import Scorer
from algorithms.fedavg import FedAvg
from algorithms.registry import METHODS, Experiment
from cluster.replay import participants as replayed
from cluster.rounds.forking import fork
from rayfl.config.loading import load_config
from rayfl.engine.client import Client
from rayfl.errors import ClientError, ConfigError, RunError
from rayfl.experiment.parts import Parts
from rayfl.metrics.moments import moments_of
from rayfl.params import Tree, num_bytes
from rayfl.runs.finding import load_run
from rayfl.runs.folder import open_run
from rayfl.runs.participation import participants
from rayfl.selection.known import Known
from rayfl.system.schedule import Clock
from tests.support.experiments import Interrupt, assert_equal, outcome

POWER = {"name": "power_of_choice", "candidates": 8}
EACH: dict[str, dict[str, Any]] = {
    "power": POWER,
    "last": {**POWER, "losses": "last"},
    "active": {"name": "active"},
    "oort": {"name": "oort", "exploration": 0.6},
    "own": {"name": f"{__name__}:least_trained", "losses": "all"},
}


def least_trained(known: Known) -> np.ndarray:
    """The clients that were there least often; of these the ones with the smallest losses."""
    assert np.isfinite(known.losses[known.able]).all()
    order = np.lexsort((known.losses[known.able], known.times[known.able]))
    return known.able[order[: known.size]]


def experiment(folder: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    """Twelve clients of digits, three of which take part in each of six rounds."""
    content = {
        "name": name,
        "storage_path": str(folder),
        "dataset": {"name": "digits"},
        "partition": {"name": "dirichlet", "num_clients": 12, "alpha": 0.5},
        "model": {"name": "two_nn", "hidden": [12]},
        "algorithm": {"name": "fedavg"},
        "train": {"rounds": 6, "clients_per_round": 3, "local_epochs": 1, "batch_size": 16, "lr": 0.1},
        "selection": POWER,
        "evaluation": {"every": 3},
        "tracking": {"tensorboard": False},
        "cluster": {"backend": "inline"},
    }
    train = {**content["train"], **changes.pop("train", {})}
    return {**content, **changes, "train": train}


def cohorts(folder: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row in pq.read_table(folder / "cohorts.parquet").to_pylist():
        found.setdefault(row["round"], []).append(row["client"])
    return found


def assert_same_run(left: Path, right: Path) -> None:
    assert pq.read_table(left / "cohorts.parquet").equals(pq.read_table(right / "cohorts.parquet"))
    one, other = outcome(left), outcome(right)
    assert_equal(one.server["model"], other.server["model"])
    assert one.clients.equals(other.clients)
    assert one.rounds.equals(other.rounds)


@pytest.mark.parametrize("selection", EACH.values(), ids=EACH.keys())
@pytest.mark.first_case
def test_an_interrupted_run_chooses_the_same_clients(tmp_path: Path, selection: dict[str, Any]) -> None:
    rayfl.run(experiment(tmp_path, "whole", selection=selection))
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(experiment(tmp_path, "parts", selection=selection), callbacks=[Interrupt(after=3)])
    rayfl.run(experiment(tmp_path, "parts", selection=selection))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    found = cohorts(tmp_path / "whole")
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert all(len(set(cohort)) == 3 for cohort in found.values())


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("selection", ["power", "oort"])
def test_actors_choose_the_clients_of_one_process(tmp_path: Path, selection: str) -> None:
    rayfl.run(experiment(tmp_path, "inline", selection=EACH[selection]))
    rayfl.run(experiment(tmp_path, "ray", selection=EACH[selection], cluster={"num_actors": 2}))
    assert_same_run(tmp_path / "inline", tmp_path / "ray")


def test_candidates_with_the_greatest_losses_take_part(tmp_path: Path) -> None:
    """Drawn again, and scored by hand at the initial model."""
    content = experiment(tmp_path)
    rayfl.run(content)
    parts = Parts(load_config(Experiment, content, {}))
    model, samples = parts.initial_server()["model"], parts.dataset.sizes()[:, 0]
    losses = []
    for client in range(12):
        examples = parts.dataset.load(client)["train"]
        x = examples.x.float() / 255 if examples.x.dtype == torch.uint8 else examples.x
        logits = parts.task.network.logits(model, x, training=False)
        losses.append(float(F.cross_entropy(logits.double(), examples.y)))
    generator = parts.context.streams.generator("selection", 0)
    candidates = generator.choice(12, size=8, replace=False, p=samples / samples.sum())
    expected = sorted(sorted(candidates.tolist(), key=lambda client: -losses[client])[:3])
    first = [row for row in pq.read_table(tmp_path / "run" / "cohorts.parquet").to_pylist() if row["round"] == 1]
    assert [row["client"] for row in first] == expected
    assert [row["loss"] for row in first] == pytest.approx([losses[client] for client in expected], rel=1e-6)


@pytest.mark.slow
def test_what_the_choice_costs_is_counted(tmp_path: Path) -> None:
    for name, selection in {"uniform": {"name": "uniform"}, **EACH}.items():
        rayfl.run(experiment(tmp_path, name, selection=selection))
    traffic = {}
    for name in ("uniform", *EACH):
        last = pq.read_table(tmp_path / name / "rounds.parquet").to_pylist()[-1]
        traffic[name] = last["bytes_down"], last["bytes_up"]
    down, up = traffic["uniform"]
    server = Parts(load_config(Experiment, experiment(tmp_path), {})).initial_server()
    model = num_bytes(server)
    assert down == 6 * 3 * model
    assert traffic["power"] == (down + 6 * 5 * model, up + 6 * 8 * 8)  # five of eight candidates in vain
    assert traffic["last"] == traffic["active"] == traffic["oort"] == (down, up + 6 * 3 * 8)
    assert traffic["own"] == (down + 6 * 9 * model, up + 6 * 12 * 16)
    assert not (tmp_path / "uniform" / "cohorts.parquet").exists()


class FirstFails(FedAvg):
    """The clients of the first half find their losses, and fail in training."""

    name: str = "first-fails"

    async def local_update(self, client: Client, model: Tree) -> Any:
        if client.id < 6:
            raise RuntimeError("out of order")
        return await super().local_update(client, model)


def test_what_clients_received_that_then_failed_is_counted(tmp_path: Path) -> None:
    rayfl.run(
        experiment(
            tmp_path, algorithm={"name": f"{__name__}:FirstFails"}, clients={"on_error": "skip"}, train={"rounds": 1}
        )
    )
    assert pq.read_table(tmp_path / "run" / "skipped.parquet").num_rows
    last = pq.read_table(tmp_path / "run" / "rounds.parquet").to_pylist()[-1]
    model = num_bytes(Parts(load_config(Experiment, experiment(tmp_path), {})).initial_server())
    assert last["bytes_down"] == 8 * model  # the eight candidates, those that failed among them


@pytest.mark.parametrize("method", ["superfed", "fedrep", "floco", "scaffold", "fedphp"])
@pytest.mark.first_case
def test_methods_of_all_kinds_have_chosen_clients(tmp_path: Path, method: str) -> None:
    rayfl.run(experiment(tmp_path, algorithm={"name": method}, selection=EACH["oort"], train={"momentum": 0.0}))
    table = pq.read_table(tmp_path / "run" / "cohorts.parquet")
    assert table.num_rows == 18
    assert table["loss"].null_count == 0


def test_who_took_part_is_known_afterwards(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path))
    run = load_run(str(tmp_path / "run"), METHODS)
    known = participants(run)
    assert known is not None
    both = list(zip(known["round"].to_pylist(), known["client"].to_pylist(), strict=True))
    assert both == [(round, client) for round, cohort in cohorts(tmp_path / "run").items() for client in cohort]
    opened = open_run(str(tmp_path / "run"), Experiment)
    assert replayed(opened, 2) == cohorts(tmp_path / "run")[2]


def test_devices_record_who_took_part_and_oort_knows_their_times(tmp_path: Path) -> None:
    system = {"name": "sampled", "over_sampling": 1.5, "dropout": 0.2}
    rayfl.run(experiment(tmp_path, "uniform", selection={"name": "uniform"}, system=system))
    fast = {"name": "oort", "preferred_s": 1.0, "pacer_step_s": 0.5, "pacer_rounds": 1}
    rayfl.run(experiment(tmp_path, "oort", selection=fast, system=system))
    seconds = {}
    for name in ("uniform", "oort"):
        known = participants(load_run(str(tmp_path / name), METHODS))
        assert known is not None
        assert 6 <= known.num_rows <= 18
        seconds[name] = pq.read_table(tmp_path / name / "rounds.parquet")["simulated_s"].to_pylist()[-1]
    assert seconds["oort"] < seconds["uniform"]


def test_rounds_of_tiers_are_of_devices_alike_and_go_on_with_what_is_known(tmp_path: Path) -> None:
    tiers = {"name": "tifl", "tiers": 3, "interval": 1, "credits": [3, 2, 3]}
    content = {"selection": tiers, "system": {"name": "sampled"}}
    rayfl.run(experiment(tmp_path, "whole", **content))
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(experiment(tmp_path, "parts", **content), callbacks=[Interrupt(after=3)])
    rayfl.run(experiment(tmp_path, "parts", **content))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    found = cohorts(tmp_path / "whole")
    parts = Parts(load_config(Experiment, experiment(tmp_path, **content), {}))
    assert parts.schedule is not None
    order = sorted(range(12), key=lambda client: parts.schedule.time_us(client, Clock()))  # type: ignore[union-attr]
    chosen = [{order.index(client) // 4 for client in cohort} for cohort in found.values()]
    assert len(chosen) == 6 and all(len(tiers) == 1 for tiers in chosen)
    times = Counter(tier for tiers in chosen for tier in tiers)
    assert len(times) > 1 and all(times[tier] <= most for tier, most in enumerate((3, 2, 3)))


@pytest.mark.slow
def test_a_fork_and_an_extension_go_on_with_what_is_known(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "long", selection=EACH["last"], train={"rounds": 9}))
    rayfl.run(experiment(tmp_path, "run", selection=EACH["last"]))
    _, begun = fork(str(tmp_path / "run"), "fork", 5, ["train.rounds=9"])
    assert begun == 5
    rayfl.run(str(tmp_path / "fork"))
    rayfl.run(str(tmp_path / "run"), **{"train.rounds": 9})
    assert cohorts(tmp_path / "fork") == cohorts(tmp_path / "run") == cohorts(tmp_path / "long")
    rayfl.run(experiment(tmp_path, "drawn", selection={"name": "uniform"}))
    fork(str(tmp_path / "drawn"), "other", 5, ["selection=active", "train.rounds=9"])
    rayfl.run(str(tmp_path / "other"))
    for name, known in (("fork", True), ("other", False)):  # the other's first rounds are not on record
        assert (participants(load_run(str(tmp_path / name), METHODS)) is not None) == known


def test_a_client_whose_loss_cannot_be_found_is_left_out_of_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Scorer.losses

    def failing(scorer: Scorer, predictors: Any, own: str, examples: Any) -> Any:
        if len(examples) == largest:
            raise ValueError("no loss here")
        return honest(scorer, predictors, own, examples)

    sizes = Parts(load_config(Experiment, experiment(tmp_path), {})).dataset.sizes()[:, 0]
    largest = int(sizes.max())
    assert (sizes == largest).sum() == 1
    monkeypatch.setattr(Scorer, "losses", failing)
    rayfl.run(experiment(tmp_path, clients={"on_error": "skip"}))
    found = cohorts(tmp_path / "run")
    assert all(len(cohort) == 3 for cohort in found.values())
    assert int(sizes.argmax()) not in {client for cohort in found.values() for client in cohort}
    skipped = pq.read_table(tmp_path / "run" / "skipped.parquet").to_pylist()
    assert {(row["client"], row["procedure"]) for row in skipped} == {(int(sizes.argmax()), "predictors")}
    with pytest.raises(ClientError, match="no loss here"):
        rayfl.run(experiment(tmp_path, "strict"))


def test_stacked_clients_tell_the_losses_of_clients_one_by_one(tmp_path: Path) -> None:
    for mode in ("looped", "vectorized"):
        rayfl.run(experiment(tmp_path, mode, engine={"mode": mode}, train={"rounds": 1}))
    one, other = (pq.read_table(tmp_path / mode / "cohorts.parquet") for mode in ("looped", "vectorized"))
    assert one["client"].equals(other["client"])
    assert one["loss"].to_pylist() == pytest.approx(other["loss"].to_pylist(), rel=1e-6)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"train": {"clients_per_round": "all"}}, "all 12 clients take part in each round"),
    ({"train": {"sampling": "cyclic"}}, "leave train.sampling out"),
    ({"train": {"min_clients_per_round": 2}}, "leave train.min_clients_per_round out"),
    ({"selection": {"name": "power_of_choice", "candidates": 2}}, r"selection.candidates is 2: .* \(3\)"),
    ({"selection": {"name": "power_of_choice", "candidates": 13}}, r"number of clients \(12\)"),
    ({"selection": {"name": "oort", "preferred_s": 1.0}}, "give the section system"),
    ({"system": {"name": "sampled"}}, "set selection.losses=last"),
    ({"selection": EACH["own"], "system": {"name": "sampled"}}, "set selection.losses=cohort"),
    (
        {"selection": {"name": "active"}, "system": {"name": "sampled", "mode": "buffered"}, "algorithm": "fedbuff"},
        "set system.mode=synchronous",
    ),
    ({"selection": "tifl"}, "selection=tifl: tiers are of the time of simulated devices: give the section system"),
    ({"selection": "tifl", "system": {"name": "sampled"}}, r"selection.tiers is 5, .* has as few as 2, .* lower"),
    ({"selection": "no_module:choose"}, "module 'no_module' cannot be imported"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_what_cannot_be_chosen_is_refused_before_a_start(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, RunError), match=words):
        rayfl.run(experiment(tmp_path, **changes))
    assert not (tmp_path / "run" / "commits").exists()


def test_losses_are_told_of_samples_one_by_one() -> None:
    found = moments_of(np.array([1.0, 2.0, 4.0]))
    assert found.n == 3
    assert found.metrics() == {"loss": 7 / 3, "square": 7.0}
    assert math.isnan((moments_of(np.zeros(0)) + moments_of(np.zeros(0))).loss)
