"""The papers' printed numbers: sums and single cells of every table, and what they are said to be comparable with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

import rayfl
from algorithms.registry import METHODS, Experiment
from rayfl.config.loading import load_config
from rayfl.config.paper_presets import method_row, method_settings, paper_presets
from rayfl.reproduction.reference import Protocol, ReferenceTable, parsed_reference, reference_tables
from rayfl.results.schemas import ROUNDS_SCHEMA

TABLES = {table.name: table for table in reference_tables()}
PRESETS = paper_presets()

# name: number of cells, sum of means, sum of standard deviations, a preset, a row, its mean and standard deviation
PRINTED = {
    "superfed-table1": (66, 5642.18, 535.88, "superfed-table1-cifar10-k500", "superfed_lm", 89.63, 11.11),
    "superfed-table2": (66, 2656.06, 346.53, "superfed-table2-tinyimagenet-alpha10", "fedrep", 9.23, 2.84),
    "superfed-table3-top1": (22, 1263.57, 240.91, "superfed-table3-femnist", "superfed_mm", 85.20, 8.40),
    "superfed-table3-top5": (22, 1771.70, 201.49, "superfed-table3-shakespeare", "superfed_lm", 83.97, 5.72),
    "superfed-table4-ece": (88, 38.21, 4.02, "superfed-table4-cifar10-pair0.1", "superfed_lm", 0.29, 0.04),
    "superfed-table4-mce": (88, 66.33, 5.39, "superfed-table4-cifar10-symmetric0.6", "superfed_lm", 0.76, 0.05),
    "superfed-table4-top1": (88, 3954.64, 443.29, "superfed-table4-cifar10-pair0.4", "superfed_lm", 28.51, 4.66),
    "superfed-table5-top1": (10, 918.86, 48.69, "superfed-table5-cifar10", "superfed_mm_start0.4", 92.69, 3.86),
    "superfed-table5-loss": (10, 16.59, 6.84, "superfed-table5-cifar10", "superfed_lm_start0.8", 6.28, 1.76),
    "superfed-tableA1": (110, 15896.04, 0, "superfed-table2-tinyimagenet-alpha1", "lr", 0.02, None),
    "superfed-arxiv-table1-global-top1": (10, 307.23, 0, "superfed-arxiv-table1-cifar10", "apfl", 31.60, None),
    "superfed-arxiv-table1-global-top5": (10, 659.37, 0, "superfed-arxiv-table1-cifar100", "fedprox", 43.69, None),
    "superfed-arxiv-table1-top1": (18, 1066.28, 156.53, "superfed-arxiv-table1-cifar10", "fedavg_lu", 84.85, 6.47),
    "superfed-arxiv-table1-ece": (18, 4.9996, 1.0785, "superfed-arxiv-table1-cifar100", "lg_fedavg", 0.3512, 0.0470),
    "superfed-arxiv-table2-global-top1": (10, 418.68, 0, "superfed-arxiv-table2-emnist", "superfed_mm", 73.53, None),
    "superfed-arxiv-table2-global-top5": (10, 604.16, 0, "superfed-arxiv-table2-tinyimagenet", "apfl", 22.88, None),
    "superfed-arxiv-table2-top1": (18, 711.17, 242.91, "superfed-arxiv-table2-emnist", "lg_fedavg", 58.07, 31.36),
    "superfed-arxiv-table2-ece": (18, 4.8068, 1.6007, "superfed-arxiv-table2-tinyimagenet", "fedper", 0.2759, 0.0724),
    "superfed-arxiv-table3-top1": (
        20, 1696.80, 132.94, "superfed-arxiv-table3-cifar10", "superfed_lm_start0.9", 76.10, 20.60
    ),
    "superfed-arxiv-table3-lambda": (20, 6.4, 0, "superfed-arxiv-table3-cifar10", "superfed_lm_start0.8", 0.5, None),
    "superfed-arxiv-table3-global-top1": (
        20, 891.32, 0, "superfed-arxiv-table3-cifar10", "superfed_mm_start0.7", 47.02, None
    ),
    "superfed-arxiv-table3-global-top5": (
        20, 1777.21, 0, "superfed-arxiv-table3-cifar10", "superfed_lm_start0.0", 83.78, None
    ),
    "floco-table1-global": (24, 1743.75, 0, "floco-table1-cifar10-5fold-resnet18", "floco", 74.61, None),
    "floco-table1-local": (24, 1847.01, 0, "floco-table1-femnist-squeezenet", "floco", 83.54, None),
    "floco-table2-global": (24, 242.15, 0, "floco-table1-cifar10-dir0.5", "ditto", 14.23, None),
    "floco-table2-local": (24, 324.99, 0, "floco-table1-cifar10-dir0.5-resnet18", "fedavg", 10.20, None),
    "floco-table3": (24, 13.24, 1.53, "floco-table1-femnist", "ditto", 0.37, 0.20),
    "floco-table4": (4, 6.0, 0, "floco-table1-femnist", "floco_vs_ditto", 1.9, None),
    "floco-fig4-local": (2, 160.97, 0, "floco-table1-cifar10-5fold", "best", 82.79, None),
    "floco-fig4-global": (2, 139.96, 0, "floco-table1-cifar10-5fold", "worst", 69.30, None),
    "floco-appendixE-global": (10, 713.66, 0, "floco-table1-femnist", "superfed_mm", 76.80, None),
    "floco-appendixE-local": (10, 752.78, 0, "floco-table1-cifar10-5fold-resnet18", "superfed_mm", 52.78, None),
    "floco-appendixF-global": (6, 363.51, 0, "floco-table1-cifar10-dir0.5", "fedpac", 68.70, None),
    "floco-appendixF-local": (6, 404.70, 0, "floco-table1-cifar10-dir0.5", "fedavg", 73.42, None),
    "fedme-table2": (15, 1185930.28, 0, "fedme-table4-shakespeare", "std", 5445.89, None),
    "fedme-table3": (12, 60.0, 19.2, "fedme-table4-cifar10", "model2", 9.2, 1.6),
    "fedme-table4": (24, 1537.77, 55.06, "fedme-table4-cifar10", "mapper", 61.29, 4.19),
    "fedme-table5": (15, 1063.27, 32.34, "fedme-table4-shakespeare", "fedme_model4", 42.55, 5.12),
    "fedme-table6": (24, 1666.70, 61.78, "fedme-table4-femnist", "fedme_mt0_dml0_mc0", 75.85, 3.27),
    "fedme-table7": (36, 3066.40, 67.49, "fedme-table7-cifar10-alpha0.1", "fedavg_noft", 80.86, 1.95),
    "fedphp-table1": (25, 12894.0, 0, "fedphp-fig5-shakespeare", "train_per_client", 2994, None),
    "fedphp-table2-begin": (9, 513.03, 0, "fedphp-table2-cifar100-100-20", "fedphp_mu_b", 11.82, None),
    "pfllib-pathological": (60, 3810.93, 12.07, "pfllib-cifar100-pat", "feddbe", 73.38, 0.18),
    "pfllib-practical": (100, 6011.11, 26.30, "pfllib-tiny-resnet18-dir0.1", "fedcp", 44.18, 0.21),
    "pfllib-heterogeneity": (120, 4132.75, 46.35, "pfllib-tiny-dir5", "fedproto", 8.92, 0.19),
    "fedphp-table2-end": (9, 659.80, 0, "fedphp-table2-cifar10-100-5", "fedphp_mu_a", 91.04, None),
}  # fmt: skip


def test_every_table_with_numbers_is_checked() -> None:
    assert {name for name, table in TABLES.items() if table.settings} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_sums_and_a_cell(name: str) -> None:
    count, means, stds, setting, row, mean, std = PRINTED[name]
    cells = [cell for *_, cell in TABLES[name].cells()]
    assert len(cells) == count
    assert sum(cell.mean for cell in cells) == pytest.approx(means, rel=1e-9)
    assert sum(cell.std or 0 for cell in cells) == pytest.approx(stds, rel=1e-9)
    cell = TABLES[name].settings[setting][row]
    assert (cell.mean, cell.std) == (mean, std)


def test_every_table_is_of_presets_and_methods_that_exist_and_every_preset_has_a_table() -> None:
    for table in TABLES.values():
        assert set(table.preset_names) <= set(PRESETS)
        assert table.name.startswith(f"{table.paper}-")
        if table.rows == "methods":
            for setting, method, _ in table.cells():
                assert method in PRESETS[setting].methods, (table.name, setting, method)
    assert {name for table in TABLES.values() for name in table.preset_names} == set(PRESETS)


def test_the_protocols_name_rows_and_columns_of_the_results() -> None:
    for table in TABLES.values():
        protocol = table.protocol
        if protocol is not None:
            assert protocol.column(table.metric) in ROUNDS_SCHEMA.names
            names = {PRESETS[name].methods[PRESETS[name].own]["algorithm"]["name"] for name in table.preset_names}
            assert (protocol.selected_on != "") == any(METHODS[name].sweep is not None for name in names) or (
                protocol.row == "global"
            )


def test_the_printed_configurations_are_those_of_the_presets() -> None:
    for setting, row in TABLES["superfed-tableA1"].settings.items():
        train = load_config(Experiment, setting, []).train
        assert (train.rounds, train.local_epochs, train.batch_size, train.lr) == tuple(
            row[name].mean for name in ("rounds", "local_epochs", "batch_size", "lr")
        )
        partition = load_config(Experiment, setting, []).partition
        # the roles of Shakespeare are all that the file has
        assert partition.num_clients in (None, row["clients"].mean)
    for setting, row in TABLES["fedphp-table1"].settings.items():
        partition = load_config(Experiment, setting, []).partition
        if partition.name == "classes":
            assert partition.num_clients == row["clients"].mean
            assert partition.classes_per_client == row["classes_per_client"].mean


def test_cells_that_are_no_targets() -> None:
    table = TABLES["superfed-table1"]
    assert table.status("superfed-table1-mnist-k50", "superfed_mm") == "target"
    assert table.status("superfed-table1-mnist-k50", "fedavg") == "caution"
    assert table.status("superfed-table1-cifar10-k50", "scaffold") == "no_target"
    (remark,) = table.remarks_on("superfed-table1-cifar10-k100", "pfedme")
    assert "APFL" in remark.reason
    none = {
        name: {method for setting, method, _ in table.cells() if table.status(setting, method) == "no_target"}
        for name, table in TABLES.items()
    }
    for name in ("superfed-table1", "superfed-table2", "superfed-table3-top1", "superfed-table4-top1"):
        assert none[name] == {"scaffold", "pfedme"}
    for name in ("superfed-arxiv-table1-top1", "superfed-arxiv-table2-ece"):
        assert none[name] == {"fedavg", "fedprox"}
    assert none["superfed-table4-ece"] == set(TABLES["superfed-table4-ece"].settings["superfed-table4-mnist-pair0.1"])
    assert none["floco-appendixF-global"] == {"feddyn", "fedrep"}
    assert none["floco-appendixF-local"] == {"feddyn"}
    assert none["fedme-table4"] == none["fedphp-table2-end"] == set()
    assert none["pfllib-practical"] == {"apple", "fedgen"}
    assert TABLES["pfllib-heterogeneity"].status("pfllib-cifar100-dir5", "ditto") == "no_target"
    assert TABLES["pfllib-heterogeneity"].status("pfllib-cifar100-dir0.01", "ditto") == "caution"
    assert TABLES["pfllib-practical"].status("pfllib-fmnist-dir0.1", "fedala") == "target"


@pytest.mark.parametrize("method", ["superfed_mm", "fedavg_lu"])
def test_a_run_has_exactly_one_row_that_compares(method: str, tmp_path: Path) -> None:
    table, preset = TABLES["superfed-arxiv-table1-top1"], "superfed-arxiv-table1-cifar10"
    tiny = {
        "dataset": "digits",
        "partition.num_clients": 4,
        "model": {"name": "two_nn", "hidden": [4]},
        "train.rounds": 2,
        "train.clients_per_round": 2,
        "train.local_epochs": 1,
        "cluster.backend": "inline",
        "tracking.tensorboard": False,
        "storage_path": str(tmp_path),
    }
    settings = method_settings(preset, method)
    if method == "superfed_mm":
        settings["algorithm"] = {**settings["algorithm"], "start": 0.0}
    result = rayfl.run(preset, **{**settings, **tiny})
    protocol, algorithm = table.protocol, result.config.algorithm
    assert protocol is not None
    row = method_row(preset, method) or algorithm.personalized
    sweep = algorithm.sweep is not None
    wanted = {
        "round": 2,
        "split": "test",
        "cohort": protocol.cohort,
        "phase": protocol.phase,
        "model": f"{algorithm.sweep}=best" if sweep else row,
        "selected_on": protocol.selected_on if sweep else "",
    }
    rows: Any = result.rounds
    for column, value in wanted.items():
        rows = rows.filter(pc.equal(rows[column], value))
    assert rows.num_rows == 1
    assert 0 <= rows[protocol.column(table.metric)][0].as_py() <= 1


PLAIN: dict[str, Any] = {
    "name": "p-table1",
    "paper": "p",
    "table": "Table 1",
    "caption": "c",
    "metric": "top1",
    "unit": "percent",
    "protocol": "last",
    "settings": {"x": {"fedavg": {"mean": 50.0}}},
}


def parse(**changes: Any) -> tuple[ReferenceTable, ...]:
    table = {key: value for key, value in {**PLAIN, **changes}.items() if value is not None}
    return parsed_reference({"protocols": {"last": {"row": "global", "differs": "-"}}, "tables": [table]})


def test_a_table_is_read_with_its_protocol() -> None:
    (table,) = parse()
    assert table.protocol == Protocol(row="global", differs="-")
    assert [(setting, row, cell.mean, cell.std) for setting, row, cell in table.cells()] == [
        ("x", "fedavg", 50.0, None)
    ]
    assert table.status("x", "fedavg") == "target"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": "share"}, "50.0 is no share"),
        ({"settings": {"x": {"fedavg": {"mean": 101.0}}}}, "101.0 is no percent"),
        ({"settings": {"x": {"fedavg": {"mean": 1.0, "std": 1.0}}}}, "std_over"),
        ({"settings": {}}, "needs either"),
        ({"settings": {}, "finding": "it falls"}, "needs either"),
        ({"protocol": None}, "without a protocol"),
        ({"protocol": "first"}, "no protocol 'first'"),
        ({"metric": "top2"}, "metric"),
        ({"remarks": [{"status": "caution", "methods": ["ditto"], "reason": "r"}]}, "ditto, which it has not"),
    ],
)
def test_malformed_tables_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(**changes)


def test_two_tables_of_one_name_are_refused() -> None:
    protocols = {"last": {"row": "global", "differs": "-"}}
    with pytest.raises(ValueError, match="two tables are called p-table1"):
        parsed_reference({"protocols": protocols, "tables": [PLAIN, PLAIN]})
