from __future__ import annotations

import io
import math

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rayfl.tracking.live import LiveView, sparkline


def shown(view: LiveView) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(view)
    return out.getvalue()


def test_the_view_has_round_cohort_accuracy_speed_time_left_and_actors() -> None:
    view = LiveView(10, 2, [{"device": "cpu"}, {"device": "cpu"}, {"device": "cuda:0"}])
    assert "starting" in shown(view)
    for round, accuracy in ((3, 0.1), (4, 0.9)):
        view.round_done(round, range(20), 2.0)
        view.evaluated(round, accuracy)
    view.score = "test accuracy: global 90.0%"
    text = shown(view)
    for expected in ("4/10", "0, 1, 2", "and 8 more", "▁█", "global 90.0%", "10.0 clients/s", "00:00:12 left"):
        assert expected in text
    assert "2 on cpu, 1 on cuda:0; training" in text


def test_a_rewind_takes_back_the_curve() -> None:
    view = LiveView(10, 0, [])
    for round in (1, 2, 3):
        view.evaluated(round, round / 10)
    view.rewound(1)
    assert "▁ " in shown(view) + " "
    assert "▃" not in shown(view)
    assert "none: in this process, replaced 1 times; an actor was replaced" in shown(view)
    view.evaluated(1, 0.2)
    view.evaluated(2, 0.4)
    assert "▁█" in shown(view)


@given(st.lists(st.floats(0, 1), max_size=60))
def test_a_sparkline_has_a_bar_per_value_and_keeps_their_order(values: list[float]) -> None:
    newest, line = values[-40:], sparkline(values)
    assert len(line) == len(newest)
    for (a, x), (b, y) in zip(zip(newest, line, strict=True), list(zip(newest, line, strict=True))[1:], strict=False):
        assert (a <= b) <= (x <= y)


def test_a_sparkline_leaves_out_what_is_not_finite() -> None:
    assert sparkline([1.0, math.inf, 2.0, math.nan, -1e308, 1e308])[1::2] == "  █"
    assert sparkline([math.inf]) == " "
