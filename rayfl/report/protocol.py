"""Captions: what the numbers of a comparison are; for a paper also the protocol and what the marks mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rayfl.config.added import ABSENT, value_at
from rayfl.report.columns import Metric
from rayfl.report.comparison import Comparison
from rayfl.report.datasets import described
from rayfl.report.grouping import shown_model
from rayfl.report.significance import LEVEL
from rayfl.runs.loading import Run

OVER_CLIENTS, OVER_SEEDS = "+- clients", "+- seeds"
"""Headings of the spreads: population standard deviation over clients, sample standard deviation over seeds."""

_OPTIONS = {
    "model": "model {}",
    "train.clients_per_round": "{} clients a round",
    "train.min_clients_per_round": "at least {} of them",
    "train.sampling": "{} sampling",
    "selection.name": "clients chosen by {}",
    "privacy.clip_norm": "messages clipped at {}",
    "privacy.target_quantile": "a norm that moves to the quantile {}",
    "privacy.noise_multiplier": "noise multiplier {}",
    "privacy.accountant": "epsilon by {}",
    "privacy.noise_at": "noise added by {}",
    "privacy.mechanism": "noise of the mechanism {}",
    "privacy.noise": "noise shared by rounds ({})",
    "privacy.tree_rounds": "a new tree every {} rounds",
    "privacy.bands": "{} bands",
    "privacy.example_clip_norm": "gradients of samples clipped at {}",
    "privacy.example_noise_multiplier": "noise multiplier of gradients {}",
    "compression": "messages compressed by {}",
    "aggregator.name": "aggregator {}",
    "attack.share": "{} of the clients malicious",
    "attack.clients": "malicious clients {}",
    "attack.labels": "their labels {}",
    "attack.backdoor.target": "a backdoor to class {}",
    "attack.backdoor.poisoned": "in {} of their samples",
    "attack.message": "their messages {}",
    "attack.perturbation": "moved along {}",
    "evaluation.adversarial.radius": "robust accuracy on samples moved by up to {}",
    "evaluation.adversarial.norm": "in the norm {}",
    "evaluation.adversarial.steps": "in {} steps",
    "evaluation.adversarial.loss": "uphill on the {}",
    "train.local_epochs": "local epochs: {}",
    "train.batch_size": "batches of {}",
    "train.optimizer": "{}",
    "train.lr": "learning rate {}",
    "train.momentum": "momentum {}",
}
"""What a protocol says, in this order, where all runs have it alike."""
_USUAL = {
    "train.sampling": "fixed",
    "selection.name": "uniform",
    "privacy.noise_multiplier": 0.0,
    "privacy.accountant": "rdp",
    "privacy.noise_at": "server",
    "privacy.mechanism": "gaussian",
    "privacy.noise": "independent",
    "privacy.example_noise_multiplier": 0.0,
    "compression": {"name": "none"},
    "aggregator.name": "mean",
    "attack.share": 0.0,
    "attack.labels": "honest",
    "attack.message": "honest",
    "evaluation.adversarial.loss": "cross_entropy",
}
"""Values that go without saying."""


def caption(comparison: Comparison) -> str:
    """Returns what the numbers of a comparison are, for the head of its table."""
    lines = comparison.lines
    rounds = sorted({line.rounds for line in lines})
    after = f"after round {rounds[0]}" if len(rounds) == 1 else f"after {rounds[0]} to {rounds[-1]} rounds"
    some = "the clients that were scored" if any(" of " in line.clients for line in lines) else "all clients"
    measured = comparison.measured
    whose = some if measured.cohort == "all" else measured.whose
    return (
        f"{measured.split.capitalize()} data of {whose}{measured.when} {after}, the last evaluation: "
        f"means over clients, with several seeds the mean of these. {OVER_CLIENTS}: population standard deviation over "
        f"clients (with several seeds its mean); {OVER_SEEDS}: sample standard deviation over seeds of the means over "
        "clients. (own): the method's personalized model."
        f"{_worst(comparison.wanted.metrics)}"
    )


def _worst(metrics: Sequence[Metric]) -> str:
    """Returns what the column of the worst clients means; nothing where there is none."""
    worst = next((metric for metric in metrics if metric.column.endswith("_worst5")), None)
    if worst is None:
        return ""
    which = "lowest" if worst.sign > 0 else "highest"
    own = worst.column.removesuffix("_worst5")
    label = "accuracy" if own == "top1" else next((one.heading for one in metrics if one.column == own), own)
    return f" Worst 5 %: mean of the 5 % of clients with the {which} {label}."


def protocol(comparisons: Mapping[str, Comparison]) -> str:
    """Returns the options that all runs have alike, in words, and the names of those in which they differ."""
    runs = [run for one in comparisons.values() for group in one.groups for run in group.runs]
    parts = []
    if len({one.dataset for one in runs}) == 1 and len(comparisons) == 1:
        parts += [runs[0].dataset, f"partition {described(runs[0].content.get('partition') or {'name': 'natural'})}"]
    counts = {run.num_clients for run in runs}
    if len(counts) == 1 and None not in counts:
        parts.append(f"{counts.pop()} clients")
    differing = []
    for path, text in _OPTIONS.items():
        values = [_value(run, path) for run in runs]
        if any(value != values[0] for value in values):
            differing.append(path)
        elif values[0] is not None:
            parts.append(text.format(values[0]))
    verb = "differs" if len(differing) == 1 else "differ"
    apart = f"; {', '.join(differing)} {verb} between the runs" if differing else ""
    return f"Protocol: {', '.join(parts)}{apart}."


def message_settings(run: Run) -> str:
    """Returns in words what is done to a run's messages, and by whom; empty where nothing is."""
    paths = [path for path in _OPTIONS if path.partition(".")[0] in ("privacy", "compression", "aggregator", "attack")]
    values = {path: _value(run, path) for path in paths}
    return ", ".join(_OPTIONS[path].format(value) for path, value in values.items() if value is not None)


