"""Methods with Adam: whole runs, what clients keep of an optimizer, and which methods suppose SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from algorithms.apfl import APFL
from algorithms.base import Algorithm
from algorithms.fedavg import FedAvg
from algorithms.fml import FML
from algorithms.l2gd import L2GD
from algorithms.local import Local
from algorithms.pfedme import PFedMe
from algorithms.scaffold import Scaffold
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ClientError, ConfigError
from rayfl.params import Tree, copy
from rayfl.randomness import RandomStreams
from tests.support.cases import ALGORITHMS, TRAIN, toy_of
from tests.support.cases.base import Case
from tests.support.experiments import KINDS
from tests.support.gradients import optimizer_of
from tests.support.toy_networks import TwoLayers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

ADAM: dict[str, Any] = {"optimizer": "adam", "momentum": 0.0, "lr": 0.02, "betas": (0.8, 0.95)}
FOURS = TRAIN.model_copy(update={"batch_size": 4})
"""Mini-batches whose steps are counted below."""
WITH_ADAM = FOURS.model_copy(update=ADAM)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
NEED_SGD = {"scaffold", "feddc", "fedcm", "mime", "mimelite", "scaffnew", "tamuna", "pfedme", "l2gd"}
TAKING = {
    name: case
    for name, case in ALGORITHMS.items()
    if case.algorithm.name not in NEED_SGD
    and not getattr(case.algorithm, "adaptive", False)
    and getattr(case.algorithm, "order", "") != "alternating"
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": ADAM,
    "adamw": {**ADAM, "optimizer": "adamw"},
    "nesterov": {"momentum": 0.5, "nesterov": True},
    "dampening": {"momentum": 0.5, "dampening": 0.25},
}


def check(method: Algorithm, **train: Any) -> None:
    """What is refused before a run starts."""
    section = TrainConfig(rounds=3, clients_per_round="all", **{"lr": 0.01, **train})
    method.check(two_layers(), RoundContext(0, 3, 4, section, RandomStreams(0)))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param(
            case, options, id=f"{name}-{what}", marks=() if name in KINDS and what == "kept" else pytest.mark.slow
        )
        for name, case in TAKING.items()
        for what, options in (("adam", ADAM), ("kept", {**ADAM, "optimizer": "adamw", "persist_optimizer": True}))
    ],
)
def test_stacked_clients_are_trained_as_one_by_one(case: Case, options: dict[str, Any]) -> None:
    if options.get("persist_optimizer") and case.algorithm.name == "fedme":
        pytest.skip("models change hands")
    train = TRAIN.model_copy(update=options)
    looped, stacked = (toy_of(case, train=train, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in case.cohorts()[:3]:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-8)
        assert_close(looped.states(), stacked.states(), 1e-8)


def one_client(train: TrainConfig, mode: str) -> Toy:
    return Toy(FedAvg(), random_clients([11]), two_layers(), train, mode=mode)


def by_torch(toy: Toy, rounds: int, keep: bool) -> Tree:
    """Local training of the only client by ``torch.optim``, which is all that federated averaging does with one."""
    module = TwoLayers().double()
    module.load_state_dict(copy(toy.server["model"]))
    train, data = toy.train, toy.dataset.load(0)["train"]
    optimizer = optimizer_of(train.rule, module.parameters())
    fresh = optimizer.state_dict()
    for t in range(rounds):
        if not keep:
            optimizer.load_state_dict(fresh)
            optimizer = optimizer_of(train.rule, module.parameters())
        generator = toy.context.streams.generator("batches", t, 0)
        for _ in range(train.local_epochs):
            for rows in np.array_split(generator.permutation(11), [4, 8]):
                optimizer.zero_grad()
                F.cross_entropy(module(data.x[rows]), data.y[rows]).backward()
                optimizer.step()
    return {name: leaf.detach() for name, leaf in module.state_dict().items()}


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("keep", [True, False])
@MODES
def test_rounds_of_one_client_are_one_run_of_torch_optim_if_it_keeps_its_optimizer(
    mode: str, keep: bool, options: dict[str, Any]
) -> None:
    train = FOURS.model_copy(update={**options, "clients_per_round": 1, "persist_optimizer": keep})
    toy = one_client(train, mode)
    expected, other = by_torch(toy, 3, keep), by_torch(toy, 3, not keep)
    found = toy.run(3)["model"]
    assert_close(found, expected, 1e-11)
    assert any((found[name] - other[name]).abs().max() > 1e-5 for name in found)
    if not keep:
        assert toy.states() == {}
    elif options in (OPTIMIZERS["adam"], OPTIMIZERS["adamw"]):
        (kept,) = toy.states()[0]["optimizer"].values()
        assert set(kept) == {"m", "v", "count"}
        assert set(kept["count"].values()) == {3 * train.local_epochs * 3}
        assert kept["m"].keys() == kept["v"].keys() == found.keys()


@MODES
def test_clients_count_the_steps_of_their_own_participations(mode: str) -> None:
    train = WITH_ADAM.model_copy(update={"persist_optimizer": True, "local_epochs": 1})
    toy = Toy(FedAvg(), random_clients([8, 12, 5]), two_layers(), train, mode=mode)
    for cohort in ([0, 1], [1, 2], [0, 1, 2]):
        toy.step(cohort)
    counts = [toy.states()[k]["optimizer"]["main"]["count"] for k in range(3)]
    assert counts == [{"": 2 * 2}, {"": 3 * 3}, {"": 2 * 2}]


def test_a_client_without_steps_keeps_nothing_and_what_it_has_stays() -> None:
    train = WITH_ADAM.model_copy(update={"persist_optimizer": True})
    idle = Toy(FedAvg(), random_clients([8, 12]), two_layers(), train.model_copy(update={"local_epochs": 0}))
    idle.step([0, 1])
    assert idle.states() == {}


@MODES
def test_one_of_two_models_keeps_its_optimizer(mode: str) -> None:
    method = FML(persist_private_optimizer=True)
    toy = Toy(
        method, random_clients([8, 12, 5]), two_layers(), WITH_ADAM.model_copy(update={"local_epochs": 1}), mode=mode
    )
    for _ in range(2):
        toy.step([0, 1, 2])
    for k, steps in enumerate((2, 3, 2)):
        kept = toy.states()[k]["optimizer"]["main"]
        assert {name: set(kept[name]) for name in kept} == {name: {"private"} for name in ("m", "v", "count")}
        assert kept["count"] == {"private": 2 * steps}


def test_local_training_in_every_round_goes_on_with_its_moments() -> None:
    toy = Toy(Local(schedule="all"), random_clients([8, 8]), two_layers(), WITH_ADAM)
    for _ in range(2):
        toy.step([0, 1])
    assert toy.states()[0]["optimizer"]["main"]["count"] == {"": 2 * 2 * 2}


@MODES
def test_controls_by_full_gradients_work_with_adam(mode: str) -> None:
    """c_k is the gradient at w; AdamW's decay is no part of it."""
    controls = {}
    for name in ("sgd", "adam", "adamw"):
        train = FOURS.model_copy(update={**ADAM, "optimizer": name, "weight_decay": 0.3})
        method = Scaffold(control_update="option1")
        toy = Toy(method, random_clients([8, 12]), two_layers(), train, mode=mode)
        start = toy.server["model"]
        toy.step([0, 1])
        controls[name] = toy.states()[0]["control"]
    assert_equal(controls["adam"], controls["sgd"])
    decayed = {path: leaf + 0.3 * start[path] for path, leaf in controls["adamw"].items()}
    assert_close(decayed, controls["adam"], 1e-12)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Scaffold(), r"SCAFFOLD needs train\.optimizer=sgd, not adamw?: .*control_update=option1"),
        (PFedMe(), r"pFedMe needs train\.optimizer=sgd, not adamw?: w_k follows"),
        (L2GD(), r"L2GD needs train\.optimizer=sgd, not adamw?"),
        (APFL(adaptive=True), r"APFL needs train\.optimizer=sgd, not adamw?: .*adaptive=false"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else "",
)
def test_methods_whose_formulas_suppose_sgd_refuse_adam(method: Algorithm, message: str, optimizer: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(method, optimizer=optimizer)
    check(method)


@pytest.mark.parametrize("options", [{"nesterov": True}, {"dampening": 0.5}], ids=str)
def test_controls_read_off_the_distance_know_plain_momentum_alone(options: dict[str, Any]) -> None:
    method = {"momentum_on_corrected": True}
    with pytest.raises(ConfigError, match=rf"SCAFFOLD does without train\.{next(iter(options))}: .*option1"):
        check(Scaffold(**method), momentum=0.9, **options)
    check(Scaffold(**method, control_update="option1"), momentum=0.9, **options)
    check(Scaffold(**method), momentum=0.9)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedprox", "feddyn", "apfl", "floco", "superfed-mm"])
def test_other_methods_take_adam(name: str) -> None:
    (case, *_) = [case for key, case in ALGORITHMS.items() if key.startswith(name)]
    check(case.algorithm, optimizer="adam")


def test_a_pull_that_a_warm_up_makes_too_strong_later_is_refused_at_once() -> None:
    strong: dict[str, Any] = {"lr": 3.0, "schedule": {"name": "constant", "warmup": 2}}
    method = L2GD(penalty_weight=1.0, aggregation_probability=0.5)
    with pytest.raises(ConfigError, match=r"1\.5 times the way"):
        check(method, **strong)
    check(method, **{**strong, "lr": 1.9})


class Momentous(FedAvg):
    """Gives momentum to whatever trains."""

    async def local_update(self, client: Any, model: Tree) -> Any:
        return self.weighted(client, await client.train(model, self.objective, momentum=0.9))


def test_momentum_that_a_method_gives_to_adam_is_refused() -> None:
    toy = Toy(Momentous(), random_clients([8]), two_layers(), WITH_ADAM)
    with pytest.raises(ClientError, match=r"client 0.*MethodError: momentum=0\.9.*adam"):
        toy.step([0])
    plain = Toy(Momentous(), random_clients([8]), two_layers(), FOURS)
    assert torch.isfinite(plain.step([0])["model"]["head.weight"]).all()
