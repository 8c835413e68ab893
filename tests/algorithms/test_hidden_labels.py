"""Labels that the section ``labelled`` hides change no bit of any method's run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayfl import run
from tests.support.experiments import FURTHER, METHODS, PRETRAINED, assert_same, each_method, outcome, small_experiment
from tests.support.hidden_digits import SECTIONS, as_they_are, changed, hidden

# digits are of no groups of people
NAMES = [name for name in (*METHODS, *FURTHER) if name not in PRETRAINED | {"fairfed", "fedfb"}]
QUICK = {"fedlc", "fixmatch", "semifl"}


def test_the_other_data_differ_in_all_hidden_labels_and_in_no_others() -> None:
    (x, y, _), (other_x, other_y, _) = as_they_are(), changed()
    assert (x == other_x).all() and sorted((y != other_y).nonzero()[0]) == sorted(hidden()) and len(hidden()) > 800


@pytest.mark.parametrize("name", each_method(NAMES, QUICK))
@pytest.mark.first_case
def test_inv_labelled_1_hidden_labels_change_no_bit_of_a_run(name: str, tmp_path: Path) -> None:
    found = []
    for source in ("as_they_are", "changed"):
        config = small_experiment(tmp_path, source, name, backend="inline")
        config = {**config, **SECTIONS, "dataset": {"name": f"tests.support.hidden_digits:{source}"}}
        config["train"] = {**config["train"], "rounds": 2}
        run(config)
        found.append(outcome(tmp_path / source))
    assert_same(*found)
