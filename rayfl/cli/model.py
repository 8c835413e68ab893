"""The commands ``rayfl model ...``: folders of pretrained models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayfl.cli.outputs import AsJson, write_json
from rayfl.cli.paths import at_home
from rayfl.tracking import terminal

_FOLDER = "~/models"


def register(app: typer.Typer) -> None:
    """Adds the commands to ``rayfl``."""
    models = typer.Typer(help="Make and describe folders of pretrained models.", no_args_is_help=True)
    models.command()(make)
    models.command()(inspect)
    app.add_typer(models, name="model")


def make(
    name: Annotated[str, typer.Argument(help="tiny-vit, tiny-clip, tiny-lm, tiny-llama or tiny-bert.")],
    out: Annotated[
        Path | None, typer.Option(callback=at_home, help="Folder to write; default ~/models/<name>.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of its initial values and mini-batches.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train a small transformer in seconds, without a download: tiny-vit on digits, tiny-lm on texts in bytes."""
    from rayfl.models.pretrained.making import make as train

    made = train(name, out or Path(_FOLDER) / name, seed)
    if as_json:
        about = {"parameters": made.parameters, "accuracy": made.accuracy, "checksum": made.sha256}
        write_json("model-make", {"folder": made.folder, **about})
        return
    terminal.out().print(
        f"folder:     {made.folder}\n"
        f"parameters: {made.parameters:,}\n"
        f"accuracy:   {made.accuracy:.3f} on what it was trained on\n"
        f"checksum:   {made.sha256}\n"
        f"use:        model=pretrained model.folder={made.folder}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def inspect(
    folder: Annotated[Path, typer.Argument(callback=at_home, help="Folder with config.json and *.safetensors.")],
    as_json: AsJson = False,
) -> None:
    """Say what is in a folder: family, size, which layers adapters go to, and the checksum that runs are tied to."""
    from rayfl.models.pretrained.families import family_of
    from rayfl.models.pretrained.folder import BaseFolder

    found = BaseFolder(folder)
    family = family_of(found.model_type)
    speaks = " or, for the next token, the base's own" if family.causal else ""
    head = f"{family.block} (new for the data set's classes){speaks}"
    if family.tower:
        head = "made of the classes' texts (model.prompt)"
    types = sorted({entry.dtype for entry in found.entries.values()})
    if as_json:
        weights = {"tensors": len(found.entries), "bytes": found.bytes, "types": types}
        family_is = {"family": found.model_type, "inputs": family.kind, "targets": list(family.targets)}
        write_json("model-inspect", {"folder": found.path, **family_is, **weights, "checksum": found.sha256})
        return
    terminal.out().print(
        f"folder:   {found.path}\n"
        f"family:   {found.model_type}, for {'images' if family.kind == 'image' else 'tokens'}\n"
        f"weights:  {len(found.entries)} tensors, {found.bytes:,} bytes as {', '.join(types)} in "
        f"{len(found.files)} file{'s' if len(found.files) > 1 else ''}\n"
        f"targets:  {', '.join(family.targets)}{f' in {family.tower}' * bool(family.tower)} (model.adapter.targets)\n"
        f"head:     {head}\n"
        f"checksum: {found.sha256}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
