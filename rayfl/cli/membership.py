"""The command ``rayfl membership``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import typer
from rich.progress import Progress

from rayfl.cli.inspect import Model, Run, Trust, open_folder
from rayfl.cli.outputs import AsJson, write_json
from rayfl.errors import RunError
from rayfl.tracking import terminal


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(membership)


def membership(
    run: Run,
    model: Model = None,
    client: Annotated[list[int] | None, typer.Option(help="A client's number; may be repeated; default: all.")] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Of each client, trained on or not, at most, drawn at random.")
    ] = 500,
    others: Annotated[Literal["test", "validation"], typer.Option(help="The split that was not trained on.")] = "test",
    round: Annotated[int | None, typer.Option(help="After which round; default: the newest commit.")] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Attack a run's models: do their losses tell which samples they were trained on (membership inference)?"""
    from rayfl.runs.committed import CommittedModels
    from rayfl.runs.membership import by_client, caveat, losses_of, summary

    models = CommittedModels(open_folder(run, trust), round)
    chosen, found = list(dict.fromkeys(client or [])), []
    with Progress(console=terminal.err(), transient=True, disable=not terminal.err().is_terminal) as bar:
        task = bar.add_task("losses", total=len(chosen) or models.parts.num_clients - len(models.idle or ()))
        for one in losses_of(models, model, chosen, others, samples):
            found.append(one)
            bar.update(task, advance=1, description=f"client {one[0]}")
    if not found:
        raise RunError(f"{models.run.uri}: no client that took part has samples in the splits train and {others}")
    about = {"run": models.run.uri, "model": found[0][1], "others": others, "round": models.rounds_completed}
    scores = summary(found)
    if but := caveat(models):
        terminal.warn(but)
    if as_json:
        listed = [{"client": number, **asdict(own)} for number, own in by_client(found)]
        write_json("membership", {**about, "scores": scores, "by_client": listed})
        return
    plural = "" if scores["clients"] == 1 else "s"
    terminal.say(
        f"{about['model']} after round {about['round']}: a threshold on the loss, {scores['members']} samples of "
        f"{scores['clients']} client{plural} that were trained on, {scores['others']} that were not ({others})\n"
        f"AUC {scores['auc']:.3f} +- {scores['auc_std']:.3f} over clients, {scores['pooled_auc']:.3f} of all samples "
        "together; 0.5 is guessing\n"
        f"advantage (true - false positive rate) {scores['advantage']:.3f} +- {scores['advantage_std']:.3f}, "
        f"{scores['pooled_advantage']:.3f} together; "
        f"at 1 % false positives {100 * scores['at_low_rate']:.1f} % of those trained on are found\n"
        f"most exposed: client {scores['most_exposed']}, AUC {scores['most_exposed_auc']:.3f}"
    )
