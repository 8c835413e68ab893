"""FLoRA: what is added to the base is the mean of the clients' products, whatever their ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from algorithms.flora import FLoRA
from algorithms.parts.adapters import added_and_rest
from algorithms.parts.ranks import cut, head_of, padded, rank_in, sites_of
from rayfl.models.pretrained.mixing import delta_name
from rayfl.models.pretrained.peft_files import write_adapter
from tests.support.adapted import TRAIN, adapted_toy, images
from tests.support.bases import section, trained, vit
from tests.support.toys import assert_close, assert_equal

WEIGHTS = {0: 5, 1: 8, 2: 9}
X = images((6,)).load(0)["train"].x


def begun(seed: int = 0) -> dict[str, Tensor]:
    """A server's model to which something has been added."""
    toy, generator = adapted_toy(FLoRA()), torch.Generator().manual_seed(seed)
    deltas, rest = added_and_rest(toy.server["model"])
    return rest | {name: torch.randn(leaf.shape, generator=generator) / 20 for name, leaf in deltas.items()}


def product(model: Any, site: str) -> Tensor:
    """B A in float64."""
    found: Tensor = model[f"{site}.lora_B.weight"].double() @ model[f"{site}.lora_A.weight"].double()
    return found


def test_inv_flora_what_is_added_is_the_dense_mean_of_products() -> None:
    """Of unlike ranks; the weights are on one factor alone, or they would count squared."""
    old = begun()
    sent = {client: cut(trained(vit(), client + 1), rank) for client, rank in enumerate((1, 3, 2))}
    found = FLoRA.combined(old, sent, WEIGHTS, vit().scale)
    for site in sites_of(old):
        mean = sum(WEIGHTS[client] / 22 * product(model, site) for client, model in sent.items())
        added = found[delta_name(site)].double() - old[delta_name(site)].double()
        assert_close(added, vit().scale * mean, 1e-6)
        assert not found[f"{site}.lora_B.weight"].any()
    for name in vit().groups["head"]:
        expected = sum(WEIGHTS[client] / 22 * model[name].double() for client, model in sent.items())
        assert_close(found[name], expected.float(), 1e-6)


def test_inv_flora_the_server_of_one_client_computes_what_the_client_does() -> None:
    old, alone = begun(), cut(trained(vit(), 1), 2)
    found = FLoRA.combined(old, {0: alone}, {0: 7}, vit().scale)
    mine = {**padded(alone, 3), **added_and_rest(old)[0]}
    assert_close(vit().logits(found, X), vit().logits(mine, X), 1e-5)
    assert not torch.allclose(
        vit().logits(found, X), vit().logits({**head_of(added_and_rest(found)[1]), **old}, X), atol=1e-3
    )


def test_inv_flora_adapters_begin_afresh_in_every_round() -> None:
    """Each client draws its own A in each round; B is zero, so that every round begins with the server's function."""
    drawn: list[dict[int, Any]] = []

    class Seen(FLoRA):
        @staticmethod
        def combined(old: Any, trained: Any, weights: Any, scale: float) -> Any:
            drawn.append(dict(trained))
            return FLoRA.combined(old, trained, weights, scale)

    toy = adapted_toy(Seen(ranks=(2, 3)), train=TRAIN.model_copy(update={"lr": 0.0}))
    before = toy.server["model"]
    for _ in range(2):
        toy.step([0, 1])
    assert_equal(toy.server["model"], before)
    (first, second), site = drawn, sites_of(before)[0]
    assert [rank_in(first[client]) for client in (0, 1)] == [2, 3]
    a = f"{site}.lora_A.weight"
    assert not torch.equal(first[0][a], first[1][a][:2]) and not torch.equal(first[0][a], second[0][a])
    assert all(not leaf.any() for tree in first.values() for name, leaf in tree.items() if ".lora_B." in name)


def test_inv_flora_what_it_begins_from_is_added_to_the_base(tmp_path: Path) -> None:
    """``model.adapter.start``: the server's model computes what that adapter does, and no round adds it again."""
    tree, made = trained(vit(), 3), section("vit")
    write_adapter(tmp_path / "start", tree, made.peft_settings(list(tree)), {})
    idle = TRAIN.model_copy(update={"lr": 0.0})
    model = {"adapter": {"r": 3, "alpha": 6, "start": str(tmp_path / "start")}}
    toy = adapted_toy(FLoRA(), model=model, train=idle)
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    expected = toy.task.network.logits(initial, X)
    assert_close(toy.task.network.logits(toy.server["model"], X), expected, 1e-5)
    toy.run()
    assert_close(toy.task.network.logits(toy.server["model"], X), expected, 1e-5)


def test_newcomers_have_the_server_s_model() -> None:
    toy = adapted_toy(FLoRA(), unseen=1)
    toy.run()
    assert set(toy.scores(newcomers=True)) == {3}
    assert not any(toy.states().values())


def test_what_is_sent_is_what_was_added_and_the_head() -> None:
    toy = adapted_toy(FLoRA())
    sent = toy.algorithm.sent(toy.server)
    assert set(sent) == {"added", "head"} and set(sent["head"]) == set(vit().groups["head"])
    assert set(sent["added"]) == {delta_name(site) for site in vit().sites}
