"""Errors of forecasts against plain numpy, added over parts, and where skill is not defined."""

from __future__ import annotations

import numpy as np
import torch

from rayfl.metrics.forecasting import METRICS, ForecastMeasures
from rayfl.tasks.further_tasks import ErrorLoss


def test_errors_and_skill_are_those_of_numpy_and_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    forecast, y = torch.randn(9, 6, generator=generator), torch.randn(9, 2, 6, generator=generator)
    measures = ForecastMeasures(ErrorLoss("huber", 0.5))
    parts = [measures.statistics(forecast[own], y[own]) for own in (slice(0, 4), slice(4, 9), slice(9, 9))]
    whole = measures.statistics(forecast, y).numpy()
    np.testing.assert_allclose(sum(part.numpy() for part in parts), whole, rtol=1e-12)
    found = measures.values(whole)
    p, (true, naive) = forecast.double().numpy(), y.double().numpy().transpose(1, 0, 2)
    error = np.abs(p - true)
    np.testing.assert_allclose(found["mse"], (error**2).mean(), rtol=1e-12)
    np.testing.assert_allclose(found["mae"], error.mean(), rtol=1e-12)
    np.testing.assert_allclose(found["skill"], 1 - (error**2).sum() / ((naive - true) ** 2).sum(), rtol=1e-12)
    huber = np.where(error < 0.5, error**2 / 2, 0.5 * (error - 0.25))
    np.testing.assert_allclose(found["loss"], huber.mean(), rtol=1e-12)
    kept = torch.tensor([True] * 4 + [False] * 5)
    np.testing.assert_allclose(measures.added(measures.by_sample(forecast, y), kept), parts[0], rtol=1e-12)


def test_skill_is_0_of_the_naive_forecast_1_of_a_perfect_one_and_undefined_where_that_is_the_naive_one() -> None:
    y = torch.randn(5, 2, 3)
    measures = ForecastMeasures(ErrorLoss())
    assert abs(measures.values(measures.statistics(y[:, 1], y).numpy())["skill"]) < 1e-12
    assert measures.values(measures.statistics(y[:, 0], y).numpy())["skill"] == 1
    flat = torch.ones(5, 2, 3)
    assert np.isnan(measures.values(measures.statistics(y[:, 0], flat).numpy())["skill"])
    assert measures.undefined("skill") and not measures.undefined("mse")
    assert np.isnan(measures.values(np.zeros(5))["mse"])


def test_units_are_told_where_data_are_scaled() -> None:
    assert [one.unit for one in ForecastMeasures(ErrorLoss(), True).metrics] == ["scaled", "", "scaled", "scaled"]
    assert ForecastMeasures(ErrorLoss()).metrics == METRICS
