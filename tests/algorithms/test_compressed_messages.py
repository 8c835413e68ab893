"""Compressed messages in rounds of methods: what the server gets, what clients keep, what is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rayfl
from actors.hosting.job import Job
from actors.hosting.outgoing import RESIDUAL, Outgoing
from algorithms.base import Algorithm
from algorithms.fedavg import FedAvg
from algorithms.registry import Experiment
from rayfl.aggregation.exact_sum import Weighted
from rayfl.config.loading import load_config
from rayfl.engine.client import Client
from rayfl.errors import ClientError, ConfigError, MethodError
from rayfl.experiment.parts import Parts
from rayfl.messages.compressors import Compressor, NoCompression, Quantize, RandomK, SecureAggregation, Sign, TopK
from rayfl.messages.privacy import PrivacyConfig
from rayfl.params import Tree, leaves, num_bytes, subtract
from rayfl.randomness import RandomStreams
from tests.algorithms.test_privacy import PRIVATE, Talkative, uniform
from tests.cluster.rounds.test_unseen_clients import experiment
from tests.support.cases import TRAIN, of_kinds, toy_of
from tests.support.cases.base import SIZES, Case
from tests.support.experiments import assert_same, outcome
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

EVERYTHING = TopK(share=1)
"""Sends all entries."""
KINDS = [TopK(share=0.1), RandomK(share=0.1), Quantize(bits=4), Sign(), SecureAggregation(bits=12)]


def toy(algorithm: Algorithm | None = None, **options: Any) -> Toy:
    clients = random_clients(SIZES, dtype=torch.float64)
    return Toy(algorithm or FedAvg(), clients, two_layers(double=True), TRAIN, **options)


def flat(tree: Tree) -> torch.Tensor:
    return torch.cat([leaf.flatten() for _, leaf in leaves(tree)])


@of_kinds(PRIVATE)
def test_a_compressor_that_loses_nothing_changes_nothing(case: Case) -> None:
    plain, compressed = toy_of(case), toy_of(case, compression=EVERYTHING)
    for _ in range(2):
        assert_close(plain.step(), compressed.step(), atol=1e-9)


@pytest.mark.two_cases
@pytest.mark.parametrize("compressor", KINDS, ids=str)
@of_kinds(PRIVATE)
def test_every_method_goes_on_with_any_number_of_hosts(case: Case, compressor: Compressor) -> None:
    if isinstance(compressor, SecureAggregation) and getattr(case.algorithm, "aggregation", "") == "fisher":
        case = replace(case, algorithm=uniform(case))  # weights of Fisher information are no whole numbers, and refused
    one, several = (toy_of(case, compression=compressor, hosts=hosts) for hosts in (1, 3))
    for _ in range(2):
        assert_equal(one.step(), several.step())
    assert_equal(one.states(), several.states())


@pytest.mark.parametrize("compressor", KINDS, ids=str)
def test_the_server_gets_the_start_and_the_compressed_change(compressor: Compressor) -> None:
    start = toy().server["model"]
    change = subtract(toy().step([2])["model"], start)
    one = toy(compression=compressor)
    found = flat(subtract(one.step([2])["model"], start))
    generator = one.context.streams.generator("compression", 0, 2)
    decoded, size = compressor.encoded(flat(change), [leaf.numel() for _, leaf in leaves(change)], generator)
    torch.testing.assert_close(found, decoded, atol=1e-9, rtol=0)
    size += compressor.beside(one.context.cohort_size)
    assert one.federation.traffic.up == size < num_bytes(start) + compressor.beside(one.context.cohort_size)
    assert one.federation.traffic.down == num_bytes(start)


def test_what_a_message_lacks_is_added_to_the_next() -> None:
    compressor = TopK(share=0.1)
    one = toy(compression=compressor)
    start = one.server["model"]
    first = subtract(one.step([2])["model"], start)
    change = flat(subtract(toy().step([2])["model"], start))
    rest = flat(one.states()[2][RESIDUAL])
    torch.testing.assert_close(rest, change - flat(first), atol=1e-9, rtol=0)
    other = toy()  # the same second round without compression
    other.server, other.round = one.server, 1
    before = one.server["model"]
    own = flat(subtract(other.step([2])["model"], before))
    second = flat(subtract(one.step([2])["model"], before))
    kept = second != 0
    torch.testing.assert_close(second[kept], (own + rest)[kept], atol=1e-9, rtol=0)
    torch.testing.assert_close(flat(one.states()[2][RESIDUAL]), own + rest - second, atol=1e-9, rtol=0)
    without = toy(compression=TopK(share=0.1, error_feedback=False))
    without.step([2])
    assert RESIDUAL not in without.states().get(2, {})


@pytest.mark.parametrize("compressor", [*KINDS, TopK(share=0.3)], ids=str)
def test_stacked_clients_send_the_same(compressor: Compressor) -> None:
    looped, stacked = (toy(compression=compressor, mode=mode) for mode in ("looped", "vectorized"))
    for _ in range(2):
        assert_close(looped.step(), stacked.step(), atol=1e-8)
    assert_close(looped.states(), stacked.states(), atol=1e-8)


@pytest.mark.parametrize("policy", ["none", "statistics"])
def test_running_statistics_are_sent_as_they_are_or_stay(policy: Any) -> None:
    train = TRAIN.model_copy(update={"batch_size": 3, "private_norm": policy})
    options = {"task": normalized_layers(), "train": train}
    plain, compressed = (
        toy_of(Case(FedAvg()), compression=one, **options) for one in (NoCompression(), RandomK(share=0.2))
    )
    plain.step(), compressed.step()
    buffers = plain.task.network.buffer_names
    for name in buffers:
        assert_close(plain.server["model"][name], compressed.server["model"][name], atol=1e-9)
    parameters = sum(leaf.numel() for name, leaf in plain.server["model"].items() if name not in buffers)
    statistics = num_bytes({name: plain.server["model"][name] for name in buffers})
    clients = len(plain.cohort(0))
    assert compressed.federation.traffic.up == clients * (-(-parameters // 5) * 8 + statistics)


class Forgetful(FedAvg):
    """Empties its clients' state."""

    name: Any = "forgetful"

    async def local_update(self, client: Client, model: Tree) -> Any:
        client.state.clear()
        return await super().local_update(client, model)


