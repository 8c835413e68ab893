"""The command ``rayfl invert``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import Progress
from rich.table import Table

from rayfl.cli.inspect import Run, Trust, open_folder
from rayfl.cli.outputs import AsJson, write_json
from rayfl.cli.paths import at_home
from rayfl.tracking import terminal

if TYPE_CHECKING:
    from rayfl.runs.inversion import Inverted

_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(invert)


def invert(
    run: Run,
    client: Annotated[
        int | None, typer.Option(help="Whose message; default: the first client that took part in the round.")
    ] = None,
    round: Annotated[int, typer.Option(help="Of which round; later ones need the commit before them.")] = 1,
    objective: Annotated[
        Literal["cosine", "l2"],
        typer.Option(help="What of two gradients is to agree: their direction (Geiping et al.), or all (Zhu et al.)."),
    ] = "cosine",
    labels: Annotated[
        Literal["known", "inferred"],
        typer.Option(help="known: the attacker has the labels; inferred: from the head's bias, of one local step."),
    ] = "known",
    iterations: Annotated[int, typer.Option(min=1, help="Of Adam (cosine), or of L-BFGS at most (l2).")] = 1000,
    restarts: Annotated[int, typer.Option(min=1, help="How often to begin; the smallest objective counts.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise that the search begins with.")] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: cuda if there is one.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(callback=at_home, help="Figure of samples above reconstructions: .png, .svg or .pdf."),
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Attack a client's message: what does it give away of its samples (gradient inversion)?"""
    from cluster.replay import participants, sent_message
    from rayfl.engine.precision import arithmetic
    from rayfl.plots.partition import check_format, save_figure
    from rayfl.plots.reconstructions import draw
    from rayfl.plots.style import paper_style
    from rayfl.runs.attackable import caveats, check_attack
    from rayfl.runs.devices import device_of
    from rayfl.runs.gradient_matching import Attack
    from rayfl.runs.inversion import inverted

    if out is not None:
        check_format(out)
    opened, place = open_folder(run, trust), device_of(device)
    whose = participants(opened, round, client)[0] if client is None else client
    check_attack(opened, whose, labels)
    message = sent_message(opened, round, whose)
    with Progress(console=terminal.err(), transient=True, disable=not terminal.err().is_terminal) as bar:
        task = bar.add_task(f"client {whose}", total=iterations * restarts)
        attack = Attack(objective, iterations, restarts, seed, report=lambda: bar.update(task, advance=1))
        with arithmetic("float32"):  # of convolutions, too, which a GPU rounds otherwise
            found = inverted(opened, round, whose, message, attack, labels, place)
    for but in caveats(opened, found.steps, objective):
        terminal.warn(but)
    method, scores = opened.config.algorithm.name, found.scores()
    if out is not None:
        with paper_style():
            save_figure(draw(found, f"{method}, round {round}, client {whose}"), out)
    if as_json:
        about = {"run": opened.uri, "client": whose, "round": round, "objective": objective, "labels": labels}
        about |= {"steps": found.steps, "agreement": found.agreement}
        write_json(
            "invert", {**about, "scores": scores, "samples": found.rows(), "file": None if out is None else str(out)}
        )
        return
    terminal.out().print(_table(found))
    if (more := scores["samples"] - _SHOWN) > 0:
        terminal.say(f"{more} more with --json")
    terminal.say(_said(found, scores, f"{method}, round {round}, client {whose}", labels))
    if out is not None:
        terminal.say(f"figure: {out}")


def _table(found: Inverted) -> Table:
    """Returns the numbers of the first samples."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    columns = ["sample", "label", "MSE", *(["PSNR dB"] if found.images else []), "MSE of a guess"]
    for column in columns:
        table.add_column(column, justify="right")
    for row in found.rows()[:_SHOWN]:
        ratio = [f"{row['psnr']:.1f}"] if found.images else []
        table.add_row(str(row["sample"]), str(row["label"]), f"{row['mse']:.4f}", *ratio, f"{row['guess_mse']:.4f}")
    return table


def _said(found: Inverted, scores: dict[str, Any], where: str, labels: str) -> str:
    count, steps = scores["samples"], found.steps
    inferred = f"inferred, {100 * scores['labels_right']:.0f} % right" if labels == "inferred" else "known"
    ratio = f"PSNR {scores['psnr']:.1f} dB, of the guess {scores['guess_psnr']:.1f} dB; " if found.images else ""
    return (
        f"{where}: {steps} local step{'s' * (steps != 1)} on {count} sample{'s' * (count != 1)}, labels {inferred}; "
        f"cosine of message and gradient {found.agreement:.3f}\n"
        f"{ratio}MSE {scores['mse']:.4f}, of the guess {scores['guess_mse']:.4f}: others' mean of the class\n"
        f"{scores['nearer']} of {count} reconstructions are nearer than the guess"
    )
