"""Runs as jobs: what is sent to a cluster, and which job a second submission finds."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from ray.job_submission import JobStatus
from ray.runtime_env import RuntimeEnv
from typer.testing import CliRunner

import cluster.jobs.jobs
import rayfl
from algorithms.registry import Experiment
from cluster.jobs.ending import exit_status
from cluster.jobs.following import follow
from cluster.jobs.jobs import JobOptions, Submitted, connect, find, jobs, stop, submit
from cluster.jobs.shipping import build_wheel
from rayfl.cli.entry import app
from rayfl.cli.jobs import required_packages
from rayfl.config.loading import load_config
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ConfigError, ResourceError, RunError
from tests.support.experiments import small_experiment
from tests.support.jobs import FakeClient


def experiment(tmp_path: Path, **changes: Any) -> ExperimentConfig:
    return load_config(Experiment, small_experiment(tmp_path, "tiny", "fedavg", address="auto", num_actors=2), changes)


def send(client: Any, config: ExperimentConfig, **options: Any) -> Submitted:
    return submit(client, config, JobOptions(**({"ship": False} | options)))


def test_the_job_carries_the_whole_configuration(tmp_path: Path) -> None:
    client = FakeClient()
    config = experiment(tmp_path, **{"cluster.stop_grace_s": 4.5})
    send(client, config, environment={"RAYFL_DATA": "/data"}, working_dir=tmp_path)
    [job] = client.sent
    command, _, text = job["entrypoint"].partition("\n")
    assert command == "exec python -m rayfl run - <<'RAYFL_END_OF_CONFIGURATION'"
    shipped = load_config(Experiment, yaml.safe_load(text.removesuffix("RAYFL_END_OF_CONFIGURATION\n")), {})
    assert shipped.fingerprint() == config.fingerprint()
    assert shipped.cluster.address is None  # the job's own cluster, not what leads there from elsewhere
    assert shipped.cluster.num_actors == 2
    assert job["runtime_env"] == {
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "65", "RAYFL_DATA": "/data"},
        "working_dir": str(tmp_path),
    }
    assert job["metadata"] == {
        "run": "tiny",
        "method": "fedavg",
        "data": "digits",
        "storage": str(tmp_path),
        "fingerprint": config.fingerprint(),
        "attempt": "1",
    }
    with pytest.raises(ConfigError, match="nowhere"):
        send(FakeClient(), config, working_dir=tmp_path / "nowhere")


@pytest.mark.parametrize("place", [{"storage_path": "runs"}, {"storage.copies": 2, "storage.copies_path": "./copies"}])
def test_results_do_not_lie_in_the_folder_of_a_job(tmp_path: Path, place: dict[str, Any]) -> None:
    client = FakeClient()
    with pytest.raises(ConfigError, match=r"storage.*=.*which Ray deletes"):
        send(client, experiment(tmp_path, **place))
    assert client.sent == []
    send(client, experiment(tmp_path, storage_path="~/runs"))


METHOD = "from algorithms.fedavg import FedAvg\n\nclass Mine(FedAvg):\n    name: str = 'mine'\n"


@pytest.mark.slow
def test_a_module_of_the_users_own_travels_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it has imported from beside it, of a package all files; and nothing else that lies there."""
    code = tmp_path / "code"
    (code / "sent_pack").mkdir(parents=True)
    (code / "sent_pack" / "__init__.py").write_text("")
    (code / "sent_beside.py").write_text("RATE = 1.0\n")
    (code / "secrets.py").write_text("nobody imports it\n")
    for file in ("sent_module.py", "sent_pack/inner.py"):
        (code / file).write_text(f"import sent_beside\n{METHOD}")
    monkeypatch.syspath_prepend(str(code))
    wanted = {
        "sent_module:Mine": {"sent_module.py", "sent_beside.py"},
        "sent_pack.inner:Mine": {"sent_pack/__init__.py", "sent_pack/inner.py", "sent_beside.py"},
    }
    for name, files in wanted.items():
        config = experiment(tmp_path, algorithm=name)
        client = FakeClient()
        assert send(client, config)
        assert files <= client.files and not {"secrets.py"} & client.files
        with pytest.raises(ConfigError, match=rf"'{name}': .*is not in --working-dir {tmp_path}.*--working-dir {code}"):
            send(FakeClient(), config, working_dir=tmp_path)
        assert send(FakeClient(), config, working_dir=code)
        client = FakeClient()
        assert send(client, config, environment={"PYTHONPATH": "/shared/code"})
        assert client.files == set()


