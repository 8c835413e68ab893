"""What other users of a machine cannot reach of the Ray that rayfl starts there."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from cluster.jobs import doctor
from cluster.rounds.privacy import keep_token, private_folder, require_token
from rayfl.errors import ResourceError

ROOT = Path(__file__).parents[3]
HAS_TOKENS = hasattr(ray._raylet, "get_authentication_mode")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o000, 0o077])
def test_a_new_token_is_its_owners_only(mask: int, tmp_path: Path) -> None:
    file = tmp_path / ".ray" / "auth_token"
    with umask(mask):
        keep_token(file)
    assert (mode(file), mode(file.parent)) == (0o600, 0o700)
    token = file.read_text()
    assert len(token) == 64 and int(token, 16)
    keep_token(file)
    assert file.read_text() == token
    assert [path.name for path in file.parent.iterdir()] == ["auth_token"]


def test_one_that_others_could_read_is_closed_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "auth_token"
    file.write_text("x")
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING, "rayfl"):
        keep_token(file)
    assert mode(file) == 0o600
    assert file.read_text() == "x"
    assert f"other users of this machine could read Ray's token in {file}" in caplog.text
    file.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(file)
    keep_token(link)  # somebody's own arrangement
    assert mode(file) == 0o640


def test_without_a_home_the_token_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with require_token():
        assert len(os.environ.get("RAY_AUTH_TOKEN", "")) == (64 if HAS_TOKENS else 0)
    assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.parametrize(
    "chosen", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "x"}, {"RAY_AUTH_TOKEN_PATH": "/nowhere"}]
)
def test_what_the_environment_says_of_tokens_goes_first(
    chosen: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RAY_AUTH_MODE": "token", **chosen}.items():
        monkeypatch.setenv(name, value)
    with require_token():
        pass
    assert not (tmp_path / ".ray").exists()


def test_the_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        with umask(0):
            folder = private_folder()
        assert folder == Path(short) / f"rayfl-user-{os.getuid()}" / "ray"
        assert mode(folder.parent) == 0o700
        folder.parent.chmod(0o755)
        assert private_folder() == folder
        assert mode(folder.parent) == 0o700
        folder.parent.rmdir()
        folder.parent.symlink_to(tmp_path)
        with pytest.raises(ResourceError, match=r"somebody else.*set RAY_TMPDIR"):
            private_folder()
        folder.parent.unlink()
        folder.parent.write_text("")
        with pytest.raises(ResourceError, match="set RAY_TMPDIR"):
            private_folder()


def test_a_path_too_long_for_sockets_leaves_rays_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (long := tmp_path / ("long" * 10)).mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    assert private_folder() is None


SCRIPT = """
import json, os, subprocess, sys
from pathlib import Path
import ray
from cluster.rounds.session import ray_session

with ray_session(None):
    ray.get(ray.remote(lambda: 1).remote())
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    attempt = (
        "import ray, sys\\n"
        "from ray._raylet import GcsClient\\n"
        "client = GcsClient(address=sys.argv[1])\\n"
        "print(client.internal_kv_put(b'theirs', b'x', True, None))\\n"
    )
    address = ray.get_runtime_context().gcs_address
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")} | {"HOME": sys.argv[1]}
    written = []
    for extra in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        other = subprocess.run(
            [sys.executable, "-c", attempt, address], env=environment | extra, capture_output=True, text=True
        )
        written.append(other.returncode == 0)
    modes = [oct(path.stat().st_mode & 0o777) for path in (session, session.parent.parent)]
    print(json.dumps([modes, written, oct((Path.home() / ".ray/auth_token").stat().st_mode & 0o777)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TOKENS, reason="this Ray has no tokens")
def test_a_ray_of_rayfls_own_is_this_users_only(tmp_path: Path) -> None:
    """Somebody else on the machine has neither the token nor a way into the folder."""
    (home := tmp_path / "home").mkdir()
    (nobody := tmp_path / "nobody").mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT)}
    with umask(0o022):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(nobody)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    modes, written, token = json.loads(done.stdout.strip().splitlines()[-1])
    assert modes == ["0o700", "0o700"]
    assert written == [False, False]
    assert token == "0o600"


def test_the_doctor_sees_a_token_that_others_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert doctor.check_token().verdict == "ok"
    keep_token(file := tmp_path / ".ray" / "auth_token")
    assert doctor.check_token().verdict == "ok"
    file.chmod(0o644)
    finding = doctor.check_token()
    assert (finding.verdict, finding.fix.partition(";")[0]) == ("warning", f"chmod 600 {file}")
