"""FedDPA: the global adapter is federated averaging's, and the local one counts by how near an input is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.feddpa import FedDPA, InstanceMixture, both, embedded
from rayfl.engine.client import Client
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.engine.updates.requests import OutputRequest
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.metrics.language import IGNORED
from rayfl.params import leaves
from rayfl.tasks.base import Batch, Predictor
from rayfl.tasks.further_tasks import LanguageModel
from tests.support.adapted import adapted_toy
from tests.support.bases import NEXT, inputs, language_network, texts, trained
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, assert_equal

VERSIONS = pytest.mark.parametrize("version", ["T", "F"])


def predictors(toy: Toy, client: int, local: dict[str, Tensor], server: dict[str, Any]) -> dict[str, Predictor]:
    """The rows of a client with a local adapter."""
    host = Client(client, {"local": local}, toy.dataset.load(client), toy.task, toy.context, torch.device("cpu"))
    procedure = toy.algorithm.predictors(host, server)
    try:
        request = procedure.send(None)
        while True:
            assert isinstance(request, OutputRequest)
            request = procedure.send(request.function(request.x, toy.task))
    except StopIteration as found:
        rows: dict[str, Predictor] = found.value
        return rows


@VERSIONS
@pytest.mark.first_case
def test_inv_feddpa_global_row_is_that_of_federated_averaging(version: str) -> None:
    """w = 0 is FedIT, to the bit."""
    toy, plain = adapted_toy(FedDPA(version=version)), adapted_toy(FedAvg())
    assert_equal(toy.run(), plain.run())
    ours, theirs = toy.scores(final=True), plain.scores(final=True)
    for client, rows in ours.items():
        assert set(rows) == {"global", "local", "even", "instance"}
        assert rows["global"].vector.tolist() == theirs[client]["global"].vector.tolist()


@VERSIONS
def test_inv_feddpa_local_adapters_stay_with_their_clients(version: str) -> None:
    toy = adapted_toy(FedDPA(version=version))
    toy.step([0, 2])
    first = {client: dict(leaves(state)) for client, state in toy.states().items()}
    if version == "F":
        assert not any(first.values())
        return
    assert {client for client, state in first.items() if state} == {0, 2}
    toy.step([1, 2])
    second = {client: dict(leaves(state)) for client, state in toy.states().items()}
    assert_equal(first[0], second[0])
    assert any(not torch.equal(first[2][name], leaf) for name, leaf in second[2].items())
    # what is sent are the model's own tensors and no others
    assert set(toy.server) == {"model"} and set(toy.server["model"]) == set(toy.task.network.parameter_names)


def test_inv_feddpa_weights_of_instances_do_not_depend_on_the_batch() -> None:
    toy = adapted_toy(FedDPA(weight_scale=1.0))
    net = toy.task.network
    shared, local, x = trained(net, 1), trained(net, 2), inputs("vit", 7, 5)
    one = predictors(toy, 1, local, {"model": shared})["instance"]
    again = predictors(toy, 1, local, {"model": shared})["instance"]
    with torch.no_grad():
        together = one.predictions(one.built(), x, toy.task)
        alone = torch.cat([again.predictions(again.built(), x[i : i + 1], toy.task) for i in range(7)])
    assert_close(together, alone, 1e-6)


def test_a_text_is_weighed_by_its_prompt_and_what_follows_is_not_read() -> None:
    """The embedding is that of the last token before the response, in evaluation too."""
    net = language_network("llama")
    task, (shared, local) = LanguageModel(net, (), NEXT), (trained(net, 1, 0.5), trained(net, 2, 0.5))
    x, y = texts(6, 0)
    asked, begins = y != IGNORED, (y != IGNORED).int().argmax(1)
    with torch.no_grad():
        found = embedded(task, local, x, asked)
        for row, place in enumerate(begins.tolist()):
            assert_close(found[row], net.features(local, x[row : row + 1, : place + 1])[0, -1], 1e-5)
        answered = x.where(torch.arange(12) <= begins[:, None], 7)
        assert_close(embedded(task, local, answered, asked), found, 1e-6)
        assert (
            embedded(task, local, x.where(torch.arange(12) != begins[:, None], 7), asked) - found
        ).abs().max() > 0.01
        row = Predictor.of(shared, local, {"seen": found[:3]}, combine=InstanceMixture(0.8), reads_asked=True)
        weights = 0.8 * F.cosine_similarity(found[:, None], found[None, :3], dim=2).mean(1, keepdim=True)
        logits = torch.cat([net.logits(both(shared, local, weights[i : i + 1]), x[i : i + 1]) for i in range(6)])
        expected = task.measures.statistics(logits.log_softmax(-1), y)
    assert weights.std() > 1e-3
    scored = evaluate({"instance": row}, Examples(x, y), task, 4)["instance"].vector
    assert scored.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("instances", [3, 50])
def test_an_input_is_weighed_by_its_cosines_with_training_inputs(instances: int) -> None:
    toy = adapted_toy(FedDPA(weight_scale=0.8, instances=instances))
    net = toy.task.network
    shared, local, x = trained(net, 1), trained(net, 2), inputs("vit", 4, 5)
    row = predictors(toy, 2, local, {"model": shared})["instance"]
    own = toy.dataset.load(2)["train"].x
    places = toy.context.streams.generator("instances", client=2).permutation(len(own))[:instances]
    with torch.no_grad():
        near = F.cosine_similarity(net.features(local, x)[:, None], net.features(local, own[places])[None], dim=2)
        weights = 0.8 * near.mean(1)
        expected = torch.cat(
            [net.logits(both(shared, local, w.view(1, 1)), x[i : i + 1]) for i, w in enumerate(weights)]
        )
        found = row.predictions(row.built(), x, toy.task)
    assert weights.std() > 1e-4
    assert_close(found, expected.log_softmax(-1), 1e-5)
    with torch.no_grad():
        assert (found - net.logits(shared, x).log_softmax(-1)).abs().max() > 1e-3


def test_inv_feddpa_rows_at_the_ends_are_the_models() -> None:
    toy = adapted_toy(FedDPA())
    net = toy.task.network
    shared, local, x = trained(net, 1), trained(net, 2), inputs("vit", 4, 5)
    with torch.no_grad():
        for weight, model in ((0.0, shared), (1.0, local)):
            assert_close(net.logits(both(shared, local, torch.tensor([[weight]])), x), net.logits(model, x), 1e-6)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_inv_feddpa_training_weight_at_the_ends(weight: float) -> None:
    """With weight 0 the local adapter has no gradient; with weight 1 it does not see the global one."""
    method = FedDPA(training_weight=weight)
    toy = adapted_toy(method)
    net, batch = toy.task.network, Batch(inputs("vit", 5, 0), torch.arange(5))
    local = {name: leaf.requires_grad_() for name, leaf in trained(net, 1).items()}
    values = [method.local_objective(local, batch, toy.task, {"other": trained(net, seed)}, None) for seed in (2, 3)]
    gradients = torch.autograd.grad(values[0], list(local.values()))
    if weight:
        assert_close(values[0], values[1], 1e-6)
        assert all(gradient.abs().max() > 0 for gradient in gradients)
    else:
        assert not any(gradient.any() for gradient in gradients)
    # and the other way round, for the global one
    value = method.global_objective(local, batch, toy.task, {"other": trained(net, 2)}, None)
    assert any(gradient.any() for gradient in torch.autograd.grad(value, list(local.values()))) == (not weight)


def test_inv_feddpa_global_next_to_a_local_adapter_of_no_weight_is_alone() -> None:
    beside = adapted_toy(FedDPA(training_weight=0.0, global_beside_local=True)).run()
    assert_close(beside, adapted_toy(FedAvg()).run(), 1e-6)
    with pytest.raises(AssertionError):
        assert_close(adapted_toy(FedDPA(global_beside_local=True)).run(), beside, 1e-4)


def test_inv_feddpa_f_without_epochs_is_the_global_adapter() -> None:
    toy = adapted_toy(FedDPA(version="F", local_epochs=0))
    toy.run()
    for rows in toy.scores(final=True).values():
        for row in ("local", "even", "instance"):
            assert abs(rows[row].loss - rows["global"].loss) < 1e-6
    assert all(set(rows) == {"global"} for rows in toy.scores().values())


def test_a_local_adapter_begins_as_the_initial_one_and_goes_on_from_where_it_was() -> None:
    """In version T, whatever the received global adapter is."""
    idle = adapted_toy(FedDPA(local_epochs=0))
    idle.step([0, 1]), idle.step([0, 1])
    initial = idle.task.network.initialize(idle.context.streams.integer("init.global"))
    assert_equal(idle.states()[0]["local"], initial)
    toy = adapted_toy(FedDPA(training_weight=1.0))
    toy.step([0, 1])
    first = toy.states()[0]["local"]
    toy.server = {"model": trained(toy.task.network, 9)}
    other = adapted_toy(FedDPA(training_weight=1.0))
    other.step([0, 1]), other.step([0, 1]), toy.step([0, 1])
    second = toy.states()[0]["local"]
    assert_close(second, other.states()[0]["local"], 1e-6)
    assert any((second[name] - leaf).abs().max() > 1e-4 for name, leaf in first.items())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="T", marks=pytest.mark.slow),
        pytest.param({"version": "F"}, id="F"),
        pytest.param({"global_beside_local": True}, id="beside"),
    ],
)
@pytest.mark.parametrize(
    "trains", [pytest.param(["a", "b"], id="ab", marks=pytest.mark.slow), pytest.param(["b"], id="b")]
)
@pytest.mark.first_case
def test_stacked_is_looped(options: dict[str, Any], trains: list[str]) -> None:
    model = {"adapter": {"r": 3, "alpha": 6, "trains": trains}}
    one, other = (adapted_toy(FedDPA(**options), mode, model) for mode in ("looped", "vectorized"))
    assert_close(one.run(), other.run(), 1e-5)
    for client, state in one.states().items():
        assert_close(state, other.states()[client], 1e-5)
    scores = other.scores(final=True)
    for client, rows in one.scores(final=True).items():
        for row, found in rows.items():
            assert abs(found.loss - scores[client][row].loss) < 1e-5


def test_newcomers_have_a_local_adapter_that_they_train() -> None:
    toy = adapted_toy(FedDPA(), unseen=1)
    toy.run()
    joined = toy.scores(newcomers=True)
    assert set(joined) == {3}
    rows = joined[3]
    assert abs(rows["local"].loss - rows["global"].loss) > 1e-4


def test_it_needs_adapters() -> None:
    toy = adapted_toy(FedDPA())
    with pytest.raises(ConfigError, match=r"FedDPA needs a model with adapters .*model=pretrained"):
        FedDPA().check(two_layers(), toy.context)
    FedDPA().check(toy.task, toy.context)