def testrequired_packages_are_installed_by_uv(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# for a backbone\ntimm==1.0.31  # pinned\n\npolars\n")
    client = FakeClient()
    send(client, experiment(tmp_path), packages=required_packages(["duckdb>=1", str(file)]))
    runtime_env = client.sent[0]["runtime_env"]
    assert runtime_env["uv"] == {"packages": ["duckdb>=1", "timm==1.0.31", "polars"]}
    assert RuntimeEnv(**runtime_env)["uv"]["packages"] == runtime_env["uv"]["packages"]  # Ray's own check
    file.write_text("--index-url https://example.org\n")
    with pytest.raises(ConfigError, match="is an option, not a package"):
        required_packages([str(file)])
    with pytest.raises(ConfigError, match="cannot be read"):
        required_packages([str(tmp_path / "missing.txt")])


@pytest.mark.slow
def test_models_and_data_of_the_users_own_are_looked_for_too(tmp_path: Path) -> None:
    for field, value in (
        ("dataset.function", {"dataset": "tests.support.own_data:whole", "partition": {"name": "natural"}}),
        ("model.factory", {"model": {"name": "tests.support.own_models:plain", "head": "2"}}),
    ):
        with pytest.raises(ConfigError, match=rf"{field}: 'tests\..*own_\w+\.py\) is not in --working-dir"):
            send(FakeClient(), experiment(tmp_path, **value), working_dir=tmp_path)
        client = FakeClient()
        send(client, experiment(tmp_path, **value))
        assert {"tests/__init__.py", "tests/support/own_data.py", "tests/support/own_models.py"} <= client.files
        assert send(FakeClient(), experiment(tmp_path, **value), working_dir=Path(__file__).parents[3])
    only_there = {"model": {"name": "nowhere.at_all:plain", "head": "2"}}
    assert send(FakeClient(), experiment(tmp_path, **only_there))


def test_the_shell_passes_the_configuration_on_unchanged(tmp_path: Path) -> None:
    client = FakeClient()
    config = experiment(tmp_path / "it's $HOME `x` \\ folder")
    send(client, config)
    command = client.sent[0]["entrypoint"].replace("python -m rayfl run -", "cat")
    printed = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    assert load_config(Experiment, yaml.safe_load(printed), {}).storage_path == config.storage_path


def test_submitting_twice_is_one_run(tmp_path: Path) -> None:
    client, config = FakeClient(), experiment(tmp_path)
    assert send(client, config) == Submitted("tiny", attached=False)
    assert send(client, config) == Submitted("tiny", attached=True)
    client.end("tiny", JobStatus.RUNNING)
    assert send(client, config) == Submitted("tiny", attached=True)
    client.end("tiny", JobStatus.FAILED, code=2)
    assert send(client, config) == Submitted("tiny.attempt-2", attached=False)
    assert send(client, config) == Submitted("tiny.attempt-2", attached=True)
    assert find(client, "tiny").submission_id == "tiny.attempt-2"  # type: ignore[arg-type]
    client.end("tiny.attempt-2", JobStatus.SUCCEEDED)
    assert send(client, config).id == "tiny.attempt-3"
    assert [job.submission_id for job in jobs(client)] == ["tiny", "tiny.attempt-2", "tiny.attempt-3"]  # type: ignore[arg-type]
    assert find(client, "tiny.attempt-2").status == JobStatus.SUCCEEDED  # type: ignore[arg-type]


def test_another_run_under_the_same_name_is_refused_while_the_first_goes_on(tmp_path: Path) -> None:
    client = FakeClient()
    send(client, experiment(tmp_path))
    with pytest.raises(RunError, match="another fingerprint"):
        send(client, experiment(tmp_path, **{"train.lr": 0.01}))
    with pytest.raises(RunError, match="another storage"):
        send(client, experiment(tmp_path / "elsewhere"))


def test_jobs_of_others_are_not_touched(tmp_path: Path) -> None:
    client = FakeClient()
    client.end("tiny", JobStatus.RUNNING, {"run": "tiny"})
    assert jobs(client) == []  # type: ignore[arg-type]
    with pytest.raises(RunError, match="its runs: none"):
        find(client, "tiny")  # type: ignore[arg-type]


def test_output_is_passed_on_once_although_the_connection_breaks(tmp_path: Path) -> None:
    client = FakeClient([["one\ntwo\n", "thr", RuntimeError("broken")], ["one\n", "two\nthree\n", "four\n"]])
    send(client, experiment(tmp_path))
    client.end("tiny", JobStatus.FAILED, code=3)
    written: list[str] = []
    assert follow(client, "tiny", written.append) == 3  # type: ignore[arg-type]
    assert "".join(written) == "one\ntwo\nthree\nfour\n"


def test_the_end_is_waited_for_although_the_connection_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient([["one\n"], ["one\n"]])
    send(client, experiment(tmp_path))
    client.end("tiny", JobStatus.FAILED, code=3)
    answer, broken = client.get_job_info, [requests.ConnectionError("refused"), RuntimeError("502: bad gateway")]

    def answers_then(job: str) -> Any:
        if broken:
            raise broken.pop()
        return answer(job)

    monkeypatch.setattr(client, "get_job_info", answers_then)
    monkeypatch.setattr("cluster.jobs.following._POLL_S", 0.0)
    assert follow(client, "tiny", lambda text: None) == 3  # type: ignore[arg-type]
    broken += [RuntimeError("502: bad gateway")] * 6
    with pytest.raises(ResourceError, match="lost the connection to job tiny, which goes on: 502: bad gateway"):
        follow(client, "tiny", lambda text: None)  # type: ignore[arg-type]
    assert not broken


def test_a_job_that_ray_could_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient([[]])
    send(client, experiment(tmp_path))
    client.end("tiny", JobStatus.FAILED)
    client.known["tiny"].message = "no environment"
    monkeypatch.setattr(cluster.jobs.jobs, "connect", lambda address: client)
    followed = CliRunner().invoke(app, ["logs", "tiny", "--follow"])
    assert (followed.exit_code, followed.output) == (1, "no environment\n")
    assert CliRunner().invoke(app, ["logs", "tiny"]).output == "what tiny said\nno environment\n"


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (JobStatus.SUCCEEDED, 0, 0),
        (JobStatus.FAILED, 2, 2),
        (JobStatus.FAILED, None, 1),
        (JobStatus.STOPPED, None, 143),
    ],
)
def test_exit_status(status: str, code: int | None, expected: int) -> None:
    client = FakeClient()
    client.end("job", JobStatus(status), {}, code)
    assert exit_status(client.known["job"]) == expected


