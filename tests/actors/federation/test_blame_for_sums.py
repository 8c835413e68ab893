"""Who is named when contributions make no sum: a client, all together, or the method; on any number of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayfl.config.cluster_section import ClientsConfig
from rayfl.errors import ClientError, MethodError
from tests.support.toys import assert_equal
from tests.support.unreliable import World


@pytest.mark.parametrize("how", ["no samples", "unweighted", "other shape"])
@pytest.mark.parametrize("hosts", [1, 3])
def test_what_no_client_is_to_blame_for_ends_the_run_whatever_the_policy(hosts: int, how: str, tmp_path: Path) -> None:
    with pytest.raises((ClientError, MethodError), match=r"file gone|must return Weighted|differ in structure"):
        World(tmp_path, hosts).play(0, [0, 2, 4], {2: how})


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("bad", [0, 4])
def test_values_too_large_for_an_exact_sum_are_blamed_on_who_has_them(hosts: int, bad: int, tmp_path: Path) -> None:
    message = rf"client {bad}, round 1, visit: OverflowError: 'value' holds up to 1e\+12 .* 1000: .* lower train.lr"
    with pytest.raises(ClientError, match=message):
        World(tmp_path, hosts, ClientsConfig()).play(0, [0, 2, 4], {bad: "huge"})


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_sum_that_only_all_together_is_too_large_is_blamed_on_nobody(hosts: int, tmp_path: Path) -> None:
    message = (
        r"^the clients, round 1, visit: .*the sum of \d weighted contributions and more is too large: weighted values"
    )
    with pytest.raises(ClientError, match=message):
        World(tmp_path, hosts, ClientsConfig()).play(0, [0, 1, 2], dict.fromkeys([0, 1, 2], "large"))


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("bad", [0, 2, 4])
def test_an_update_whose_squared_norm_has_no_exact_sum_is_blamed_on_who_has_it(
    hosts: int, bad: int, tmp_path: Path
) -> None:
    """Its message would fit: what does not is the sum for the variance of updates (`update_variance`)."""
    own = World(tmp_path, hosts)
    own.splits = ("test",)
    found = own.play(0, [0, 2, 4], {bad: "farther"})
    (failure,) = own.federation.absent.values()
    assert list(own.federation.absent) == [bad]
    assert failure.reason.startswith("OverflowError: its update: 'squared_norm' holds up to 3.2e+13")
    rest = World(tmp_path / "rest", 1)
    rest.splits = ("test",)
    assert_equal(found, rest.play(0, sorted({0, 2, 4} - {bad}), {}))
    assert own.federation.updates.variance() == rest.federation.updates.variance()
    own = World(tmp_path / "fail", hosts, ClientsConfig())
    own.splits = ("test",)
    with pytest.raises(ClientError, match=rf"client {bad}, round 1, visit: OverflowError: its update: 'squared_norm'"):
        own.play(0, [0, 2, 4], {bad: "farther"})


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_updates_that_only_all_together_are_too_large_are_blamed_on_nobody(hosts: int, tmp_path: Path) -> None:
    far = dict.fromkeys([0, 2, 4], "far")
    own = World(tmp_path, hosts, ClientsConfig())
    own.splits = ("test",)
    with pytest.raises(ClientError, match=r"^the clients, round 1, visit: .*the sum of \d weighted contributions and"):
        own.play(0, [0, 2, 4], far)
    own = World(tmp_path / "skip", hosts)
    own.splits = ("test",)
    assert own.play(0, [0, 2, 4], far) == {}
    assert sorted(own.federation.absent) == [0, 2, 4]
