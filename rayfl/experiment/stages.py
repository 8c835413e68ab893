"""Data that change over rounds: what a run with the section ``stages`` cannot have, and what it says of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rayfl.data.partitions.arriving import Arriving
from rayfl.data.partitions.stage import NoStages
from rayfl.engine.shortfall import fewest
from rayfl.errors import ConfigError
from rayfl.system.config import NoSystem

if TYPE_CHECKING:
    from rayfl.experiment.parts import Parts

_log = logging.getLogger("rayfl")


def check_stages(parts: Parts) -> None:
    """Refuses what goes by samples that stay as they are, and stages in which nobody could train.

    Args:
        parts: of the experiment.

    Raises:
        ConfigError: naming the option and the fix.
    """
    config, stages = parts.config, parts.config.stages
    if isinstance(stages, NoStages):
        return
    for option, used, why in (
        ("labelled", config.labelled.active, "which samples keep their labels is drawn from all that a client has"),
        ("system", not isinstance(config.system, NoSystem), "times of simulated devices go by all samples of a client"),
        ("privacy.example_clip_norm", config.privacy.example_clip_norm is not None, "its epsilon goes by n_k"),
        ("early_stopping", config.early_stopping.on, "evaluations of different stages are not alike"),
        (
            "evaluation.official_test" if config.evaluation.official_test else "evaluation.official_personalized",
            config.evaluation.scores_official,
            "the official test part is that of no stage; clients' test parts are",
        ),
    ):
        if used:
            raise ConfigError(f"stages: not together with {option}, for {why}: leave one of the two out")
    begins = [stage * stages.rounds for stage in range(stages.count)]
    never = [stage for stage, begin in enumerate(begins) if begin >= config.train.rounds]
    if never:
        _log.warning(
            "stages: stage %d of %d would begin with round %d, and there are %d (train.rounds)",
            never[0] + 1, stages.count, begins[never[0]] + 1, config.train.rounds,
        )  # fmt: skip
    _check_trained(parts, begins)


def _check_trained(parts: Parts, begins: list[int]) -> None:
    """Refuses stages with too few clients that have samples, and says where there are fewer than are asked for."""
    config, context = parts.config, parts.context
    able = [len(parts.able(begin)) for begin in begins]
    needed = max(fewest(context), 1)
    instead = "set stages.memory, or divide the samples otherwise"
    if not isinstance(config.stages, Arriving):
        instead = "choose another kind of stages"
    for stage, count in enumerate(able):
        if count < needed:
            raise ConfigError(
                f"stages: in stage {stage + 1} only {count} of {context.num_clients} clients have training samples, "
                f"and a round needs {needed}: lower stages.count, or {instead}"
            )
    short = [stage for stage, count in enumerate(able) if count < context.num_clients]
    if short and (why := config.algorithm.everyone_needed()):
        raise ConfigError(
            f"stages: {config.algorithm.name} needs every client in every round, since {why}, and in stage "
            f"{short[0] + 1} only {able[short[0]]} of {context.num_clients} have training samples: {instead}"
        )
    if short and config.privacy.clip_norm is not None:
        raise ConfigError(
            f"stages: not together with privacy.clip_norm where clients are without samples ({able[short[0]]} of "
            f"{context.num_clients} have some in stage {short[0] + 1}), since epsilon goes by all being sampled: "
            f"{instead}, or leave one of the two out"
        )
    if short:
        _log.warning(
            "stages: of %d clients those take part that have training samples: %s, by stage",
            context.num_clients,
            ", ".join(map(str, able)),
        )
