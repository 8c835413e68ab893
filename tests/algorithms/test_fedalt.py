"""FedALT: adapters of others are averaged and frozen, and a client's own is never overwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedalt import FedALT
from algorithms.local import Local
from algorithms.parts.adapters import adapters_of
from rayfl.errors import ConfigError
from rayfl.params import leaves
from tests.support.adapted import TRAIN, adapted_toy, images
from tests.support.bases import trained, vit
from tests.support.toy_networks import two_layers
from tests.support.toys import assert_close, assert_equal


def adapters(*seeds: int) -> list[dict[str, Tensor]]:
    """Adapters some way from their initial values."""
    return [adapters_of(trained(vit(), seed), vit()) for seed in seeds]


def server(initial: dict[str, Tensor], **own: dict[str, Tensor]) -> dict[str, Any]:
    """The server's tree with adapters of some clients, ``k0`` being that of client 0."""
    return {"initial": initial, **({"own": {name[1:]: adapter for name, adapter in own.items()}} if own else {})}


def test_inv_fedalt_of_two_clients_each_has_the_other() -> None:
    """K = 2: R_0 = theta_1, to the bit."""
    initial, zero, one = adapters(0, 1, 2)
    rest = FedALT.rest(server(initial, k0=zero, k1=one), [0, 1], 2)
    assert_equal(rest[0], one)
    assert_equal(rest[1], zero)


@pytest.mark.parametrize("clients", [2, 3, 7])
def test_inv_fedalt_equal_adapters_are_themselves(clients: int) -> None:
    initial, same = adapters(0, 1)
    own = {f"k{k}": same for k in range(clients)}
    for adapter in FedALT.rest(server(initial, **own), range(clients), clients).values():
        assert_equal(adapter, same)
    for adapter in FedALT.rest(server(initial), range(clients), clients).values():
        assert_equal(adapter, initial)


def test_inv_fedalt_the_rest_is_the_mean_of_all_others_and_of_initial_ones() -> None:
    """K = 5, of which two have sent something; the numbers from K on are newcomers."""
    initial, one, three = adapters(0, 1, 3)
    tree = server(initial, k1=one, k3=three)
    everybody = [initial, one, initial, three, initial]
    rest = FedALT.rest(tree, [0, 1, 3, 5], 5)
    for k, found in rest.items():
        others = [adapter for j, adapter in enumerate(everybody) if j != k]
        for name, leaf in found.items():
            exact = torch.stack([adapter[name].double() for adapter in others]).mean(0)
            assert_close(leaf, exact.float(), 1e-9)
    assert_equal(FedALT.rest(tree, [0], 1)[0], initial)


def test_inv_fedalt_with_all_weight_on_its_own_adapter_is_local_training() -> None:
    toy, alone = adapted_toy(FedALT(own_share=1.0)), adapted_toy(Local())
    toy.run(), alone.run()
    expected = alone.states()
    for client, state in toy.states().items():
        assert set(state) == ({"own"} if state else set())
        if state:
            assert_close(state["own"], expected[client]["local"], 1e-6)


def test_inv_fedalt_of_no_weight_leaves_its_own_adapter() -> None:
    """The other end: the gradient of the individual adapter is zero, and the head learns over the others' mean."""
    toy = adapted_toy(FedALT(own_share=0.0))
    toy.step([0, 1])
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    own = toy.states()[0]["own"]
    assert_equal(adapters_of(own, vit()), adapters_of(initial, vit()))
    assert any(not torch.equal(own[name], initial[name]) for name in vit().groups["head"])


def test_inv_fedalt_own_adapters_go_on_and_nobody_overwrites_them() -> None:
    """What the server has of a client is what that client has; others' rounds change neither."""
    toy = adapted_toy(FedALT())
    toy.step([0, 2])
    first = toy.states()
    assert {client for client, state in first.items() if state} == {0, 2}
    assert set(first[0]) == {"own", "mixer"}
    toy.step([1, 2])
    second = toy.states()
    assert_equal(first[0], second[0])
    for client in (0, 1, 2):
        assert_equal(adapters_of(second[client]["own"], vit()), toy.server["own"][str(client)])
    # neither heads nor mixers reach the server
    assert {path.rpartition("/")[2] for path, _ in leaves(toy.server)} == set(vit().groups["adapters"])
    mixers = [second[client]["mixer"] for client in (0, 1, 2)]
    assert all(set(mixer) == set(vit().sites) for mixer in mixers)
    site = next(iter(vit().sites))
    assert not torch.equal(mixers[0][site], mixers[1][site])
    assert not torch.equal(first[2]["mixer"][site], second[2]["mixer"][site])


def test_each_client_begins_with_a_mixer_of_its_own() -> None:
    idle = adapted_toy(FedALT(), train=TRAIN.model_copy(update={"lr": 0.0}))
    idle.step([0, 1])
    drawn = [idle.states()[client]["mixer"] for client in (0, 1)]
    for site, width in vit().sites.items():
        assert drawn[0][site].shape == (2, width) and drawn[0][site].abs().max() <= width**-0.5
        assert drawn[0][site].abs().max() > width**-0.5 / 2
        assert not torch.equal(drawn[0][site], drawn[1][site])


@pytest.mark.parametrize("trains", [["a", "b"], ["b"]], ids=["ab", "b"])
@pytest.mark.parametrize("share", [pytest.param(None, marks=pytest.mark.slow), 0.3])
def test_stacked_is_looped(share: float | None, trains: list[str]) -> None:
    model = {"adapter": {"r": 3, "alpha": 6, "trains": trains}}
    one, other = (adapted_toy(FedALT(own_share=share), mode, model) for mode in ("looped", "vectorized"))
    assert_close(one.run(), other.run(), 1e-5)
    for client, state in one.states().items():
        assert_close(state, other.states()[client], 1e-5)
    scores = other.scores()
    for client, rows in one.scores().items():
        assert set(rows) == {"personalized"}
        assert abs(rows["personalized"].loss - scores[client]["personalized"].loss) < 1e-5


def test_newcomers_have_the_mean_of_all() -> None:
    toy = adapted_toy(FedALT(), unseen=1)
    toy.run()
    common, own = toy.algorithm.served(toy.server, toy.context)
    assert not common and set(own) == {0, 1, 2, 3}
    everyone = [toy.server["own"].get(str(k), toy.server["initial"]) for k in range(3)]
    for name, leaf in own[3]["rest"].items():
        assert_close(leaf, torch.stack([adapter[name].double() for adapter in everyone]).mean(0).float(), 1e-9)
    assert set(toy.scores(newcomers=True)) == {3}


def test_it_needs_adapters() -> None:
    toy = adapted_toy(FedALT(), dataset=images((4, 4)))
    with pytest.raises(ConfigError, match=r"FedALT needs a model with adapters .*model=pretrained"):
        FedALT().check(two_layers(), toy.context)
    FedALT().check(toy.task, toy.context)
