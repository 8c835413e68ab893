"""SuperFed's local models: where they begin, what they cost, and that they stay."""

from __future__ import annotations

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.parts.lines import GRID
from algorithms.superfed import SuPerFed
from rayfl.engine.updates.settings import TrainConfig
from rayfl.engine.updates.trampoline import run_procedures
from rayfl.params import copy, squared_distance
from tests.support.superfed_toys import MODES, SIZES, TRAIN, client_of, toy
from tests.support.toy_networks import Quadratic, softmax_regression, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

NO_DECAY = TRAIN.model_copy(update={"weight_decay": 0.0})


def test_inv_sf_8_one_layer_makes_lm_and_mm_the_same() -> None:
    runs = [toy(SuPerFed(mode=mode, start=0.0, orthogonality_weight=1.5), task=softmax_regression()) for mode in MODES]
    assert_equal(runs[0].run(), runs[1].run())
    assert_equal(runs[0].states(), runs[1].states())


def test_inv_sf_13_proximity_bounds_the_drift_on_quad() -> None:
    train = TrainConfig(rounds=1, clients_per_round=1, local_epochs=200, batch_size=None, lr=0.3)
    for start in (0.0, 1.0):
        algorithm = SuPerFed(start=start, fixed_coefficient=0.0, orthogonality_weight=0.0, proximal_weight=0.7)
        server = Toy(algorithm, quadratic_clients([3.0], [2]), Quadratic(start=1.0), train).run()
        assert float(server["model"]["theta"]) == pytest.approx((3.0 + 1.4 * 1.0) / (1 + 1.4), abs=1e-12)


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_inv_sf_14_only_the_federated_model_travels(start: float) -> None:
    run, reference = toy(SuPerFed(start=start)), toy(FedAvg())
    run.step([0, 2])
    reference.step([0, 2])
    assert run.federation.traffic == reference.federation.traffic
    assert set(run.server) == {"model"}
    assert set(run.server["model"]) == set(run.task.network.parameter_names)
    engine = run.client_hosts[0].engine
    procedure = run.algorithm.local_update(client_of(run, 1), run.server["model"])  # type: ignore[attr-defined]
    reply = run_procedures({1: procedure}, engine)[1]
    assert set(reply.tree) == set(run.task.network.parameter_names)
    assert reply.weight == SIZES[1]


def test_own_local_models_differ_between_clients() -> None:
    run = toy(SuPerFed(start=0.0), TRAIN.model_copy(update={"lr": 0.0, "clients_per_round": 4}))
    run.step()
    locals_ = [state["local"] for state in run.states().values()]
    for client, local in enumerate(locals_):
        assert_equal(local, client_of(run, client).fresh_model())
        others = [*locals_[:client], *locals_[client + 1 :], run.server["model"]]
        assert not any(torch.equal(local["head.weight"], other["head.weight"]) for other in others)


def test_a_shared_local_model_is_the_same_for_all_and_not_the_global_one() -> None:
    run = toy(SuPerFed(start=0.0, local_init="shared"), TRAIN.model_copy(update={"lr": 0.0, "clients_per_round": 4}))
    run.step()
    first, *rest = [state["local"] for state in run.states().values()]
    for other in rest:
        assert_equal(other, first)
    assert not torch.equal(first["head.weight"], run.server["model"]["head.weight"])


def test_a_shared_local_model_costs_no_traffic() -> None:
    """Every client draws it from the same stream; the preprint's server sends it."""
    runs = [toy(SuPerFed(start=0.0, local_init=init)) for init in ("shared", "own")]  # type: ignore[arg-type]
    for run in runs:
        run.step([0, 2])
    assert runs[0].federation.traffic == runs[1].federation.traffic


def test_a_copied_local_model_is_not_repelled_in_its_first_step() -> None:
    """Two equal models have a squared cosine of 1, where its gradient is zero."""
    one_step = NO_DECAY.model_copy(update={"local_epochs": 1, "batch_size": None})
    models = [
        toy(SuPerFed(start=0.0, local_init="copy", orthogonality_weight=nu), one_step).step([0]) for nu in (0.0, 5.0)
    ]
    assert_close(*models, atol=1e-12)
    own = [toy(SuPerFed(start=0.0, orthogonality_weight=nu), one_step).step([0]) for nu in (0.0, 5.0)]
    assert squared_distance(*own) > 1e-4


def test_a_copied_local_model_is_the_first_model_received() -> None:
    """Also where the client first took part before mixing began."""
    run = toy(SuPerFed(start=0.5, local_init="copy"))
    received = [copy(run.server["model"])]
    for cohort in ([0], [0, 1]):
        received.append(copy(run.step(cohort)["model"]))
    assert_equal(run.states()[0]["local"], received[0])
    assert_equal(run.states()[1]["local"], received[1])
    assert not torch.equal(received[0]["head.weight"], received[1]["head.weight"])
    run.step([0])
    assert not torch.equal(run.states()[0]["local"]["head.weight"], received[0]["head.weight"])


def test_local_models_persist_between_rounds() -> None:
    run = toy(SuPerFed(start=0.0))
    run.step([0, 1])
    before = run.states()
    run.step([1, 2])
    assert_equal(run.states()[0], before[0])
    assert not torch.equal(run.states()[1]["local"]["head.weight"], before[1]["local"]["head.weight"])


@pytest.mark.two_cases
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["squared", "norm_per_layer"])
def test_vectorized_matches_looped_on_ragged_clients(mode: str, form: str) -> None:
    algorithm = SuPerFed(mode=mode, start=0.25, proximal_weight=0.1, proximal_form=form)
    looped, stacked = (toy(algorithm, mode=engine) for engine in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run(), atol=1e-9)
    assert_close(looped.states(), stacked.states(), atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_vectorized_matches_looped_in_single_precision(mode: str) -> None:
    clients = random_clients(SIZES, dtype=torch.float32)
    train = TRAIN.model_copy(update={"momentum": 0.0})
    looped, stacked = (
        Toy(SuPerFed(mode=mode, start=0.0), clients, two_layers(double=False), train, mode=engine)
        for engine in ("looped", "vectorized")
    )
    assert_close(looped.run(), stacked.run(), atol=1e-5)
    assert_close(looped.states(), stacked.states(), atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_hosts_do_not_matter(mode: str) -> None:
    one, three = (toy(SuPerFed(mode=mode, start=0.25), hosts=hosts) for hosts in (1, 3))
    assert_equal(one.run(), three.run())
    assert_equal(one.states(), three.states())


def test_no_local_epochs_change_nothing() -> None:
    run = toy(SuPerFed(start=0.25), TRAIN.model_copy(update={"local_epochs": 0}))
    initial = copy(run.server)
    assert_equal(run.run(), initial)


def test_defaults() -> None:
    assert (SuPerFed().nu, SuPerFed(mode="lm").nu, SuPerFed(orthogonality_weight=0.0).nu) == (1.0, 2.0, 0.0)
    algorithm = SuPerFed()
    assert (algorithm.start, algorithm.proximal_weight, algorithm.proximal_form) == (0.4, 0.01, "squared")
    assert (algorithm.local_init, algorithm.aggregation) == ("own", "samples")
    assert tuple(GRID) == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
