from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from rayfl.sweeps.measures import Measure
from rayfl.sweeps.report import groups_table, printed, trials_table

VARIED = ("algorithm", "seed")


def trial(algorithm: str, seed: int, validation: float, test: float, status: str = "finished") -> dict[str, Any]:
    return {
        "trial": f"{algorithm}-{seed}",
        "status": status,
        "reason": "it broke" if status == "failed" else "",
        "rounds": 4,
        "point": {"algorithm": algorithm, "seed": seed},
        "clients": 14,
        "test_clients": 12 if seed else 14,
        "validation_top1": validation,
        "validation_top1_std_over_clients": 0.1 + 0.1 * seed,
        "test_top1": test,
    }


ROWS = [
    trial("fedavg", 0, 0.5, 0.9),
    trial("fedavg", 1, 0.7, 0.9),
    trial("floco", 0, 0.8, 0.6),
    trial("floco", 1, 0.9, 0.5),
    trial("ditto", 0, 0.99, 0.99),
    trial("ditto", 1, 0.99, 0.99, "failed"),
]


def groups(judge: Any = "validation") -> dict[str, dict[str, Any]]:
    table = groups_table(trials_table(ROWS, VARIED), VARIED, Measure(judge=judge))
    return {row["algorithm"]: row for row in table.to_pylist()}


def test_mean_and_std_are_over_the_seeds_of_finished_experiments() -> None:
    found = groups()
    assert found["fedavg"]["validation_top1"] == pytest.approx(0.6)
    assert found["fedavg"]["validation_top1_std_over_seeds"] == pytest.approx(0.1 * 2**0.5)
    assert found["fedavg"]["validation_top1_std_over_clients"] == pytest.approx(0.15)
    assert (found["fedavg"]["clients"], found["fedavg"]["test_clients"]) == (14, 12)
    assert (found["ditto"]["experiments"], found["ditto"]["finished"]) == (2, 1)
    assert found["ditto"]["validation_top1_std_over_seeds"] is None
    assert found["ditto"]["validation_top1_std_over_clients"] == pytest.approx(0.1)
    assert found["fedavg"]["test_loss"] is None


def test_the_judge_chooses_among_whole_groups() -> None:
    assert {name: row["selected_on"] for name, row in groups().items()} == {
        "fedavg": "",
        "floco": "validation",
        "ditto": "",
    }
    assert groups("test")["fedavg"]["selected_on"] == "test"


def test_one_group_is_no_choice() -> None:
    rows = ROWS[:2]
    assert groups_table(trials_table(rows, VARIED), VARIED, Measure()).column("selected_on").to_pylist() == [""]
    alone = groups_table(trials_table(rows, ("seed",)), ("seed",), Measure())
    assert alone.num_rows == 1


def test_values_keep_their_types() -> None:
    rows = [
        {**trial("a", n, 0.5, 0.5), "point": {"lr": rate, "mixed": mixed, "hidden": [n]}}
        for n, (rate, mixed) in enumerate([(0.1, "all"), (1, 5)])
    ]
    table = trials_table(rows, ("lr", "mixed", "hidden"))
    assert table.schema.field("lr").type == pa.float64()
    assert table.column("mixed").to_pylist() == ['"all"', "5"]
    assert table.column("hidden").to_pylist() == ["[0]", "[1]"]


@pytest.mark.parametrize(
    ("judge", "caption"), [("validation", "> best by validation data"), ("test", "* chosen on test data: not a fair")]
)
def test_what_is_printed_says_what_chose(judge: Any, caption: str) -> None:
    console = Console(width=120, record=True, file=None)
    with console.capture() as captured:
        measure = Measure(judge=judge)
        console.print(printed(groups_table(trials_table(ROWS, VARIED), VARIED, measure), VARIED, measure))
    text = captured.get()
    assert caption in text
    lines = [line.split() for line in text.splitlines()]
    assert ["fedavg", "validation", "60.00", "14.14", "15.00", "-", "2", "of", "2"] in [line[-9:] for line in lines]
    assert ["ditto", "test", "99.00", "-", "-", "14", "1", "of", "2"] in [line[-9:] for line in lines]
    assert any(line[-6:] == ["12", "of", "14", "2", "of", "2"] for line in lines)
    above, below = lines[2:4]
    assert above == ["+-", "+-"]
    assert below == ["algorithm", "data", "top1", "%", "seeds", "clients", "clients", "finished"]
    assert text.count("+-") == 2


def test_long_values_cut_no_number_in_80_columns() -> None:
    keys = ("algorithm", "partition.classes_per_client", "train.clients_per_round")
    rows = [
        row | {"point": {keys[0]: "remembering:Remembering", keys[1]: number, keys[2]: 1000}}
        for number, row in enumerate(ROWS)
    ]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(printed(groups_table(trials_table(rows, keys), keys, Measure()), keys, Measure()))
    splits = [line.split() for line in captured.get().splitlines() if " 1000 " in line]
    assert [line[-3:] for line in splits] == [["1", "of", "1"]] * 10 + [["0", "of", "1"]] * 2
    assert splits[3][-9:-3] == ["90.00", "-", "-", "12", "of", "14"]


def test_a_group_of_which_a_seed_has_no_number_is_not_chosen() -> None:
    rows = [dict(row) for row in ROWS]
    rows[2]["validation_top1"] = None
    table = groups_table(trials_table(rows, VARIED), VARIED, Measure())
    assert {row["algorithm"]: row["selected_on"] for row in table.to_pylist()} == {
        "fedavg": "validation",
        "floco": "",
        "ditto": "",
    }


def test_without_a_best_row_the_table_says_why() -> None:
    def said(rows: list[dict[str, Any]]) -> str:
        console = Console(width=120)
        with console.capture() as captured:
            console.print(printed(groups_table(trials_table(rows, VARIED), VARIED, Measure()), VARIED, Measure()))
        return " ".join(captured.get().split())

    blind = [{**row, "validation_top1": None} for row in ROWS]
    assert "no best row: there are no numbers on validation data (set holdout.validation, or" in said(blind)
    assert "no best row: none has all" in said([{**row, "status": "unfinished"} for row in ROWS])
    assert "no best row" not in said(ROWS) and "no best row" not in said(blind[:2])


@pytest.mark.parametrize(
    "path",
    [
        *("partition.alpha", "dataset", "attack.share", "evaluation"),
        *("evaluation.unseen_clients", "evaluation.adversarial.radius"),
    ],
)
def test_every_setting_of_the_data_has_a_choice_of_its_own(path: str) -> None:
    """With a number for each method on easy data and on hard ones."""
    numbers = {("easy", "fedavg"): 0.9, ("easy", "floco"): 0.8, ("hard", "fedavg"): 0.5, ("hard", "floco"): 0.6}
    rows = [
        {**trial(method, 0, number, number), "point": {path: data, "algorithm": method, "seed": 0}}
        for (data, method), number in numbers.items()
    ]
    varied = (path, "algorithm", "seed")
    found = groups_table(trials_table(rows, varied), varied, Measure()).to_pylist()
    chosen = {(row[path], row["algorithm"]) for row in found if row["selected_on"]}
    assert chosen == {("easy", "fedavg"), ("hard", "floco")}
    alone = [{**row, "point": {**row["point"], "algorithm": "fedavg"}} for row in rows[::2]]
    assert set(groups_table(trials_table(alone, varied), varied, Measure()).column("selected_on").to_pylist()) == {""}
