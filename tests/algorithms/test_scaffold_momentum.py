"""SCAFFOLD with momentum: refused unless asked for, and what it is applied to."""

from __future__ import annotations

import pytest

from algorithms.scaffold import Scaffold, sum_of_step_weights
from rayfl.errors import ConfigError
from tests.support.scaffold_toys import TRAIN, controls, mean, quad, toy_of
from tests.support.toys import assert_close


def test_momentum_is_refused_unless_asked_for() -> None:
    train = TRAIN.model_copy(update={"momentum": 0.9})
    toy = toy_of(Scaffold(momentum_on_corrected=True), train)
    with pytest.raises(ConfigError, match=r"train\.momentum=0.*momentum_on_corrected=true"):
        Scaffold().check(toy.task, toy.context)
    Scaffold(momentum_on_corrected=True).check(toy.task, toy.context)
    Scaffold().check(toy.task, toy_of(Scaffold()).context)


def test_kept_momentum_is_refused_where_the_control_is_read_off_the_distance_moved() -> None:
    train = TRAIN.model_copy(update={"momentum": 0.9, "persist_optimizer": True})
    toy = toy_of(Scaffold(momentum_on_corrected=True), train)
    with pytest.raises(ConfigError, match=r"train\.persist_optimizer=false.*control_update=option1"):
        Scaffold(momentum_on_corrected=True).check(toy.task, toy.context)
    Scaffold(momentum_on_corrected=True, control_update="option1").check(toy.task, toy.context)


def test_sum_of_step_weights() -> None:
    for momentum in (0.0, 0.5, 0.9):
        for steps in (1, 2, 7):
            weights = [sum(momentum**i for i in range(steps - j)) for j in range(steps)]
            assert abs(sum_of_step_weights(steps, momentum) - sum(weights)) < 1e-10
            if not momentum:
                assert sum_of_step_weights(steps, momentum) == steps


def test_momentum_applies_to_the_corrected_gradient() -> None:
    points, eta, momentum, steps = [0.0, 4.0], 0.1, 0.5, 3
    toy = quad(Scaffold(momentum_on_corrected=True), points, [1, 1], lr=eta, momentum=momentum, local_epochs=steps)
    model, control, own = 1.0, 0.0, [0.0, 0.0]
    for _ in range(3):
        replies, renewed = [], []
        for client, point in enumerate(points):
            y, velocity, applied, gradients = model, 0.0, [0.0] * steps, []
            for step in range(steps):
                gradients.append(y - point)
                velocity = momentum * velocity + gradients[-1] - own[client] + control
                y -= eta * velocity
                # a gradient is applied again, m times weaker, in every later step
                applied = [a + (momentum ** (step - j) if j <= step else 0) for j, a in enumerate(applied)]
            replies.append(y)
            renewed.append(sum(a * g for a, g in zip(applied, gradients, strict=True)) / sum(applied))
        model = sum(replies) / 2
        control += sum(new - old for new, old in zip(renewed, own, strict=True)) / 2
        own = renewed
        toy.step()
        assert abs(float(toy.server["model"]["theta"]) - model) < 1e-12
        assert abs(float(toy.server["control"]["theta"]) - control) < 1e-12
        for control_of_client, expected in zip(controls(toy, range(2)), own, strict=True):
            assert abs(float(control_of_client["theta"]) - expected) < 1e-12


def test_sca_1_holds_with_momentum_and_weight_decay() -> None:
    train = TRAIN.model_copy(update={"momentum": 0.9, "weight_decay": 0.01})
    toy = toy_of(Scaffold(momentum_on_corrected=True), train)
    for cohort in ([0], [1, 3], [0, 2]):
        toy.step(cohort)
        assert_close(toy.server["control"], mean(controls(toy)), 1e-12)
