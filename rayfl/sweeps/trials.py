"""The experiments of a sweep, all validated before the first one starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfl.config.identity import older_fingerprints
from rayfl.config.loading import STANDARD_INPUT, load_config
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ConfigError, RayflError
from rayfl.experiment.parts import Parts
from rayfl.runs.older_runs import where_begun
from rayfl.storage.files import Storage, absolute
from rayfl.sweeps.space import Space

_SHOWN = 10


@dataclass(frozen=True)
class Trial:
    """One experiment of a sweep.

    Attributes:
        point: the values of what the sweep varies, by path.
        config: the experiment; its folder lies in the sweep's.
        judged_on: the splits that are scored and of which clients have samples.
    """

    point: dict[str, Any]
    config: ExperimentConfig
    judged_on: frozenset[str]

    @property
    def name(self) -> str:
        """The experiment's folder, the same in every sweep that has it."""
        return self.config.run_name

    @property
    def storage(self) -> Storage:
        """The experiment's folder."""
        return Parts(self.config).storage


@dataclass(frozen=True)
class Sweep:
    """All experiments of a sweep.

    Attributes:
        folder: where they are.
        varied: the paths that differ between them.
        trials: in the order of the command line's values, the first varying slowest.
        repeated: number of points that were drawn again; each stands among the trials once.
    """

    folder: Storage
    varied: tuple[str, ...]
    trials: tuple[Trial, ...]
    repeated: int = 0

    def described(self, trial: Trial) -> str:
        """The varied values of a trial, in a line."""
        return ", ".join(f"{path}={_short(trial.point[path])}" for path in self.varied) or trial.name


def plan_sweep(
    schema: type[ExperimentConfig], source: str | Mapping[str, Any], space: Space, samples: int | None, draw_seed: int
) -> Sweep:
    """Loads, validates and checks every experiment of a sweep, its data included.

    Args:
        schema: the configuration class.
        source: a preset's name, a YAML file or a mapping. Its ``name`` is the sweep's: the folder of all experiments.
        space: what is varied.
        samples: how often random values are drawn.
        draw_seed: of the random values.

    Raises:
        ConfigError: naming all experiments that cannot run and why, or two that are the same.
    """
    if source == STANDARD_INPUT:
        raise ConfigError("a sweep reads its configuration once per experiment: give a file, not standard input")
    drawn = space.points(samples, draw_seed)
    points = list({repr(point): point for point in drawn}.values())
    loaded, problems = [], dict[str, str]()
    for point in points:
        try:
            config = load_config(schema, source, point)
            sizes = Parts(config).check()
            held = {name: sizes[:, place].sum() > 0 for place, name in enumerate(("train", "validation", "test"))}
            loaded.append((point, config, frozenset(name for name in config.evaluation.splits if held[name])))
        except RayflError as error:
            values = ", ".join(f"{path}={_short(point[path])}" for path in space.varied)
            problems.setdefault(str(error), values or "the sweep")
    if problems:
        lines = [f"  {values}: {problem}" for problem, values in list(problems.items())[:_SHOWN]]
        more = f"\n  and {len(problems) - _SHOWN} problems more" if len(problems) > _SHOWN else ""
        raise ConfigError("some experiments cannot run, so none was started:\n" + "\n".join(lines) + more)
    first = loaded[0][1]
    root = _root(first, [config for _, config, _ in loaded])
    trials = tuple(
        Trial(
            {path: point[path] for path in space.varied},
            where_begun(config.model_copy(update={"name": None, "storage_path": root.uri})),
            judged_on,
        )
        for point, config, judged_on in loaded
    )
    _refuse_twins(trials)
    return Sweep(root, space.varied, trials, len(drawn) - len(points))


def _refuse_twins(trials: Sequence[Trial]) -> None:
    seen: dict[str, Trial] = {}
    for trial in trials:
        other = seen.setdefault(trial.name, trial)
        if other is not trial:
            raise ConfigError(
                f"{other.point} and {trial.point} are one experiment: results depend on none of the values in which "
                "they differ; leave out the second"
            )


def _root(first: ExperimentConfig, configs: Sequence[ExperimentConfig]) -> Storage:
    """The sweep's folder: by default that in which an older rayfl has begun the same experiments, if it has."""
    place = Storage(absolute(first.storage_path))
    if first.name is not None:
        return place.inside(first.name)
    # By age, the fingerprints of all experiments, as far as all could be asked for then.
    histories = ([config.fingerprint(), *(f for f, _ in older_fingerprints(config.identity()))] for config in configs)
    folders = [place.inside(_default_name(fingerprints)) for fingerprints in zip(*histories, strict=False)]
    return next((folder for folder in folders if folder.exists("sweep.yaml")), folders[0])


def _default_name(fingerprints: Sequence[str]) -> str:
    return f"sweep-{hashlib.sha256(json.dumps(sorted(fingerprints)).encode()).hexdigest()[:8]}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
