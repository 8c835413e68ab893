"""What a sweep is refused for before any of its experiments starts."""

from __future__ import annotations

from cluster.sweep.folder import RECORD, of_a_beginning
from rayfl.errors import ConfigError
from rayfl.storage.run_folder import refuse_foreign_folder
from rayfl.sweeps.report import of_data
from rayfl.sweeps.trials import Sweep


def check_folder(sweep: Sweep) -> None:
    """Makes sure that the sweep's folder is new, or that of a sweep.

    Raises:
        ConfigError: it is the folder of a single run, or has other files.
    """
    if sweep.folder.exists("config.yaml"):
        raise ConfigError(f"{sweep.folder.uri} is the folder of a single run: give the sweep a name=... of its own")
    if not sweep.folder.exists(RECORD):
        refuse_foreign_folder(sweep.folder, of_a_beginning, f"no {RECORD}")


def check_scheduler(sweep: Sweep, scheduler: str, judge: str, grace_rounds: int) -> None:
    """Makes sure that a scheduler has numbers to decide by, and that they can be compared.

    Raises:
        ConfigError: naming the experiment without such numbers, or the option that makes them incomparable.
    """
    blind = [trial for trial in sweep.trials if judge not in trial.judged_on]
    if blind:
        raise ConfigError(
            f"{scheduler} judges by {judge} data, but {sweep.described(blind[0])} has none that are scored: "
            "set holdout.validation and evaluation.splits"
        )
    rounds = min(trial.config.train.rounds for trial in sweep.trials)
    if grace_rounds >= rounds:
        raise ConfigError(f"--grace-rounds is {grace_rounds}, but experiments end after {rounds} rounds")
    if mixed := [path for path in sweep.varied if of_data(path)]:
        raise ConfigError(
            f"{mixed[0]}: {scheduler} would compare numbers on different data, and stop the experiments on the harder; "
            f"give each value a sweep of its own, or leave out --scheduler"
        )
