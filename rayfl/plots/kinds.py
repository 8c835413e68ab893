"""All kinds of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from rayfl.errors import ConfigError
from rayfl.naming.spelling import nearest
from rayfl.naming.splits import stage_in

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.figure import Figure

    from rayfl.runs.folder import RunFolder


class Draw(Protocol):
    """The function ``draw`` that the module of a kind has."""

    def __call__(self, runs: Sequence[RunFolder], **options: Any) -> tuple[Figure, pa.Table]:
        """Returns the figure, and its numbers as a table; raises RayflError when the runs cannot give it."""
        ...


_SCORED = ("test", "validation")
_TABLES, _SAMPLES = (*_SCORED, "official", "train"), (*_SCORED, "train")


@dataclass(frozen=True)
class Kind:
    """A kind of figure.

    Attributes:
        module: name of the module in this package.
        description: a line.
        source: the paper's figures or tables of this kind; empty for our own.
        options: the keyword arguments of its ``draw``.
        splits: what its option ``split`` may be.
    """

    module: str
    description: str
    source: str = ""
    options: tuple[str, ...] = ()
    splits: tuple[str, ...] = _SCORED

    @property
    def draw(self) -> Draw:
        """Returns the function that draws it; its module is imported only now."""
        function: Draw = import_module(f"rayfl.plots.{self.module}").draw
        return function


KINDS: dict[str, Kind] = {
    "curves": Kind(
        "curves",
        "accuracy and loss against rounds, bytes and seconds",
        "SuPerFed (arXiv) Fig. 3, FLOCO Figs. 2 and 3, FedMe Fig. 3, FedPHP Fig. 4",
        ("x", "metric", "model", "split", "cohort"),
        _TABLES,
    ),
    "lambda": Kind(
        "lambda_sweep",
        "a metric against lambda between the federated and the local model: mean and standard deviation over clients",
        "SuPerFed Figs. 3 and A2",
        ("metric", "split"),
    ),
    "ablation": Kind(
        "ablation",
        "SuPerFed's nu by mu, or its phase ratio L/R, from several runs",
        "SuPerFed (arXiv) Fig. 2 and Table 3, SuPerFed (KDD) Fig. 3 and Table 5",
        ("split",),
    ),
    "landscape": Kind(
        "landscape",
        "loss on a plane through three models, or around one: surface and contours",
        "SuPerFed Fig. A1",
        ("plane", "clients", "points", "samples", "split"),
        _SAMPLES,
    ),
    "simplex": Kind(
        "simplex",
        "FLOCO's loss over the simplex, of all clients and of some, and the clients' points",
        "FLOCO Fig. 1",
        ("clients", "points", "samples", "split"),
        _SAMPLES,
    ),
    "heatmap": Kind(
        "heatmap",
        "FLOCO's accuracy by assignment round tau and radius rho, from several runs",
        "FLOCO Fig. 4",
        ("split",),
    ),
    "variance": Kind("variance", "total variance of the clients' updates of the last layer by round", "FLOCO Fig. 2"),
    "delta": Kind(
        "delta",
        "delta_t: what the next download costs the clients that have just trained",
        "FedPHP Figs. 2 and 6",
    ),
    "rounds-time": Kind("rounds_time", "seconds per round, of the clients and of the server", "FedMe Fig. 4"),
    "architectures": Kind(
        "architectures",
        "how many clients have which architecture, and fixed architectures against tuned ones",
        "FedMe Tables 3 and 5",
        ("split",),
    ),
    "clients": Kind("clients", "the clients' accuracies, sorted", "", ("metric", "model", "split", "cohort"), _TABLES),
    "stages": Kind("stages", "how models do on test samples of each stage, after each stage", "", ("metric",)),
    "contributions": Kind("contributions", "what each client has contributed to the model"),
    "masks": Kind(
        "masks",
        "segmentation: inputs of the worst, the middle and the best client, their masks, and what the runs predict",
        "",
        ("model", "clients", "samples", "split"),
        _SAMPLES,
    ),
}
"""By the name that users give."""


def kind_of(name: str) -> Kind:
    """Returns the kind of a name; raises ConfigError, naming all, when there is none."""
    if name not in KINDS:
        raise ConfigError(f"there is no kind {name!r}{nearest(name, KINDS)}; there are: {', '.join(KINDS)}")
    return KINDS[name]


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that a kind does not take, and a split that it cannot draw."""
    wrong = [option for option in options if option not in KINDS[name].options]
    if wrong:
        taken = ", ".join(f"--{option}" for option in KINDS[name].options) or "none"
        raise ConfigError(f"--{wrong[0]}: {name} does not take this option; it takes: {taken}")
    split, splits = options.get("split"), KINDS[name].splits
    of_a_stage = splits is _TABLES and split is not None and stage_in(split) is not None
    if split is not None and split not in splits and not of_a_stage:
        raise ConfigError(f"--split: {name} has no {split!r}{nearest(split, splits)}; there are {', '.join(splits)}")
