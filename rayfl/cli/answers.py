"""The command ``rayfl answers``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.panel import Panel
from rich.progress import Progress
from rich.text import Text

from rayfl.cli.inspect import Model, Run, Trust, open_folder
from rayfl.cli.outputs import AsJson, write_json
from rayfl.cli.paths import at_home
from rayfl.errors import RunError
from rayfl.tracking import terminal

_SHOWN = 3


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(answers)


def answers(
    run: Run,
    model: Model = None,
    client: Annotated[list[int] | None, typer.Option(help="A client's number; may be repeated; default: all.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Of each client at most, drawn at random.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="Of an answer at most.")] = 64,
    split: Annotated[Literal["test", "validation", "train"], typer.Option(help="Whose samples.")] = "test",
    round: Annotated[int | None, typer.Option(help="After which round; default: the newest commit.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: cuda if there is one.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(callback=at_home, help="File for all answers, an object of JSON a line.")
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Have a run's language models answer their clients' prompts, and compare with the data's answers (ROUGE-L)."""
    from rayfl.results.plain_json import json_text
    from rayfl.runs.answers import answered, summary
    from rayfl.runs.committed import CommittedModels

    models = CommittedModels(open_folder(run, trust), round)
    chosen = list(dict.fromkeys(client or []))
    listed = []
    with Progress(console=terminal.err(), transient=True, disable=not terminal.err().is_terminal) as bar:
        task = bar.add_task("answers", total=len(chosen) or models.parts.dataset.num_clients)
        for number, found in answered(models, model, chosen, samples, split, tokens, device):
            listed.append(found)
            bar.update(task, advance=1, description=f"client {number}")
    if not listed:
        raise RunError(f"{models.run.uri}: no client has samples in the split {split}")
    rows = [asdict(one) for own in listed for one in own]
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("".join(f"{json_text(row)}\n" for row in rows), encoding="utf-8")
    about = {"run": models.run.uri, "model": listed[0][0].model, "split": split, "round": models.rounds_completed}
    scores = summary(listed)
    if as_json:
        write_json("answers", {**about, "scores": scores, "file": None if out is None else str(out)})
        return
    for row in rows[:_SHOWN]:
        shown = {name: terminal.visible(str(row[name])) for name in ("prompt", "answer", "reference")}
        text = Text(f"{shown['prompt']}\n\nanswer:    {shown['answer']}\nreference: {shown['reference']}")
        terminal.out().print(Panel(text, title=f"client {row['client']}", title_align="left"))
    terminal.say(
        f"{about['model']} after round {models.rounds_completed}, {split} samples of "
        f"{_count(scores['clients'], 'client')}, {_count(scores['answers'], 'answer')}:\n"
        f"ROUGE-L {100 * scores['rouge_l']:.2f} +- {100 * scores['rouge_l_std']:.2f} % over clients "
        f"({100 * scores['pooled_rouge_l']:.2f} % of all answers together)\n"
        f"exactly right {100 * scores['exact']:.2f} +- {100 * scores['exact_std']:.2f} %; "
        f"ended by themselves {100 * scores['ended']:.2f} %" + ("" if out is None else f"\nanswers: {out}")
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
