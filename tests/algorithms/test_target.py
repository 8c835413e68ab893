"""TARGET: rounds in plain PyTorch, limits that are federated averaging, what the server makes, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedavg import FedAvg
from algorithms.parts.layers import linear
from algorithms.parts.synthesis import boundary_divergence, draw_generator, generated, statistics_apart
from algorithms.target import TARGET
from rayfl.data.partitions.stage import NoStages
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.params import Tree, leaves, num_bytes
from rayfl.randomness import RandomStreams
from rayfl.tasks.classification import Classification
from tests.support.made_samples import Rows, kl, made_rows
from tests.support.partial_toys import initial, three_layers
from tests.support.staged_toys import COHORTS, DATA, cross_entropy, descended, logits_of, samples_of, staged_toy, summed
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

SMALL: dict[str, Any] = {"draws": 4, "made_per_draw": 6, "generator_steps": 3, "first_draws": 1, "student_steps": 5}
SMALL |= {"noise_dim": 4, "generator_width": 5, "student_lr": 0.05, "distillation_weight": 0.7}
SETTINGS: dict[str, dict[str, Any]] = {
    "separate": {"outputs": "separate"},
    "all": {"made_batch_size": 3, "aggregation": "uniform", "temperature": 1.0, "student_temperature": 4.0},
    "no-student": {"boundary_weight": 0, "label_weight": 2.0, "noise_lr": 0.3},
}


def made_by(method: TARGET, toy: Toy, round: int, model: Tree, known: list[int], cohort: list[int]) -> Tree:
    """The samples of a stage's end, with PyTorch's own layers and optimizers."""
    streams: RandomStreams = toy.context.streams
    inputs = torch.cat([samples_of(k, round // 2)[0] for k in cohort])
    low, high = inputs.amin(0), inputs.amax(0)
    drawn = streams.generator("synthesis", round, -1)
    network = Rows(draw_generator((5,), 4, 5, low, drawn))
    student = {
        name: leaf.requires_grad_()
        for name, leaf in toy.task.network.initialize(streams.integer("init.local", client=-1)).items()
    }
    known_student, pool = False, torch.zeros(0, 5, dtype=torch.float64)
    for number in range(method.draws):
        z, y = torch.from_numpy(drawn.standard_normal((6, 4))), torch.from_numpy(drawn.choice(known, 6))
        frozen = {name: leaf.detach() for name, leaf in student.items()} if known_student else {}

        def value(x: Tensor, y: Tensor = y, frozen: Tree = frozen) -> Tensor:
            teacher = logits_of(model, x)
            found = method.label_weight * F.cross_entropy(teacher, y)
            if frozen:
                said = logits_of(frozen, x)
                agree = (said.argmax(1) == teacher.argmax(1)).double()
                found = found - method.boundary_weight * (agree * kl(teacher, said)).mean()
            return found

        pool = torch.cat([pool, made_rows(method, network, z, low, high, value)])
        if method.boundary_weight and method.first_draws <= number < method.draws - 1:
            known_student = True
            sgd = torch.optim.SGD(student.values(), lr=method.student_lr, momentum=0.9, weight_decay=1e-4)
            batches = streams.generator(f"batches.student.{number}", round, -1)
            for index in plan_batches(len(pool), 6, method.student_steps, batches).batches(CPU):
                sgd.zero_grad()
                apart = kl(logits_of(model, pool[index]), logits_of(student, pool[index]), method.student_temperature)
                (method.student_temperature**2 * apart.mean()).backward()  # type: ignore[no-untyped-call]
                sgd.step()
    return {"x": pool, "logits": logits_of(model, pool)}


def descended_with(
    method: TARGET, toy: Toy, round: int, client: int, model: Tree, made: Tree, known: list[int]
) -> Tree:
    """A local update of a later stage."""
    x, y = samples_of(client, round // 2)
    separate, size = method.outputs == "separate", method.made_batch_size or 4
    compared = known if separate else [0, 1, 2]
    opened = [c for c in range(3) if c not in known] if separate else [0, 1, 2]
    tree = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    sgd = torch.optim.SGD(tree.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
    steps = 2 * -(-len(y) // 4)
    mix, rows = toy.context.streams.generator("mix", round, client), len(made["x"])
    order = [int(place) for _ in range(-(-steps * size // rows)) for place in mix.permutation(rows)]
    batches = plan_batches(len(y), 4, steps, toy.context.streams.generator("batches", round, client)).batches(CPU)
    for step, index in enumerate(batches):
        sgd.zero_grad()
        places = order[step * size : (step + 1) * size]
        value = F.cross_entropy(
            logits_of(tree, x[index])[:, opened], torch.tensor([opened.index(int(c)) for c in y[index]])
        )
        student = logits_of(tree, made["x"][places])[:, compared]
        apart = kl(made["logits"][places][:, compared], student, method.temperature).mean()
        (value + method.distillation_weight * apart).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    return {name: leaf.detach() for name, leaf in tree.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_target_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = TARGET(**{**SMALL, **SETTINGS[name]})
    toy, made, known = staged_toy(method), dict[str, Tensor](), list[int]()
    model, seen = initial(toy), set[int]()
    for round, cohort in enumerate(COHORTS[:5]):
        mean, total = {key: torch.zeros_like(leaf) for key, leaf in model.items()}, 0
        for k in cohort:
            if made:
                trained = descended_with(method, toy, round, k, model, made, known)
            else:
                trained = descended_plain(toy, round, k, model)
            labels = samples_of(k, round // 2)[1]
            seen |= set(labels.tolist())
            weight = 1 if method.aggregation == "uniform" else len(labels)
            mean, total = summed(mean, trained, weight), total + weight
        model = {key: leaf / total for key, leaf in mean.items()}
        if round in (1, 3):
            known = sorted(seen)
            made = made_by(method, toy, round, model, known, cohort)
        server = toy.step(cohort)
        assert_close(server["model"], model, 1e-12)
        assert server["classes"].tolist() == [float(c in seen) for c in range(3)]
        if made:
            assert_close({"x": server["made"]["x"], "logits": server["made"]["logits"]}, made, 1e-12)
    assert not any(toy.states().values())


def descended_plain(toy: Toy, round: int, client: int, model: Tree) -> Tree:
    """A local update of federated averaging."""
    return descended(toy, round, client, model, samples_of(client, round // 2), cross_entropy)


def test_inv_target_2_until_the_first_stage_ends_and_with_weight_0_it_is_federated_averaging_to_the_bit() -> None:
    plain, ours, off = (
        staged_toy(method, task=three_layers())
        for method in (FedAvg(), TARGET(**SMALL), TARGET(**{**SMALL, "distillation_weight": 0}))
    )
    for round, cohort in enumerate(COHORTS):
        expected = plain.step(cohort)["model"]
        assert_equal(off.step(cohort)["model"], expected)
        same = torch.equal(ours.step(cohort)["model"]["head.bias"], expected["head.bias"])
        assert same == (round < 2)
    assert "made" not in off.server


def test_inv_target_3_without_stages_it_is_federated_averaging_and_makes_nothing() -> None:
    ours, theirs = (staged_toy(one, task=three_layers(), stages=NoStages()) for one in (TARGET(**SMALL), FedAvg()))
    for cohort in COHORTS[:3]:
        assert_equal(ours.step(cohort), theirs.step(cohort))
    assert ours.federation.traffic.by_client == theirs.federation.traffic.by_client


def test_inv_target_4_made_samples_lie_between_the_bounds_and_look_like_the_classes_so_far() -> None:
    method = TARGET(**{**SMALL, "generator_steps": 300, "boundary_weight": 0, "draws": 1, "generator_lr": 0.05})
    toy = staged_toy(method)
    toy.step(COHORTS[0])
    made = toy.step(COHORTS[1])["made"]
    inputs = torch.cat([samples_of(k, 0)[0] for k in COHORTS[1]])
    assert (made["x"] >= inputs.amin(0)).all() and (made["x"] <= inputs.amax(0)).all()
    assert made["classes"].tolist() == [1, 0, 0] and (made["logits"].argmax(1) == 0).all()


def test_inv_target_5_where_models_agree_the_divergence_has_no_slope() -> None:
    toy = staged_toy(TARGET(**SMALL))
    model = {name: leaf.requires_grad_() for name, leaf in initial(toy).items()}
    x = DATA.load(0)["train"].x
    value = boundary_divergence(logits_of(model, x).detach(), logits_of(model, x), True)
    slopes = torch.autograd.grad(value, list(model.values()))
    assert value.item() == 0 and all(slope.abs().max() < 1e-15 for slope in slopes)


def test_divergence_counts_where_both_choose_one_class_or_different_ones() -> None:
    numbers = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(40, 3, generator=numbers, dtype=torch.float64) for _ in range(2))
    agree = (teacher.argmax(1) == student.argmax(1)).double()
    assert 0 < agree.sum() < 40
    for agreeing, counted in ((True, agree), (False, 1 - agree)):
        expected = (counted * kl(teacher, student)).mean()
        assert_close(boundary_divergence(teacher, student, agreeing), expected, 1e-12)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 10)])
def test_images_are_made_by_the_authors_layers(height: int, width: int) -> None:
    like, drawn = torch.zeros(1, dtype=torch.float64), RandomStreams(3).generator("x")
    tree = draw_generator((3, height, width), 4, 2, like, drawn)
    quarter = (-(-height // 4), -(-width // 4))
    layers = nn.Sequential(
        *(nn.BatchNorm2d(4), nn.Upsample((-(-height // 2), -(-width // 2)))),
        *(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2)),
        *(nn.Upsample((height, width)), nn.Conv2d(4, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)),
        *(nn.LeakyReLU(0.2), nn.Conv2d(2, 3, 3, padding=1), nn.Sigmoid()),
    ).double()
    unfolds, first, second, writes = (tree[name] for name in ("unfolds", "first", "second", "writes"))
    flat = [unfolds["norm_gain"], unfolds["norm_offset"], *first.values(), *second.values(), *writes.values()]
    for parameter, value in zip(layers.parameters(), flat, strict=True):
        parameter.data.copy_(value)
    z = torch.from_numpy(drawn.standard_normal((6, 4)))
    low, high = -torch.ones(3, height, width, dtype=torch.float64), torch.full((3, height, width), 2.0).double()
    expected = -1 + 3 * layers(linear(unfolds, z).view(6, 4, *quarter))
    assert_close(generated(tree, z, low, high), expected.detach(), 1e-12)


def test_statistics_are_those_that_batch_normalizations_read() -> None:
    task = normalized_layers()
    model = task.network.initialize(0)
    numbers = torch.Generator().manual_seed(1)
    model |= {
        "norm.running_mean": torch.randn(7, generator=numbers, dtype=torch.float64),
        "norm.running_var": 1 + torch.rand(7, generator=numbers, dtype=torch.float64),
    }
    x = torch.randn(9, 5, generator=numbers, dtype=torch.float64)
    read = F.linear(x, model["inner.weight"], model["inner.bias"])
    expected = (read.mean(0) - model["norm.running_mean"]).norm()
    expected = expected + (read.var(0, correction=0) - model["norm.running_var"]).norm()
    assert_close(statistics_apart(model, x, task), expected, 1e-12)
    assert statistics_apart(two_layers().network.initialize(0), x, two_layers()) == 0


def test_the_generator_follows_running_statistics() -> None:
    made = []
    for weight in (0.0, 10.0):
        options = {"statistics_weight": weight, "generator_steps": 60, "boundary_weight": 0, "generator_lr": 0.05}
        toy = staged_toy(TARGET(**{**SMALL, **options}), task=normalized_layers())
        toy.step(COHORTS[0])
        server = toy.step(COHORTS[1])
        made.append(statistics_apart(server["model"], server["made"]["x"], toy.task).item())
    assert made[1] < 0.7 * made[0]


def test_what_travels() -> None:
    toy = staged_toy(TARGET(**SMALL))
    size, table = num_bytes(initial(toy)), 4 * 6 * (5 + 3) * 8
    for round, cohort in enumerate(COHORTS):
        toy.step(cohort)
        known, bounds = (table + 12 if round > 1 else 0), (2 * 5 * 8 if round in (1, 3) else 0)
        down, up = size + known, size + 12 + bounds
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (down, up))


@pytest.mark.parametrize("outputs", ["separate", "all"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, outputs: Any, caplog: pytest.LogCaptureFixture) -> None:
    method = TARGET(**SMALL, outputs=outputs)
    looped, stacked = (staged_toy(method, task=make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        left, right = (dict(leaves(toy.step(cohort))) for toy in (looped, stacked))
        assert_close(left, right, 1e-8)
    assert "failed together" not in caplog.text


@pytest.mark.parametrize(("kind", "what"), [("tokens", "rows of tokens"), ("graph", "graphs")])
def test_what_is_no_array_of_numbers_is_refused(kind: Any, what: str) -> None:
    task = Classification(two_layers().network, spec=InputSpec(kind, (5,), 3))
    with pytest.raises(ConfigError, match=f"target cannot learn task=classification from {what}"):
        TARGET().check_task(task)


def test_what_is_idle() -> None:
    assert len(TARGET(distillation_weight=0, draws=3, outputs="separate", first_draws=1).idle_settings()) == 3
    assert len(TARGET(boundary_weight=0, student_lr=0.1, first_draws=2).idle_settings()) == 2
