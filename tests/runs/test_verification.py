"""``rayfl verify`` finds every kind of damage, names it, and changes nothing."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import rayfl
from rayfl.cli.entry import app
from rayfl.errors import RunError
from rayfl.results.schemas import PARTITION_KEY
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.lease import Lease
from rayfl.storage.manifest import FORMAT_VERSION, Manifest
from rayfl.storage.tables import to_parquet
from tests.support.experiments import small_experiment


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    rayfl.run(small_experiment(folder, "run", "scaffold", backend="inline"))
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def newest(run: Path) -> Manifest:
    manifest = CommitStore(Storage(str(run))).latest()
    assert manifest is not None
    return manifest


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def of_commit(choose: Callable[[Manifest], str]) -> Callable[[Path], Path]:
    return lambda run: run / "commits" / choose(newest(run))


FILES: dict[str, Callable[[Path], Path]] = {
    "server": of_commit(lambda manifest: manifest.server.name),
    "states": of_commit(lambda manifest: next(iter(manifest.states.values())).name),
    "table": of_commit(lambda manifest: manifest.tables["clients"][-1].name),
    "skipped": of_commit(lambda manifest: manifest.tables["skipped"][-1].name),
    "manifest": lambda run: run / "commits" / "manifest-000004.json",
    "older manifest": lambda run: run / "commits" / "manifest-000003.json",
    "published": lambda run: run / "rounds.parquet",
    "partition": lambda run: run / "partition.parquet",
}


def test_a_whole_run(run: Path) -> None:
    before = contents(run)
    report = verify(Storage(str(run)))
    assert (report.problems, report.notes, report.commits) == ([], [], [3, 4])
    # all but config.yaml, rayfl.log, timings.jsonl, costs.jsonl, environment.json, result.json, progress.csv,
    # newest.json and both manifests
    assert report.files == len(before) - 10
    assert contents(run) == before
    done = CliRunner().invoke(app, ["verify", str(run)])
    assert done.exit_code == 0
    assert "whole: " in done.stdout


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        pytest.param(kind, damage, marks=() if damage == "flipped bit" or kind == "manifest" else pytest.mark.slow)
        for kind in FILES
        for damage in ("flipped bit", "truncated", "empty", "text")
    ],
)
@pytest.mark.two_cases
def test_every_damage_is_found_and_named(run: Path, kind: str, damage: str) -> None:
    path = FILES[kind](run)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(
        {"flipped bit": bytes(content), "truncated": content[: len(content) // 2], "empty": b"", "text": b"text" * 99}[
            damage
        ]
    )
    before = contents(run)
    report = verify(Storage(str(run)))
    assert report.problems
    assert any(path.name in problem for problem in report.problems)
    assert contents(run) == before
    done = CliRunner().invoke(app, ["verify", str(run)])
    assert done.exit_code == 1
    assert path.name in done.stdout


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind != "older manifest"])
def test_every_missing_file_is_named(run: Path, kind: str) -> None:
    path = FILES[kind](run)
    path.unlink()
    report = verify(Storage(str(run)))
    assert any(f"{path.name} is missing" in problem for problem in report.problems)


def test_tables_that_are_not_written_yet_are_a_note(run: Path) -> None:
    """As after ``rayfl fork``, which copies commits alone."""
    for table in run.glob("*.parquet"):
        if table.name != "partition.parquet":
            table.unlink()
    report = verify(Storage(str(run)))
    assert (report.problems, len(report.notes), report.commits) == ([], 1, [3, 4])
    assert "no tables beside commits/" in report.notes[0]


def test_a_damaged_file_of_both_commits_is_one_problem(run: Path) -> None:
    FILES["skipped"](run).write_bytes(b"x")
    assert len(verify(Storage(str(run))).problems) == 1


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "a: [", "\x00"])
def test_a_damaged_configuration(run: Path, content: str) -> None:
    (run / "config.yaml").write_text(content)
    assert any("config.yaml" in problem for problem in verify(Storage(str(run))).problems)


def test_a_configuration_that_names_code_does_not_run_it(run: Path, tmp_path: Path) -> None:
    text = (run / "config.yaml").read_text().replace("name: scaffold", "name: trap:Trap")
    (run / "config.yaml").write_text(text + "\nextra: !!python/object/apply:os.mkdir [trapped]\n")
    report = verify(Storage(str(run)))
    assert any("config.yaml" in problem for problem in report.problems)
    (run / "config.yaml").write_text(text)
    (problem,) = verify(Storage(str(run))).problems
    assert "is not what it was at the commit of round 4" in problem


@pytest.mark.parametrize("change", [b"\n", b"# a remark\n"])
def test_a_configuration_that_was_edited(run: Path, change: bytes) -> None:
    path, before = run / "config.yaml", (run / "config.yaml").read_bytes()
    path.write_bytes(before.replace(b"lr: 0.1", b"lr: 0.2") + change)
    (problem,) = verify(Storage(str(run))).problems
    assert "config.yaml in" in problem and "is not what it was at the commit of round 4" in problem
    done = CliRunner().invoke(app, ["verify", str(run)])
    assert done.exit_code == 1
    path.write_bytes(before)
    assert verify(Storage(str(run))).problems == []


def test_commits_of_before_the_configurations_checksum_was_recorded(run: Path) -> None:
    store = CommitStore(Storage(str(run)))
    for name in store.manifests():
        path = run / "commits" / name
        content = json.loads(path.read_text())
        assert set(content["inputs"]) == {"config.yaml"}
        del content["inputs"], content["checksum"]
        content["version"] = 3
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        path.write_text(json.dumps(content | {"checksum": hashlib.sha256(text.encode()).hexdigest()}))
    report = verify(Storage(str(run)))
    assert (report.problems, report.commits) == ([], [3, 4])
    assert any("SHA-256 of config.yaml: not recorded" in note for note in report.notes)
    done = CliRunner().invoke(app, ["verify", str(run)])
    assert done.exit_code == 0
    assert "not recorded" in done.stdout


def with_checksums(run: Path, name: str, data: bytes) -> None:
    """Replaces the newest commit's table as somebody would who keeps to the format."""
    store, manifest = CommitStore(Storage(str(run))), newest(run)
    tables = {**manifest.tables, name: (store.write_table(4, name, data),)}
    store.write_manifest(manifest.model_copy(update={"tables": tables}))


