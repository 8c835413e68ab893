"""The connection to Ray: attach to a cluster that is there, or start a local one for this run."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from unittest import mock

import ray
from ray._private import ray_constants

from actors.processes.working_folder import working_folder
from cluster.rounds.privacy import private_folder, require_token
from rayfl.errors import ConfigError, ResourceError

# Ray's own switch that keeps ports closed to the network. Its name mentions Windows and macOS, where it is the default,
# but it works on Linux too. `_node_ip_address="127.0.0.1"` alone is overruled by Ray.
_LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# The object store frees objects in batches of this size, or once a second. By default each round's objects lie in
# memory that no process has touched yet, at a page fault for each 4 KiB. Batches save calls only between nodes.
_FREE_AT_ONCE = ("RAY_free_objects_batch_size", "1")
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_PROBE_TIMEOUT_S = 10.0
_NO_CLIENT = (
    ", through which models would crawl: give the cluster's own address (host:6379), or submit the run as a Ray job"
)


@contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Connects to Ray for the duration of a run.

    A connection that exists is used and left alone; a cluster (``address``, or the environment's
    ``RAY_ADDRESS``) is attached to and never stopped; otherwise a local Ray is started, bound to the loopback
    interface and without dashboard, and stopped at the end.

    Raises:
        ConfigError: when workers would import modules of the current folder in place of rayfl's.
        ResourceError: when there is no cluster at the address.
    """
    if folder := working_folder():
        _refuse_shadowing(folder)
    if ray.is_initialized():
        if ray.util.client.ray.is_connected():  # type: ignore[no-untyped-call]
            raise ResourceError(f"this process is connected by a Ray Client{_NO_CLIENT}")
        yield
        return
    target = address or os.environ.get("RAY_ADDRESS")
    try:
        if target and target != "local":
            _attach(target)
        else:
            start_local()
        yield
    finally:
        ray.shutdown()


def _refuse_shadowing(folder: str) -> None:
    """Refuses a current folder with packages of rayfl's names: Ray has its workers look for modules there first."""
    home = Path(__file__).resolve().parents[2]
    for name in ("actors", "algorithms", "cluster", "rayfl"):
        # None where nothing shadows an editable installation, which is on no path.
        spec = PathFinder.find_spec(name, [folder, *sys.path])
        places = [] if spec is None else [*(spec.submodule_search_locations or [str(spec.origin)])]
        if places and Path(places[0]).resolve() != home / name:
            raise ConfigError(
                f"Ray's workers would import {places[0]} in place of rayfl's own package {name!r}, because the current "
                "folder comes first on their search path: rename it, or start from another folder"
            )


def _attach(target: str) -> None:
    if "://" in target:
        raise ResourceError(f"{target} is the address of a Ray Client or dashboard{_NO_CLIENT}")
    host, _, port = target.rpartition(":")
    if host:
        _probe(host, port)
    with loopback() if host in _LOOPBACK_HOSTS else nullcontext():
        try:
            ray.init(address=target, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ResourceError(
                f"cannot connect to the Ray cluster at {target}: {error} (one with token authentication needs "
                "RAY_AUTH_MODE=token and its token in RAY_AUTH_TOKEN or ~/.ray/auth_token)"
            ) from None


def _probe(host: str, port: str) -> None:
    """Tries to connect first, because Ray waits minutes for a cluster that is not there."""
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ResourceError(
            f"no Ray cluster at {host}:{port} ({error}); correct cluster.address or RAY_ADDRESS"
        ) from None


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable and restores it afterwards; those that Ray itself sets inside stay."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def loopback() -> Iterator[None]:
    """Lets Ray use 127.0.0.1 as a node's address instead of one that the network can reach."""
    with _variable(_LOOPBACK_SWITCH, "0"), mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False):
        yield


def start_local(num_cpus: int | None = None) -> None:
    """Starts a Ray of one node that can be reached only from this machine, and there only by this user.

    Args:
        num_cpus: number of CPUs that Ray schedules on; None for those of the machine.

    Raises:
        ResourceError: when there is no folder for its files, or it does not start.
    """
    name, value = _FREE_AT_ONCE
    folder = private_folder()
    with loopback(), _variable(name, os.environ.get(name, value)), require_token():
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=None if folder is None else str(folder),
            )
        except Exception as error:  # Ray raises plain ones: a busy machine is no defect
            ray.shutdown()
            said = " ".join(str(error).split())
            raise ResourceError(
                f"Ray did not start on this machine ({said}): it may be busy or short of memory; try again, or "
                "run without Ray in this process: cluster.backend=inline"
            ) from error
    _close_session_folder()


def _close_session_folder() -> None:
    """Takes away other users' access to the folder of the session, which Ray makes writable for everybody."""
    node = ray._private.worker._global_node
    if node is not None:
        with suppress(OSError):
            os.chmod(node.get_session_dir_path(), 0o700)
