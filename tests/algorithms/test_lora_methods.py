"""FedIT, FFA-LoRA and FedSA-LoRA, which are federated averaging and FedPer over adapters: what must hold for them."""

from __future__ import annotations

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedper import FedPer
from algorithms.local import Local
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.tasks.base import Predictor
from tests.support.adapted import SIZES, TRAIN, adapted_toy, images
from tests.support.bases import network, trained
from tests.support.toys import assert_equal

FEDSA = FedPer(head_group="lora_b_and_head")


@pytest.mark.parametrize("trains", [["a", "b"], ["b"]], ids=["FedIT", "FFA-LoRA"])
def test_inv_fedit_of_one_client_is_local_training_to_the_bit(trains: list[str]) -> None:
    model = {"adapter": {"r": 3, "alpha": 6, "trains": trains}}
    options = {"dataset": images((9,)), "train": TRAIN.model_copy(update={"clients_per_round": 1})}
    averaged, alone = (adapted_toy(method, "looped", model, **options) for method in (FedAvg(), Local()))
    alone.run()
    assert_equal(averaged.run()["model"], alone.states()[0]["local"])


def test_inv_fedit_equal_adapters_are_themselves() -> None:
    """Whatever they weigh: sums are exact."""
    tree, total = trained(network("vit"), 1), ExactSum()
    for size in SIZES:
        total.add(Weighted(tree, size))
    assert_equal(total.mean(), tree)


def test_inv_fedsa_a_client_never_sampled_has_the_base_and_the_initial_head() -> None:
    """Its B is zero, so that the A of others add nothing."""
    toy = adapted_toy(FEDSA)
    toy.step([0, 1]), toy.step([0, 1])
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    assert any(not torch.equal(initial[name], leaf) for name, leaf in toy.server["shared"].items())
    found = toy.scores()[3]["personalized"].vector
    expected = evaluate({"initial": Predictor.of(initial)}, toy.dataset.load(3)["test"], toy.task, 64)
    assert found.tolist() == pytest.approx(expected["initial"].vector.tolist(), rel=1e-6)


def test_inv_fedsa_with_b_at_its_start_sends_a_constant() -> None:
    """Where B is zero and not trained, A has no gradient."""
    toy = adapted_toy(FEDSA, model={"adapter": {"r": 3, "alpha": 6, "trains": ["a"]}})
    begun = {name: leaf.clone() for name, leaf in toy.server["shared"].items()}
    assert begun and all(".lora_A." in name for name in begun)
    assert_equal(toy.run()["shared"], begun)
    heads = [state["personal"] for state in toy.states().values() if state]
    assert heads and all(".classifier." in name for own in heads for name in own)