def test_a_table_of_other_data(run: Path) -> None:
    table = pq.read_table(run / "clients.parquet").replace_schema_metadata({PARTITION_KEY: b"0" * 64})
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    with_checksums(run, "clients", buffer.getvalue())
    problems = verify(Storage(str(run))).problems
    assert any("clients-000004-" in problem and "is of a run on other data" in problem for problem in problems)


def test_a_table_with_other_columns(run: Path) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"round": [1]}), buffer)
    with_checksums(run, "rounds", buffer.getvalue())
    problems = verify(Storage(str(run))).problems
    assert any("has other columns than a table of rounds" in problem for problem in problems)


def test_states_that_are_not_in_their_file(run: Path) -> None:
    store, manifest = CommitStore(Storage(str(run))), newest(run)
    file = store.write_states(4, 0, {0: {"n": 1}})
    store.write_manifest(manifest.model_copy(update={"states": {**manifest.states, 3: file, 11: file}}))
    assert f"commits/{file.name} lacks the states of clients 3, 11" in verify(Storage(str(run))).problems


def test_tables_beside_the_commits_may_be_older_but_not_longer(run: Path) -> None:
    table, path = pq.read_table(run / "clients.parquet"), run / "clients.parquet"
    path.write_bytes(to_parquet(table.slice(0, table.num_rows - 1)))
    assert verify(Storage(str(run))).problems == []
    path.write_bytes(to_parquet(pa.concat_tables([table, table.slice(0, 1)])))
    assert any("clients.parquet" in problem for problem in verify(Storage(str(run))).problems)
    path.write_bytes(to_parquet(table.slice(1)))
    assert any("is not what was committed" in problem for problem in verify(Storage(str(run))).problems)


def test_a_table_that_another_arrow_has_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, buffer = pq.read_table(run / "clients.parquet"), io.BytesIO()
    pq.write_table(table, buffer, compression="gzip")
    (run / "clients.parquet").write_bytes(buffer.getvalue())
    assert any("clients.parquet" in problem for problem in verify(Storage(str(run))).problems)
    version = next(iter({pq.read_metadata(io.BytesIO(buffer.getvalue())).created_by})).encode()
    other = version.replace(b"version ", b"version_")
    (run / "clients.parquet").write_bytes(buffer.getvalue().replace(version, other))
    assert verify(Storage(str(run))).problems == []


def test_commits_of_two_runs(run: Path) -> None:
    CommitStore(Storage(str(run))).write_manifest(newest(run).model_copy(update={"fingerprint": "other"}))
    assert any("2 different runs" in problem for problem in verify(Storage(str(run))).problems)


def test_a_newer_format(run: Path) -> None:
    version = FORMAT_VERSION + 1
    CommitStore(Storage(str(run))).write_manifest(newest(run).model_copy(update={"version": version}))
    assert any(f"has format version {version}" in problem for problem in verify(Storage(str(run))).problems)


def test_what_a_crash_leaves_behind_is_no_problem(run: Path) -> None:
    (run / "commits" / "states-000005-0000-abcdef01.safetensors").write_bytes(b"half")
    report = verify(Storage(str(run)))
    assert report.problems == []
    assert report.notes == ["1 files in commits/ belong to no commit; the next one removes them"]


@pytest.mark.parametrize("name", ["costs.jsonl", "timings.jsonl", "result.json", "environment.json"])
def test_damage_to_a_file_beside_the_results_is_named(run: Path, name: str) -> None:
    whole = (run / name).read_text() if (run / name).exists() else ""
    (run / name).write_text(f"{whole[:-20]}\nxx\n")
    (problem,) = verify(Storage(str(run))).problems
    assert name in problem and "delete it to do without what it says" in problem
    (run / name).unlink()
    assert verify(Storage(str(run))).problems == []


def test_a_driver_at_work_is_mentioned(run: Path) -> None:
    with Lease(Storage(str(run)), 90):
        assert any("was working on this run" in note for note in verify(Storage(str(run))).notes)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run's folder"):
        verify(Storage(str(tmp_path)))


def test_a_run_that_has_only_begun(run: Path) -> None:
    shutil.rmtree(run / "commits")
    for table in ("rounds", "clients", "skipped"):
        (run / f"{table}.parquet").unlink()
    report = verify(Storage(str(run)))
    assert (report.problems, report.notes) == ([], ["the run has no commit yet"])


def test_manifests_are_documented_by_their_fields(run: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "commits.md").read_text()
    content = json.loads((run / "commits" / "manifest-000004.json").read_text())
    for field in (*content, *content["server"]):
        assert f"`{field}`" in page
