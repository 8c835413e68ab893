"""The section augment: what it reaches, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.config.paper_presets import paper_presets
from rayfl.data.images.augment import AugmentConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts

EVERYTHING = AugmentConfig(crop=2, flip=True, rotate=30)

NATURAL = {"name": "natural"}

DIGITS = {
    "dataset": "digits",
    "partition": {"name": "iid", "num_clients": 3},
    "model": {"name": "two_nn", "hidden": [4]},
    "algorithm": "fedavg",
    "train": {"clients_per_round": 2},
}


def parts(augment: Any, **sections: Any) -> Parts:
    return Parts(load_config(Experiment, {**DIGITS, "augment": augment, **sections}, []))


def test_the_section_reaches_the_clients() -> None:
    found = parts({"crop": 1, "flip": True})
    found.check()
    assert found.context.augmentation is not None and found.context.augmentation.config.crop == 1
    plain = Parts(load_config(Experiment, DIGITS, []))
    plain.check()
    assert plain.context.augmentation is None


@pytest.mark.parametrize(
    ("augment", "sections", "message"),
    [
        (
            {"flip": True},
            {
                "dataset": {"name": "synthetic", "num_clients": 3, "dimension": 8, "num_classes": 3},
                "partition": NATURAL,
            },
            r"augment: only images .* the inputs are vectors or arrays of the shape \(8,\); leave out",
        ),
        ({"crop": 8, "padding": "reflect"}, {}, "augment.crop is 8, but images of 8 x 8 .* by 7 at most"),
        ({"crop": 8}, {}, "augment.crop is 8, but images of 8 x 8 pixels keep something .* by 7 at most"),
    ],
)
def test_what_cannot_be_augmented_is_refused_before_anything_starts(
    augment: Any, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(augment, **sections).check()


def test_text_is_refused() -> None:
    tokens = InputSpec("tokens", (80,), 80, 80)
    with pytest.raises(ConfigError, match="the inputs are tokens; leave out the section augment"):
        EVERYTHING.build(tokens, np.zeros(80, dtype=np.float32))


@pytest.mark.parametrize("section", [{"padding": "reflect"}, {"crop": -1}, {"rotate": 200}, {"cutout": 3}])
def test_a_section_that_says_nothing_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AugmentConfig.model_validate(section)


def test_presets_augment_where_the_papers_codes_do() -> None:
    found = {name: preset.content["augment"] for name, preset in paper_presets().items() if "augment" in preset.content}
    for name, section in found.items():
        AugmentConfig.model_validate(section)
        assert name.startswith(("fedphp", "fedme", "superfed-table2-tinyimagenet"))
    assert found["superfed-table2-tinyimagenet-alpha1"] == {"flip": True, "rotate": 20}
    cifar = {name: section for name, section in found.items() if name.startswith("fedphp")}
    assert cifar and all(section == {"crop": 4, "flip": True} for section in cifar.values())