def paper_caption(comparisons: Mapping[str, Comparison], headings: Sequence[str], by_seed: bool | None) -> str:
    """Returns the whole caption as plain text.

    Args:
        comparisons: by data set.
        headings: of the metrics.
        by_seed: whether the spreads are over seeds; else over clients; None: no number has one.
    """
    return " ".join([*_measured(comparisons, headings, by_seed), protocol(comparisons)])


def _measured(comparisons: Mapping[str, Comparison], headings: Sequence[str], by_seed: bool | None) -> Iterator[str]:
    lines = [line for one in comparisons.values() for line in one.lines]
    measured = next(iter(comparisons.values())).measured
    rounds = sorted({line.rounds for line in lines})
    seeds = sorted({line.seeds for line in lines})
    first = next(iter(comparisons.values()))
    model = "" if len(first.wanted.models) > 1 else f" of {shown_model(first.groups)}"
    cohorts = {"all": "", "selected": " in the round's cohort", "unseen": " held out from training"}
    whose = f"of each client{cohorts[measured.cohort]}"
    last = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    when = f"after {last} rounds" if measured.phase == "received" else f"right after local training in round {last}"
    over = f", then over {seeds[-1]} seeds" if seeds[-1] > 1 else ""
    if seeds[0] != seeds[-1]:
        over = f", then over {seeds[0]} to {seeds[-1]} seeds"
    yield (f"{_capital(', '.join(headings))}{model} on {measured.split} data {whose} {when}; mean over clients{over}.")
    if by_seed is not None:
        what = "sample standard deviation over seeds" if by_seed else "population standard deviation over clients"
        yield f"±: {what}."
    if any(cell.best for line in lines for cell in line.cells.values()):
        yield "Bold: best, underlined: second best in a column."


def marks_caption(over_clients: bool, over_seeds: bool) -> str:
    """Returns what the marks of tests mean; empty where no test was made."""
    kinds = [text for text, made in (("c: paired over clients", over_clients), ("s: over seeds", over_seeds)) if made]
    if not kinds:
        return ""
    return (
        f"The best method of the column is significantly better than those marked ({', '.join(kinds)}; Wilcoxon's "
        f"signed-rank test, p adjusted by Holm's method, below {LEVEL})."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _value(run: Run, path: str) -> Any:
    found = value_at(run.content, path)
    if found is ABSENT or found == _USUAL.get(path, ABSENT):
        return None
    return described(found) if isinstance(found, Mapping) else found