def test_a_method_cannot_lose_what_is_kept() -> None:
    own, usual = (toy(method, compression=TopK(share=0.1)) for method in (Forgetful(), FedAvg()))
    for _ in range(3):
        assert_equal(own.step([0, 1]), usual.step([0, 1]))


class Unreceived(FedAvg):
    """Sends what nobody received."""

    name: Any = "unreceived"

    async def local_update(self, client: Client, model: Tree) -> Any:
        return replace(await super().local_update(client, model), tree={"new": torch.zeros(2)})


def test_messages_that_are_no_changes_are_refused() -> None:
    with pytest.raises(ClientError, match="compression: local_update sends 'new', which is no change of a tensor"):
        toy(Unreceived(), compression=Sign()).step()


@pytest.mark.parametrize(
    ("way", "asked"), [("map", r"Clients\.map, call 1"), ("groups", r"Clients\.mean, call 2"), ("twice", "call 2")]
)
def test_other_messages_of_ones_own_method_are_refused(way: str, asked: str) -> None:
    with pytest.raises(MethodError, match=f"for nothing else that they send; this is .*{asked} of the round"):
        toy(Talkative(way=way), compression=Sign()).step()
    toy(Talkative(way="also"), compression=Sign()).step()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "scaffold"}, "compression=sign: it is for changes of one model.*; scaffold: its clients send"),
        (
            {"algorithm": {"name": "fedavg", "aggregation": "uniform"}, "privacy": {"clip_norm": 1}},
            "compression=sign: together with noise that the server adds it is not",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    content = {**experiment(tmp_path), "compression": "sign", **changes}
    with pytest.raises(ConfigError, match=message):
        Parts(load_config(Experiment, content, {})).check()


def test_a_continued_run_has_the_same_bits(tmp_path: Path) -> None:
    changes = {"compression": {"name": "quantize", "bits": 3, "error_feedback": True}, "evaluation": {"every": 1}}
    rayfl.run(experiment(tmp_path, "whole", **changes))
    rayfl.run(experiment(tmp_path, "parts", **changes), **{"train.rounds": 1})
    rayfl.run(str(tmp_path / "parts"), **{"train.rounds": 2})
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "parts"))


