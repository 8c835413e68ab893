"""Errors of forecasts against plain numpy, added over parts, and where they are not defined."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayfl.metrics.forecasting import METRICS, ForecastMeasures, interval_of, metrics_of_quantiles
from rayfl.tasks.forecasting import PinballLoss
from rayfl.tasks.further_tasks import ErrorLoss

QUANTILES = (0.1, 0.3, 0.5, 0.8, 0.9)


def drawn(quantiles: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(9, 3, 6, generator=generator)
    y[:, 2] = torch.tensor([0.5, 2.0, 1.5, 0, 0, 0.1])
    forecast = torch.randn(9, 6, quantiles, generator=generator).sort(-1).values
    return forecast.flatten(1), y


def of_parts(measures: ForecastMeasures, forecast: torch.Tensor, y: torch.Tensor) -> dict[str, np.ndarray]:
    """The metrics of all samples, whose sums are those of their parts."""
    parts = [measures.statistics(forecast[own], y[own]) for own in (slice(0, 4), slice(4, 9), slice(9, 9))]
    whole = measures.statistics(forecast, y).numpy()
    assert whole.shape == (measures.size,)
    np.testing.assert_allclose(sum(part.numpy() for part in parts), whole, rtol=1e-12)
    kept = torch.tensor([True] * 4 + [False] * 5)
    np.testing.assert_allclose(measures.added(measures.by_sample(forecast, y), kept), parts[0], rtol=1e-12)
    found = dict(measures.values(whole))
    assert set(found) == {metric.name for metric in measures.metrics}
    return found


def check_errors(found: dict[str, np.ndarray], p: np.ndarray, y: torch.Tensor) -> np.ndarray:
    true, naive, step = y.double().numpy().transpose(1, 0, 2)
    error = np.abs(p - true)
    np.testing.assert_allclose(found["mse"], (error**2).mean(), rtol=1e-12)
    np.testing.assert_allclose(found["mae"], error.mean(), rtol=1e-12)
    np.testing.assert_allclose(found["rmse"], (error**2).mean() ** 0.5, rtol=1e-12)
    np.testing.assert_allclose(found["mase"], (error[:, [0, 1, 2, 5]] / step[:, [0, 1, 2, 5]]).mean(), rtol=1e-12)
    np.testing.assert_allclose(found["skill"], 1 - (error**2).sum() / ((naive - true) ** 2).sum(), rtol=1e-12)
    return error


def test_errors_and_skill_are_those_of_numpy_and_add_up() -> None:
    forecast, y = drawn()
    found = of_parts(ForecastMeasures(ErrorLoss("huber", 0.5)), forecast, y)
    error = check_errors(found, forecast.double().numpy(), y)
    huber = np.where(error < 0.5, error**2 / 2, 0.5 * (error - 0.25))
    np.testing.assert_allclose(found["loss"], huber.mean(), rtol=1e-12)


def test_quantiles_have_a_pinball_loss_and_an_interval_and_errors_are_those_of_the_median() -> None:
    forecast, y = drawn(5)
    found = of_parts(ForecastMeasures(PinballLoss(QUANTILES), quantiles=QUANTILES), forecast, y)
    said, true = forecast.double().numpy().reshape(9, 6, 5), y[:, 0].double().numpy()
    check_errors(found, said[:, :, 2], y)
    above = true[..., None] - said
    levels = np.array(QUANTILES)
    pinball = np.where(above > 0, levels * above, (levels - 1) * above).mean()
    np.testing.assert_allclose(found["pinball"], pinball, rtol=1e-12)
    np.testing.assert_allclose(found["loss"], pinball, rtol=1e-12)
    inside = (said[:, :, 0] <= true) & (true <= said[:, :, 4])
    assert 0.3 < inside.mean() < 0.9
    np.testing.assert_allclose(found["coverage"], inside.mean(), rtol=1e-12)
    np.testing.assert_allclose(found["width"], (said[:, :, 4] - said[:, :, 0]).mean(), rtol=1e-12)


@pytest.mark.parametrize(
    ("quantiles", "places"),
    [((0.1, 0.5, 0.9), (0, 2)), ((0.05, 0.2, 0.5, 0.8), (1, 3)), ((0.5, 0.9), None), ((), None)],
)
def test_the_interval_is_the_outermost_symmetric_one(
    quantiles: tuple[float, ...], places: tuple[int, int] | None
) -> None:
    assert interval_of(quantiles) == places
    names = [metric.name for metric in metrics_of_quantiles(quantiles)]
    assert ("coverage" in names) == ("width" in names) == (places is not None)
    if quantiles:
        forecast, y = drawn(len(quantiles))
        of_parts(ForecastMeasures(PinballLoss(quantiles), quantiles=quantiles), forecast, y)


def test_skill_is_0_of_the_naive_forecast_1_of_a_perfect_one_and_undefined_where_that_is_the_naive_one() -> None:
    y = torch.randn(5, 3, 3).abs()
    measures = ForecastMeasures(ErrorLoss())
    assert abs(measures.values(measures.statistics(y[:, 1], y).numpy())["skill"]) < 1e-12
    assert measures.values(measures.statistics(y[:, 0], y).numpy())["skill"] == 1
    flat = torch.ones(5, 3, 3)
    flat[:, 2] = 0
    undefined = measures.values(measures.statistics(y[:, 0], flat).numpy())
    assert np.isnan(undefined["skill"]) and np.isnan(undefined["mase"]) and np.isfinite(undefined["rmse"])
    assert measures.undefined("skill") and measures.undefined("mase") and not measures.undefined("mse")
    assert np.isnan(measures.values(np.zeros(measures.size))["mse"])


def test_units_are_told_where_data_are_scaled() -> None:
    scaled = {one.name: one.unit for one in ForecastMeasures(PinballLoss(QUANTILES), True, QUANTILES).metrics}
    assert {name for name, unit in scaled.items() if not unit} == {"skill", "mase", "coverage"}
    assert ForecastMeasures(ErrorLoss()).metrics == METRICS
