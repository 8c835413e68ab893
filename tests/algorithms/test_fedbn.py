"""FedBN: invariants BN, and the option that the method sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedbn import FedBN
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.engine.client import Client
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.models.private_norm import STATE
from rayfl.params import Tree, copy, num_bytes
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import ListDataset, RelabelledStreams, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3,
    clients_per_round=2,
    local_epochs=2,
    batch_size=4,
    lr=0.1,
    momentum=0.5,
    weight_decay=0.01,
    private_norm="all",
)
SHARED = TRAIN.model_copy(update={"private_norm": "none"})
NORM = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
OWN_MODEL = "model={name: 'tests.support.own_norm:normalized', head: '4'}"


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": normalized_layers(), "train": train} | options)


def identical_clients(**options: Any) -> dict[str, Any]:
    one = random_clients([10]).load(0)["train"]
    return {"dataset": ListDataset([(one.x, one.y)] * 4), "streams": RelabelledStreams(0, (0,) * 4), **options}


def test_a_newcomer_fits_its_normalization_layers_and_nothing_else() -> None:
    moved = set()

    class Watched(FedBN):
        async def join(self, client: Client, server: Tree) -> Tree:
            before = copy(server["model"])
            joined = await super().join(client, server)
            moved.update(name for name, leaf in joined["model"].items() if not torch.equal(leaf, before[name]))
            return joined

    toy = toy_of(Watched())
    toy.federation.begin_round(0)
    toy.federation.map(toy.algorithm.join, [1], {"server": {"model": toy.server["model"]}})
    assert moved >= {"norm.weight", "norm.bias"}
    assert moved <= NORM


def test_inv_bn_1_a_model_without_normalization_is_refused() -> None:
    config = load_config(Experiment, "quickstart", ["algorithm=fedbn"])
    with pytest.raises(ConfigError, match=r"fedbn cannot have here.*no normalization layer.*model\.norm"):
        Parts(config).check()
    Parts(load_config(Experiment, "quickstart", ["algorithm=fedbn", OWN_MODEL])).check()


def test_inv_bn_1_unchecked_it_is_fedavg() -> None:
    bn, plain = (toy_of(a, t, task=two_layers()) for a, t in ((FedBN(), TRAIN), (FedAvg(), SHARED)))
    assert_equal(bn.run(), plain.run())


def test_inv_bn_2_a_single_client_is_fedavg() -> None:
    dataset = random_clients([11])
    bn, plain = (toy_of(a, t, dataset=dataset) for a, t in ((FedBN(), TRAIN), (FedAvg(), SHARED)))
    for _ in range(TRAIN.rounds):
        bn.step()
        plain.step()
        own = bn.states()[0][STATE]
        assert set(own) == NORM
        assert_equal({**bn.server["model"], **own}, plain.server["model"])
    found, expected = bn.scores()[0]["personalized"], plain.scores()[0]["global"]
    assert found.vector.tolist() == expected.vector.tolist()


def test_inv_bn_3_no_byte_of_a_normalization_layer_travels() -> None:
    toy = toy_of(FedBN())
    toy.step([0, 2])
    model = toy.task.network.initialize(0)
    shared = num_bytes({name: leaf for name, leaf in model.items() if name not in NORM})
    assert 0 < shared < num_bytes(model)
    assert toy.federation.traffic.down == toy.federation.traffic.up == 2 * shared
    assert all(toy.server["model"][name].numel() == 0 for name in NORM)


def test_inv_bn_4_identical_clients_are_fedavg() -> None:
    bn, plain = (toy_of(a, t, **identical_clients()) for a, t in ((FedBN(), TRAIN), (FedAvg(), SHARED)))
    for _ in range(TRAIN.rounds):
        bn.step([0, 1, 2, 3])
        plain.step([0, 1, 2, 3])
        for state in bn.states().values():
            assert_equal({**bn.server["model"], **state[STATE]}, plain.server["model"])


def test_inv_bn_5_layers_of_a_client_not_sampled_stay() -> None:
    toy = toy_of(FedBN())
    toy.step([0, 1])
    before = toy.states()
    toy.step([1, 2])
    after = toy.states()
    assert_equal(after[0], before[0])
    assert not torch.equal(after[1][STATE]["norm.weight"], before[1][STATE]["norm.weight"])
    assert set(after) == {0, 1, 2}


def test_inv_bn_6_permuting_clients_permutes_their_layers() -> None:
    original = (2, 0, 3, 1)
    clients = random_clients(SIZES)
    parts = [clients.load(k)["train"] for k in original]
    moved = ListDataset([(part.x, part.y) for part in parts])
    plain, permuted = toy_of(FedBN()), toy_of(FedBN(), dataset=moved, streams=RelabelledStreams(0, original))
    for cohort in ([0, 2], [1, 2, 3]):
        plain.step(cohort)
        permuted.step(sorted(original.index(k) for k in cohort))
    for client, state in plain.states().items():
        assert_close(permuted.states()[original.index(client)], state, 1e-12)


def test_never_sampled_clients_have_the_initial_layers() -> None:
    toy = toy_of(FedBN())
    toy.step([0, 1])
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    model = {**toy.server["model"], **{name: initial[name] for name in NORM}}
    test = toy.dataset.load(3)["test"]
    right = (toy.task.network.logits(model, test.x).argmax(1) == test.y).double().mean()
    assert toy.scores()[3]["personalized"].top1 == pytest.approx(float(right))
    assert set(toy.scores()[3]) == {"personalized"}


def test_the_method_sets_the_option() -> None:
    for given in ([], ["train.private_norm=all"]):
        config = load_config(Experiment, "quickstart", ["algorithm=fedbn", OWN_MODEL, *given])
        assert config.train.private_norm == "all"
        assert config.train.rounds == load_config(Experiment, "quickstart", []).train.rounds
    again = Experiment.model_validate(config.model_dump())
    assert again.fingerprint() == config.fingerprint()


@pytest.mark.parametrize("policy", ["none", "statistics"])
def test_another_value_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.private_norm is {policy}, but algorithm=fedbn"):
        load_config(Experiment, "quickstart", ["algorithm=fedbn", f"train.private_norm={policy}"])
