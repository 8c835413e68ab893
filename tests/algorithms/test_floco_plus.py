"""FLOCO+: invariants FLP, its rows of the equivalence matrix, fixture G15, options and learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.ditto import Ditto
from algorithms.floco import Floco, model_at
from algorithms.floco_plus import FlocoPlus
from algorithms.parts.simplex_sampling import sample_simplex
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch
from tests.support.floco_plus_toys import SIMPLEX, TRAIN, plus, simplex_of, toy
from tests.support.toy_networks import normalized_layers, softmax_regression, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, random_clients

HEAD = "head.weight"
ROUNDS = ([0, 2, 5], [1, 2, 3], [0, 4, 5], [1, 3, 5])


def flat(simplex: Tree) -> Tree:
    """The model of a simplex with one endpoint."""
    return {**simplex["body"], HEAD: simplex["endpoints"][0]}


def personal(run: Toy) -> dict[int, Tree]:
    return {client: state["personal"] for client, state in run.states().items()}


def vectors(run: Toy, row: str, final: bool = False) -> dict[int, list[float]]:
    return {client: rows[row].vector.tolist() for client, rows in run.scores(final).items()}


def scores_of(run: Toy, models: dict[int, Tree]) -> dict[int, float]:
    """Mean losses of given models on their clients."""
    parts = {k: run.dataset.load(k)["test"] for k in models}
    return {k: float(run.task.loss(copy(m), Batch(parts[k].x, parts[k].y))) for k, m in models.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"proximal_weight": 0.0, "personal_epochs": 3}, marks=pytest.mark.slow),
        pytest.param({"proximal_weight": 5.0, "personal_epochs": 0, "unseen": "init"}, marks=pytest.mark.slow),
        {"posthoc": True},
        {"radius": 2.0, "aggregation": "population", "simplex_dimension": 1},
    ],
)
@pytest.mark.parametrize("mode", [pytest.param("looped", marks=pytest.mark.slow), "vectorized"])
def test_inv_flp_1_server_is_floco(changes: dict[str, Any], mode: str) -> None:
    algorithm = plus(**changes)
    shared = {name: getattr(algorithm, name) for name in Floco.model_fields if name != "name"}
    extended, plain = toy(algorithm, mode=mode), toy(Floco(**shared), mode=mode)
    for cohort in ROUNDS:
        assert_equal(extended.step(cohort), plain.step(cohort))
    assert "points" in plain.server
    assert vectors(extended, "global", final=True) == vectors(plain, "global", final=True)


@pytest.mark.parametrize(
    ("tau", "radius"),
    [(0, 0.3), (2, 0.0), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 2.5), (99, 0.1)))],
)
@pytest.mark.parametrize("unseen", ["init", "global"])
def test_inv_flp_2_one_endpoint_is_ditto(tau: int, radius: float, unseen: Any) -> None:
    common = {"proximal_weight": 0.7, "personal_epochs": 3, "unseen": unseen}
    one = toy(plus(simplex_dimension=0, assignment_round=tau, radius=radius, **common))
    ditto = toy(Ditto(**common))
    for cohort in ([0, 2], [2, 5], [0, 1], [1, 5]):
        assert_equal(flat(one.step(cohort)), ditto.step(cohort)["model"])
        assert_equal({k: flat(tree) for k, tree in personal(one).items()}, personal(ditto))
    for row in ("global", "personalized"):
        assert vectors(one, row) == vectors(ditto, row)


@pytest.mark.parametrize("mode", [pytest.param("looped", marks=pytest.mark.slow), "vectorized"])
def test_inv_flp_2_in_single_precision_and_with_dropout(mode: str) -> None:
    dataset = random_clients((9, 12, 6, 10), dtype=torch.float32)
    cases = [(dataset, two_layers(double=False))]
    if mode == "looped":
        cases.append((random_clients((8, 12, 7, 10)), normalized_layers(0.3)))
    for clients, task in cases:
        one = Toy(plus(simplex_dimension=0), clients, task, TRAIN, mode=mode)
        ditto = Toy(Ditto(), clients, task, TRAIN, mode=mode)
        for cohort in ([0, 2], [1, 2, 3], [0, 3]):
            assert_equal(flat(one.step(cohort)), ditto.step(cohort)["model"])
        assert_equal({k: flat(tree) for k, tree in personal(one).items()}, personal(ditto))


def test_inv_flp_3_free_of_the_server_and_of_chance_it_is_local_training_at_the_point() -> None:
    """One full-batch step, without momentum: body and endpoints follow the gradient at the client's point."""
    settings = TRAIN.model_copy(
        update={"local_epochs": 1, "batch_size": None, "momentum": 0.0, "weight_decay": 0.0, "rounds": 5}
    )
    run = toy(plus(proximal_weight=0.0, radius=0.0, assignment_round=0), settings)
    expected = run.algorithm.init(run.task, run.context)
    for _ in range(3):
        server = run.step([3, 4])
        part = run.dataset.load(3)["train"]
        point = server["points"][3]
        weight = model_at(expected, point, run.task)[HEAD].requires_grad_()
        body = {name: leaf.clone().requires_grad_() for name, leaf in expected["body"].items()}
        loss = run.task.loss({**body, HEAD: weight}, Batch(part.x, part.y))
        by_weight, *by_body = torch.autograd.grad(loss, [weight, *body.values()])
        moved = {n: leaf - 0.1 * g for (n, leaf), g in zip(expected["body"].items(), by_body, strict=True)}
        expected = {"body": moved, "endpoints": expected["endpoints"] - 0.1 * point.view(3, 1, 1) * by_weight}
        assert_close(personal(run)[3], expected, 1e-14)