def sent_in_turn(state: dict[str, Any], *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """What a client's messages become, which are changes of zeros: one after the other."""
    network = SimpleNamespace(buffer_names=())
    context = SimpleNamespace(compression=TopK(share=0.5), secure_sum=False, cohort_size=1)
    own: Any = SimpleNamespace(
        context=context, norm=SimpleNamespace(names=()), engine=SimpleNamespace(task=SimpleNamespace(network=network))
    )
    found = []
    for round, message in enumerate(messages):
        client: Any = SimpleNamespace(id=0, state=state, context=SimpleNamespace(streams=RandomStreams(0)))
        common = {"model": {name: torch.zeros_like(leaf) for name, leaf in message.items()}}
        job = Job("local_update", "mean", round, (0,))
        outcome = Outgoing(own, job, common, {0: client}, None).sent({0: Weighted({"model": message}, 1.0)})[0]
        found.append({name: leaf.tolist() for name, leaf in outcome.tree["model"].items()})
    return found


def test_a_tensor_gets_what_its_own_last_message_lacked() -> None:
    """As where one factor of an adapter is sent in even rounds, and the other in odd ones."""
    state: dict[str, Any] = {}
    b, none = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.zeros(4)
    first, second, third = sent_in_turn(state, {"b": b}, {"a": none}, {"b": none})
    assert (first["b"], second["a"], third["b"]) == ([4.0, 3.0, 0.0, 0.0], [0.0] * 4, [0.0, 0.0, 2.0, 1.0])
    sizes = sent_in_turn({}, {"b": b}, {"a": torch.zeros(6)}, {"b": none})
    assert sizes[2]["b"] == [0.0, 0.0, 2.0, 1.0]


def test_what_older_releases_kept_goes_on() -> None:
    state: dict[str, Any] = {RESIDUAL: torch.tensor([0.0, 0.0, 2.0, 1.0])}
    assert sent_in_turn(state, {"b": torch.zeros(4)}) == [{"b": [0.0, 0.0, 2.0, 1.0]}]
    assert sent_in_turn({RESIDUAL: torch.ones(3)}, {"b": torch.zeros(4)}) == [{"b": [0.0] * 4}]


@pytest.mark.two_cases
@of_kinds(PRIVATE)
def test_every_private_method_goes_on_with_integers_of_noise(case: Case) -> None:
    noise = PrivacyConfig(clip_norm=0.5, noise_multiplier=0.1, mechanism="skellam")
    chosen = replace(case, algorithm=uniform(case))
    rule = SecureAggregation(clip=0.5, bits=16)
    one, several = (toy_of(chosen, compression=rule, privacy=noise, hosts=hosts) for hosts in (1, 3))
    # No message is longer than what epsilon is counted for: it would end the round.
    counted = [leaf for _, leaf in leaves(chosen.algorithm.summed(one.server)) if isinstance(leaf, torch.Tensor)]
    one.federation._summed = sum(leaf.numel() for leaf in counted)
    for _ in range(2):
        assert_equal(one.step(), several.step())
    assert_equal(one.states(), several.states())
    one.federation._summed = 1
    with pytest.raises(MethodError, match=r"and epsilon is for 1 at most: the method's function summed"):
        one.step()
