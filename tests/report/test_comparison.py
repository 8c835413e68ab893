"""Groups, means over seeds, the best, and what may not be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from algorithms.registry import METHODS
from rayfl.errors import RunError
from rayfl.report.columns import columns_of
from rayfl.report.comparison import compare
from rayfl.report.datasets import compare_by_dataset
from rayfl.report.formats import numbers
from rayfl.report.grouping import Group, config_table, group_runs, on_same_data
from rayfl.report.lines import DEFAULT, Wanted
from rayfl.report.rows import RowKey, final_by_key, own_key
from rayfl.report.several import comparison_table
from rayfl.report.significance import over_clients, over_seeds
from rayfl.runs.finding import load_run, load_runs
from rayfl.runs.loading import Run
from rayfl.runs.measured import Measured

Copied = Callable[..., Path]
NAMES = ("fedavg-0", "fedavg-1", "superfed-mm-0", "superfed-mm-1")


@pytest.fixture
def runs(finished: Path) -> list[Run]:
    return load_runs([str(finished / name) for name in NAMES], METHODS)


def configured(run: Path, **sections: object) -> Run:
    content = yaml.safe_load((run / "config.yaml").read_text())
    for name, value in sections.items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    return load_run(str(run), METHODS)


def with_accuracies(run: Path, values: list[float]) -> Run:
    """The run, had its clients these accuracies with the global model in the end."""
    for name in ("clients", "rounds"):
        table = pq.read_table(run / f"{name}.parquet")
        rows = table.to_pylist()
        wanted = [r for r in rows if (r["round"], r["split"], r["cohort"], r["model"]) == (4, "test", "all", "global")]
        assert len(wanted) == (len(values) if name == "clients" else 1)
        for row, value in zip(wanted, values if name == "clients" else [float(np.mean(values))], strict=True):
            row["top1"] = value
        changed = pa.Table.from_pylist(rows, schema=table.schema)
        pq.write_table(changed, run / f"{name}.parquet")
    return load_run(str(run), METHODS)


def test_seeds_are_grouped_and_averaged(runs: list[Run]) -> None:
    comparison = compare(runs)
    assert [(group.label, [run.seed for run in group.runs]) for group in comparison.groups] == [
        ("fedavg", [0, 1]),
        ("superfed", [0, 1]),
    ]
    line = next(line for line in comparison.lines if (line.method, line.key) == ("fedavg", RowKey("global")))
    values = [100 * final_by_key(run)[RowKey("global")]["top1"] for run in runs[:2]]
    assert line.cells["top1"].mean == pytest.approx(sum(values) / 2)
    assert line.cells["top1"].over_seeds == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert line.seeds == 2
    assert line.own and line.eligible


def test_clients_and_seeds_of_other_partitions_are_no_pairs(copied: Copied, runs: list[Run]) -> None:
    same = [Group("fedavg", runs[:2]), Group("superfed", runs[2:])]
    assert [test.pairs for test in over_clients(same)] and [test.pairs for test in over_seeds(same)] == [2]
    others = []
    for name in NAMES[2:]:
        place = copied(name)
        table = pq.read_table(place / "partition.parquet")
        pq.write_table(table.slice(0, table.num_rows - 1), place / "partition.parquet")
        others.append(load_run(str(place), METHODS))
    for groups in ([same[0], Group("superfed", others)], [Group("fedavg", others), Group("superfed", runs[2:])]):
        assert not over_clients(groups) and not over_seeds(groups)


def test_what_is_over_clients_is_never_in_the_column_of_what_is_over_seeds(runs: list[Run]) -> None:
    alone = compare([runs[0], runs[2]]).lines[0]
    row = final_by_key(runs[0])[alone.key]
    assert (alone.cells["top1"].over_clients, alone.cells["top1"].over_seeds) == (
        pytest.approx(100 * row["top1_std"]),
        None,
    )
    assert alone.cells["top1_worst5"].over_clients is None
    seeds = [final_by_key(run)[alone.key] for run in runs[:2]]
    both = compare(runs).lines[0]
    assert both.cells["top1"].over_clients == pytest.approx(50 * sum(row["top1_std"] for row in seeds))
    # One group of two seeds and one of a single one: the columns stay apart.
    mixed = comparison_table(compare(runs[:3]))
    headings = [column.heading for column in mixed.columns]
    cells = {cells[0].text: dict(zip(headings, (c.text for c in cells), strict=True)) for cells in mixed.rows}
    assert len(set(headings)) == len(headings)
    assert cells["superfed"]["accuracy +- seeds"] == "-" != cells["fedavg"]["accuracy +- seeds"]
    for method in ("fedavg", "superfed"):
        assert float(cells[method]["accuracy +- clients"]) > 0
    assert not any("+-" in text for row in cells.values() for text in row.values())
    # Without any group of several seeds the columns that would be empty go.
    single = [column.heading for column in comparison_table(compare([runs[0], runs[2]])).columns]
    assert "accuracy +- clients" in single and not any(heading.endswith("+- seeds") for heading in single)


def test_what_was_chosen_on_test_data_is_marked_and_never_best(runs: list[Run]) -> None:
    lines = compare(runs).lines
    chosen = [line for line in lines if line.key.seen_test]
    assert {line.key.selected_on for line in chosen} == {"test", "test per client"}
    assert all(line.model.endswith(" *") for line in chosen)
    assert not any(cell.best for line in chosen for cell in line.cells.values())
    others = [line for line in lines if not line.key.seen_test]
    for column, sign in (("top1", 1), ("ece", -1)):
        best = [line for line in lines if line.cells[column].best]
        top = max(sign * line.cells[column].mean for line in others)
        assert best
        assert all(sign * line.cells[column].mean == top for line in best)


def test_a_single_method_has_no_best(runs: list[Run]) -> None:
    assert not any(cell.best for line in compare(runs[:2]).lines for cell in line.cells.values())


def test_equal_means_whose_last_bits_differ_are_both_best(copied: Copied) -> None:
    values = [0.99, 0.98, 0.97, 1.0, 0.96]
    assert np.mean(values) != np.mean(values[::-1])
    one = with_accuracies(copied("fedavg-0"), values)
    copied("fedavg-0", "other")
    with_accuracies(Path(one.uri).parent / "other", values[::-1])
    other = configured(Path(one.uri).parent / "other", algorithm={"name": "fedprox"})
    lines = [line for line in compare([one, other]).lines if line.key == RowKey("global")]
    assert [line.method for line in lines] == ["fedavg", "fedprox"]
    assert [line.cells["top1"].best for line in lines] == [True, True]


@pytest.mark.parametrize("unit", [1.0, 1e-14, 1e9])
def test_tests_by_hand(copied: Copied, unit: float) -> None:
    """In any unit: squared errors of small numbers have no digits behind the point."""
    one = [
        with_accuracies(copied(f"fedavg-{s}", f"a{s}"), [unit * v for v in (0.5, 0.6, 0.7, 0.8, 0.9)]) for s in (0, 1)
    ]
    # Worse by 0.01 ... 0.05 for seed 0, better by 0.06 and equal four times for seed 1.
    values = [[0.49, 0.58, 0.67, 0.76, 0.85], [0.56, 0.6, 0.7, 0.8, 0.9]]
    for seed in (0, 1):
        copied(f"fedavg-{seed}", f"b{seed}")
    folder = Path(one[0].uri).parent
    for seed in (0, 1):
        with_accuracies(folder / f"b{seed}", [unit * value for value in values[seed]])
    other = [configured(folder / f"b{seed}", algorithm={"finetune_epochs": 2}) for seed in (0, 1)]
    comparison = compare([*one, *other])
    (test,) = comparison.clients
    assert (test.first, test.second) == ("fedavg (finetune_epochs=1)", "fedavg (finetune_epochs=2)")
    assert (test.pairs, test.wins, test.losses) == (10, 5, 1)
    assert test.difference == pytest.approx(unit * (0.15 - 0.06) / 10)
    # Six pairs differ, ranks 1..6; the rank sum of the negative one is 6: 14 of 64 sets of ranks have at most that.
    assert test.p == pytest.approx(2 * 14 / 64)
    assert test.adjusted == test.p
    (seeds,) = comparison.seeds
    assert (seeds.pairs, seeds.wins, seeds.losses, seeds.p) == (2, 1, 1, pytest.approx(1.0))
    lines = compare([*one, *other], Wanted(models=("global",))).lines
    assert [line.method for line in lines if line.cells["top1"].best] == [test.first]


def test_what_changes_no_result_makes_no_group(copied: Copied) -> None:
    one = load_run(str(copied("fedavg-0")), METHODS)
    other = configured(copied("fedavg-1"), name="b", storage_path="/b", max_failures=7, tracking={"tensorboard": True})
    (group,) = group_runs([other, one])
    assert [run.seed for run in group.runs] == [0, 1]
    assert config_table([group]) == {}


def test_options_that_differ_are_named(copied: Copied) -> None:
    one = load_run(str(copied("fedavg-0")), METHODS)
    other = configured(copied("fedavg-0", "other"), train={"lr": 0.5})
    groups = group_runs([one, other])
    assert [group.label for group in groups] == ["fedavg (lr=0.1)", "fedavg (lr=0.5)"]
    assert config_table(groups) == {"train.lr": ["0.1", "0.5"]}


def test_the_same_experiment_twice_is_refused(copied: Copied) -> None:
    runs = load_runs([str(copied("fedavg-0")), str(copied("fedavg-0", "again"))], METHODS)
    with pytest.raises(RunError, match="the same experiment"):
        compare(runs)


def test_other_data_are_refused(copied: Copied, runs: list[Run]) -> None:
    partition = pq.read_table(Path(runs[0].uri) / "partition.parquet")
    changed = copied("superfed-mm-0")
    pq.write_table(partition.slice(1), changed / "partition.parquet")
    with pytest.raises(RunError, match=r"made on different data.*but another partition"):
        compare([runs[0], load_run(str(changed), METHODS)])
    other = configured(copied("superfed-mm-1"), partition={"classes_per_client": 3})
    with pytest.raises(RunError, match=r"partition\.classes_per_client: 2 and 3"):
        compare([runs[0], other])


def test_samples_that_drift_otherwise_are_other_data_and_those_that_arrive_are_not(copied: Copied) -> None:
    turned, classes = {"name": "rotation", "count": 2, "rounds": 1}, {"name": "classes", "count": 2, "rounds": 1}
    plain = configured(copied("fedavg-0"))
    drifted = configured(copied("superfed-mm-0"), stages={**turned, "degrees": 30.0})
    further = configured(copied("superfed-mm-0", "further"), stages={**turned, "degrees": 60.0})
    for one, other, words in ((plain, drifted, "stages"), (drifted, further, "stages.degrees: 30.0 and 60.0")):
        with pytest.raises(RunError, match=f"made on different data .*{words}"):
            compare([one, other])
    assert len(compare_by_dataset([plain, drifted, further], DEFAULT)) == 3
    kept = configured(copied("superfed-mm-0", "kept"), stages={**classes, "memory": 20})
    compare([plain, kept, configured(copied("superfed-mm-0", "lost"), stages={**classes, "memory": 0})])
    compare([drifted, configured(copied("fedavg-0", "alike"), stages={**turned, "degrees": 30.0})])
    # of two stages the second never comes
    early = configured(copied("superfed-mm-0", "early"), stages={**classes, "rounds": 9})
    with pytest.raises(RunError, match=r"made on different data .*stages.*classes"):
        compare([plain, early])
    compare([early, configured(copied("fedavg-0", "as-early"), stages={**classes, "rounds": 7, "memory": 20})])
    with pytest.raises(RunError, match=r"stages\.stage: 2 and 4"):
        compare([drifted, configured(copied("fedavg-0", "later"), stages={**turned, "count": 9, "degrees": 30.0})])


def test_training_samples_of_unlike_stages_are_other_data(copied: Copied) -> None:
    """Of the last evaluation: those of the stage, and those that clients remember."""
    parts = {"name": "samples", "count": 2, "rounds": 1, "memory": 0}
    plain = configured(copied("fedavg-0"))
    staged = configured(copied("superfed-mm-0"), stages=parts)
    longer = configured(copied("superfed-mm-0", "longer"), stages={**parts, "rounds": 2})
    remembering = configured(copied("superfed-mm-0", "remembering"), stages={**parts, "memory": 20})
    compare([plain, staged, longer, remembering])  # on test samples
    trained = [run.viewed(measured=Measured("train")) for run in (plain, staged, longer, remembering)]
    assert on_same_data(trained[1], trained[1].viewed(measured=Measured("train")))
    for other in (0, 3):
        assert not on_same_data(trained[1], trained[other])
    with pytest.raises(RunError, match=r"made on different data .*stages\.memory: 0 and 20"):
        compare([trained[1], trained[3]])


def test_runs_that_hold_clients_out_are_on_other_data_whatever_their_seeds(copied: Copied, runs: list[Run]) -> None:
    folder = copied("superfed-mm-1")
    pq.write_table(pq.read_table(folder / "partition.parquet").slice(1), folder / "partition.parquet")
    held = configured(folder, evaluation={"unseen_clients": 0.2})
    for run in runs[:2]:
        with pytest.raises(RunError, match=r"evaluation\.unseen_clients: 0\.0 and 0\.2"):
            compare([run, held])


def test_equal_places_in_other_data_are_other_samples(copied: Copied) -> None:
    """Two data sets of one size have the same partition where it looks at no labels."""
    one = configured(copied("fedavg-0"), dataset={"name": "mnist"})
    other = configured(copied("superfed-mm-0"), dataset={"name": "fashion_mnist"})
    with pytest.raises(RunError, match=r"made on different data \(dataset\.name: mnist and fashion_mnist\)"):
        compare([one, other])
    assert list(compare_by_dataset([one, other], DEFAULT)) == ["mnist", "fashion_mnist"]
    functions = ({"name": "custom", "function": f"own:{name}"} for name in ("first", "second"))
    runs = [configured(copied("fedavg-0", f"own{n}"), dataset=section) for n, section in enumerate(functions)]
    with pytest.raises(RunError, match=r"dataset\.function: own:first and own:second"):
        compare(runs)
    options = ({"name": "parquet", "standardize": how, "path": f"/{how}.csv"} for how in ("none", "global"))
    runs = [configured(copied("fedavg-0", f"file{n}"), dataset=section) for n, section in enumerate(options)]
    assert len(compare(runs).groups) == 2


def test_without_a_common_seed_there_is_no_test_and_a_note(runs: list[Run]) -> None:
    comparison = compare([runs[0], runs[3]])
    assert (comparison.clients, comparison.seeds) == ([], [])
    assert any("no test with fedavg, superfed" in note for note in comparison.notes)


def test_unfinished_runs_are_shown_apart_and_never_best(copied: Copied, runs: list[Run]) -> None:
    unfinished = configured(copied("fedavg-1"), train={"rounds": 9})
    comparison = compare([runs[0], runs[2], unfinished])
    assert len(comparison.groups) == 3
    lines = [line for line in comparison.lines if not line.finished]
    assert lines
    assert not any(cell.best for line in lines for cell in line.cells.values())
    assert {test.second for test in comparison.clients} == {"superfed"}
    assert any(": unfinished, 4 of 9 rounds" in note for note in comparison.notes)


def test_runs_without_evaluation_are_left_out(copied: Copied, runs: list[Run]) -> None:
    begun = copied("fedavg-1")
    for name in ("rounds", "clients", "calibration"):
        (begun / f"{name}.parquet").unlink()
    loaded = load_run(str(begun), METHODS)
    assert own_key(loaded) is None
    comparison = compare([runs[0], runs[2], loaded])
    assert any(": left out, its clients were never evaluated" in note for note in comparison.notes)
    with pytest.raises(RunError, match="nothing to compare yet"):
        compare([loaded])


def test_equal_notes_are_one_note(copied: Copied, runs: list[Run]) -> None:
    """Both seeds are unfinished alike: one note names both, and what differs stays apart."""
    unfinished = [configured(copied(f"fedavg-{seed}"), train={"rounds": 9}) for seed in (0, 1)]
    notes = [note for note in compare([*unfinished, runs[2]]).notes if "unfinished" in note]
    assert notes == [
        f"{unfinished[0].uri}, {unfinished[1].uri}: unfinished, 4 of 9 rounds are done: shown after its last "
        "evaluation, but in no test, joined with no other seed, and never the best"
    ]


def test_finetuned_models_that_are_not_compared_are_named(runs: list[Run]) -> None:
    said = "--model finetuned compares the fine-tuned models"
    (note,) = [note for note in compare(runs).notes if said in note]
    assert "fedavg-0" in note and "superfed" not in note, "only FedAvg was fine-tuned"
    assert not any(said in note for note in compare(runs, Wanted(models=("finetuned",))).notes)


def test_the_best_round_is_marked_and_never_the_best_or_tested(runs: list[Run]) -> None:
    known = columns_of(runs)
    wanted = Wanted((known["top1_best_round"], known["pooled_top1_best_round"], known["top1"]))
    comparison = compare(runs, wanted)
    line = next(line for line in comparison.lines if (line.method, line.key) == ("fedavg", RowKey("global")))
    for column in ("top1", "pooled_top1"):
        values = []
        for run in runs[:2]:
            rows = [row for row in run.rounds.filter(run.measured.rows).to_pylist() if row["model"] == "global"]
            assert len(rows) == 2
            values.append(100 * max(row[column] for row in rows))
        assert line.cells[f"{column}_best_round"].mean == pytest.approx(sum(values) / 2)
    assert not any(cell.best for line in comparison.lines for name, cell in line.cells.items() if "round" in name)
    assert any(line.cells["top1"].best for line in comparison.lines)
    assert not comparison.clients and not comparison.seeds
    assert any(note.startswith("* best round: the best of all evaluations") for note in comparison.notes)
    assert known["top1_best_round"].heading == "best round, accuracy % *"
    rows = numbers({"": comparison})
    assert {row["metric"]: row["seen_test"] for row in rows if row["model"] == "global"} == {
        "top1_best_round": True,
        "pooled_top1_best_round": True,
        "top1": False,
    }
    official = replace(comparison, groups=[Group("", [run.viewed(Measured("official"))]) for run in runs[:1]])
    assert any(row["seen_test"] for row in numbers({"": official}) if row["metric"] == "top1_best_round")


def test_cohorts_that_were_evaluated_at_another_moment_are_said_to_have_been(runs: list[Run]) -> None:
    cohorts = [run.viewed(measured=Measured(cohort="selected")) for run in (runs[0], runs[2])]
    with pytest.raises(RunError, match=r"its cohorts were never evaluated on test data .*; --phase trained has such"):
        compare(cohorts)
