"""Runs every method on the preset quickstart, and draws its curve beside FedAvg's for its page.

    python scripts/docs/method_curves.py                   runs what ``docs/methods/curves.csv`` lacks, draws all
    python scripts/docs/method_curves.py --again NAME...   runs these methods again first
    python scripts/docs/method_curves.py --draw            runs nothing, and draws what the table has
    python scripts/docs/method_curves.py --check           runs nothing; exit status 1 if a run or a picture is missing
                                                           or a picture is not the table's

Each run is ``rayfl run quickstart`` with the settings of its row and those of ``ALIKE``; methods over adapters run in
``quickstart-lora``, and methods of prompts in ``quickstart-clip``, which need the bases that ``rayfl model make
tiny-vit`` and ``rayfl model make tiny-clip`` make. All are in this process, one after the other, and each is written to
the table when it has ended, so that the script goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import io
import math
import re
import tempfile
import time
from pathlib import Path

import matplotlib
import numpy as np
import yaml
from small_runs import (
    EVERY,
    PICTURES,
    ROUNDS,
    TABLE,
    Curve,
    command_of,
    read_table,
    reference_of,
    settings_of,
    write_table,
)

import rayfl
from algorithms.registry import METHODS
from rayfl.plots.style import draw_curve, new_figure, paper_style, whole_numbers
from rayfl.results.personalized import PersonalizedRows

ROOT = Path(__file__).resolve().parents[2]
_DECIMAL = r"-?\d+\.\d+"
ALIKE = {
    "evaluation.every": EVERY,
    "engine.mode": "vectorized",
    "storage.commit_every": 30,
    "cluster.backend": "inline",
}
"""Of all runs: an evaluation every second round, and what makes them quick without changing more than last bits."""


def all_settings() -> list[str]:
    """Returns the settings of every run that the pages show, those of a larger model last: they take minutes."""
    runs = dict.fromkeys(run for name in METHODS for run in (settings_of(name), reference_of(name)))
    return sorted(runs, key=lambda settings: "model=" in settings)


def measured(settings: str) -> Curve:
    """Returns the curve of a run that is made now."""
    with tempfile.TemporaryDirectory() as folder:
        preset, *others = command_of(settings).split()
        given = {key: yaml.safe_load(value) for key, _, value in (setting.partition("=") for setting in others)}
        result = rayfl.run(preset, **given, **ALIKE, storage_path=folder)
    own = PersonalizedRows.recorded(result.rounds) or PersonalizedRows.of(result.config.algorithm)
    found = {
        row["round"]: 100 * row["top1"]
        for row in result.rounds.to_pylist()
        if (row["split"], row["cohort"], row["phase"]) == ("test", "all", "received") and own.is_summary(row)
    }
    rounds = tuple(range(EVERY, ROUNDS + 1, EVERY))
    return Curve(rounds, tuple(found.get(number, math.nan) for number in rounds))


def picture(name: str, curves: dict[str, Curve]) -> str:
    """Returns the picture of a method as SVG, made short; FedAvg's has its curve alone."""
    shown = dict.fromkeys([reference_of(name), settings_of(name)])
    with paper_style(), matplotlib.rc_context({"font.sans-serif": ["DejaVu Sans"]}):
        figure = new_figure(4.6, 2.2)
        axes = figure.subplots()
        for position, settings in enumerate(shown):
            label = "fedavg" if position == 0 else name
            curve = curves[settings]
            draw_curve(axes, position, label, np.array(curve.rounds), np.array(curve.accuracy))
        axes.set_ylim(0, 102)
        axes.set_xlabel("round")
        axes.set_ylabel("accuracy (%)")
        whole_numbers(axes)
        axes.legend(loc="lower right")
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = re.sub(r"^ +", "", text[text.index("<svg") :], flags=re.MULTILINE)
    return re.sub(r"(\.\d\d)\d+", r"\1", re.sub(r' transform="rotate\(-0 [^"]*"', "", text))


def pictures(curves: dict[str, Curve]) -> dict[Path, str]:
    """Returns the pictures of all methods of which there are runs, by their files."""
    return {
        PICTURES / f"{name}.svg": picture(name, curves)
        for name in METHODS
        if {settings_of(name), reference_of(name)} <= set(curves)
    }


def shows(path: Path, text: str) -> bool:
    """Returns whether a file has a picture, up to what other processors round otherwise: 0.05 of a point."""
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    if re.sub(_DECIMAL, "", known) != re.sub(_DECIMAL, "", text):
        return False
    pairs = zip(re.findall(_DECIMAL, known), re.findall(_DECIMAL, text), strict=True)
    return all(abs(float(one) - float(other)) <= 0.05 for one, other in pairs)


def main() -> int:
    """Runs, draws or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", nargs="+", default=[], choices=sorted(METHODS), metavar="NAME")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    curves = read_table()
    again = {settings_of(name) for name in given.again}
    missing = [settings for settings in all_settings() if settings not in curves or settings in again]
    if given.check:
        return _check(curves, missing)
    if given.draw:
        missing = []
    for number, settings in enumerate(missing, 1):
        begun = time.monotonic()
        curves[settings] = measured(settings)
        curves = {settings: curves[settings] for settings in all_settings() if settings in curves}
        write_table(curves)
        took = time.monotonic() - begun
        print(f"{number}/{len(missing)} {settings}: {curves[settings].last:.2f} %, {took:.0f} s", flush=True)
    PICTURES.mkdir(exist_ok=True)
    for path in PICTURES.glob("*.svg"):
        if path.stem not in METHODS:
            path.unlink()
    for path, text in pictures(curves).items():
        if not shows(path, text):
            path.write_text(text, encoding="utf-8")
    return 0


def _check(curves: dict[str, Curve], missing: list[str]) -> int:
    wrong = [f"{TABLE.relative_to(ROOT)}: no run of {settings}" for settings in missing]
    for path, text in pictures(curves).items():
        if not shows(path, text):
            wrong.append(f"out of date: {path.relative_to(ROOT)}")
    print("\n".join(wrong), end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
