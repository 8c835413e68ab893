"""The section ``clients``: what becomes of clients that fail."""

from __future__ import annotations

import pytest

from algorithms.registry import Experiment
from rayfl.config.cluster_section import ClientsConfig
from rayfl.config.loading import load_config, to_yaml
from rayfl.errors import ConfigError
from rayfl.experiment.checking import check_parts
from rayfl.experiment.parts import Parts


@pytest.mark.parametrize(
    ("options", "attempts", "skips"),
    [
        ({}, 1, False),
        ({"on_error": "fail"}, 1, False),
        ({"on_error": "skip"}, 1, True),
        ({"on_error": "retry"}, 3, False),
        ({"on_error": "retry", "retries": 5, "after_retries": "skip"}, 6, True),
    ],
)
def test_policies(options: dict[str, object], attempts: int, skips: bool) -> None:
    config = ClientsConfig(**options)  # type: ignore[arg-type]
    assert (config.attempts, config.skips) == (attempts, skips)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["clients.retries=3"], "clients: retries need on_error=retry, not fail"),
        (["clients.on_error=skip", "clients.after_retries=skip"], "after_retries need on_error=retry, not skip"),
        (["clients.deadline_s=5", "cluster.backend=inline"], "clients.deadline_s needs cluster.backend=ray"),
        (["clients.deadline_s=0"], "clients.deadline_s"),
        (["clients.on_error=ignore"], "allowed: fail, skip, retry"),
        (["clients.retries=0", "clients.on_error=retry"], "clients.retries"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Experiment, None, overrides)


def test_a_run_is_the_same_whatever_the_policy() -> None:
    config = load_config(Experiment, None, [])
    other = load_config(
        Experiment, None, ["clients.on_error=retry", "clients.deadline_s=60", "storage.lease_timeout_s=5"]
    )
    assert other.fingerprint() == config.fingerprint()
    assert other.run_name == config.run_name
    assert "on_error: retry" in to_yaml(other)


def test_options_of_actors_are_named_where_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    options = ["cluster.num_actors=3", "cluster.balance=sizes", "cluster.state_memory=1GiB"]
    check_parts(Parts(load_config(Experiment, "quickstart", options)))
    assert not caplog.records
    check_parts(Parts(load_config(Experiment, "quickstart", [*options, "cluster.backend=inline"])))
    (said,) = caplog.messages
    assert said.endswith("with backend=inline, and so no effect of num_actors, balance")