def test_stop(tmp_path: Path) -> None:
    client = FakeClient()
    send(client, experiment(tmp_path))
    assert stop(client, "tiny", 1)  # type: ignore[arg-type]
    assert not stop(client, "tiny", 1)  # type: ignore[arg-type]


def test_logs_and_stop_for_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    send(client, experiment(tmp_path))
    monkeypatch.setattr(cluster.jobs.jobs, "connect", lambda address: client)
    found = [json.loads(CliRunner().invoke(app, [name, "tiny", "--json"]).stdout) for name in ("logs", "stop", "stop")]
    assert found == [
        {"schema": "rayfl.logs/1", "job": "tiny", "text": "what tiny said\n"},
        {"schema": "rayfl.stop/1", "job": "tiny", "stopped": True},
        {"schema": "rayfl.stop/1", "job": "tiny", "stopped": False},
    ]


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "ray://127.0.0.1:10001", "http://127.0.0.1:9"])
def test_no_dashboard_at_an_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:10")
    with pytest.raises(ResourceError, match=address):
        connect(address)


@pytest.mark.parametrize("module", ["aiohttp", "cluster.jobs.jobs"])
def test_a_ray_without_jobs_or_too_old_for_them(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    result = CliRunner().invoke(app, ["status"])
    assert isinstance(result.exception, ResourceError)
    assert "pip install 'rayfl[cluster]'" in str(result.exception)


@pytest.mark.slow
def test_the_wheel_is_this_rayfl_without_its_dependencies(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    wheel, again = build_wheel(tmp_path), build_wheel(tmp_path / "again")
    assert wheel.name == again.name and wheel.read_bytes() == again.read_bytes()
    assert wheel.name.startswith(f"rayfl-{rayfl.__version__}+")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(archive.read(name).decode() for name in names if name.endswith("METADATA"))
    assert "Requires-Dist" not in metadata
    assert {"rayfl/presets/quickstart.yaml", "cluster/templates/slurm.sh.j2", "actors/hosting/host.py"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    found = subprocess.run(
        [sys.executable, "-c", "import rayfl, cluster; print(rayfl.__file__, cluster.__file__)"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == [str(target / "rayfl/__init__.py"), str(target / "cluster/__init__.py")]


def test_a_job_is_sent_with_the_wheel(tmp_path: Path) -> None:
    client = FakeClient()
    send(client, experiment(tmp_path), ship=True)
    assert client.wheels == [build_wheel(tmp_path).name]
