"""Methods that can be buffered, and options of FedBuff."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from algorithms.base import Averaging
from algorithms.fedbuff import Buffered, FedBuff
from algorithms.fedopt import FedAvgM
from algorithms.fedprox import FedProx
from algorithms.scaffold import Scaffold
from rayfl.errors import ConfigError
from rayfl.params import Tree, add_scaled, subtract, zeros_like
from tests.support.fedbuff_toys import TRAIN, Rounds, toy_of
from tests.support.toys import assert_close


class BufferedProx(Buffered, FedProx):
    """FedProx's local update in rounds without a barrier."""

    name: str = "buffered_prox"  # type: ignore[assignment]


class BufferedMomentum(FedAvgM, Buffered):
    """FedAvgM's server on buffers."""

    name: str = "buffered_momentum"  # type: ignore[assignment]


def test_any_averaging_methods_local_update_can_be_buffered() -> None:
    weak, strong = (
        Rounds(toy_of(BufferedProx(proximal_weight=mu)), [1, 2, 5, 3], 2, concurrency=4) for mu in (0.0, 5.0)
    )
    plain = Rounds(toy_of(FedBuff()), [1, 2, 5, 3], 2, concurrency=4)
    assert weak.toy.algorithm.aggregation == "uniform"
    start = weak.toy.server["model"]
    far, near = weak.run(6)["model"], strong.run(6)["model"]
    assert_close(far, plain.run(6)["model"], 1e-12)
    moved = [float(sum((leaf - start[name]).square().sum() for name, leaf in model.items())) for model in (far, near)]
    assert moved[1] < 0.5 * moved[0]


def test_a_servers_optimizer_can_step_along_buffers() -> None:
    options: Any = {"server_momentum": 0.9, "server_lr": 0.5}
    mine = Rounds(toy_of(BufferedMomentum(**options, aggregation="uniform")), [1, 2, 5, 3], 2, concurrency=4)
    option = Rounds(toy_of(FedBuff(**options)), [1, 2, 5, 3], 2, concurrency=4)
    for _ in range(5):
        assert_close(mine.step()["model"], option.step()["model"], 1e-12)


class BufferedScaffold(Scaffold):
    """SCAFFOLD whose clients correct by the control variate of the time at which they began."""

    name: str = "buffered_scaffold"  # type: ignore[assignment]

    def round(self, server: Tree, cohort: Sequence[int], clients: Any) -> Tree:
        payloads = {client: clients.received(client, server) for client in cohort}
        mean = clients.mean(self.change, cohort, broadcast={}, payloads=payloads)
        share = len(cohort) / clients.context.num_clients
        return {
            "model": add_scaled(server["model"], mean["model"], self.server_lr),
            "control": add_scaled(server["control"], mean["control"], share),
        }

    async def change(self, client: Any, model: Tree, control: Tree) -> Any:
        found = await self.local_update(client, model, control)
        return type(found)({**found.tree, "model": subtract(found.tree["model"], model)}, found.weight)


def test_what_else_is_sent_is_as_old_as_the_model() -> None:
    train = TRAIN.model_copy(update={"momentum": 0.0, "weight_decay": 0.0})
    rounds = Rounds(toy_of(BufferedScaffold(), train), [1, 2, 5, 3], 2, concurrency=4)
    states: dict[int, Tree] = {}
    controls = [zeros_like(rounds.toy.server["control"])]
    for t in range(6):
        controls.append(rounds.step()["control"])
        old = {k: states.get(k, {"control": zeros_like(controls[0])})["control"] for k in range(4)}
        states = rounds.toy.states()
        change = zeros_like(controls[0])
        for k in rounds.turnouts[-1].cohort:
            change = add_scaled(change, subtract(states[k]["control"], old[k]), 1 / 4)
        assert_close(controls[-1], add_scaled(controls[t], change, 1), 1e-12)
    assert any(turnout.started for turnout in rounds.turnouts)


def test_options_out_of_range_are_refused() -> None:
    for wrong in ({"server_lr": 0}, {"staleness_exponent": -1}, {"stale_factor": 0}, {"server_momentum": 1}):
        with pytest.raises(ValidationError):
            FedBuff(**wrong)  # type: ignore[arg-type]
    assert issubclass(FedBuff, Averaging) and FedBuff.asynchronous


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staleness": "constant", "staleness_exponent": 1}, "staleness is constant, which has no staleness_exponent"),
        ({"staleness": "constant", "unit_staleness": 1}, "has no unit_staleness: drop it"),
        ({"stale_factor": 0.1, "staleness_threshold": 3}, "polynomial, which has no staleness_threshold, stale_factor"),
    ],
)
def test_options_of_another_staleness_are_refused(options: dict[str, Any], message: str) -> None:
    toy = toy_of(FedBuff(**options))
    with pytest.raises(ConfigError, match=message):
        toy.algorithm.check(toy.task, toy.context)
    toy_of(FedBuff()).algorithm.check(toy.task, toy.context)
