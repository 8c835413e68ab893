"""FLOCO over adapters: the endpoints' products are summed, and all else is what it is over the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.floco import Floco, model_at
from algorithms.floco_plus import FlocoPlus
from rayfl.config.added import ADDED
from rayfl.errors import ConfigError
from rayfl.models.pretrained.products import contribution, product_error
from rayfl.plots.simplex import model_on_simplex as plotted
from rayfl.tasks.further_tasks import LanguageModel
from tests.support.adapted import adapted_toy
from tests.support.bases import inputs, language_network, trained, vit
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close


def floco(**options: Any) -> Floco:
    return Floco(simplex_over="adapters", **{"simplex_dimension": 2, "assignment_round": 1, "radius": 0.3, **options})


def as_model(server: Any) -> dict[str, torch.Tensor]:
    """The model of a simplex with one endpoint."""
    return {**server["body"], **{name: leaf[0] for name, leaf in server["endpoints"].items()}}


def test_inv_floco_a_point_adds_the_sum_of_the_endpoints_products() -> None:
    models, point = [trained(vit(), m) for m in range(3)], torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    endpoints = {name: torch.stack([model[name] for model in models]) for name in vit().groups["adapters"]}
    simplex = {"body": {name: models[0][name] for name in vit().groups["head"]}, "endpoints": endpoints}
    found = model_at(simplex, point, adapted_toy(floco()).task)
    for site in vit().sites:
        a, b = f"{site}.lora_A.weight", f"{site}.lora_B.weight"
        exact = sum(p * model[b].double() @ model[a].double() for p, model in zip(point, models, strict=True))
        torch.testing.assert_close((found[b] @ found[a]).double(), exact, rtol=1e-4, atol=1e-6)
    drawn = plotted({**simplex, "points": None}, point.numpy(), "unread")
    for name, leaf in drawn.items():
        torch.testing.assert_close(leaf, found[name], rtol=1e-5, atol=1e-6)
    with torch.no_grad():  # a corner is that endpoint, with the common head
        corner = model_at(simplex, torch.tensor([0.0, 1.0, 0.0]), adapted_toy(floco()).task)
        expected = vit().logits({**models[1], **simplex["body"]}, inputs("vit", 3, 0))
        torch.testing.assert_close(vit().logits(corner, inputs("vit", 3, 0)), expected, rtol=1e-5, atol=1e-5)


def test_inv_floco_of_one_endpoint_is_federated_averaging() -> None:
    one, plain = adapted_toy(floco(simplex_dimension=0)), adapted_toy(FedAvg())
    assert_close(as_model(one.run()), plain.run()["model"], 1e-6)


def test_inv_floco_plus_of_one_endpoint_is_ditto() -> None:
    options = {"simplex_dimension": 0, "assignment_round": 1, "simplex_over": "adapters"}
    plus, ditto = adapted_toy(FlocoPlus(**options)), adapted_toy(Ditto())
    assert_close(as_model(plus.run()), ditto.run()["model"], 1e-6)
    states = ditto.states()
    for client, state in plus.states().items():
        if state:
            assert_close(as_model(state["personal"]), states[client]["personal"], 1e-6)


def test_stacked_is_looped_and_clients_get_points_of_the_simplex() -> None:
    toys: list[Toy] = [adapted_toy(floco(), mode) for mode in ("looped", "vectorized")]
    servers = [toy.run() for toy in toys]
    points = servers[0]["points"]
    assert points.shape == (4, 3) and torch.allclose(points.sum(1), torch.ones(4, dtype=torch.float64))
    assert points.unique(dim=0).shape[0] > 1
    # Points come from the directions of small updates, so that rounding shows in them more than in what is trained.
    assert_close(*servers, 1e-3)
    shapes = {name: (3, *leaf.shape) for name, leaf in vit().initialize(0).items() if ".lora_" in name}
    assert {name: tuple(leaf.shape) for name, leaf in servers[0]["endpoints"].items()} == shapes
    assert set(servers[0]["body"]) == set(vit().groups["head"])
    for rows in toys[0].scores().values():
        assert set(rows) == {"global", "personalized"}


def test_the_error_of_averaged_factors_is_that_of_all_endpoints() -> None:
    def sent(*seeds: int) -> Any:
        models = [trained(vit(), seed) for seed in seeds]
        endpoints = {name: torch.stack([one[name] for one in models]) for name in vit().groups["adapters"]}
        return contribution(vit(), {"body": {}, "endpoints": endpoints}, 1.0)

    def mean(*all_sums: Any) -> Any:
        return {
            site: sum(one[site] for one in all_sums) / len(all_sums)
            if site == "weight"
            else {key: sum(one[site][key] for one in all_sums) / len(all_sums) for key in sums}
            for site, sums in all_sums[0].items()
        }

    assert (product_error(mean(sent(1, 2), sent(1, 2))) or 0) < 1e-6
    error = product_error(mean(sent(1, 2), sent(3, 4)))
    assert error is not None and 0.1 < error < 2


def test_what_has_no_adapters_of_two_factors_is_refused() -> None:
    context = adapted_toy(floco()).context
    with pytest.raises(ConfigError, match=r"algorithm\.simplex_over=adapters is about adapters"):
        floco().check(two_layers(), context)
    half = adapted_toy(floco(), model={"adapter": {"r": 3, "alpha": 6, "trains": ["a"]}})
    with pytest.raises(ConfigError, match=r"simplex_over=adapters needs model\.adapter\.trains=\[a,b\]"):
        floco().check(half.task, context)
    floco().check(LanguageModel(language_network("llama")), context)  # which trains no head
    assert ADDED["algorithm.simplex_over"] == Floco().simplex_over