def test_inv_flp_3_it_does_not_depend_on_other_clients() -> None:
    fixed = torch.from_numpy(sample_simplex(np.random.default_rng(0), 3, 6))
    settings = {"proximal_weight": 0.0, "radius": 0.0, "assignment_round": 0}
    with_others, alone = toy(plus(**settings)), toy(plus(**settings))
    for run, cohorts in ((with_others, ([1, 3, 4], [0, 3, 5])), (alone, ([3], [3]))):
        run.server["points"] = fixed
        for cohort in cohorts:
            run.step(cohort)
    assert_equal(personal(with_others)[3], personal(alone)[3])


@pytest.mark.parametrize("unseen", ["init", "global"])
def test_inv_flp_4_without_personal_epochs_the_copy_stays_initial(unseen: Any) -> None:
    run = toy(plus(personal_epochs=0, unseen=unseen))
    start = simplex_of(copy(run.server))
    for cohort in ([0, 1], [0, 2], [0, 2], [1, 2]):
        run.step(cohort)
    assert_equal(personal(run), dict.fromkeys(range(3), start))
    points, after = run.server["points"], simplex_of(run.server)
    used = {k: start if k < 3 or unseen == "init" else after for k in range(6)}
    expected = scores_of(run, {k: model_at(used[k], points[k], run.task) for k in range(6)})
    for client, rows in run.scores().items():
        assert abs(rows["personalized"].loss - expected[client]) < 1e-12


def test_personal_draws_are_in_the_subregion_and_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any]] = []
    around = FlocoPlus.draw_around

    def recording(self: FlocoPlus, point: Tensor | None) -> Any:
        draw = around(self, point)

        def drawn(generator: np.random.Generator, steps: int) -> Tree:
            seen.append((str(point), draw(generator, steps)["point"]))
            return {"point": seen[-1][1]}

        return drawn

    monkeypatch.setattr(FlocoPlus, "draw_around", recording)
    run = toy(plus())
    for cohort in ([3], [3], [3]):
        seen.clear()
        run.step(cohort)
    (center, first), (same, second) = seen[-2:]
    assert center == same == str(run.server["points"][3])
    for drawn in (first, second):
        assert np.abs(drawn - run.server["points"][3].numpy()).sum(1).max() <= 0.3 + 1e-12
    assert not np.array_equal(first, second)


