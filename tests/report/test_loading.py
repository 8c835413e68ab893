"""Runs are read as their folders have them; what cannot be read is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml

from algorithms.registry import METHODS, Experiment
from rayfl.errors import ConfigError, DamageError, RunError
from rayfl.report.comparison import check_models, compare
from rayfl.report.rows import RowKey, curve, final_by_key, lacking, own_key, wall_seconds
from rayfl.results.schemas import ALL_TABLES, PARTITION_KEY, TABLES
from rayfl.runs.finding import load_run, load_runs
from rayfl.runs.folder import open_run
from rayfl.runs.measured import Measured
from rayfl.runs.rows import personalized_rows
from tests.support.documents import Document, rendered

Copied = Callable[..., Path]


def change(run: Path, **values: object) -> None:
    content = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(content | values))


def test_a_finished_run(finished: Path) -> None:
    run = load_run(f"{finished}/superfed-mm-0/", METHODS)
    assert (run.name, run.method, run.dataset, run.seed) == ("superfed-mm-0", "superfed", "digits", 0)
    assert (run.rounds_completed, run.total_rounds, run.finished, run.notes) == (4, 4, True, [])
    assert own_key(run) == RowKey("lambda=best", "validation")
    assert len(run.partition_hash) == 64
    assert run.environment[0]["versions"]["rayfl"]
    assert wall_seconds(run) == pytest.approx(sum(sum(line.values()) - line["round"] for line in run.timings))
    assert own_key(load_run(str(finished / "fedavg-0"), METHODS)) == RowKey("global")


def test_reports_and_plots_read_a_run_alike(finished: Path) -> None:
    """What is opened with its configuration checked says the same of itself as what a report reads."""
    path = str(finished / "superfed-mm-0")
    read, opened = load_run(path, METHODS), open_run(path, Experiment)
    assert isinstance(opened, type(read))
    for name in ("uri", "name", "method", "dataset", "seed", "total_rounds", "own", "num_clients", "rounds_completed"):
        assert getattr(opened, name) == getattr(read, name), name
    for name in ("timings", "partition_hash", "environment", "notes"):
        assert getattr(opened, name) == getattr(read, name), name
    for name in ALL_TABLES:
        assert getattr(opened, name).equals(getattr(read, name)), name


def test_plots_need_times_and_say_so_each_time(copied: Copied) -> None:
    run = copied("fedavg-0")
    (run / "timings.jsonl").unlink()
    opened = open_run(str(run), Experiment)
    for _ in range(2):
        with pytest.raises(RunError, match="no timings"):
            _ = opened.timings


@pytest.mark.parametrize("name", ["rounds", "clients", "skipped", "calibration", "partition"])
@pytest.mark.parametrize("content", [b"", b"text" * 9])
def test_damaged_tables_are_named(copied: Copied, name: str, content: bytes) -> None:
    run = copied("fedavg-0")
    (run / f"{name}.parquet").write_bytes(content)
    with pytest.raises(DamageError, match=rf"{name}\.parquet in {re.escape(str(run))} is damaged"):
        load_run(str(run), METHODS)


@pytest.mark.parametrize("name", ["rounds", "partition"])
def test_tables_with_other_columns_are_named(copied: Copied, name: str) -> None:
    run = copied("fedavg-0")
    table = pq.read_table(run / f"{name}.parquet")
    pq.write_table(table.drop_columns([table.column_names[-1]]), run / f"{name}.parquet")
    with pytest.raises(DamageError, match=f"{name}.parquet in .* has other columns"):
        load_run(str(run), METHODS)


@pytest.mark.parametrize("content", ["", "- a", "a: [", "seed: 1", "\x00", "seed: x\nalgorithm: {name: a}"])
def test_a_damaged_configuration_is_named(copied: Copied, content: str) -> None:
    run = copied("fedavg-0")
    (run / "config.yaml").write_text(content)
    with pytest.raises(DamageError, match=r"config\.yaml in"):
        load_run(str(run), METHODS)


@pytest.mark.parametrize("content", ["{", "[]", '{"a": "b"}', '{"clients": 1}'])
@pytest.mark.parametrize("file", ["timings", "costs"])
def test_damaged_times_and_costs_are_named(copied: Copied, file: str, content: str) -> None:
    run = copied("fedavg-0")
    (run / f"{file}.jsonl").write_text(content)
    with pytest.raises(DamageError, match=rf"{file}\.jsonl in"):
        load_run(str(run), METHODS)


def test_a_table_that_is_missing_beside_its_summary_is_damage(copied: Copied) -> None:
    run = copied("fedavg-0")
    (run / "clients.parquet").unlink()
    with pytest.raises(DamageError, match=r"clients\.parquet is missing"):
        load_run(str(run), METHODS)


def test_a_damaged_environment_is_not_known_and_ends_nothing(copied: Copied) -> None:
    run = copied("fedavg-0")
    for content in ("{", '{"versions": {}}', '["text", 1]'):
        (run / "environment.json").write_text(content)
        assert load_run(str(run), METHODS).environment == []


def test_rows_of_a_choice_are_of_test_data_and_that_is_said(finished: Path) -> None:
    run = load_run(str(finished / "superfed-mm-0"), METHODS).viewed(Measured("validation"))
    assert lacking(run).startswith("its lambda is chosen on validation data, and rows of the choice are of test data")
    with pytest.raises(RunError, match=r"in the split validation: it is chosen there.* --model: global, lambda=0\.0"):
        personalized_rows(open_run(run.uri, Experiment), "validation")


def test_the_virtual_clock_is_no_wall_time(copied: Copied) -> None:
    run = copied("fedavg-0")
    real = wall_seconds(load_run(str(run), METHODS))
    lines = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    (run / "timings.jsonl").write_text("".join(f"{json.dumps({**line, 'simulated': 150.0})}\n" for line in lines))
    loaded = load_run(str(run), METHODS)
    drawn = curve(loaded, RowKey("global"), "top1")
    assert real is not None and drawn is not None and drawn.seconds is not None
    assert wall_seconds(loaded) == pytest.approx(real) == pytest.approx(float(drawn.seconds[-1]))


def test_all_problems_at_once(copied: Copied, tmp_path: Path) -> None:
    whole, damaged = copied("fedavg-0"), copied("fedavg-1")
    (damaged / "rounds.parquet").write_bytes(b"x")
    with pytest.raises(RunError) as raised:
        load_runs([str(whole), str(damaged), str(tmp_path / "none"), f"{whole}/"], METHODS)
    for part in ("rounds.parquet in", "none is no run's folder", "fedavg-0 is given twice"):
        assert part in str(raised.value)


def test_runs_of_before_there_were_bins_and_environments(copied: Copied) -> None:
    run = copied("fedavg-0")
    for name in ("calibration.parquet", "environment.json", "skipped.parquet", "timings.jsonl", "partition.parquet"):
        (run / name).unlink(missing_ok=True)
    loaded = load_run(str(run), METHODS)
    assert (loaded.calibration.num_rows, loaded.environment, loaded.skipped.num_rows) == (0, [], 0)
    assert wall_seconds(loaded) is None
    assert loaded.partition_hash == ""
    assert any("partition.parquet is missing" in note for note in loaded.notes)


def test_an_unfinished_run(copied: Copied) -> None:
    run = copied("fedavg-0")
    content = yaml.safe_load((run / "config.yaml").read_text())
    change(run, train=content["train"] | {"rounds": 9})
    loaded = load_run(str(run), METHODS)
    assert not loaded.finished
    assert next(iter(final_by_key(loaded).values()))["round"] == 4


def of_an_older_rayfl(run: Path) -> None:
    """Takes from the tables what they have not said from the beginning."""
    for name in TABLES:
        table = pq.read_table(run / f"{name}.parquet")
        metadata = {PARTITION_KEY: table.schema.metadata[PARTITION_KEY]}
        pq.write_table(table.replace_schema_metadata(metadata), run / f"{name}.parquet")


def test_the_personalized_model_of_a_method_of_ones_own_is_on_record(copied: Copied) -> None:
    run, swept = copied("fedavg-0"), copied("superfed-mm-0")
    for folder in (run, swept):
        change(folder, algorithm={"name": "trap:Trap"})
    assert own_key(load_run(str(run), METHODS)) == RowKey("global")
    assert own_key(load_run(str(swept), METHODS)) == RowKey("lambda=best", "validation")


def test_in_older_runs_of_a_method_of_ones_own_the_row_is_named_and_never_guessed(copied: Copied) -> None:
    run, swept, known = copied("fedavg-0"), copied("superfed-mm-0"), copied("superfed-mm-1")
    for folder in (run, swept, known):
        of_an_older_rayfl(folder)
    for folder in (run, swept):
        change(folder, algorithm={"name": "trap:Trap"})
    assert own_key(load_run(str(known), METHODS)) == RowKey("lambda=best", "validation")
    # Only a method that sweeps has rows that were chosen.
    assert own_key(load_run(str(swept), METHODS)) == RowKey("lambda=best", "validation")
    with pytest.raises(RunError, match=r"trap:Trap, a method of your own.*--model NAME.*there are: global, finetuned$"):
        load_run(str(run), METHODS)
    with pytest.raises(RunError, match="there are: global, finetuned"):
        load_run(str(run), METHODS, ["memory"])
    loaded = load_run(str(run), METHODS, ["finetuned"])
    assert (own_key(loaded), loaded.num_clients) == (RowKey("finetuned"), 5)
    assert load_runs([str(run), str(known)], METHODS, ["finetuned"])[0].own.model == "finetuned"
    with pytest.raises(ConfigError, match=r"--model finetuned: no run has such a row"):
        check_models(load_runs([str(known)], METHODS, ["finetuned"]), ["finetuned"])


def test_no_other_row_stands_in_for_the_personalized_model(copied: Copied) -> None:
    run = copied("superfed-mm-0")
    for name in ("rounds", "calibration"):
        table = pq.read_table(run / f"{name}.parquet")
        pq.write_table(table.filter(pc.field("model") != "lambda=best"), run / f"{name}.parquet")
    loaded = load_run(str(run), METHODS)
    assert own_key(loaded) is None
    assert "no lambda that was chosen on validation data" in lacking(loaded)
    comparison = compare([loaded, load_run(str(copied("fedavg-0")), METHODS)])
    assert not any(line.own for line in comparison.lines if line.method == "superfed")
    assert comparison.clients == []
    assert [note for note in comparison.notes if "in no test and in no curve" in note]
    page = Document(rendered(run))
    assert "No number here is that of the method's personalized model" in page.text
    assert "by accuracy of global" in page.text


def test_credentials_in_the_folders_address_are_not_kept(copied: Copied) -> None:
    run = copied("fedavg-0")
    assert load_run(f"file://{run}", METHODS).uri == str(run)


def test_the_environment_says_nothing_of_places_and_people(finished: Path) -> None:
    (entry,) = json.loads((finished / "fedavg-0" / "environment.json").read_text())
    assert set(entry) == {"rounds_completed", "rounds", "started", "versions", "machine", "devices"}
    assert set(entry["machine"]) == {"system", "processor", "cpus", "memory", "gpus"}
    text = json.dumps(entry)
    assert str(Path.home()) not in text
    assert str(finished) not in text
