"""FedBuff: invariants BUFF, its known path, options and momentum, and other methods' local updates in it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
import torch

from actors.hosting.host import ClientHost
from actors.hosting.job import Job
from algorithms.fedavg import FedAvg
from algorithms.fedbuff import FedBuff
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, add_scaled, copy, subtract
from tests.support.fedbuff_toys import SIZES, TRAIN, Rounds, toy_of
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients


def quadratic(algorithm: Any, **train: Any) -> Toy:
    options = {"rounds": 8, "clients_per_round": 2, "local_epochs": 1, "batch_size": None, "lr": 0.1, **train}
    return Toy(algorithm, quadratic_clients([0.0, 4.0, 2.0], [1, 1, 1]), Quadratic(), TrainConfig(**options))


def theta(server: Mapping[str, Any]) -> float:
    return float(server["model"]["theta"])


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_buff_1_equal_devices_give_fedavg_of_the_same_cohorts(mode: str) -> None:
    buffered = Rounds(toy_of(FedBuff(), mode=mode), [3] * 4, 2)
    plain = toy_of(FedAvg(aggregation="uniform"), mode=mode)
    for _ in range(6):
        server = buffered.step()
        assert not buffered.turnouts[-1].started
        assert_equal(server["model"], plain.step(buffered.turnouts[-1].cohort)["model"])
    assert len({turnout.cohort for turnout in buffered.turnouts}) > 2


def test_inv_buff_2_one_at_a_time_each_model_is_the_next() -> None:
    buffered, plain = Rounds(toy_of(FedBuff()), [1, 5, 2, 3], 1), toy_of(FedAvg())
    for _ in range(6):
        server = buffered.step()
        (client,) = buffered.turnouts[-1].cohort
        assert_equal(server["model"], plain.step([client])["model"])
        assert plain.federation.traffic.by_client == buffered.toy.federation.traffic.by_client


def test_inv_buff_5_without_scaling_the_order_of_arrival_does_not_matter() -> None:
    found = []
    # the slower of the two arrives last, or the other way round
    for seconds in ([1, 2, 2.5, 50], [2, 1, 2.5, 50]):
        rounds = Rounds(toy_of(FedBuff(staleness="constant"), hosts=3), seconds, 3, concurrency=4)
        rounds.step()
        assert rounds.turnouts[0].cohort == (0, 1, 2)
        found.append(rounds.toy.server["model"])
    assert_equal(*found)


GOLDEN = [1.1, 1.19, 1.159367513459, 1.200747640543, 1.280672876489]


def test_inv_buff_6_known_path() -> None:
    rounds = Rounds(quadratic(FedBuff()), [1, 2, 5], 2, concurrency=3)
    for expected in GOLDEN:
        assert abs(theta(rounds.step()) - expected) < 1e-11


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_inv_buff_7_stale_rounds_are_the_same_on_any_number_of_hosts(hosts: int) -> None:
    rounds = Rounds(toy_of(FedBuff(), hosts=hosts), [1, 2, 5, 3], 2, concurrency=4)
    alone = Rounds(toy_of(FedBuff()), [1, 2, 5, 3], 2, concurrency=4)
    assert_equal(rounds.run(8), alone.run(8))
    assert rounds.turnouts == alone.turnouts
    assert any(turnout.started for turnout in rounds.turnouts)


def test_inv_buff_8_factors() -> None:
    expected = (1, 0.707106781187, 0.577350269190, 0.5, 0.447213595500)
    for staleness, factor in enumerate(expected):
        assert abs(FedBuff().scale(staleness) - factor) < 1e-12
        assert FedBuff(staleness="constant").scale(staleness) == 1
        # the authors' code: fresh updates get sqrt(2)
        assert FedBuff(unit_staleness=1).scale(staleness) == pytest.approx(math.sqrt(2 / (1 + staleness)))
    assert FedBuff().scale(0) == 1
    assert FedBuff(staleness_exponent=1).scale(3) == 0.25
    threshold = FedBuff(staleness="threshold", staleness_threshold=2, stale_factor=0.1)
    assert [threshold.scale(staleness) for staleness in range(5)] == [1, 1, 1, 0.1, 0.1]


@pytest.mark.parametrize("aggregation", ["uniform", "samples", "population"])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_a_round_is_the_papers_step_over_changes_from_old_models(aggregation: Any, server_lr: float) -> None:
    algorithm = FedBuff(aggregation=aggregation, server_lr=server_lr)
    rounds = Rounds(toy_of(algorithm), [1, 2, 5, 3], 2, concurrency=4)
    plain = toy_of(FedAvg())
    models = [copy(rounds.toy.server["model"])]
    for t in range(7):
        models.append(rounds.step()["model"])
        turnout, expected, whole = rounds.turnouts[-1], models[t], 0.0
        if aggregation == "population":
            whole = float(sum(SIZES))
        else:
            whole = float(sum(SIZES[k] if aggregation == "samples" else 1 for k in turnout.cohort))
        for k in turnout.cohort:
            began = turnout.started.get(k, t)
            # what the client trains is what it would have trained in the round in which it began
            plain.round, plain.server = began, {"model": models[began]}
            change = subtract(plain.step([k])["model"], models[began])
            share = (1 if aggregation == "uniform" else SIZES[k]) / whole
            expected = add_scaled(expected, change, server_lr * share / math.sqrt(1 + t - began))
        assert_close(models[-1], expected, 1e-12)
    assert sum(len(turnout.started) for turnout in rounds.turnouts) >= 3


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_an_old_update_has_the_learning_rate_of_the_round_in_which_it_began(mode: Literal["looped"]) -> None:
    algorithm = FedBuff(staleness="constant")
    toy = quadratic(algorithm, lr_decay=0.5)
    toy = Toy(algorithm, toy.dataset, toy.task, toy.train, mode=mode)
    rounds = Rounds(toy, [1, 2, 5], 2, concurrency=3)
    w = [1.0]
    for t in range(5):
        w.append(theta(rounds.step()))
        turnout, step = rounds.turnouts[-1], 0.0
        for k in turnout.cohort:
            began = turnout.started.get(k, t)
            step += 0.1 * 0.5**began * ([0.0, 4.0, 2.0][k] - w[began]) / 2
        assert abs(w[-1] - w[-2] - step) < 1e-12
    assert any(turnout.started for turnout in rounds.turnouts)


def test_looped_and_stacked_agree_on_old_updates() -> None:
    looped, stacked = (
        Rounds(toy_of(FedBuff(), mode=mode), [1, 2, 5, 3], 3, concurrency=4) for mode in ("looped", "vectorized")
    )
    for _ in range(6):
        assert_close(looped.step(), stacked.step(), 1e-10)
    assert any(turnout.started for turnout in looped.turnouts)


def test_one_that_fails_is_missing_in_the_buffer() -> None:
    rounds = Rounds(quadratic(FedBuff()), [1, 2, 5], 2, concurrency=3)
    rounds.run(2)
    # of clients 0 and 2 the second fails: the step is that of the first alone
    before = theta(rounds.toy.server)
    assert abs(theta(rounds.step(absent=[2])) - (before + 0.1 * (0 - before))) < 1e-12
    # the plan is the same
    assert rounds.turnouts[-1].cohort == (0, 2)
    assert rounds.step() and rounds.turnouts[-1].cohort == (0, 1)
    # and a round whose clients all fail changes nothing but the clock
    before = theta(rounds.toy.server)
    assert theta(rounds.step(absent=[0, 1])) == before


def test_running_statistics_step_as_parameters_do_and_have_no_momentum() -> None:
    task = normalized_layers()
    rounds = Rounds(toy_of(FedBuff(server_momentum=0.9), task=task), [1, 2, 5, 3], 2, concurrency=4)
    server = rounds.run(6)
    assert set(server["momentum"]) == set(task.network.parameter_names)
    assert torch.isfinite(server["model"]["norm.running_var"]).all()
    assert (server["model"]["norm.running_var"] != 1).all()
    assert list(server["model"]) == list(task.network.initialize(0))


def test_private_layers_stay_with_clients_whose_updates_are_old() -> None:
    toy = toy_of(FedBuff(server_momentum=0.5), TRAIN.model_copy(update={"private_norm": "all"}), normalized_layers())
    rounds = Rounds(toy, [1, 2, 5, 3], 2, concurrency=4)
    server = rounds.run(6)
    assert any(turnout.started for turnout in rounds.turnouts)
    assert server["model"]["norm.weight"].numel() == server["momentum"]["norm.weight"].numel() == 0
    assert all((state["private_norm"]["norm.weight"] != 1).any() for state in toy.states().values())


def test_momentum_is_the_heavy_balls() -> None:
    plain = Rounds(quadratic(FedBuff(server_lr=0.5)), [3, 3, 3], 3)
    pushed = Rounds(quadratic(FedBuff(server_lr=0.5, server_momentum=0.9)), [3, 3, 3], 3)
    w, u = 1.0, 0.0
    for _ in range(4):
        u = 0.9 * u + 0.1 * (2.0 - w)
        w += 0.5 * u
        server = pushed.step()
        assert abs(theta(server) - w) < 1e-12 and abs(float(server["momentum"]["theta"]) - u) < 1e-12
    assert theta(plain.step()) == pytest.approx(1 + 0.5 * 0.1)


def test_clients_are_sent_the_model_alone_and_the_past_is_kept_while_it_is_needed() -> None:
    toy = toy_of(FedBuff(server_momentum=0.5))
    rounds = Rounds(toy, [1, 2, 50, 3], 2, concurrency=4)
    model = 8 * sum(leaf.numel() for leaf in toy.server["model"].values())
    for _ in range(5):
        rounds.step()
        assert set(toy.federation.traffic.by_client.values()) == {(model, model)}
        unfinished = rounds._unfinished
        assert set(unfinished.past) == {update.began for update in unfinished.updates}
        assert len(unfinished.past) <= 4 and all(set(tree) == {"model"} for tree in unfinished.past.values())
    assert set(toy.algorithm.served(toy.server, toy.context)[0]) == {"model"}


def test_one_model_travels_once_to_all_clients_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    run = ClientHost.run
    monkeypatch.setattr(ClientHost, "run", lambda host, job, *given: (jobs.append(job), run(host, job, *given))[1])
    toy = toy_of(FedBuff(), task=two_layers(hidden=64))
    Rounds(toy, [3] * 4, 3).step()
    (job,) = jobs
    one, *others = (tree["model"]["head.weight"] for tree in job.payloads.values())
    assert len(others) == 2 and all(other is one for other in others)
    model = sum(leaf.numel() * leaf.element_size() for leaf in toy.server["model"].values())
    assert model < len(pickle.dumps(job)) < 2 * model
    assert toy.federation.traffic.down == 3 * model


def test_a_method_that_writes_to_what_an_old_update_began_with_is_told() -> None:
    class Writing(FedBuff):
        def round(self, server: Tree, cohort: Sequence[int], clients: Any) -> Tree:
            for client in clients.context.started:
                clients.received(client, server)["model"]["theta"].add_(1)
            return super().round(server, cohort, clients)

    rounds = Rounds(quadratic(Writing()), [1, 2, 5], 2, concurrency=3)
    rounds.run(2)
    with pytest.raises(Exception, match=r"writes to '\(after round 0\)/model/theta'"):
        rounds.step()
