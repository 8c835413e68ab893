"""All methods by name, and the configuration class that knows them."""

from __future__ import annotations

from algorithms.base import Algorithm
from algorithms.fedavg import FedAvg
from algorithms.fedphp import FedPHP
from algorithms.fedprox import FedProx
from algorithms.floco import Floco
from algorithms.scaffold import Scaffold
from algorithms.superfed import SuPerFed
from rayfl.config.schema import experiment_schema

METHODS: dict[str, type[Algorithm]] = {
    method.model_fields["name"].default: method for method in (FedAvg, FedProx, Scaffold, SuPerFed, Floco, FedPHP)
}
"""Method classes by the name used in configurations."""

Experiment = experiment_schema(list(METHODS.values()))
"""The configuration class of experiments with any of these methods."""
