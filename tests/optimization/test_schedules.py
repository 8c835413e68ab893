"""Learning rates by round: their values, who follows them, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pydantic import ValidationError

from algorithms.fedavg import FedAvg
from algorithms.pfedme import PFedMe
from rayfl.engine.updates.settings import TrainConfig
from tests.support.toy_networks import Quadratic, two_layers
from tests.support.toys import Toy, assert_equal, quadratic_clients, ragged_toy, random_clients

COSINE = [0.1, 0.097552826, 0.09045085, 0.079389263, 0.06545085, 0.05, 0.03454915, 0.020610737, 0.00954915, 0.002447174]
WARMED = [
    0.033333333,
    0.066666667,
    0.1,
    0.1,
    0.095048443,
    0.08117449,
    0.061126047,
    0.038873953,
    0.01882551,
    0.004951557,
]


def train(schedule: dict[str, Any] | None = None, **options: Any) -> TrainConfig:
    return TrainConfig.model_validate({"rounds": 10, "lr": 0.1, "schedule": schedule, **options})


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (None, [0.1] * 10),
        ({"name": "constant"}, [0.1] * 10),
        ({"name": "constant", "warmup": 4}, [0.025, 0.05, 0.075, *[0.1] * 7]),
        ({"name": "linear", "warmup": 20}, [0.005 * t for t in range(1, 11)]),
        ({"name": "exponential", "factor": 0.5}, [0.1 * 0.5**t for t in range(10)]),
        ({"name": "cosine"}, COSINE),
        ({"name": "cosine", "warmup": 3}, WARMED),
        ({"name": "cosine", "minimum": 0.02}, [0.02 + 0.8 * rate for rate in COSINE]),
        ({"name": "linear"}, [0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01]),
        ({"name": "linear", "warmup": 2}, [0.05, 0.1, *[0.1 * (1 - t / 8) for t in range(8)]]),
        ({"name": "step", "every": 4}, [*[0.1] * 4, *[0.01] * 4, *[0.001] * 2]),
        ({"name": "step", "every": 3, "factor": 0.5, "warmup": 1}, [*[0.1] * 4, *[0.05] * 3, *[0.025] * 3]),
        ({"name": "multistep", "milestones": [5, 7]}, [*[0.1] * 5, *[0.01] * 2, *[0.001] * 3]),
        ({"name": "multistep", "milestones": [5, 5]}, [*[0.1] * 5, *[0.001] * 5]),
        ({"name": "multistep", "milestones": [1, 2], "factor": 0.5, "warmup": 2}, [0.05, 0.1, 0.1, 0.05, *[0.025] * 6]),
    ],
    ids=str,
)
def test_rates_of_ten_rounds(schedule: dict[str, Any] | None, rates: list[float]) -> None:
    section = train(schedule)
    assert [section.lr_in(t) for t in range(10)] == pytest.approx(rates, abs=5e-10)
    assert [section.factor_in(t) for t in range(10)] == pytest.approx([rate / 0.1 for rate in rates], abs=5e-9)


@pytest.mark.parametrize("lr", [0.0, 0.1, 0.3])
def test_the_exponential_schedule_is_lr_decay_to_the_bit(lr: float) -> None:
    old, new = train(lr=lr, lr_decay=0.93), train({"name": "exponential", "factor": 0.93}, lr=lr)
    for t in range(10):
        assert old.lr_in(t) == new.lr_in(t) == lr * 0.93**t
        assert old.factor_in(t) == new.factor_in(t) == 0.93**t


@pytest.mark.parametrize("name", ["cosine", "linear", "step"])
def test_other_rates_follow_a_schedule_of_a_rate_of_zero(name: str) -> None:
    schedule = {"name": name, **({"every": 2} if name == "step" else {})}
    none, some = train(schedule, lr=0.0), train(schedule)
    assert [none.lr_in(t) for t in range(10)] == [0.0] * 10
    assert [none.factor_in(t) for t in range(10)] == [some.factor_in(t) for t in range(10)]
    assert none.factor_in(9) < 0.2


def test_cosine_depends_on_how_many_rounds_there_are() -> None:
    short, long = train({"name": "cosine"}), train({"name": "cosine"}, rounds=11)
    assert short.lr_in(0) == long.lr_in(0) == 0.1
    assert all(short.lr_in(t) < long.lr_in(t) for t in range(1, 10))


@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "constant"},
        {"name": "exponential", "factor": 1.0},
        {"name": "step", "every": 1, "factor": 1.0},
        {"name": "multistep", "milestones": [1], "factor": 1.0},
        {"name": "cosine", "minimum": 0.1},
        {"name": "constant", "warmup": 1},
    ],
    ids=str,
)
def test_schedules_that_change_nothing_leave_the_bits_as_they_are(schedule: dict[str, Any]) -> None:
    plain, other = ragged_toy("looped"), ragged_toy("looped", schedule=schedule)
    assert_equal(plain.run(), other.run())


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize(
    "schedule",
    [{"name": "linear", "warmup": 3}, {"name": "cosine", "minimum": 0.05}, {"name": "step", "every": 2}],
    ids=str,
)
def test_a_run_goes_as_far_in_each_round_as_its_rate_says(schedule: dict[str, Any], mode: str) -> None:
    """Of half a squared distance to 0 a step leaves the share 1 - eta_t."""
    section = train(schedule, clients_per_round=1, local_epochs=1, batch_size=None)
    toy = Toy(FedAvg(), quadratic_clients([0.0], [3]), Quadratic(), section, mode=mode)
    theta = 1.0
    for t in range(10):
        theta *= 1 - section.lr_in(t)
        assert float(toy.step([0])["model"]["theta"]) == pytest.approx(theta)


@pytest.mark.parametrize("schedule", [None, {"name": "linear"}, {"name": "constant", "warmup": 2}], ids=str)
def test_both_rates_of_pfedme_follow_the_schedule(schedule: dict[str, Any] | None) -> None:
    """Where w_k does not move, theta_k goes as far as its own rate says."""
    section = train(schedule, rounds=4, clients_per_round=1, local_epochs=1, batch_size=None, lr=0.0)
    method = PFedMe(personal_lr=0.2, personal_decay=0.0, proximal_weight=0.0, inner_steps=1)
    toy = Toy(method, quadratic_clients([0.0], [3]), Quadratic(), section)
    for t in range(4):
        toy.step([0])
        assert float(toy.states()[0]["personal"]["theta"][0]) == pytest.approx(1 - 0.2 * section.factor_in(t))


def test_a_rate_of_a_methods_own_that_is_constant_stays_so() -> None:
    """Fine-tuning with ``finetune_lr`` has that rate whatever the schedule."""

    def tuned(schedule: dict[str, Any] | None) -> dict[str, float]:
        section = train(schedule, rounds=2, clients_per_round=1, local_epochs=0, batch_size=4)
        toy = Toy(FedAvg(finetune_epochs=1, finetune_lr=0.3), random_clients((8, 12)), two_layers(), section)
        toy.run()
        return {f"{k} {name}": s.loss for k, scores in toy.scores(final=True).items() for name, s in scores.items()}

    assert tuned(None) == tuned({"name": "linear"})
    assert len(set(tuned(None).values())) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": {"name": "linear"}, "lr_decay": 0.9}, "schedule and lr_decay both"),
        ({"schedule": {"name": "cosine", "minimum": 0.2}}, r"minimum=0\.2 is more than lr=0\.1"),
        ({"schedule": {"name": "linear", "factor": 0.5}}, "factor"),
        ({"schedule": {"name": "cosine", "milestones": [3]}}, "milestones"),
        ({"schedule": {"name": "exponential"}}, "factor"),
        ({"schedule": {"name": "step"}}, "every"),
        ({"schedule": {"name": "multistep", "milestones": []}}, "milestones"),
        ({"schedule": {"name": "multistep", "milestones": [5, 3]}}, "ascend"),
        ({"schedule": {"name": "polynomial"}}, "polynomial"),
        ({"schedule": {"name": "linear", "warmup": -1}}, "warmup"),
    ],
    ids=str,
)
def test_schedules_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate({"rounds": 10, "lr": 0.1, **options})


def test_rates_never_rise_after_the_warm_up() -> None:
    for schedule in (
        {"name": "cosine"},
        {"name": "linear"},
        {"name": "step", "every": 2},
        {"name": "exponential", "factor": 0.9},
    ):
        rates = [train({**schedule, "warmup": 3}).lr_in(t) for t in range(2, 10)]
        assert all(later <= earlier for earlier, later in itertools.pairwise(rates))
        assert rates[0] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "cosine", "warmup": 20, "minimum": 0.01},
        {"name": "linear"},
        {"name": "exponential", "factor": 0.99},
        {"name": "step", "every": 50},
        {"name": "multistep", "milestones": [50, 150]},
    ],
    ids=str,
)
def test_a_schedule_of_a_shorter_run_has_the_same_course(schedule: dict[str, Any]) -> None:
    long = train(schedule, rounds=200)
    assert long.schedule is not None
    short = train(long.schedule.stretched(200, 20).model_dump(), rounds=20)
    after = short.schedule.warmup if short.schedule is not None else 0
    assert after == schedule.get("warmup", 0) / 10
    for t in range(after, 20):
        assert short.lr_in(t) == pytest.approx(long.lr_in(10 * t), rel=1e-9)
    crowded = train({"name": "multistep", "milestones": [50, 51]}, rounds=200).schedule
    assert crowded is not None and crowded.stretched(200, 20).model_dump()["milestones"] == (5, 5)
