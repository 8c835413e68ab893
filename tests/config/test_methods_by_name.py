"""Which class a section ``algorithm`` is of, and which modules are imported to find out."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from algorithms.fedavg import FedAvg
from algorithms.fedprox import FedProx
from algorithms.registry import METHODS, Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError

CONTENT = {"dataset": {"name": "synthetic"}, "model": {"name": "two_nn"}}

CODE = """
import sys
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
load_config(Experiment, "quickstart", ["algorithm=fedprox"])
own = {"dataset": {"name": "digits"}, "model": {"name": "two_nn"}, "algorithm": {"name": "nowhere:Mine"}}
assert load_config(Experiment, own, [], trust=False).algorithm.name == "nowhere:Mine"
modules = {path.partition(":")[0] for path in Experiment.methods.paths.values()}
print(sorted(modules & set(sys.modules)))
"""


def test_every_path_is_that_of_the_method_of_this_name() -> None:
    for name, path in METHODS.paths.items():
        found = METHODS[name]
        assert path == f"{found.__module__}:{found.__qualname__}"
        assert found.model_fields["name"].default == name
    assert len(METHODS) == len(set(METHODS.values()))


def test_of_all_methods_the_named_one_alone_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "['algorithms.fedavg', 'algorithms.fedprox']", "FedProx is made from FedAvg"


def test_sections_and_methods_become_the_same() -> None:
    of_section = Experiment.model_validate({**CONTENT, "algorithm": {"name": "fedprox", "proximal_weight": 0.5}})
    of_method = Experiment.model_validate({**CONTENT, "algorithm": FedProx(proximal_weight=0.5)})
    assert type(of_section.algorithm) is FedProx
    assert of_section == of_method
    assert pickle.loads(pickle.dumps(of_section)) == of_section


def test_a_method_of_another_class_than_its_name_says_is_refused() -> None:
    class Strange(FedAvg):
        """Says that it is FedProx."""

    other = Strange.model_construct(name="fedprox")
    with pytest.raises(ConfigError, match=r"algorithm: is a section: set algorithm=NAME"):
        load_config(Experiment, {**CONTENT, "algorithm": other}, {})


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            {"name": "fedprx"},
            r"algorithm: 'fedprx' does not exist \(did you mean 'fedprox'\?\); allowed: fedavg, fedprox",
        ),
        ({"name": 3}, r"algorithm: '3' does not exist"),
        ({"proximal_weight": 1}, r"algorithm: needs a name"),
        (3, r"algorithm: is a section: set algorithm=NAME or algorithm.OPTION=VALUE \(got 3\)"),
        (
            {"name": "fedprox", "proximal_wieght": 1},
            r"algorithm.proximal_wieght: unknown \(did you mean 'proximal_weight'\?\)",
        ),
        (
            {"name": "fedprox", "mu": 1.0},
            r"algorithm.mu: unknown \(did you mean 'proximal_weight', the paper's mu\?\)",
        ),
        (
            {"name": "fedprox", "proximal_weight": -1},
            r"algorithm.proximal_weight: should be greater than or equal to 0",
        ),
    ],
)
def test_what_is_wrong_with_a_section_is_said(section: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(Experiment, {**CONTENT, "algorithm": section}, {})
