"""Classes that break the contract of methods are refused by name, before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from actors.hosting.contract import check_changes, check_keepable, check_predictors, check_sendable
from algorithms.base import Algorithm, Averaging, Clients
from algorithms.contract import check_method
from algorithms.registry import METHODS
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ClientError, ConfigError, MethodError
from rayfl.params import Tree
from rayfl.results.personalized import check_personalized
from rayfl.results.summaries import Scores
from rayfl.tasks.base import Predictor
from tests.support.own_files import parts
from tests.support.toy_networks import softmax_regression
from tests.support.toys import Toy, random_clients


class NotAsynchronous(Averaging):
    name: str = "a"

    def local_update(self, client: Client, model: Tree) -> Any:  # type: ignore[override]
        return self.weighted(client, model)


class RowsNotAsynchronous(Averaging):
    name: str = "b"

    def predictors(self, client: Client, server: Tree) -> Any:  # type: ignore[override]
        return {}


class RoundAsynchronous(Averaging):
    name: str = "c"

    async def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Any:  # type: ignore[override]
        return {}


class ObjectiveAsynchronous(Averaging):
    name: str = "d"

    async def objective(self, model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Any:  # type: ignore[override]
        return task.loss(model, batch)


class NoRound(Algorithm):
    name: str = "e"


class NoServer(Averaging):
    name: str = "f"

    def init(self, task: Any, context: Any) -> Any:
        super().init(task, context)


class RoundWithoutResult(Averaging):
    name: str = "h"

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        super().round(server, cohort, clients)
        return None  # type: ignore[return-value]


class ServerWithANote(Averaging):
    name: str = "g"

    def init(self, task: Any, context: Any) -> Any:
        return {**super().init(task, context), "note": "begun"}


def passed_on(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator whose function is no coroutine function, but returns the coroutine."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return wrapped


class Decorated(Averaging):
    name: str = "f"

    @passed_on
    async def local_update(self, client: Client, model: Tree) -> Weighted:
        return self.weighted(client, await client.train(model, self.objective))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            NotAsynchronous,
            "NotAsynchronous.local_update is a client's procedure: define it with `async def",
        ),
        (RowsNotAsynchronous, "`async def predictors`"),
        (RoundAsynchronous, "RoundAsynchronous.round is no client's procedure: define it with `def round`"),
        (ObjectiveAsynchronous, "`def objective`, without async"),
        (NoRound, "NoRound defines no round"),
    ],
)
def test_a_class_that_breaks_the_contract_is_refused(method: type[Algorithm], message: str) -> None:
    with pytest.raises(MethodError) as caught:
        check_method(method)
    assert message in str(caught.value)
    assert method is NoRound or __file__ in str(caught.value)


@pytest.mark.parametrize("method", [*METHODS.values(), Decorated])
def test_methods_that_keep_it_are_not(method: type[Algorithm]) -> None:
    check_method(method)


def test_a_decorated_procedure_runs() -> None:
    toy = small(Decorated())
    before = toy.server["model"]
    toy.step([0, 1])
    assert not any((toy.server["model"][name] == before[name]).all() for name in before)


def small(method: Algorithm) -> Toy:
    train = TrainConfig(rounds=2, clients_per_round=2, local_epochs=1, batch_size=4, lr=0.1)
    return Toy(method, random_clients([5, 9]), softmax_regression(), train)


class OwnProcedure(Averaging):
    """A procedure of its own name, not asynchronous."""

    name: str = "g"

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        return {"model": clients.mean(self.my_update, cohort, broadcast={"model": server["model"]})}  # type: ignore[arg-type]

    def my_update(self, client: Client, model: Tree) -> Weighted:
        return Weighted(model)


class Sends(Averaging):
    """Sends what the procedure does not take."""

    name: str = "h"

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        return {"model": clients.mean(self.local_update, cohort, broadcast={"modell": server["model"]})}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        return Weighted(model)


class Slash(Averaging):
    """Returns a key that is two."""

    name: str = "i"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        return Weighted({"a/b": model})


class PrototypesByClass(Averaging):
    """Keeps something for each class, under the class's number."""

    name: str = "p"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        client.state["prototypes"] = {0: torch.ones(2)}
        return Weighted(model)


class NoRows(Averaging):
    """Forgets to return its predictors."""

    name: str = "j"

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            Sends(),
            r"client 0, round 1, local_update: MethodError: what it is sent .* unexpected keyword argument 'modell'",
        ),
        (Slash(), r"client 0, round 1, local_update: MethodError: local_update returned the key 'a/b'"),
        (PrototypesByClass(), r"client 0, round 1, .* client.state cannot be kept: .* got 0 below 'prototypes/'"),
    ],
)
def test_a_breach_names_client_and_procedure_and_where_it_is(method: Algorithm, message: str) -> None:
    with pytest.raises(ClientError, match=message) as caught:
        small(method).step([0, 1])
    assert __file__ in str(caught.value)


