"""What commands print for programs: one JSON object on standard output, with the fields that its schema has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from rayfl.results.plain_json import json_text
from rayfl.tracking import terminal

AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON object on standard output in place of text; see docs/agents.md.")
]

OUTPUTS: Mapping[str, Mapping[str, str]] = {
    "answers": {
        "run": "folder",
        "model": "row of the tables",
        "split": "whose samples",
        "round": "after which round",
        "scores": "`clients` and `answers`, how many; `rouge_l`, `exact` and `ended`, means over clients in [0, 1], "
        "each with `_std` and `pooled_` too",
        "file": "that was written, or null",
    },
    "clients": {
        "run": "folder",
        "model": "row of the tables",
        "split": "samples that were scored",
        "round": "after which round",
        "evaluated": "how many clients were scored",
        "cohort": "all, or unseen",
        "clients": "a list; an object for each client with the columns of `rayfl clients`",
    },
    "cluster-template": {
        "kind": "of the file",
        "file": "that was written, or null",
        "text": "what is in it",
        "warnings": "a list of sentences",
    },
    "data-import": {
        "file": "that was written",
        "clients": "number",
        "samples": "numbers by split",
        "warnings": "a list of sentences",
    },
    "data-list": {"root": "data root", "files": "a list; `kind`, `content`, `path`, `bytes`, `source` of each"},
    "data-prepare": {"dataset": "name", "file": "that all processes of a machine read"},
    "data-show": {"dataset": "name", "clients": "number", "file": "the picture"},
    "data-stats": {"dataset": "name", "clients": "number", "facts": "texts by heading", "notes": "a list of sentences"},
    "data-verify": {"files": "a list; `path`, `wrong` and `unknown` (lists of sentences) of each"},
    "diff": {
        "first": "what was given",
        "second": "what was given",
        "differences": "a list; `field`, `first`, `second` of each",
        "same_results": "whether the same results are to be expected",
    },
    "doctor": {"findings": "a list; `what`, `verdict` (ok, warning, wrong), `found`, `fix` of each"},
    "export": {
        "file": "that was written",
        "row": "row of the tables",
        "client": "number",
        "round": "after which round",
        "parameters": "how many numbers",
        "metrics": "by split, metrics by name",
    },
    "fork": {"folder": "of the new run", "round": "after which it begins", "rounds": "how many it is to have"},
    "invert": {
        "run": "folder",
        "client": "whose message",
        "round": "of which round",
        "objective": "cosine or l2",
        "labels": "known or inferred",
        "steps": "local steps behind the message",
        "agreement": "cosine of the message and the gradient of its samples",
        "scores": "`samples`, how many; `mse` and `psnr` (null for vectors), means over samples; `guess_mse` and "
        "`guess_psnr`, those of a guess without the message; `nearer`, how many are nearer than it; `labels_right`, "
        "share",
        "samples": "a list; `sample` (place among the client's training samples), `label`, `mse`, `psnr`, `guess_mse` "
        "of each",
        "file": "the figure, or null",
    },
    "list": {"kind": "by kind, a list; `name`, `about` and more of each"},
    "logs": {"job": "its id", "text": "what it has printed so far"},
    "membership": {
        "run": "folder",
        "model": "row of the tables",
        "others": "split that was not trained on",
        "round": "after which round",
        "scores": "`clients`, `members` and `others`, how many; `auc` and `advantage`, means over clients, each with "
        "`_std` and `pooled_` too; `at_low_rate`, share of members found at 1 % false positives; `most_exposed`, the "
        "client with the largest AUC, and `most_exposed_auc`",
        "by_client": "a list; `client`, `members`, `others`, `auc`, `advantage`, `at_low_rate` of each",
    },
    "model-inspect": {
        "folder": "of the pretrained model",
        "family": "its architecture",
        "inputs": "image or tokens",
        "targets": "a list; the layers that adapters go to",
        "tensors": "how many",
        "bytes": "of all tensors",
        "types": "a list",
        "checksum": "that runs are tied to",
    },
    "model-make": {
        "folder": "that was written",
        "parameters": "how many numbers",
        "accuracy": "on what it was trained on",
        "checksum": "that runs are tied to",
    },
    "new": {"kind": "method, data, model or task", "files": "a list; those that were written"},
    "plot": {"kind": "of the figure", "runs": "a list of folders", "figure": "file", "numbers": "CSV file"},
    "repair": {"run": "folder", "repaired": "a list of sentences; empty if nothing needed repair"},
    "replay": {
        "round": "number",
        "compared": "numbers of values, by what they are",
        "differences": "distances by place; empty: equal to the bit",
        "note": "how to read differences; empty without any",
    },
    "report": {"report": "the page", "tables": "a list of files beside it", "notes": "a list of sentences"},
    "reproduce": {
        "table": "name, or one setting of it",
        "scale": "quick or paper",
        "folder": "of runs and table",
        "cells": "a list; the rows of `table.parquet`",
        "failures": "a list; `method`, `setting`, `seed`, `reason` of each run that failed",
    },
    "run": {
        "folder": "of the run",
        "method": "name",
        "rounds_completed": "number",
        "rounds": "number",
        "summary": "a list; the rows of `rounds.parquet` of the last evaluation of all clients",
        "further": "a list; such rows of clients held out from training, and on the official test part, also of the "
        "server's models",
        "skipped": "how often a client was left out of a round",
        "damage": "a list of sentences; empty if nothing was lost",
        "contributions": "a list, the greatest value first; `client`, `rounds` and `value` of each; empty without the "
        "section `contribution`",
    },
    "status": {"jobs": "a list; `job`, `run`, `method`, `data`, `status`, `minutes`, `exit_status` of each, as texts"},
    "stop": {"job": "its id", "stopped": "whether it was still under way"},
    "submit": {"job": "its id", "attached": "whether it was under way already"},
    "sweep": {
        "folder": "of the sweep",
        "experiments": "a list; the rows of `trials.parquet`",
        "groups": "a list; the rows of `groups.parquet`",
    },
    "show-configuration": {"configuration": "every value, resolved", "fingerprint": "of what results depend on"},
    "show-method": {
        "name": "of the method",
        "about": "its docstring",
        "fields": "a list; `field`, `symbol`, `default`, `range`, `meaning` of each",
    },
    "show-model": {
        "models": "a list; `model`, `inputs`, `classes`, `parameters`, `trained`, `buffers`, `head`, `body`, `stacks`, "
        "`why_not` of each candidate",
        "methods": "a list; `method`, `down`, `up`, `state` (bytes for each client) and `refused` of each",
    },
    "verify": {
        "run": "folder",
        "whole": "whether nothing is wrong",
        "commits": "rounds of the commits that are whole",
        "files": "how many files were read",
        "bytes": "how many bytes they have",
        "problems": "a list of sentences",
        "notes": "a list of sentences",
    },
    "watch": {
        "folder": "of the run",
        "method": "name",
        "dataset": "name",
        "rounds_completed": "rounds that are committed",
        "rounds": "how many there are to be",
        "state": "finished, running or stopped",
        "holder": "the process that works on it; empty for none",
        "seconds_a_round": "mean over the last rounds, or null",
        "seconds_left": "at that pace, or null",
        "evaluated": "after which round all clients were scored last, or null",
        "metric": "that the task is judged by first: top1, mse, ...",
        "score": "its mean over clients, of the personalized model then, or null",
        "accuracy": "the same, if that is accuracy: a share, or null",
        "devices": "number of actors by device",
    },
}
"""By name of the schema, its fields and what they are. A field is never renamed or removed without another number."""


def write_json(name: str, content: Mapping[str, Any]) -> None:
    """Prints an object of a schema of :data:`OUTPUTS`, on one line; numbers that are not finite are null."""
    assert content.keys() == OUTPUTS[name].keys(), f"{name}: {sorted(content.keys() ^ OUTPUTS[name].keys())}"
    terminal.write(json_text({"schema": f"rayfl.{name}/1", **content}) + "\n")
