"""A fork may change an option and goes on with it, or refuses it because what is kept depends on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest
from torch import Tensor

from algorithms.parts.settings import kept_settings
from algorithms.registry import METHODS
from rayfl.params import Tree, leaves
from tests.algorithms.test_options import CASE_OF, COHORTS, add, alternatives, choices, outcome, toy_of
from tests.support.option_values import BASES, BESIDE, PERMISSIONS, TRAINING
from tests.support.toys import Toy

LATER = {
    ("ccvr", "calibrate_every"): "the last round calibrates in any case",
    ("cfl", "linkage"): "of the small run's splits there is one way",
    ("cfl", "split_from"): "the round is over",
    ("ditto", "unseen"): "for clients never sampled, of which there are none",
    ("fedld", "mean_rounds"): "the round is over",
    ("fedamp", "alpha"): "has fallen to alpha_min by then",
    ("fedap", "warmup"): "the round is over",
    ("fedcorr", "clean_level"): "the rounds of clean clients are over",
    ("fedcorr", "proximal_form"): "the passes are over",
    ("fedcorr", "proximal_weight"): "the passes are over",
    ("fedas", "align_first"): "for clients that take part for the first time",
    ("feddrift", "merge_threshold"): "no cluster of the small run is old enough to be merged",
    ("federaser", "calibration_share"): "nobody leaves in the small run",
    **{
        ("feedsign", option): "it does not turn the votes of the last round"
        for option in ("aggregation", "difference", "perturbation")
    },
    ("fedfomo", "explore"): "all clients that there are have been met",
    ("fedfomo", "explore_decay"): "all clients that there are have been met",
    ("fedbuff", "staleness_threshold"): "no update of the small run is late",
    ("feddistill", "divergence"): "both have the same gradients",
    ("fedkd", "energy_start"): "the last round has energy_end",
    ("fedme", "cluster_outputs"): "both give the small run's clusters",
    ("fedme", "cluster_rounds"): "the rounds are over",
    ("fedphp", "one_sample"): "no mini-batch of the small run's last round has one sample",
    ("fedphp", "skip_first_transfer"): "for clients that take part for the first time",
    ("fedrap", "own_start"): "for clients that take part for the first time",
    ("fedlesam", "first_previous"): "for clients that take part for the first time",
    ("pfedvem", "initial_sigma"): "for clients that take part for the first time",
    ("fltrust", "server_lr"): "nobody is trusted in the small run's last round",
    **{(key, "unseen"): "for clients never sampled, of which there are none" for key in ("fedrod", "perada")},
    ("floco_plus", "unseen"): "for clients never sampled, of which there are none",
    **{
        ("gcfl", key): "its series begin again with the small run's split, and are too short for another"
        for key in ("max_norm", "split_from", "min_size", "length", "standardize")
    },
    ("hetlora", "kept_share"): "nothing is pruned in the small run's last round",
    ("hetlora", "padding"): "no rank is lacking in the small run's last round",
    ("mapper", "select_on"): "both choose the same in the small run's last round",
    ("mapper", "unseen"): "for clients never sampled, of which there are none",
    ("moon", "first_previous"): "for clients that take part for the first time",
    ("pfedsim", "warmup"): "the round is over",
    ("superfed", "local_init"): "for clients that train a local model for the first time; before start that is all",
    ("superfed", "start"): "the round is over",
}
"""Options that a fork may change and that have no effect after it in a small run, and why."""


def options() -> Iterator[Any]:
    """Options of methods of which something is kept that others do not keep."""
    for name, method in METHODS.items():
        plain = (method.client_keeps, method.server_keeps) == ("-", "w")
        for option, field in method.model_fields.items():
            shared = option in ("name", "aggregation") or option.startswith("finetune_")
            if not (plain or shared or (name, option) in PERMISSIONS or len(choices(field.annotation)) == 1):
                yield pytest.param(name, option, id=f"{name}-{option}")


def step(toy: Toy, name: str, cohort: list[int]) -> None:
    everyone = CASE_OF.get(name, CASE_OF["fedavg"]).everyone
    toy.step(range(toy.context.num_clients) if everyone else cohort)


def begun(name: str, settings: Mapping[str, Any], training: Mapping[str, Any]) -> tuple[Tree, dict[int, Tree]]:
    """The server's tree and all clients' states after two rounds."""
    toy = toy_of(name, settings, training)
    for cohort in COHORTS[:2]:
        step(toy, name, cohort)
    return toy.server, toy.states()


def gone_on(
    name: str, after: tuple[Tree, dict[int, Tree]], settings: Mapping[str, Any], training: Mapping[str, Any]
) -> str:
    """A hash of all that a third round with these settings leaves."""
    toy = toy_of(name, settings, training)
    toy.server, toy.round = deepcopy(after[0]), 2
    for client, state in deepcopy(after[1]).items():
        toy.client_hosts[0].states.replace(client, state, 1)
    step(toy, name, COHORTS[2])
    found = hashlib.sha256()
    scores = {str(client): {row: s.vector for row, s in rows.items()} for client, rows in toy.scores(True).items()}
    for tree in (toy.server, toy.states(), scores):
        add(found, tree)
    return found.hexdigest()


def shapes(server: Tree) -> dict[str, Any]:
    return {path: tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves(server)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option"), options())
def test_an_option_counts_after_a_fork_or_is_refused(name: str, option: str) -> None:
    settings = {**BASES.get(name, {}), **BESIDE.get((name, option), {})}
    training = TRAINING.get((name, option), {})
    after = begun(name, settings, training)
    stayed, server = gone_on(name, after, settings, training), shapes(toy_of(name, settings, training).server)
    counts = refused = False
    for value in alternatives(name, option, settings):
        other = {**settings, option: value}
        if outcome(name, tuple(sorted(other.items())), tuple(training.items())) is None:
            continue
        changed = METHODS[name](**other)
        if (
            kept_settings(METHODS[name](**settings), changed, 2)
            or shapes(toy_of(name, other, training).server) != server
        ):
            refused = True
            continue
        counts |= gone_on(name, after, other, training) != stayed
    assert counts or refused or (name, option) in LATER