def test_a_procedure_of_any_name_is_checked_before_it_is_sent() -> None:
    with pytest.raises(MethodError, match=r"my_update is called as a coroutine: define it with `async def my_update`"):
        small(OwnProcedure()).step([0, 1])


def test_predictors_that_are_none_are_named() -> None:
    toy = small(NoRows())
    with pytest.raises(ClientError, match=r"predictors: MethodError: predictors must return .*, got NoneType"):
        toy.federation.evaluate(toy.server, ("test",), False)


def test_no_predictors_at_all_are_no_evaluation() -> None:
    nothing: Scores = {client: {"test": {}, "validation": {}} for client in range(2)}
    with pytest.raises(ConfigError, match="a has no predictors of any client, so that there is nothing to score"):
        check_personalized(NotAsynchronous(), nothing, True)
    check_personalized(NotAsynchronous(), {}, True)  # nobody was to be scored


def test_a_round_that_returns_nothing_is_played_once() -> None:
    """What it returns is for :func:`check_changes` to refuse; none is no sign of clients that have failed."""
    toy = Toy(RoundWithoutResult(), random_clients([6, 6], seed=0), softmax_regression(), TrainConfig(rounds=1))
    toy.federation.begin_round(0, ())
    assert toy.federation.play(toy.algorithm, toy.server, [0, 1]) is None


def test_trees_are_checked() -> None:
    with pytest.raises(MethodError, match=r"client.state cannot be kept: .* 'seen' is a list"):
        check_keepable({"seen": [1, 2]})
    with pytest.raises(
        MethodError, match=r"client.state cannot be kept: keys .* strings without '/', got 3 below 'seen/'"
    ):
        check_keepable({"seen": {3: torch.ones(2)}})
    with pytest.raises(MethodError, match=r"look returned the key 3"):
        check_sendable({"a": {3: 1.0}}, "look")
    with pytest.raises(MethodError, match=r"look must return a dict of tensors and numbers, got float"):
        check_sendable(1.0, "look")
    with pytest.raises(MethodError, match=r"'mine' has dict"):
        check_predictors({"mine": {}}, "predictors")
    with pytest.raises(MethodError, match=r"round must return the entries of the server's tree that change, got None"):
        check_changes(None, NotAsynchronous(), {})
    with pytest.raises(MethodError, match=r"what round returned cannot be kept: .* 'names' is a str"):
        check_changes({"names": "x"}, NotAsynchronous(), {})
    check_changes({}, NotAsynchronous(), {})
    server = {"model": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, "control": torch.zeros(3)}
    changed = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    check_changes({"model": changed, "clusters": torch.arange(3)}, NotAsynchronous(), server)
    with pytest.raises(MethodError, match=r"round returned 'modell', .*\(did you mean 'model'\?\)"):
        check_changes({"modell": {}}, NotAsynchronous(), server)
    with pytest.raises(MethodError, match=r"'weight' has the shape \(6,\), and had \(2, 3\) before"):
        check_changes({"model": {**changed, "weight": torch.ones(6)}}, NotAsynchronous(), server)
    with pytest.raises(MethodError, match=r"'bias' has the type torch.float64, and had torch.float32 before"):
        check_changes({"model": {**changed, "bias": torch.zeros(2, dtype=torch.float64)}}, NotAsynchronous(), server)
    with pytest.raises(MethodError, match=r"a model without 'bias', which the model before it had"):
        check_changes({"model": {"weight": torch.ones(2, 3)}}, NotAsynchronous(), server)
    with pytest.raises(MethodError, match=r"a model with 'scale', which the model before it did not have"):
        check_changes({"model": {**changed, "scale": torch.ones(2)}}, NotAsynchronous(), server)
    endless = {**changed, "bias": torch.tensor([0.0, torch.inf])}
    with pytest.raises(MethodError, match=r"a model with NaN or infinity in 'bias': .* the server's step made it"):
        check_changes({"model": endless}, NotAsynchronous(), server)
    check_changes({"model": endless, "best": torch.tensor(torch.nan)}, NotAsynchronous(), {"model": endless})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("NoServer", r"init must return the server's tree, .*, got None"),
        ("ServerWithANote", r"what init returned cannot be kept: .* 'note' is a str"),
    ],
)
def test_a_server_that_cannot_be_kept_is_refused_before_the_start(method: str, message: str) -> None:
    begun = parts({"name": "digits"}, algorithm=f"{__name__}:{method}")
    with pytest.raises(MethodError, match=message) as caught:
        begun.check()
    assert __file__ in str(caught.value)


def test_attributes_cannot_be_set() -> None:
    with pytest.raises(MethodError, match=r"Decorated.count cannot be set: .* hyper-parameters only.*client.state"):
        Decorated().count = 1  # type: ignore[attr-defined]
    with pytest.raises(MethodError, match=r"Decorated.aggregation cannot be set"):
        Decorated().aggregation = "uniform"
