"""The command ``rayfl sweep``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from rayfl.cli import completion
from rayfl.cli.outputs import AsJson, write_json
from rayfl.tracking import terminal


class Model(StrEnum):
    """The models that experiments can be compared by."""

    PERSONALIZED = "personalized"
    GLOBAL = "global"


class Scheduler(StrEnum):
    """Who decides which experiments go on."""

    NONE = "none"
    ASHA = "asha"


def register(app: typer.Typer) -> None:
    """Adds the command to ``rayfl``."""
    app.command("sweep")(sweep)


def sweep(
    config: Annotated[
        str,
        typer.Argument(
            help="A preset or a YAML file; its name is the sweep's folder.", autocompletion=completion.configurations
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides with several values: algorithm=fedavg,floco seed=0:5 'train.lr=log(0.001,0.1)', also "
            "uniform(a,b) and choice(a,b,c).",
            autocompletion=completion.overrides,
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="How often random values are drawn.")] = None,
    draw_seed: Annotated[int, typer.Option(min=0, help="Seed of the random values.")] = 0,
    scheduler: Annotated[Scheduler, typer.Option(help="asha stops experiments that lag behind.")] = Scheduler.NONE,
    grace_rounds: Annotated[int, typer.Option(min=1, help="asha: stops nothing before this round.")] = 1,
    reduction: Annotated[int, typer.Option(min=2, help="asha: of n experiments at a rung, n / reduction go on.")] = 3,
    metric: Annotated[
        str | None, typer.Option(help="What experiments are compared by: a metric of the task; its first.")
    ] = None,
    model: Annotated[Model, typer.Option(help="Whose metric.")] = Model.PERSONALIZED,
    select_on_test: Annotated[
        bool, typer.Option("--select-on-test", help="Choose by test data, as some papers do; the result is marked.")
    ] = False,
    at_once: Annotated[int | None, typer.Option(min=1, help="Experiments at a time; as many as fit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run many experiments, and compare them over seeds; the same command continues a sweep that stopped."""
    from algorithms.registry import Experiment
    from cluster.rounds.interrupts import TERMINATED, Terminated
    from cluster.sweep.run import SweepOptions, run_sweep
    from rayfl.errors import ConfigError
    from rayfl.sweeps.measures import Measure
    from rayfl.sweeps.report import printed
    from rayfl.sweeps.space import parse_space
    from rayfl.sweeps.trials import plan_sweep

    if scheduler is Scheduler.NONE and (grace_rounds, reduction) != (1, 3):
        raise ConfigError("--grace-rounds and --reduction are asha's: add --scheduler asha")
    space = parse_space(overrides or [])
    if draw_seed and not space.random:
        raise ConfigError("--draw-seed needs a value that is drawn: log(a,b), uniform(a,b) or choice(a,b,...)")
    planned = plan_sweep(Experiment, config, space, samples, draw_seed)
    if planned.repeated:
        terminal.warn(
            f"{planned.repeated} of the points drawn repeat another: {len(planned.trials)} experiments are left, each "
            "is run once"
        )
    task = planned.trials[0].config.task
    if any(trial.config.task != task for trial in planned.trials):
        raise ConfigError("task: the experiments of a sweep are compared by one metric, so that all need the same task")
    measure = Measure.of_task(task.judged_by(), metric, model.value, "test" if select_on_test else "validation")
    options = SweepOptions(measure, "asha" if scheduler is Scheduler.ASHA else None, grace_rounds, reduction, at_once)
    try:
        result = run_sweep(planned, options, terminal.warn if as_json else terminal.say)
    except (KeyboardInterrupt, Terminated) as stop:
        terminal.err().print("interrupted; the same command continues the sweep", markup=False)
        raise typer.Exit(TERMINATED if isinstance(stop, Terminated) else terminal.INTERRUPTED) from None
    if as_json:
        tables = {"experiments": result.trials.to_pylist(), "groups": result.groups.to_pylist()}
        write_json("sweep", {"folder": str(result.path), **tables})
    else:
        terminal.out().print(printed(result.groups, planned.varied, measure))
    failed = [
        row for row in result.trials.select(["trial", "status", "reason"]).to_pylist() if row["status"] == "failed"
    ]
    for row in failed:
        terminal.warn(f"failed: {row['trial']}: {row['reason']}")
    if not as_json:
        terminal.say(f"sweep folder: {result.path} (trials.parquet, groups.parquet, a folder per experiment)")
    if result.stopped_by is not None:
        terminal.err().print("interrupted; the same command continues the sweep", markup=False)
        raise typer.Exit(TERMINATED if isinstance(result.stopped_by, Terminated) else terminal.INTERRUPTED)
    if failed:
        raise typer.Exit(terminal.FAILED)
