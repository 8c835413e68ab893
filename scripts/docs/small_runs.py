"""The small runs that the pages on methods show: their settings, and the table of what they gave."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

PAGES = Path(__file__).resolve().parents[2] / "docs" / "methods"
TABLE = PAGES / "curves.csv"
PICTURES = PAGES / "curves"
PRESET = "quickstart"
EVERY = 2
"""Rounds from one evaluation to the next."""
ROUNDS = 30
"""Rounds of the longest run."""
_TURNING = "partition.classes_per_client=10 stages.name=rotation stages.count=3 stages.rounds=10"
"""Images that turn twice during a run, for methods that do nothing of their own on data that stay."""
_NOISY = "partition.classes_per_client=10 noise.kind=symmetric noise.ratio=0.7 noise.clients=0.4"
"""Wrong labels at some clients, for methods that are made for these."""
_FEW = "model.hidden=[16] partition.classes_per_client=10 train.momentum=0"
"""A small model and clients that are alike, for methods whose steps are the noisier the more parameters there are."""
NEEDS = {
    "ccvr": "algorithm.calibrate_every=2",
    "cfl": "train.clients_per_round=all",
    "creff": "algorithm.features_per_class=20 algorithm.retrain_epochs=50 algorithm.retrain_lr=0.1",
    "decomfl": f"{_FEW} train.lr=0.02 algorithm.local_steps=20 algorithm.directions=20",
    "dense": (
        "partition.classes_per_client=10 train.rounds=6 train.local_epochs=30 algorithm.draws=20 "
        "algorithm.generator_width=8 algorithm.noise_dim=32 algorithm.made_per_draw=64 "
        "algorithm.generator_lr=0.01 algorithm.noise_lr=0.01 algorithm.student_lr=0.02"
    ),
    "depthfl": "model.hidden=[64,64,64,64] algorithm.ramp_up=10",
    "fedap": "model=resnet9 train.local_epochs=1",
    "fedasync": "system=sampled system.mode=buffered train.clients_per_round=1 system.concurrency=8",
    "ca2fl": "system=sampled system.mode=buffered",
    "fedbn": "model=resnet9 train.local_epochs=1",
    "fedbuff": "system=sampled system.mode=buffered",
    "fedcm": "train.momentum=0",
    "fedcorr": f"{_NOISY} algorithm.clean_rounds=10",
    "feddc": "train.momentum=0",
    "feddf": "holdout.public=200 algorithm.distill_steps=100",
    "fedewc": _TURNING,
    "federaser": "stages.name=clients stages.count=2 stages.rounds=15 stages.course=leave",
    "fedkseed": f"{_FEW} train.lr=0.01",
    "fedlaw": "holdout.public=200",
    "fedloge": "algorithm.classifier_norm=1",
    "fedlsr": f"{_NOISY} train.lr=0.15 train.momentum=0.9",
    "fedmd": "holdout.public=200",
    "fedme": "train.clients_per_round=all",
    "fedpm": (
        "model.hidden=[256,256] partition.classes_per_client=10 train.optimizer=adam train.lr=0.03 train.momentum=0"
    ),
    "fedpft": "train.clients_per_round=all train.rounds=2 algorithm.server_lr=0.01",
    "fedrolex": "algorithm.scaler=false",
    "fedtpg": "model.prompt.context=shared model.prompt.start=drawn",
    "gcfl": "train.clients_per_round=all",
    "flexlora": "algorithm.ranks=[1,2,4]",
    "flora": "algorithm.ranks=[1,2,4]",
    "fedweit": _TURNING,
    "fedzo": f"{_FEW} train.lr=0.01 algorithm.distribution=gaussian algorithm.directions=20",
    "feedsign": f"{_FEW} train.lr=0.03",
    "fixmatch": "labelled.share=0.2 algorithm.threshold=0.8 algorithm.unlabelled_ratio=1",
    "fltrust": "holdout.public=100",
    "flwf": _TURNING,
    "heterofl": "algorithm.scaler=false",
    "hetlora": "algorithm.ranks=[1,2,4]",
    "inclusivefl": "model.hidden=[64,64,64,64]",
    "l2gd": "train.clients_per_round=all train.momentum=0",
    "lotteryfl": "algorithm.prune_share=0.5",
    "mime": "train.momentum=0",
    "mimelite": "train.momentum=0",
    "perada": "holdout.public=200 algorithm.distill_steps=100",
    "pfedbayes": "train.momentum=0 algorithm.kl_weight=0.01",
    "pfedme": "train.momentum=0",
    "pfedpara": "model.factorize=pfedpara",
    "qfedavg": "algorithm.lipschitz=1",
    "rofl": f"{_NOISY} algorithm.forget_rate=0.3",
    "scaffnew": "train.clients_per_round=all train.momentum=0",
    "scaffold": "train.momentum=0",
    "scalefl": "model.hidden=[64,64,64,64]",
    "semifl": "holdout.public=100 labelled.at=server algorithm.threshold=0.8",
    "tamuna": "train.momentum=0 algorithm.senders=4",
    "target": (
        "partition.classes_per_client=10 stages.name=classes stages.count=3 stages.rounds=10 "
        "algorithm.generator_width=8 algorithm.noise_dim=32 algorithm.made_per_draw=64 algorithm.student_steps=50"
    ),
}
"""What a method needs of the preset to run there, or to show what it is for."""
ELSEWHERE = (
    dict.fromkeys(
        ("fedalt", "feddpa", "fedex_lora", "flexlora", "flora", "hetlora", "lora_fair", "rolora"), "quickstart-lora"
    )
    | dict.fromkeys(("fedotp", "fedpgp", "fedtpg", "pfedmoap"), "quickstart-clip")
    | dict.fromkeys(("fairfed", "fedfb"), "quickstart-groups")
)
"""The preset of methods that do not run in quickstart."""
CLIENTS = {"quickstart-groups": 8}
"""Clients of presets that have not 20."""


@dataclass(frozen=True)
class Curve:
    """What a run gave.

    Attributes:
        rounds: after which its models were evaluated, shape (T,), or would have been in a longer run.
        accuracy: mean over clients of the method's own model, in percent, shape (T,); not a number before the method
            has such a model, and after the run.
    """

    rounds: tuple[int, ...]
    accuracy: tuple[float, ...]

    @property
    def end(self) -> int:
        """The last round."""
        return max(number for number, value in zip(self.rounds, self.accuracy, strict=True) if not math.isnan(value))

    @property
    def last(self) -> float:
        """The accuracy after the last round."""
        return self.accuracy[self.rounds.index(self.end)]


def settings_of(name: str) -> str:
    """Returns what follows ``rayfl run quickstart`` for a method, or ``rayfl run``; the key of its row."""
    return " ".join([*_preset(name), f"algorithm={name}", *NEEDS.get(name, "").split()])


def command_of(settings: str) -> str:
    """Returns what follows ``rayfl run`` for settings, the preset included."""
    return f"{PRESET} {settings}" if settings.startswith("algorithm=") else settings


def reference_of(name: str) -> str:
    """Returns the settings of the FedAvg run that a method's curve is shown with.

    They are the method's own, but for its hyper-parameters and the section ``system``: FedAvg waits for all of a
    round's clients, and of that section nothing but the simulated time would follow. Where the server has all labels,
    clients of FedAvg have theirs, too: without any they could not train.
    """
    needs = [
        need for need in NEEDS.get(name, "").split() if not need.startswith(("system", "algorithm.", "labelled.at"))
    ]
    return " ".join([*_preset(name), "algorithm=fedavg", *needs])


def _preset(name: str) -> list[str]:
    return [ELSEWHERE[name]] if name in ELSEWHERE else []


def read_table() -> dict[str, Curve]:
    """Returns the curve of each run that has been made, by its settings."""
    if not TABLE.exists():
        return {}
    with TABLE.open(encoding="utf-8", newline="") as file:
        head, *lines = csv.reader(file)
    rounds = tuple(int(number) for number in head[1:])
    return {line[0]: Curve(rounds, tuple(float(cell) if cell else math.nan for cell in line[1:])) for line in lines}


def write_table(curves: dict[str, Curve]) -> None:
    """Writes the curves of all runs, one a line, by their settings."""
    rounds = next(iter(curves.values())).rounds
    lines = [
        [settings, *("" if math.isnan(value) else f"{value:.2f}" for value in curve.accuracy)]
        for settings, curve in sorted(curves.items())
    ]
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["settings", *map(str, rounds)], *lines])