def test_unseen_clients_and_published_rows() -> None:
    runs = {unseen: toy(plus(unseen=unseen)) for unseen in ("init", "global")}
    start = simplex_of(copy(runs["init"].server))
    for unseen, run in runs.items():
        for cohort in ([4], [4, 5], [4]):
            run.step(cohort)
        points, server = run.server["points"], simplex_of(run.server)
        trees = {k: personal(run).get(k, start if unseen == "init" else server) for k in range(6)}
        expected = scores_of(run, {k: model_at(trees[k], points[k], run.task) for k in range(6)})
        published = run.federation.trained_scores[4]["test"]
        rows = run.scores()
        assert all(abs(rows[k]["personalized"].loss - expected[k]) < 1e-12 for k in range(6))
        assert set(published) == {"local", "personalized"}
        assert published["personalized"].vector.tolist() == rows[4]["personalized"].vector.tolist()
    assert set(personal(runs["init"])) == {4, 5}


@pytest.mark.slow
def test_posthoc_is_one_pass_of_all_clients_from_the_final_simplex() -> None:
    algorithm = plus(posthoc=True, personal_epochs=3, proximal_weight=0.5)
    run, plain = toy(algorithm), toy(Floco(**SIMPLEX))
    run.run()
    plain.run()
    assert not any(run.states().values())
    assert vectors(run, "personalized") == vectors(plain, "personalized")  # not final
    last = toy(plus(personal_epochs=3, proximal_weight=0.5), TRAIN)
    last.run()
    server, t = simplex_of(last.server), last.round - 1
    last.federation.begin_round(t)
    # the per-round pass from the same start, in the same round, is the same pass
    for host in last.client_hosts:
        for k in range(6):
            host.states.replace(k, {"personal": server}, t)
    payloads = {k: {"point": last.server["points"][k]} for k in range(6)}
    last.federation.mean(last.algorithm.local_update, range(6), {"model": server}, payloads)
    trees = {k: model_at(personal(last)[k], last.server["points"][k], last.task) for k in range(6)}
    expected = scores_of(run, trees)
    for client, rows in run.scores(final=True).items():
        assert abs(rows["personalized"].loss - expected[client]) < 1e-12
        assert rows["personalized"].loss != rows["global"].loss
    assert not any(run.states().values())


@pytest.mark.parametrize("changes", [pytest.param({}, marks=pytest.mark.slow), {"posthoc": True}])
def test_looped_equals_vectorized_and_hosts_do_not_matter(changes: dict[str, Any]) -> None:
    looped, stacked, spread = (
        toy(plus(**changes)),
        toy(plus(**changes), mode="vectorized"),
        toy(plus(**changes), hosts=3),
    )
    for cohort in ROUNDS:
        before = looped.states()
        looped.step(cohort)
        assert_close(stacked.step(cohort), looped.server, 1e-8)
        assert_equal(spread.step(cohort), looped.server)
        for client in set(before) - set(cohort):
            assert_equal(looped.states()[client], before[client])
    assert_close(stacked.states(), looped.states(), 1e-8)
    assert_equal(spread.states(), looped.states())
    assert vectors(spread, "personalized", final=True) == vectors(looped, "personalized", final=True)


@pytest.mark.slow
def test_personal_simplices_beat_the_points_of_the_shared_one() -> None:
    """Eight clients with rules of their own: a line of models has no room for eight."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(8):
        x = torch.randn(30, 5, generator=generator, dtype=torch.float64)
        clients.append((x, (x @ torch.randn(5, 2, generator=generator, dtype=torch.float64)).argmax(1)))
    settings = TrainConfig(rounds=20, clients_per_round=4, local_epochs=2, batch_size=10, lr=0.3)
    line: dict[str, Any] = {"simplex_dimension": 1, "assignment_round": 5, "radius": 0.2}
    accuracy = []
    for method in (FlocoPlus(proximal_weight=0.1, **line), Floco(**line)):
        run = Toy(method, ListDataset(clients, classes=2), softmax_regression(classes=2), settings)
        run.run()
        accuracy.append(np.mean([rows["personalized"].top1 for rows in run.scores(final=True).values()]))
    assert accuracy[0] > 0.9 > accuracy[1] + 0.1
